"""What the options of a class or of a group of settings are, and in plain words what is wrong with those that were given."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

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
    """The options of a dataclass or of a group of settings, in their order."""
    schema = _schema(cls)
    required = schema.get("required", ())
    return [
        Option(name, about.get("default"), name in required, describe_field(about))
        for name, about in schema.get("properties", {}).items()
    ]


def path_options(cls: type) -> list[str]:
    """The names of the options that are files or folders."""
    return [
        name
        for name, about in _schema(cls).get("properties", {}).items()
        if any(part.get("format") == "path" for part in (about, *about.get("anyOf", ())))
    ]


def describe_field(about: Mapping[str, Any]) -> str:
    """Meaning and range of a field, from its JSON schema; a range that the meaning names already is not repeated."""
    text = str(about.get("description", "")).replace("\n", " ")
    limits = []
    for part in (about, *about.get("anyOf", ())):
        phrase = _range(part)
        if phrase and phrase not in text.lower():
            limits.append(phrase)
        values = [str(value) for value in part.get("enum", ())]
        if not all(value in text for value in values):
            limits.append("one of " + ", ".join(values))
    return f"{text} ({'; '.join(limits)})" if limits else text


def _range(part: Mapping[str, Any]) -> str:
    """``"1 to 512"``, ``"above 0, to 500"``, ``"at least 1"`` ...; empty when there is no limit."""
    low, above, high, below = (part.get(key) for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"))
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    phrases = [] if low is None else [f"at least {low:g}"]
    phrases += [] if above is None else [f"above {above:g}"]
    phrases += [] if below is None else [f"below {below:g}"]
    if high is not None:
        phrases.append(f"to {high:g}" if phrases else f"at most {high:g}")
    return ", ".join(phrases)


class _Lenient(GenerateJsonSchema):
    """A user's class may have options of types that JSON does not know: these have no schema, the others do."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  (pydantic's own way)

    def handle_invalid_for_json_schema(self, schema: CoreSchema, error_info: str) -> JsonSchemaValue:
        return {}


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
    for kind in (annotation, *get_args(annotation)):
        if isinstance(values, Mapping) and _is_group(kind) and kind.model_config.get("extra") != "allow":
            for key, value in values.items():
                if key not in kind.model_fields:
                    raise unknown_key(str(key), kind.model_fields, where, tree, prefix)
                check_keys(value, kind.model_fields[key].annotation, f"{where}.{key}" if where else key, tree, prefix)


def unknown_key(
    key: str, known: Iterable[str], where: str, tree: type[Settings], prefix: str = "", of: str = ""
) -> ConfigError:
    """The error for a key that a group of settings does not have.

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
    """The places of all settings within a group, ``"train.optimiser.lr"``."""
    paths = []
    for name, field in model.model_fields.items():
        place = f"{prefix}.{name}" if prefix else name
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if _is_group(kind)]
        paths += [place, *(path for kind in inner for path in _paths(kind, place))]
    return paths


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Settings)


def explain(error: ValidationError, where: str, values: Any, cls: Any = None) -> str:
    """What pydantic found, in the words of the configuration: place, value, what it must be, and what it means.

    Args:
        where: the place of ``values`` in the configuration, ``"method"``; empty at the top.
        values: what was validated.
        cls: the class or type that they were validated for; its descriptions are added.
    """
    problems: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for item in error.errors(include_url=False):
        problems.setdefault(_place(values, item), []).append(item)
    # Of a value that may be of several kinds, pydantic tells what is wrong for each: the deepest one is what was meant.
    deepest = [place for place in problems if not any(_within(other, place) for other in problems)]
    lines = []
    for place in deepest:
        name = ".".join(str(part) for part in (where, *place) if str(part)) or "the value"
        about = _about(cls, place)
        text, self_explaining = _problem(name, _value_at(values, place), problems[place], about)
        lines.append(text)
        meaning = describe_field(about)
        if meaning and not self_explaining:
            lines.append(f"  {name}: {meaning}")
    return "\n".join(lines)


def _place(values: Any, item: Mapping[str, Any]) -> tuple[Any, ...]:
    """Where the value stands: pydantic's location without the kinds of value that it tried (``("cohort", "int")``)."""
    place: list[Any] = []
    at = values
    for part in item["loc"]:
        item_of_list = isinstance(at, (list, tuple)) and isinstance(part, int) and part < len(at)
        if item_of_list or (isinstance(at, Mapping) and part in at):
            at = at[part]
        elif not (item["type"] == "missing" and isinstance(at, Mapping) and part == item["loc"][-1]):
            continue
        place.append(part)
    return tuple(place)


