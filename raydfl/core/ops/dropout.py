"""Reproducible dropout: masks depend on a client's seed, not on its group of batched clients.

An element's mask is a function of the seed, the number of earlier calls within :func:`random_state`, the element's row (its
example) and its position in the row. Device, process, batched clients and padding behind the element have no influence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from raydfl.core.ops import _torch
from raydfl.core.ops._backend import select_operators, stack_clients


class _State:
    """A seed and the number of draws from it."""

    def __init__(self, seed: Tensor) -> None:
        self.seed = seed
        self.calls = 0


_STATE: ContextVar[_State | None] = ContextVar("raydfl_dropout", default=None)


@contextmanager
def random_state(seed: Tensor) -> Iterator[None]:
    """Make every :class:`Dropout` and :func:`uniform` in this context draw from a seed.

    Open a new context for each training step: it counts the draws from 0.

    Args:
        seed: int64 scalar; under vmap, a scalar for each client.

    Raises:
        TypeError: ``seed`` is not an int64 scalar.
    """
    if seed.dtype != torch.int64 or seed.dim() != 0:
        raise TypeError(
            f"random_state: the seed must be an int64 scalar, not {seed.dtype} of shape {list(seed.shape)}."
        )
    token = _STATE.set(_State(seed))
    try:
        yield
    finally:
        _STATE.reset(token)


class Dropout(nn.Dropout):
    """Replacement of torch.nn.Dropout for x [batch, ...]. Within :func:`random_state` it draws from the context's seed."""

    def forward(self, x: Tensor) -> Tensor:
        """Zero a fraction ``p`` of the values and divide the rest by 1 - p while training. Return ``x`` otherwise."""
        state = _STATE.get()
        if state is None or not self.training or not 0 < self.p < 1:
            return super().forward(x)
        call, state.calls = state.calls, state.calls + 1
        operators = select_operators(x)
        drop = _Drop.apply if operators is None else operators.drop
        output: Tensor = drop(x, state.seed, call, min(round(self.p * 2**32), 2**32 - 1), 1 / (1 - self.p))
        return output


def uniform(rows: int, device: torch.device) -> Tensor:
    """Draw uniform random numbers from [0, 1): float32 [rows].

    Within :func:`random_state` this is a single draw from its seed. A row's value depends neither on batched clients nor on
    padding.
    """
    state = _STATE.get()
    if state is None:
        return torch.rand(rows, device=device)
    call, state.calls = state.calls, state.calls + 1
    # 24 bits are exact in float32; 32 bits could round to 1.
    return (_torch.random_bits(state.seed, call, rows, 1).squeeze(-1) >> 8).float() / 2**24


class _Drop(torch.autograd.Function):
    forward = staticmethod(_torch.drop)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, seed, *ctx.options = inputs
        ctx.save_for_backward(seed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx: Tensor = _Drop.apply(dy, *ctx.saved_tensors, *ctx.options)
        return dx, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> tuple[Any, Any]:
        return _Drop.apply(*stack_clients(info.batch_size, in_dims, values)), 0
