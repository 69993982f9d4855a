"""Names in a federation of several parts (``data.parts``), each with its own classes. A single unnamed part adds no mark.

What fits all parts (the trunk of a network) the server has once. What depends on a part's classes (its last layer) it has for each
part, under the tensor's name with the part's behind it: ``"model/output.weight@digits"``. A client knows only plain names: on the
way to it what is its part's loses the mark, and on the way back it gets it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TypeVar

from raydfl.core.errors import ConfigError

_MARK = "@"

T = TypeVar("T")


def qualify(part: str, separator: str, name: str) -> str:
    """Name something of a part, such as a client or a score, for the whole federation.

    >>> qualify("digits", "/", "george"), qualify("", "/", "george")
    ('digits/george', 'george')
    """
    return f"{part}{separator}{name}" if part else name


def describe_part(part: str) -> dict[str, str]:
    """Return the part's entry in the profiles of its clients: empty for an unnamed part."""
    return {"part": part} if part else {}


def own_name(name: str, part: str) -> str:
    """Return the name under which the server has a tensor of a part.

    Raises:
        ConfigError: the name holds an @ already; it could not be told from a part's.

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
            f"the name {name!r} of a tensor contains {_MARK!r}, the mark of a part's name in data.parts. Rename the tensor in the "
            f"network or the method, or remove data.parts"
        )
    return name


def plain_name(name: str) -> str:
    """Return the name under which clients know a tensor.

    >>> plain_name("model/output.weight@digits"), plain_name("model/gru.weight")
    ('model/output.weight', 'model/gru.weight')
    """
    return name.partition(_MARK)[0]


def beside(name: str, tensor: str) -> str:
    """Qualify a name by the part of a tensor. Tensors of all parts leave it unchanged.

    >>> beside("clients", "model/output.weight@digits"), beside("clients", "model/gru.weight")
    ('clients@digits', 'clients')
    """
    _, mark, part = tensor.partition(_MARK)
    return f"{name}{mark}{part}"


def of_part(tensors: Mapping[str, T], part: str) -> Mapping[str, T]:
    """Select the server's tensors for clients of a part, by plain names."""
    end = _mark(part)
    return {name.removesuffix(end): value for name, value in tensors.items() if _MARK not in name or name.endswith(end)}


def marked(values: Mapping[str, T], part: str, server: Container[str]) -> dict[str, T]:
    """Rename a payload of a client of a part to the server's names.

    Args:
        values: the payload by plain names.
        part: the client's part.
        server: the server's names. Names that are missing here belong to the part.

    Raises:
        ConfigError: a name contains an @.
    """
    return {name if check_name(name, part) in server else own_name(name, part): value for name, value in values.items()}
