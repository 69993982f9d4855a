"""Strict reading and writing of configuration files in YAML 1.2's core schema."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from raydfl.core.errors import ConfigError
from raydfl.core.files import open_regular

_BYTES = 10_000_000
_DEPTH = 100
_NODES = 100_000
_DIGITS = 100
"""Limits of a text: size, nesting, number of nodes, and length of a number. An alias counts as all the nodes it repeats."""

_TOO_LARGE = f"a configuration has at most {_BYTES // 10**6} MB, but this is larger. Give a smaller file."

_TAG = "tag:yaml.org,2002:"
_SCHEMA = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}
"""Pattern and possible first characters of the core schema's plain scalars, by tag."""

# libyaml is eight times as fast as PyYAML's own parser. It escapes characters beyond U+FFFF.
_Parser: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_Writer: Any = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper


class _Loader(_Parser):  # type: ignore[misc]
    """Loader of the core schema: null, booleans, numbers, text, lists, and groups without duplicate keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own way)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"the key in line {line} is a list or a group. Write text instead.")
            key = self.construct_object(key_node, deep=True)
            if key in mapping:
                raise ConfigError(f"the key {key!r} appears twice, the second time in line {line}. Remove either.")
            mapping[key] = self.construct_object(value_node, deep=deep)
        return mapping

    def construct_number(self, node: yaml.ScalarNode) -> int | float | bool | None:
        """Convert null, a boolean or a number."""
        kind, text = node.tag.removeprefix(_TAG), node.value
        if re.fullmatch(_SCHEMA[kind][0], text) is None:  # after an explicit tag: !!int five
            raise ConfigError(
                f"{text!r} in line {node.start_mark.line + 1} has the tag !!{kind}, but it is not a valid {kind}. Remove the tag."
            )
        if len(text) > _DIGITS:
            raise ConfigError(
                f"the number in line {node.start_mark.line + 1} has {len(text)} characters. Write at most {_DIGITS}."
            )
        if kind in ("null", "bool"):
            return None if kind == "null" else text.lower() == "true"
        if kind == "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text if base == 10 else text[2:], base)


_Loader.yaml_constructors = {
    **dict.fromkeys((_TAG + kind for kind in _SCHEMA), _Loader.construct_number),
    **{_TAG + kind: _Parser.yaml_constructors[_TAG + kind] for kind in ("str", "seq", "map")},
    None: _Parser.yaml_constructors[None],
}


class _EarlierLoader(_Parser):  # type: ignore[misc]
    """Loader with the schema of earlier versions: YAML 1.1, but with ``yes`` as text and ``1e3`` as a number."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's own way)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TAG + "bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(_Writer):  # type: ignore[misc]
    """Dumper that quotes text if either loader would misread it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _add_schema() -> None:
    exponent = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
    _EarlierLoader.add_implicit_resolver(_TAG + "bool", re.compile(rf"^({_SCHEMA['bool'][0]})$"), _SCHEMA["bool"][1])
    _EarlierLoader.add_implicit_resolver(_TAG + "float", exponent, list("-+0123456789."))
    for kind, (pattern, first) in _SCHEMA.items():
        for cls in (_Loader, _Dumper):
            cls.add_implicit_resolver(_TAG + kind, re.compile(rf"^({pattern})\Z"), first)


_add_schema()


class _SavedLoader(_Loader):
    """Loader of files from all versions. Earlier versions wrote the text 08 without quotes."""

    yaml_implicit_resolvers = _EarlierLoader.yaml_implicit_resolvers


def to_yaml(value: Any, flow: bool = True) -> str:
    """Write a value as YAML. :func:`parse_yaml` restores the same value.

    Args:
        value: plain data.
        flow: whether to write a single line instead of a line for each key.
    """
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=flow, sort_keys=False, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").rstrip("\n") if flow else text


def read_yaml(path: Path, saved: bool = False) -> Any:
    """Read a YAML file to plain data.

    Args:
        path: the file.
        saved: whether raydfl wrote the file.

    Raises:
        OSError: the file cannot be read, or it is not a regular file.
        UnicodeDecodeError: the file is not UTF-8 text.
        ConfigError: see :func:`parse_yaml`.
    """
    with open_regular(path) as file:
        content = file.read(_BYTES + 1)
    if len(content) > _BYTES:
        raise ConfigError(f"{path}: {_TOO_LARGE}")
    return parse_yaml(content.decode(), str(path), saved)


def parse_yaml(text: str, where: str, saved: bool = False) -> Any:
    """Convert YAML text to plain data.

    Args:
        text: at most 10 MB, 100 levels and 100,000 nodes.
        where: place of the text, for messages.
        saved: whether raydfl wrote the text.

    Raises:
        ConfigError: the text is invalid YAML, exceeds a limit, has a duplicate key, or has a scalar with a different meaning in
            earlier versions.
    """
    try:
        if len(text.encode()) > _BYTES:
            raise ConfigError(_TOO_LARGE)
        _check_events(text, saved)
        return yaml.load(text, Loader=_SavedLoader if saved else _Loader)
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{where} is not valid YAML{place}: {reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_events(text: str, saved: bool) -> None:
    """Check limits, aliases and scalars on the event stream, before large values are constructed."""
    total = 0
    groups: list[list[Any]] = []  # anchor, number of nodes before, and inner levels of each open list or group
    anchors: dict[str | None, tuple[int, int]] = {}  # nodes and levels of each anchor
    event: Any
    for event in yaml.parse(text, Loader=_Loader):
        nodes, levels, line = 1, 0, event.start_mark.line + 1
        if isinstance(event, yaml.CollectionStartEvent):
            groups.append([event.anchor, total, 0])
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before, levels = groups.pop()
            levels, nodes = levels + 1, 0
            anchors[anchor] = total - before, levels
        elif isinstance(event, yaml.AliasEvent):
            if any(event.anchor == group[0] for group in groups):
                raise ConfigError(
                    f"*{event.anchor} in line {line} is an alias inside its own value &{event.anchor}, and would repeat endlessly. "
                    f"Remove the alias."
                )
            nodes, levels = anchors.get(event.anchor, (1, 0))
        elif isinstance(event, yaml.ScalarEvent):
            anchors[event.anchor] = 1, 0
            if event.implicit[0]:
                _check_reading(event.value, line, saved)
        else:
            continue
        total += nodes
        if groups:
            groups[-1][2] = max(groups[-1][2], levels)
        if len(groups) + levels > _DEPTH:
            raise ConfigError(f"line {line} is nested more than {_DEPTH} levels deep. Use fewer levels.")
        if total > _NODES:
            raise ConfigError(f"more than {_NODES} values up to line {line}, including aliases. Write fewer values.")


def _check_reading(text: str, line: int, saved: bool) -> None:
    """Reject a plain scalar with a different meaning in earlier versions.

    Raises:
        ConfigError: the meanings differ. The message gives both.
    """
    if _UNCHANGED.fullmatch(text) or len(text) > _DIGITS:
        return
    try:
        before = _read_scalar(_EARLIER, text)
    except ValueError:  # an invalid date, so no earlier configuration contains it
        return
    if isinstance(before, str) and (saved or text.startswith("0o")):  # earlier configurations had no numbers like 0o10
        return
    if not isinstance(before, (str, int, float)):
        before = str(before)  # earlier versions converted dates to text
    now = _read_scalar(_NOW, text)
    if repr(before) != repr(now):
        old, new = to_yaml(before), to_yaml(now)
        raise ConfigError(
            f"{text} in line {line} was {old} in earlier versions and is {new} now, in YAML 1.2. Write {old} or {new}."
        )


_UNCHANGED = re.compile(r"([^-+.0-9].*)?|[-+]?(0|[1-9][0-9]*)(\.[0-9]+)?", re.DOTALL)
"""Scalars with the same meaning in both schemas: words and ordinary numbers."""
_NOW, _EARLIER = _Loader(""), _EarlierLoader("")


def _read_scalar(loader: Any, text: str) -> Any:
    """Return the value of a plain scalar."""
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))
    return loader.yaml_constructors[tag](loader, yaml.ScalarNode(tag, text))
