"""YAML as configurations are written in it: read strictly, and written so that it is read as the same."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import yaml

from raydfl.core.errors import ConfigError


class _Strict(yaml.constructor.SafeConstructor, yaml.resolver.Resolver):
    """YAML in which ``1e-3`` is a number, the words yes, no, on and off are words, and a key written twice is an error."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's own way)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(
                    f"the key {key!r} stands twice, the second time in line {key_node.start_mark.line + 1}"
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Loader(_Strict, yaml.SafeLoader):
    """The reader whose messages users see."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._open: list[str | None] = []

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse an alias within what it stands for, which would have no end."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self._open:
                mark: Any = event.start_mark
                raise ConfigError(
                    f"*{event.anchor} in line {mark.line + 1} stands within what &{event.anchor} names, and so would "
                    f"go on without end"
                )
            return super().compose_node(parent, index)
        self._open.append(event.anchor)
        try:
            return super().compose_node(parent, index)
        finally:
            self._open.pop()


_Strict.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_EXPONENT = (
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)
_Strict.add_implicit_resolver(*_EXPONENT)


class _FastLoader(_Strict, yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """The same by libyaml, for text without aliases and mistakes."""


# libyaml is eight times as fast. Both write the same, but libyaml escapes characters beyond U+FFFF.
class _Dumper(yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper):  # type: ignore[misc]
    """Puts quotes around text that :class:`_Loader` would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver(*_EXPONENT)


def to_yaml(value: Any, flow: bool = True) -> str:
    """Write a value as YAML that :func:`parse_yaml` reads as the same value; in one line, or in a line for each key."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=flow, sort_keys=False, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").rstrip("\n") if flow else text


def parse_yaml(text: str, where: str) -> Any:
    """YAML text to plain data.

    Raises:
        ConfigError: not YAML (the line is named), or a key stands twice.
    """
    if "&" not in text:
        with contextlib.suppress(yaml.YAMLError, ConfigError):
            return yaml.load(text, Loader=_FastLoader)
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{where} is not valid YAML{place}: {reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
