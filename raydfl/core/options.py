"""Options of a class or of a group of settings, and messages that say what is wrong with those that were given."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.settings import Settings

_SHOWN = 80
"""Characters of a wrong value that a message repeats."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a method, rule, data set or group of settings."""

    name: str
    default: Any
    """As plain data; ``None`` also where there is none."""
    required: bool
    meaning: str
    """With unit and range."""


def options_of(cls: type) -> list[Option]:
    """Return the options of a dataclass or of a group of settings, in their order."""
    schema = _schema(cls)
    required = schema.get("required", ())
    given = {item.name for item in dataclasses.fields(cls) if not item.init} if dataclasses.is_dataclass(cls) else set()
    return [
        Option(name, about.get("default"), name in required, describe_field(about))
        for name, about in schema.get("properties", {}).items()
        if name not in given
    ]


def path_options(cls: type) -> list[str]:
    """Return the names of the options that are files or folders."""
    return [
        name
        for name, about in _schema(cls).get("properties", {}).items()
        if any(part.get("format") == "path" for part in (about, *about.get("anyOf", ())))
    ]


def describe_field(about: Mapping[str, Any]) -> str:
    """Return the meaning and the range of a field, from its JSON schema; a range that the meaning names already is not repeated."""
    text = str(about.get("description", "")).replace("\n", " ")
    limits = []
    for part in (about, *about.get("anyOf", ())):
        phrase = _range(part)
        if phrase and phrase not in text.lower():
            limits.append(phrase)
        values = [str(value) for value in part.get("enum", ())]
        if not all(value in text for value in values):
            limits.append("one of " + ", ".join(values))
    return f"{text} ({'; '.join(limits)})".lstrip() if limits else text


