"""Resolved configurations as commented YAML, and lists of methods, rules, attacks, objectives and architectures."""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from raydfl.attacks import Attack
from raydfl.core import registry
from raydfl.core.errors import ConfigError, nearest
from raydfl.core.options import Option, describe_field, options_of, plain
from raydfl.core.settings import Settings
from raydfl.core.yaml import to_yaml
from raydfl.data import DataSettings, find_transform
from raydfl.engine import Config
from raydfl.methods import Method
from raydfl.models import architectures, model_options
from raydfl.objectives import Objective
from raydfl.rules import RULES

_WIDTH = 110
_MODULE = re.compile(r":mod:`([^`]+)`")
_ROLE = re.compile(r":\w+:`~?([^`]+)`")
"""A cross-reference in a docstring."""
T = TypeVar("T")


def explain_config(config: Config) -> str:
    """Return a configuration with all defaults as YAML, with comments on meaning, unit and range."""
    lines = [
        "# The complete configuration, with all defaults. Run it with `raydfl run`.",
        "",
    ]
    tuning, groups = config.components.fine_tune, config.components.former.get("tasks", "none")
    resolved = {
        "train": config.train.model_copy(update={"groups": groups}),
        "evaluate": config.evaluate.model_copy(update={"fine_tune": tuning}) if tuning.epochs else config.evaluate,
    }
    for name, field in Config.model_fields.items():
        if name == "method":
            built = config.components.method
            lines += _comment(str(field.description), 0)
            lines += ["method:", *_comment("Name of the method. `raydfl methods` lists them.", 1)]
            lines.append(f"  name: {to_yaml(config.method['name'])}")
            options, values = options_of(type(built)), plain(built) | _list_former_options(config)
            lines += [
                f"  {name}: {to_yaml(values[name])}  # option of an earlier version"
                for name in sorted(values.keys() - {option.name for option in options})
            ]
            lines += _options(options, values, 1)
        elif name == "objective":
            objective = config.components.method.objective
            lines += _comment(str(field.description), 0)
            lines += [
                "objective:",
                *_comment("Name of the objective. `raydfl methods` lists them.", 1),
                f"  name: {to_yaml(config.objective['name'])}",
            ]
            lines += _options(options_of(type(objective)), plain(objective), 1)
        elif name == "attack":
            attack = config.components.attack
            lines += _comment(f"{_as_sentence(field.description)} `raydfl methods` lists the attacks.", 0)
            if config.attack is None or attack is None:
                lines.append("attack: null")
            else:
                lines += ["attack:", f"  name: {to_yaml(config.attack['name'])}"]
                lines += _options(options_of(type(attack)), plain(attack), 1)
        elif name == "models":
            known = ", ".join(architectures())
            lines += _comment(
                f"{_as_sentence(field.description)} Built in: {known}. Your own class: my_file.py:Class", 0
            )
            lines.append("models:")
            for model, choices in config.components.models.items():
                lines.append(
                    f"  {model}: {to_yaml(_format_architectures(choices, config.components.chosen_by.get(model)))}"
                )
        else:
            lines += _group(name, resolved.get(name, getattr(config, name)), 0)
        lines.append("")
    return "\n".join(lines).rstrip()


def _list_former_options(config: Config) -> dict[str, Any]:
    """Return options of earlier versions that the digest of the configuration depends on."""
    named = registry.find(
        "raydfl.methods", config.method["name"], Method, "method"
    )  # with mode=as_run, the class of today differs
    own, today = ({option.name for option in options_of(cls)} for cls in (named, type(config.components.method)))
    former = config.method.keys() - today - {"name", "tasks"}  # tasks is train.groups today
    if not former and own == today:
        return {}
    return {name: value for name, value in config.components.former.items() if name in today | former}


def _format_architectures(
    choices: Sequence[tuple[str, Mapping[str, Any]]], chosen: tuple[str, Sequence[str]] | None
) -> Any:
    """Return the architectures of a model in the shortest form of a configuration."""
    items = [{"name": name, **options} if options else name for name, options in choices]
    if chosen is not None:
        return {"by": chosen[0], "choices": dict(zip(chosen[1], items, strict=True))}
    return items[0] if len(items) == 1 else items


def _group(name: str, settings: Settings, depth: int) -> list[str]:
    """Return the lines of a group of settings and its inner groups. ``depth`` counts the enclosing groups."""
    indent = "  " * depth
    lines = [*_comment((type(settings).__doc__ or "").partition("\n")[0], depth), f"{indent}{name}:"]
    schema = type(settings).model_json_schema()["properties"]
    for key, field in type(settings).model_fields.items():
        value = getattr(settings, key)
        if isinstance(value, Settings):
            lines += _group(key, value, depth + 1)
            continue
        if isinstance(value, Mapping):  # groups under names chosen by the user
            value = {
                name: item.model_dump(mode="json") if isinstance(item, Settings) else item
                for name, item in value.items()
            }
        about = describe_field(schema[key])
        inner = [kind for kind in get_args(field.annotation) if isinstance(kind, type) and issubclass(kind, Settings)]
        if inner:
            about += f" Its settings: {', '.join(inner[0].model_fields)}."
        lines += [*_comment(about, depth + 1), f"{indent}  {key}: {to_yaml(plain(value))}"]
        if (
            isinstance(settings, DataSettings) and key == "name" and settings.name
        ):  # with data.parts, every part has its own data set
            data_set = settings.source.open()
            lines += _options(options_of(type(data_set)), plain(data_set) | settings.uris, depth + 1)
    return lines


