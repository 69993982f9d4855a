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

from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.settings import Settings

PAPER = Field(json_schema_extra={"source": "paper"})
"""Source of a default that the method's paper states, as a value or an equation: ``Annotated[float, Field(...), PAPER]``."""
RELEASE = Field(json_schema_extra={"source": "release"})
"""Source of a default from the authors' published code, if the paper does not state it."""
OURS = Field(json_schema_extra={"source": "ours"})
"""Source of a default of raydfl's choice, and of an option that the paper and the code lack."""

_SHOWN = 80
"""Maximum number of characters of a wrong value in a message."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a method, rule, data set or group of settings."""

    name: str
    default: Any
    """Plain data. ``None``: null, or no default."""
    required: bool
    meaning: str
    """Description with unit and range."""
    source: str = ""
    """Source of the default: ``paper``, ``release`` or ``ours``. Empty: not given."""


def options_of(cls: type) -> list[Option]:
    """Return the options of a dataclass or of a group of settings, in order of definition."""
    schema = _schema(cls)
    required = schema.get("required", ())
    derived = (
        {item.name for item in dataclasses.fields(cls) if not item.init} if dataclasses.is_dataclass(cls) else set()
    )
    return [
        Option(name, about.get("default"), name in required, describe_field(about), about.get("source", ""))
        for name, about in schema.get("properties", {}).items()
        if name not in derived
    ]


def path_options(cls: type) -> list[str]:
    """Return the names of the options of type ``Path``."""
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
        phrase = _describe_range(part)
        if phrase and phrase not in text.lower():
            ranges.append(phrase)
        values = [str(value) for value in part.get("enum", ())]
        if not all(value in text for value in values):
            choices.append(f"one of {', '.join(values)}")
    limits = [*ranges, *choices]
    if limits and text.endswith("."):
        sentences = (f"Range: {limit}." if limit[0] in "-0123456789" else f"{limit.capitalize()}." for limit in limits)
        return " ".join([text, *sentences])
    return f"{text} ({'; '.join(limits)})".lstrip() if limits else text