def _range(part: Mapping[str, Any]) -> str:
    """Return ``"1 to 512"``, ``"above 0, to 500"``, ``"at least 1"`` ...; empty when there is no limit."""
    low, above, high, below = (part.get(key) for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"))
    if low is not None and high is not None:
        return f"{low:.10g} to {high:.10g}"
    phrases = [] if low is None else [f"at least {low:.10g}"]
    phrases += [] if above is None else [f"above {above:.10g}"]
    phrases += [] if below is None else [f"below {below:.10g}"]
    if high is not None:
        phrases.append(f"to {high:.10g}" if phrases else f"at most {high:.10g}")
    return ", ".join(phrases)


class _Lenient(GenerateJsonSchema):
    """A user's class may have options of types that JSON does not know: these have no schema, the others do."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  (pydantic's own way)

    def handle_invalid_for_json_schema(self, schema: CoreSchema, error_info: str) -> JsonSchemaValue:
        return {}


@functools.lru_cache(maxsize=512)  # a fifth of the start of a small run went into making them again
def _schema(cls: type) -> Mapping[str, Any]:
    return TypeAdapter(cls).json_schema(schema_generator=_Lenient, mode="validation")


# -- what is wrong ---------------------------------------------------------------------------------------------------


def check_keys(values: Any, annotation: Any, where: str, tree: type[Settings], prefix: str = "") -> None:
    """Refuse a key that a group of settings, or one within it, does not have.

    Pydantic would too, but without the nearest known one. Groups that also take other keys are left to their own check.

    Args:
        values: as given; what is no group is left to pydantic.
        annotation: of the field that they are for.
        where: the group's place; empty at the top.
        tree: see :func:`unknown_key`.
        prefix: see :func:`unknown_key`.

    Raises:
        ConfigError: naming the first.
    """
    if get_origin(annotation) is dict:  # groups by names of the user's
        for name, group in values.items() if isinstance(values, Mapping) else ():
            check_keys(group, get_args(annotation)[1], f"{where}.{name}", tree, prefix)
        return
    for kind in (annotation, *get_args(annotation)):
        if isinstance(values, Mapping) and _is_group(kind) and kind.model_config.get("extra") != "allow":
            for key, value in values.items():
                if key not in kind.model_fields:
                    raise unknown_key(str(key), kind.model_fields, where, tree, prefix)
                check_keys(value, kind.model_fields[key].annotation, f"{where}.{key}" if where else key, tree, prefix)


def unknown_key(
    key: str, known: Iterable[str], where: str, tree: type[Settings], prefix: str = "", of: str = ""
) -> ConfigError:
    """Return the error for a key that a group of settings does not have.

    A key that stands in another group is most likely meant for that one: ``rounds`` is ``train.rounds``.

    Args:
        known: the group's keys.
        where: the group's place, ``"train.optimiser"``; empty at the top.
        tree: the settings to look for the key in, which stand at ``prefix``.
        of: what the keys are of, ``" for data set 'fsdd'"``.
    """
    same = [path for path in dict.fromkeys(_paths(tree, prefix)) if path.rpartition(".")[2] == key]
    hint = f"did you mean {' or '.join(same)}?" if 0 < len(same) < 4 else nearest(key, known)
    return ConfigError(f"{where}{': ' if where else ''}unknown key {key!r}{of}; {hint}")


def _paths(model: type[BaseModel], prefix: str) -> list[str]:
    """Return the places of all settings within a group, ``"train.optimiser.lr"``."""
    paths = []
    for name, field in model.model_fields.items():
        place = f"{prefix}.{name}" if prefix else name
        # Groups in a mapping have names of the user's own: their settings have no place that could be named here.
        named = get_origin(field.annotation) in (dict, Mapping)
        inner = [] if named else [kind for kind in (field.annotation, *get_args(field.annotation)) if _is_group(kind)]
        paths += [place, *(path for kind in inner for path in _paths(kind, place))]
    return paths


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Settings)


def explain(error: ValidationError, where: str, values: Any, cls: Any = None) -> str:
    """Say what pydantic found in the words of a configuration: place, value, what it must be, and what it means.

    Args:
        where: the place of ``values`` in the configuration, ``"method"``; empty at the top.
        values: what was validated.
        cls: the class or type that they were validated for; its descriptions are added.
    """
    problems: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for item in error.errors(include_url=False):
        problems.setdefault(_place(values, item), []).append(item)
    lines = []
    for place, items in problems.items():
        # Of a value that may be of several kinds, pydantic tells what is wrong for each: the deepest one is what was meant.
        if any(len(other) > len(place) and other[: len(place)] == place for other in problems):
            continue
        name = ".".join(str(part) for part in (where, *place) if str(part)) or "the value"
        about = _about(cls, place)
        lines.append(f"{name}{_problem(items, about)}")
        meaning = describe_field(about)
        if meaning and not any(item["type"] in _WHOLE for item in items):
            lines.append(f"  {name}: {meaning}")
    return "\n".join(lines)


_WHOLE = ("value_error", "assertion_error", "extra_forbidden")
"""Errors that say all that there is to say."""


def _place(values: Any, item: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return where the value stands: pydantic's location without the kinds of value that it tried (``("cohort", "int")``)."""
    place: list[Any] = []
    at = values
    for position, part in enumerate(item["loc"], 1):
        item_of_list = isinstance(at, (list, tuple)) and isinstance(part, int) and part < len(at)
        if item_of_list or (isinstance(at, Mapping) and part in at):
            at = at[part]
        elif item["type"] != "missing" or position < len(item["loc"]):
            continue
        place.append(part)
    return tuple(place)


def _about(cls: Any, place: Sequence[Any]) -> Mapping[str, Any]:
    """Return the JSON schema of the setting at ``place``; empty when there is none."""
    try:
        root = {} if cls is None else _schema(cls)
    except PydanticUserError:
        return {}
    node = root
    for part in place:
        group = _resolved(node, root)
        node = group.get("properties", {}).get(part) or group.get("additionalProperties") or {}
        if not isinstance(node, Mapping):  # true: any key, of any kind
            return {}
    return {**_resolved(node, root), **node}


def _resolved(node: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a node without references; of a group that may be null, the group."""
    for part in (node, *node.get("anyOf", ())):
        if "$ref" in part:
            found: Mapping[str, Any] = root["$defs"][part["$ref"].rpartition("/")[2]]
            return found
    return node


def _problem(items: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    """Return the rest of a sentence that begins with the setting's name."""
    first = next((item for item in items if item["type"] in _WHOLE), items[0])
    value = first["input"]
    if first["type"] == "missing":
        return " is missing"
    if first["type"] == "extra_forbidden":
        return f": there is no such setting (got {_shown(value)}); take it out, or mend its name"
    if first["type"] in _WHOLE:
        return f": {first['ctx']['error']}" + ("" if isinstance(value, Mapping) else f" (got {_shown(value)})")
    wanted = list(dict.fromkeys(_wanted(item) for item in items))
    if "a number" in wanted and "a whole number" in wanted:
        wanted.remove("a whole number")
    if wanted == ["text"] and isinstance(value, (bool, int, float)):
        wanted = ["text (put it in quotes)"]
    if wanted == ["a group of settings"]:
        wanted[0] += f" ({', '.join(about.get('properties', ()))})"
    before = _earlier_reading(items)
    hint = nearest(str(value), [choice for item in items for choice in _choices(item)])
    text = f" is {_shown(value)}; it must be {' or '.join(wanted)}"
    if before is not None:
        return f"{text} (earlier versions read {_shown(before)})"
    return f"{text}; {hint}" if hint.startswith("did") else text


def _earlier_reading(items: Sequence[Mapping[str, Any]]) -> int | float | None:
    """Return the number or boolean into which earlier versions converted a value of another type; ``None`` if they refused it."""
    for item in items:
        kind = {"int_type": int, "float_type": float, "bool_type": bool}.get(item["type"])
        if kind is not None:
            with contextlib.suppress(ValidationError):
                return TypeAdapter(kind).validate_python(item["input"])
    return None


_PLAIN = {
    r"^Input (should be|is not) ": "",
    r"^\w+ should have (.*?)( after validation.*)?$": r"\1 long",
    r"^String should match pattern": "text that matches",
    r"a valid integer.*": "a whole number",
    r"a valid number.*": "a number",
    r"a valid boolean.*": "true or false",
    r"a valid string": "text",
    r"a valid path.*": "a path",
    r"a valid (list|tuple|set|frozenset)": "a list",
    r"a valid dictionary$": "a group {key: value}",
    r"a (valid )?dictionary or .*": "a group of settings",
    r"^None$": "null",
    r"greater than or equal to": "at least",
    r"less than or equal to": "at most",
    r"greater than": "above",
    r"less than": "below",
}
"""Pydantic's words for what a value should be, where a configuration has others."""


def _wanted(item: Mapping[str, Any]) -> str:
    """Return what a value must be, to follow ``it must be``."""
    choices = _choices(item)
    if choices:
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    text = str(item["msg"])
    for pattern, words in _PLAIN.items():
        text = re.sub(pattern, words, text)
    return text


def _choices(item: Mapping[str, Any]) -> list[str]:
    return re.findall(r"'([^']*)'", item["ctx"]["expected"]) if item["type"] == "literal_error" else []


def _shown(value: Any) -> str:
    """Return a value as a configuration writes it."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def plain(value: Any) -> Any:
    """Return a built option's value as plain data: tuples as lists, paths as text, dataclasses as mappings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value) if item.init}
    return json.loads(json.dumps(value, default=_text))


def _text(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))  # a function's address says nothing about which one it is
