"""The server's state of a federation of several parts: joined from what a method makes for each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from raydfl.core.part_names import check_name, own_name
from raydfl.core.types import State


def join_states(states: Mapping[str, State], wider: State, common: bool = False) -> State:
    """Return one state: what fits all parts once, what depends on a part's classes or features for each part.

    Args:
        states: what ``Method.init`` made for each part and its clients, by plain names. What all share is the first part's.
        wider: the same for the first part with one class more, and for all clients. What it says in ``extra`` holds for the whole
            federation, what a part's state says there is kept under the part's own name.
        common: whether parts share what depends on classes too, where it has the same shape in all.

    Raises:
        ConfigError: a tensor's name could be taken for a part's.
    """
    first = next(iter(states.values()))
    for part, state in states.items():
        for tensors in state.tensors.values():
            for name in tensors:
                check_name(name, part)
    joined: dict[str, dict[str, Tensor]] = {}
    for part, state in states.items():
        for key, tensors in state.tensors.items():
            for name, tensor in tensors.items():
                shapes = {other.tensors[key][name].shape for other in states.values() if _has(other, key, name)}
                depends = (
                    not common
                    and _has(wider, key, name)
                    and wider.tensors[key][name].shape != first.tensors[key][name].shape
                )
                full = own_name(name, part) if depends or len(shapes) > 1 else name
                joined.setdefault(key, {}).setdefault(full, tensor)
    own = {own_name(name, part): value for part, state in states.items() for name, value in state.extra.items()}
    return dataclasses.replace(first, tensors=joined, extra={**wider.extra, **own})


def _has(state: State, key: str, name: str) -> bool:
    return name in state.tensors.get(key, {})
