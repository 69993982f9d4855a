"""Tensor names in a federation of several parts (``data.parts``), each with its own classes. A single unnamed part adds no mark.

All parts share the trunk of a network. Each part has its own last layer, because the layer depends on the part's classes. The
server marks its tensors with the part: ``"model/output.weight@digits"``. Clients use plain names. The server removes the mark
before a broadcast, and adds it to a client's update.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TypeVar

from raydfl.core.errors import ConfigError

_MARK = "@"

T = TypeVar("T")


def qualify(part: str, separator: str, name: str) -> str:
    """Prefix the name of a client or a score with its part.

    >>> qualify("digits", "/", "george"), qualify("", "/", "george")
    ('digits/george', 'george')
    """
    return f"{part}{separator}{name}" if part else name


def describe_part(part: str) -> dict[str, str]:
    """Return the part's entry in the profiles of its clients: empty for an unnamed part."""
    return {"part": part} if part else {}


def own_name(name: str, part: str) -> str:
    """Return the server's name of a part's tensor.

    Raises:
        ConfigError: the name contains an @, and the part is named.

    >>> own_name("model/output.weight", "digits")
    'model/output.weight@digits'
    """
    return check_name(name, part) + _mark(part)


def _mark(part: str) -> str:
    return f"{_MARK}{part}" if part else ""


def check_name(name: str, part: str) -> str:
    """Check the name of a tensor at clients of a part, and return it.

    Raises:
        ConfigError: the name contains an @, and the part is named.
    """
    if _MARK in name and _mark(part):
        raise ConfigError(
            f"the tensor name {name!r} contains {_MARK!r}, the mark of a part's name in data.parts. Rename the tensor in the "
            f"network or the method, or remove data.parts"
        )
    return name


def plain_name(name: str) -> str:
    """Return the clients' name of a tensor, without the mark of its part.

    >>> plain_name("model/output.weight@digits"), plain_name("model/gru.weight")
    ('model/output.weight', 'model/gru.weight')
    """
    return name.partition(_MARK)[0]


def mark_like(name: str, tensor: str) -> str:
    """Mark a name with the part of a tensor. A tensor that all parts share leaves it unchanged.

    >>> mark_like("clients", "model/output.weight@digits"), mark_like("clients", "model/gru.weight")
    ('clients@digits', 'clients')
    """
    _, mark, part = tensor.partition(_MARK)
    return f"{name}{mark}{part}"


def select_part(tensors: Mapping[str, T], part: str) -> Mapping[str, T]:
    """Select the server's tensors for clients of a part, by plain names."""
    end = _mark(part)
    return {name.removesuffix(end): value for name, value in tensors.items() if _MARK not in name or name.endswith(end)}


def mark_names(values: Mapping[str, T], part: str, server: Container[str]) -> dict[str, T]:
    """Rename a client's payload to the server's names.

    Args:
        values: the payload by plain names.
        part: the client's part.
        server: the server's names. Names missing here belong to the part.

    Raises:
        ConfigError: a name contains an @.
    """
    return {name if check_name(name, part) in server else own_name(name, part): value for name, value in values.items()}
