"""Dropout whose mask is a function of a client's seed, so that it does not matter with whom a client is trained.

Whether an element is zeroed depends on the seed, on how many calls of dropout came before in the same :func:`random_state`,
on the element's row (its example) and on its place in the row, and on nothing else: not on the device, the process, the other
clients, or examples and frames of padding after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from raydfl.core.ops import _torch
from raydfl.core.ops._backend import compiled_for, grouped


class _State:
    """A seed and the number of calls that have drawn from it."""

    def __init__(self, seed: Tensor) -> None:
        self.seed = seed
        self.calls = 0


_STATE: ContextVar[_State | None] = ContextVar("raydfl_dropout", default=None)


@contextmanager
def random_state(seed: Tensor) -> Iterator[None]:
    """Within this context every :class:`Dropout` draws from ``seed``: an int64 scalar, under vmap one for each client.

    Open it once for each step of training: the first dropout in it is call 0, the next call 1.

    Raises:
        TypeError: not an int64 scalar.
    """
    if seed.dtype != torch.int64 or seed.dim() != 0:
        raise TypeError(f"a random state's seed is an int64 scalar, not {seed.dtype} of shape {list(seed.shape)}")
    token = _STATE.set(_State(seed))
    try:
        yield
    finally:
        _STATE.reset(token)


class Dropout(nn.Dropout):
    """torch.nn.Dropout; within :func:`random_state`, from its seed and of x [batch, ...]."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with a share ``p`` of its values zeroed and the rest divided by 1 - p while training, ``x`` otherwise."""
        state = _STATE.get()
        if state is None or not self.training or not 0 < self.p < 1:
            return super().forward(x)
        call, state.calls = state.calls, state.calls + 1
        operators = compiled_for(x)
        drop = _Drop.apply if operators is None else operators.drop
        output: Tensor = drop(x, state.seed, call, min(round(self.p * 2**32), 2**32 - 1), 1 / (1 - self.p))  # type: ignore[no-untyped-call]
        return output


def uniform(rows: int, device: torch.device) -> Tensor:
    """Return random numbers float32 [rows], from 0 to below 1; within :func:`random_state` from its seed, one call of it.

    A row's number is the same whoever else is computed, and however many rows of padding stand after it.
    """
    state = _STATE.get()
    if state is None:
        return torch.rand(rows, device=device)
    call, state.calls = state.calls, state.calls + 1
    return (_torch.random_bits(state.seed, call, rows, 1).squeeze(-1) >> 8).float() / 2**24


class _Drop(torch.autograd.Function):
    forward = staticmethod(_torch.drop)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, seed, *ctx.options = inputs
        ctx.save_for_backward(seed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx: Tensor = _Drop.apply(dy, *ctx.saved_tensors, *ctx.options)  # type: ignore[no-untyped-call]
        return dx, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> tuple[Any, Any]:
        return _Drop.apply(*grouped(info.batch_size, in_dims, values)), 0  # type: ignore[no-untyped-call]