def _describe_range(part: Mapping[str, Any]) -> str:
    """Describe a range: ``"1 to 512"``, ``"above 0, to 500"``, ``"at least 1"`` ... Empty: no limits."""
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
    """Schema generator for users' classes. It tolerates types without a JSON schema."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  (pydantic's own way)

    def handle_invalid_for_json_schema(self, schema: CoreSchema, error_info: str) -> JsonSchemaValue:
        return {}


@functools.lru_cache(maxsize=512)  # without a cache, schemas take a fifth of a small run's start-up time
def _schema(cls: type) -> Mapping[str, Any]:
    return TypeAdapter(cls).json_schema(schema_generator=_Lenient, mode="validation")


# -- errors -----------------------------------------------------------------------------------------------------------


def unknown_key(key: str, known: Iterable[str], where: str, of: str = "") -> ConfigError:
    """Return the error for an unknown key, with the nearest setting of all groups.

    Args:
        key: the unknown key.
        known: the group's keys.
        where: the group's place, ``"train.optimiser"``. Empty: the root.
        of: the keys' owner, ``" for data set 'fsdd'"``, for the message.
    """
    known, elsewhere = list(known), dict[str, list[str]]()
    for place in () if Settings.tree is None else dict.fromkeys(_iter_places(Settings.tree, "")):
        elsewhere.setdefault(place.rpartition(".")[2], []).append(place)
    close = difflib.get_close_matches(key, [*known, *elsewhere], n=1, cutoff=0.6)
    places = elsewhere.get(close[0], []) if close and close[0] not in known else []
    hint = f"Did you mean {' or '.join(places)}?" if 0 < len(places) < 4 else nearest(key, known)
    return ConfigError(f"{where}{': ' if where else ''}unknown key {key!r}{of}. {hint}")


def _iter_places(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """Yield the places of all settings within a group, ``"train.optimiser.lr"``."""
    for name, field in model.model_fields.items():
        place = f"{prefix}.{name}" if prefix else name
        yield place
        # Users choose the keys of a mapping, so settings of groups in it have no fixed place.
        is_mapping = get_origin(field.annotation) in (dict, Mapping)
        for kind in () if is_mapping else (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Settings):
                yield from _iter_places(kind, place)


def explain(error: ValidationError, where: str, values: Any, cls: Any = None) -> str:
    """Format pydantic's errors: the place, the problem, the value and the description of each wrong setting.

    Args:
        error: pydantic's error.
        where: the place of ``values`` in the configuration, ``"method"``. Empty: the root.
        values: the validated values.
        cls: the class or type, for descriptions. ``None``: no descriptions.
    """
    problems: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for item in error.errors(include_url=False):
        problems.setdefault(_place(values, item), []).append(item)
    lines = []
    for place, items in problems.items():
        # pydantic reports a union's errors for every member. The deepest place belongs to the member that the user meant.
        if any(len(deeper) > len(place) and deeper[: len(place)] == place for deeper in problems):
            continue
        name = ".".join(str(part) for part in (where, *place) if str(part)) or "the value"
        if items[0]["type"] == "extra_forbidden":
            known = _about(cls, place[:-1]).get("properties", ())
            lines.append(str(unknown_key(str(place[-1]), known, name.removesuffix(str(place[-1])).rstrip("."))))
            continue
        complete = [item for item in items if item["type"] in _COMPLETE]
        words = [str(item["msg"]).removeprefix("Value error, ") for item in complete[:1] or items]
        value = items[0]["input"]
        omit_value = items[0]["type"] == "missing" or (complete and isinstance(value, Mapping))
        # Each member of a union adds "Input should be ...": name the alternatives after a single prefix.
        text = " or ".join(dict.fromkeys(words)).replace(" or Input should be ", " or ")
        lines.append(f"{name}: {text}{'' if omit_value else f' (got {_show(value)})'}")
        meaning = "" if complete else describe_field(_about(cls, place))
        if meaning:
            lines.append(f"  {name}: {meaning}")
    return "\n".join(lines)


_COMPLETE = ("value_error", "assertion_error")
"""Types of errors with complete messages, written by raydfl."""


def _place(values: Any, item: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the place of an error's value: pydantic's location without the members of unions (``"int"``)."""
    place: list[Any] = []
    at = values
    for position, part in enumerate(item["loc"], 1):
        item_of_list = isinstance(at, (list, tuple)) and isinstance(part, int) and part < len(at)
        if item_of_list or (isinstance(at, Mapping) and part in at):
            at = at[part]
        elif item["type"] != "missing" or position < len(item["loc"]):
            continue  # a union member; only a missing key is a place without a value
        place.append(part)
    return tuple(place)


def _about(cls: Any, place: Sequence[Any]) -> Mapping[str, Any]:
    """Return the JSON schema of the setting at ``place``, or an empty mapping."""
    try:
        root = {} if cls is None else _schema(cls)
    except PydanticUserError:
        return {}
    node = root
    for part in place:
        group = _resolve(node, root)
        node = group.get("properties", {}).get(part) or group.get("additionalProperties") or {}
        if not isinstance(node, Mapping):  # True: any key with any value
            return {}
    return {**_resolve(node, root), **node}


def _resolve(node: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolve a node's references. A union of groups gives the settings of all members."""
    parts = (node, *node.get("anyOf", ()), *node.get("oneOf", ()))
    groups = [root["$defs"][part["$ref"].rpartition("/")[2]] for part in parts if "$ref" in part]
    properties = {name: about for group in groups for name, about in group.get("properties", {}).items()}
    return {**groups[0], "properties": properties} if groups else node


def _show(value: Any) -> str:
    """Format a value like in a configuration file, shortened."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def plain(value: Any) -> Any:
    """Convert an option's value to plain data: tuples to lists, paths to text, dataclasses to mappings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value) if item.init}
    return json.loads(json.dumps(value, default=_text))


def _text(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))  # an object's address differs between processes