def _options(options: Iterable[Option], values: Mapping[str, Any], depth: int) -> list[str]:
    lines = []
    for option in options:
        lines += [*_comment(option.meaning, depth), f"{'  ' * depth}{option.name}: {to_yaml(values[option.name])}"]
    return lines


def _comment(text: str, depth: int) -> list[str]:
    indent = "  " * depth + "# "
    return textwrap.wrap(text.strip().replace("``", "`"), _WIDTH, initial_indent=indent, subsequent_indent=indent)


def _as_sentence(text: object) -> str:
    return f"{str(text)[:1].upper()}{str(text)[1:].rstrip('.')}."


# -- lists of what is built in ---------------------------------------------------------------------------------------------------


def explain_class(cls: type) -> str:
    """Return the docstrings of a method, rule, data set or the like: its module's, and its own without the first line.

    Names are marked as in Markdown, and modules have the names of their files.
    """
    module = inspect.getdoc(sys.modules[cls.__module__]) or ""
    own = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[2]
    text = _MODULE.sub(lambda match: f"`{match[1].replace('.', '/')}.py`", f"{module}\n\n{own}".strip())
    return _ROLE.sub(r"`\1`", text).replace("``", "`")


def methods_as_data(only: Sequence[str] = ()) -> dict[str, Any]:
    """Return the built-in methods, rules, attacks, objectives, transforms and architectures with their options.

    Args:
        only: names to include. Empty: all.

    Raises:
        ConfigError: a name is unknown.
    """
    everything: dict[str, dict[str, Any]] = {
        "methods": {
            name: {**_about(cls), "models": dict(cls.models)}
            for name, cls in _classes_of("raydfl.methods", Method, "method").items()
        },
        "rules": {name: _about(cls) for name, cls in RULES.items()},
        "attacks": {name: _about(cls) for name, cls in _classes_of("raydfl.attacks", Attack, "attack").items()},
        "objectives": {
            name: _about(cls) for name, cls in _classes_of("raydfl.objectives", Objective, "objective").items()
        },
        "transforms": {name: _about(find_transform(name)) for name in registry.names("raydfl.data.transforms")},
        "models": {name: {"options": plain(model_options(name))} for name in architectures()},
    }
    known = {name for kind in everything.values() for name in kind}
    for name in only:
        if name not in known:
            hint = nearest(name, known)
            raise ConfigError(
                f"no method, rule, attack, objective, transform or architecture {name!r} is built in. {hint}"
            )
    return {
        kind: {name: about for name, about in entries.items() if not only or name in only}
        for kind, entries in everything.items()
    }


def _classes_of(package: str, base: type[T], what: str) -> dict[str, type[T]]:
    return {name: registry.find(package, name, base, what) for name in registry.names(package)}


def _about(cls: type) -> dict[str, Any]:
    options = {
        option.name: {"default": option.default, "required": option.required, "meaning": option.meaning}
        | ({"source": option.source} if option.source else {})
        for option in options_of(cls)
    }
    about = (cls.__doc__ or "").strip().partition("\n")[0]
    return {"about": about, "explanation": explain_class(cls), "options": options}


_TITLES = {
    "methods": "Methods (method: {name: ...})",
    "rules": "Aggregation rules (method.rule)",
    "attacks": "Attacks (attack: {name: ...}), simulated",
    "objectives": "Objectives (objective: {name: ...})",
    "transforms": "Transforms of training examples (data.transforms: [{name: ...}, ...])",
    "models": "Architectures (models)",
}


def explain_methods(width: int, only: Sequence[str] = ()) -> str:
    """Format the result of :func:`methods_as_data` as text, in lines of ``width`` characters.

    With names, each entry contains its explanation: equations, sources and deviations.
    """
    return "\n\n\n".join(
        "\n".join(
            [
                _TITLES[kind],
                *(_architectures(entries, width) if kind == "models" else _classes(entries, width, bool(only))),
            ]
        )
        for kind, entries in methods_as_data(only).items()
        if entries
    )


def _classes(entries: Mapping[str, Mapping[str, Any]], width: int, with_explanation: bool) -> list[str]:
    lines = []
    for name, about in entries.items():
        lines += ["", *_wrap(f"{name}: {about['about']}", 0, width)]
        if with_explanation:
            lines += ["", *about["explanation"].splitlines(), ""]
        if "models" in about:
            models = ", ".join(f"{model} ({architecture})" for model, architecture in about["models"].items())
            lines += _wrap(f"models, with their default architectures: {models}", 1, width)
        lines += _option_lines(about["options"], width)
    return lines


def _architectures(entries: Mapping[str, Mapping[str, Any]], width: int) -> list[str]:
    lines = [""]
    for name, about in entries.items():
        options = ", ".join(f"{key}: {json.dumps(value)}" for key, value in about["options"].items())
        lines += _wrap(f"{name}{': ' if options else ''}{options}", 0, width)
    return lines


def _option_lines(options: Mapping[str, Mapping[str, Any]], width: int) -> list[str]:
    lines = []
    for name, option in options.items():
        default = "(required)" if option["required"] else f"= {json.dumps(option['default'])}"
        source = f" Source: {option['source']}." if "source" in option else ""
        lines += _wrap(f"{name} {default}: {option['meaning']}{source}", 1, width)
    return lines


def _wrap(text: str, depth: int, width: int) -> list[str]:
    indent = "  " * depth
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + "    ")
