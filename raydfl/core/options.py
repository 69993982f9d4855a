"""Options of a class or of a group of settings, and error messages for their values."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """Return the meaning and the range of a field, from its JSON schema. A range within the meaning is not repeated."""
    text = str(about.get("description", "")).replace("\n", " ").strip()
    ranges, choices = [], []
    for part in (about, *about.get("anyOf", ())):
        phrase = _range(part)
        if phrase and phrase not in text.lower():
            ranges.append(phrase)
        values = [str(value) for value in part.get("enum", ())]
        if not all(value in text for value in values):
            choices.append(f"one of {', '.join(values)}")
    limits = [*ranges, *choices]
    if limits and text.endswith("."):
        sentences = (f"Range: {limit}." if limit[0].isdigit() else f"{limit.capitalize()}." for limit in limits)
        return " ".join([text, *sentences])
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


def unknown_key(key: str, known: Iterable[str], where: str, of: str = "") -> ConfigError:
    """Return the error for a key that a group of settings does not have, with the nearest setting of all groups.

    Args:
        known: the group's keys.
        where: the group's place, ``"train.optimiser"``; empty at the top.
        of: what the keys are of, ``" for data set 'fsdd'"``.
    """
    known, elsewhere = list(known), dict[str, list[str]]()
    for place in () if Settings.tree is None else dict.fromkeys(_places(Settings.tree, "")):
        elsewhere.setdefault(place.rpartition(".")[2], []).append(place)
    close = difflib.get_close_matches(key, [*known, *elsewhere], n=1, cutoff=0.6)
    found = elsewhere.get(close[0], []) if close and close[0] not in known else []
    hint = f"did you mean {' or '.join(found)}?" if 0 < len(found) < 4 else nearest(key, known)
    return ConfigError(f"{where}{': ' if where else ''}unknown key {key!r}{of}; {hint}")


def _places(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """Yield the places of all settings within a group, ``"train.optimiser.lr"``."""
    for name, field in model.model_fields.items():
        place = f"{prefix}.{name}" if prefix else name
        yield place
        # Groups in a mapping have names of the user's own: their settings have no place that could be named here.
        named = get_origin(field.annotation) in (dict, Mapping)
        for kind in () if named else (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Settings):
                yield from _places(kind, place)


def explain(error: ValidationError, where: str, values: Any, cls: Any = None) -> str:
    """Return what pydantic found: for each wrong setting its place, pydantic's words, the value, and what the setting means.

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
        if items[0]["type"] == "extra_forbidden":
            known = _about(cls, place[:-1]).get("properties", ())
            lines.append(str(unknown_key(str(place[-1]), known, name.removesuffix(str(place[-1])).rstrip("."))))
            continue
        own = [item for item in items if item["type"] in _OWN]
        words = [str(item["msg"]).removeprefix("Value error, ") for item in own[:1] or items]
        value = items[0]["input"]
        told = items[0]["type"] == "missing" or (own and isinstance(value, Mapping))
        text = " or ".join(dict.fromkeys(words)).replace(" or Input should be ", " or ")
        lines.append(f"{name}: {text}{'' if told else f' (got {_show(value)})'}")
        meaning = "" if own else describe_field(_about(cls, place))
        if meaning:
            lines.append(f"  {name}: {meaning}")
    return "\n".join(lines)


_OWN = ("value_error", "assertion_error")
"""Types of errors whose messages are raydfl's own and complete."""


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
    """Return a node without references: the group, where it may be null; where it may be one of several, all their settings."""
    parts = (node, *node.get("anyOf", ()), *node.get("oneOf", ()))
    groups = [root["$defs"][part["$ref"].rpartition("/")[2]] for part in parts if "$ref" in part]
    properties = {name: about for group in groups for name, about in group.get("properties", {}).items()}
    return {**groups[0], "properties": properties} if groups else node


def _show(value: Any) -> str:
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