def _within(inner: tuple[Any, ...], outer: tuple[Any, ...]) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _value_at(values: Any, place: Sequence[Any]) -> Any:
    for part in place:
        if isinstance(values, Mapping) and part not in values:
            return None  # it is missing
        values = values[part]
    return values


def _about(cls: Any, place: Sequence[Any]) -> Mapping[str, Any]:
    """The JSON schema of the setting at ``place``; empty when there is none."""
    if cls is None:
        return {}
    try:
        root = _schema(cls)
    except PydanticUserError:
        return {}
    node: Mapping[str, Any] = root
    for part in place:
        described = _resolved(node, root).get("properties", {}).get(part)
        if described is None:
            return {}
        node = described
    return {**_resolved(node, root), **node}


def _resolved(node: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A node without references; of a group that may be null, the group."""
    for part in (node, *node.get("anyOf", ()), *node.get("allOf", ())):
        if "$ref" in part:
            found: Mapping[str, Any] = root["$defs"][part["$ref"].rpartition("/")[2]]
            return found
    return node


def _problem(name: str, value: Any, items: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> tuple[str, bool]:
    """A sentence, and whether it says all that there is to say."""
    own = [item for item in items if item["type"] in ("value_error", "assertion_error")]
    if own:
        shown = "" if isinstance(value, Mapping) else f" (got {_shown(value)})"
        return f"{name}: {own[0]['ctx']['error']}{shown}", True
    if items[0]["type"] == "extra_forbidden":
        return f"{name}: there is no such setting (got {_shown(value)}); take it out, or mend its name", True
    if items[0]["type"] == "missing" and not isinstance(value, (list, tuple)):
        return f"{name} is missing", False
    wanted = list(dict.fromkeys(_wanted(item, about) for item in items))
    if "a number" in wanted and "a whole number" in wanted:
        wanted.remove("a whole number")
    if wanted == ["text"] and isinstance(value, (bool, int, float)):
        wanted = ["text (put it in quotes)"]
    choices = [choice for item in items if item["type"] == "literal_error" for choice in _choices(item)]
    hint = nearest(str(value), choices) if choices else ""
    return f"{name} is {_shown(value)}; it must be {' or '.join(wanted)}" + (
        f"; {hint}" if hint.startswith("did you mean") else ""
    ), False


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "path": "a path",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "dict": "a group {key: value}",
    "none": "null",
}
"""What a value must be, by the beginning of the names of pydantic's errors (``int_type``, ``int_parsing`` ...)."""


def _wanted(item: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """What a value must be, to follow ``it must be``."""
    kind, limits = item["type"], item.get("ctx", {})
    if kind == "literal_error":
        choices = _choices(item)
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
        return " and ".join(f"{words[key]} {limit:g}" for key, limit in limits.items() if key in words)
    if kind in ("too_short", "string_too_short", "too_long", "string_too_long"):
        least = "min_length" in limits
        count = limits["min_length" if least else "max_length"]
        what = ("character" if kind.startswith("string") else "item") + ("" if count == 1 else "s")
        return f"{'at least' if least else 'at most'} {count} {what} long"
    if kind == "missing":  # of a list with a set number of items
        return f"longer: item {item['loc'][-1] + 1} is missing"
    if kind == "finite_number":
        return "a finite number"
    if kind in ("model_type", "dataclass_type", "model_attributes_type"):
        keys = list(about.get("properties", ()))
        return "a group of settings" + (f" ({', '.join(keys)})" if keys else "")
    first = kind.partition("_")[0]
    if first in _KINDS:
        return _KINDS[first]
    message = str(item["msg"])
    return message.removeprefix("Input should be ").removeprefix("Value error, ")


def _choices(item: Mapping[str, Any]) -> list[str]:
    return re.findall(r"'([^']*)'", item["ctx"]["expected"]) or [item["ctx"]["expected"]]


def _shown(value: Any) -> str:
    """A value as a configuration writes it."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def plain(value: Any) -> Any:
    """A built option's value as plain data: tuples as lists, paths as text, dataclasses as mappings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value) if item.init}
    return json.loads(json.dumps(value, default=_text))


def _text(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))  # a function's address says nothing about which one it is
