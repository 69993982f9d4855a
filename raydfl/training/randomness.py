"""Random numbers inside a client's training: dropout masks that do not depend on who else is computed with the client."""

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
"""Odd and irregular, so that the seeds of a fit's steps have nothing to do with those of another's."""


def fit_seed(step: Step) -> int:
    """Return a 63-bit seed for one fit, a function of where the client's generator stands, which it leaves alone."""
    stand: int = step.rng.bit_generator.state["state"]["state"]
    digest = hashlib.blake2b(stand.to_bytes(16, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def derive_step_seed(seed: Tensor, number: int) -> Tensor:
    """Return the seed of a fit's optimiser step ``number`` (from 0): int64, of the shape of ``seed``, computed without waiting."""
    offset = number * _STRIDE % 2**64
    return seed + (offset - 2**64 if offset >= 2**63 else offset)


def use_step_seed(seed: Tensor | None) -> AbstractContextManager[None]:
    """Inside, ``raydfl.ops.Dropout`` draws from this seed (int64 scalar); ``None``: as everywhere else."""
    return contextlib.nullcontext() if seed is None else random_state(seed)


@contextlib.contextmanager
def preserve_generators(unless_done: bool = False) -> Iterator[None]:
    """Leave PyTorch's generators as they were.

    Args:
        unless_done: only if what is inside fails.
    """
    states = generator_states()
    done = False
    try:
        yield
        done = True
    finally:
        if not (done and unless_done):
            set_generator_states(states)


def generator_states() -> list[Tensor]:
    """Return the states of PyTorch's generators: the CPU's, and the current CUDA device's where CUDA is in use."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states


def set_generator_states(states: Sequence[Tensor]) -> None:
    """Put back what :func:`generator_states` gave."""
    torch.default_generator.set_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
