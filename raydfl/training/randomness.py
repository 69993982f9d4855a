"""Random numbers of a client's training, the same in batched and unbatched computation."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from raydfl.core.ops import random_state
from raydfl.training.step import Step

_STRIDE = 0x9E3779B97F4A7C15
"""Odd and irregular (the 64-bit golden ratio), so that the step seeds of different fits are unrelated."""


def fit_seed(step: Step) -> int:
    """Derive a 63-bit seed for one fit from the state of the client's generator, without advancing it."""
    state: int = step.rng.bit_generator.state["state"]["state"]
    digest = hashlib.blake2b(state.to_bytes(16, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # 63 bits fit into a tensor of int64


def derive_step_seed(seed: Tensor, number: int) -> Tensor:
    """Derive the seed of a fit's optimiser step ``number`` (from 0): int64, shaped like ``seed``.

    The result stays on the device of ``seed``, without synchronisation.
    """
    offset = number * _STRIDE % 2**64
    return seed + (offset - 2**64 if offset >= 2**63 else offset)  # the offset as int64, whose sum wraps around


def use_step_seed(seed: Tensor | None) -> AbstractContextManager[None]:
    """Have ``raydfl.ops.Dropout`` draw from this seed (int64 scalar). ``None``: from PyTorch's generator."""
    return contextlib.nullcontext() if seed is None else random_state(seed)


@contextlib.contextmanager
def preserve_generators(unless_done: bool = False) -> Iterator[None]:
    """Restore PyTorch's generators at the end of a ``with`` block.

    Args:
        unless_done: restore them only if the block raises.
    """
    states = get_generator_states()
    done = False
    try:
        yield
        done = True
    finally:
        if not (done and unless_done):
            set_generator_states(states)


def get_generator_states() -> list[Tensor]:
    """Return the states of PyTorch's CPU generator and, once CUDA is in use, of the current device's."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states


def set_generator_states(states: Sequence[Tensor]) -> None:
    """Restore the states returned by :func:`get_generator_states`."""
    torch.default_generator.set_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
