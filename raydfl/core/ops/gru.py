"""Single-layer gated recurrent unit (GRU), over all time steps, directions and clients in a single call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raydfl.core.ops import _torch
from raydfl.core.ops._backend import (
    autocast_type,
    check_group,
    second_derivative_error,
    select_operators,
    stack_clients,
    torch_is_better,
)


def gru(x: Tensor, weights: Sequence[Tensor], lengths: Tensor | None = None) -> Tensor:
    """Compute the output of a GRU with the initial state 0.

    Args:
        x: float [batch, frames, inputs], or [clients, batch, frames, inputs] with weights and lengths of each client.
        weights: ``weight_ih, weight_hh, bias_ih, bias_hh`` of torch.nn.GRU for the forward direction, and four more for the
            backward direction if the GRU is bidirectional.
        lengths: int64 [batch] or [clients, batch]: valid frames. The backward direction starts at the last valid frame, and the
            output of padding is 0. ``None``: all.

    Returns:
        [..., batch, frames, directions * hidden], like torch.nn.GRU with ``batch_first``.
    """
    dtype = autocast_type(x)
    if dtype is not None:
        with torch.autocast(x.device.type, enabled=False):
            return gru(x.to(dtype), [weight.to(dtype) for weight in weights], lengths)
    operators = select_operators(x)
    if operators is None:
        output: Tensor = _GRUFunction.apply(x, lengths, *weights)[0]
    else:
        output = operators.gru_forward(x, lengths, weights)[0]
    return output


class GRU(nn.GRU):
    """Fast replacement of torch.nn.GRU.

    Several layers, initial states, packed sequences and time before batch fall back to torch's implementation.
    """

    def forward(self, x: Any, hx: Tensor | None = None) -> tuple[Any, Tensor]:
        """Return the output and the last state, like torch.nn.GRU."""
        if not isinstance(x, Tensor) or hx is not None or not self._supports(x) or self._torch_is_better(x):
            output: tuple[Any, Tensor] = nn.GRU.forward(self, x, hx)
            return output
        outputs = gru(x, self._weights())
        last = [outputs[:, -1, : self.hidden_size]]
        if self.bidirectional:
            last.append(outputs[:, 0, self.hidden_size :])
        return outputs, torch.stack(last)

    def outputs(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the output without the last state (see :func:`gru`).

        Args:
            x: float [batch, frames, inputs].
            lengths: int64 [batch]: valid frames. ``None``: all.

        Returns:
            [batch, frames, directions * hidden].

        Raises:
            ValueError: the module has several layers or lacks ``batch_first``.
        """
        if lengths is None and self._torch_is_better(x):
            output: Tensor = nn.GRU.forward(self, x)[0]
            return output
        if not self._supports(x):
            raise ValueError(
                "GRU.outputs: a single layer, batch_first=True and x [batch, frames, inputs] of at least one frame are required, "
                f"not {self} with x of shape {list(x.shape)}. Call the module itself instead."
            )
        return gru(x, self._weights(), lengths)

    def _torch_is_better(self, x: Tensor) -> bool:
        """Return whether cuDNN is faster and usable. In evaluation mode it has no gradients."""
        return torch_is_better(x) and (self.training or not torch.is_grad_enabled())

    def _weights(self) -> list[Tensor]:
        """Return four weights for each direction."""
        weights: list[Tensor] = []  # by name, because torch.func.functional_call replaces attributes
        for suffix in ("", "_reverse") if self.bidirectional else ("",):
            weights += [getattr(self, f"weight_{kind}_l0{suffix}") for kind in ("ih", "hh")]
            if self.bias:
                weights += [getattr(self, f"bias_{kind}_l0{suffix}") for kind in ("ih", "hh")]
            else:
                weights += [weights[-1].new_zeros(3 * self.hidden_size)] * 2
        return weights

    def _supports(self, x: Tensor) -> bool:
        """Return whether :func:`gru` implements the module's options for ``x``."""
        return self.num_layers == 1 and self.batch_first and x.dim() == 3 and x.shape[1] > 0


class _GRUFunction(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, lengths: Tensor | None, *weights: Tensor) -> tuple[Tensor, Tensor]:
        return _torch.gru_forward(x, lengths, weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, *inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        y, gates, x, lengths, *weights = ctx.saved_tensors
        if dy is None:
            return (None,) * (2 + len(weights))
        needed = ctx.needs_input_grad[0]
        # torch.func may map the gradient, too, so there it must be an operation with a vmap rule.
        if torch.is_grad_enabled():
            dx, *dweights = _GRUBackward.apply(needed, dy, y, gates, x, lengths, *weights)
        else:
            dx, *dweights = _torch.gru_backward(dy, y, gates, x, lengths, weights, needed)
        return dx if needed else None, None, *dweights

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> tuple[Any, Any]:
        stacked = stack_clients(info.batch_size, in_dims, values)
        check_group("GRU", stacked[0])
        return _GRUFunction.apply(*stacked), (0, 0)


class _GRUBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        needed: bool, dy: Tensor, y: Tensor, gates: Tensor, x: Tensor, lengths: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(_torch.gru_backward(dy, y, gates, x, lengths, weights, needed))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save nothing, because backward raises an error."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise second_derivative_error("GRU")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> tuple[Any, Any]:
        stacked = stack_clients(info.batch_size, in_dims, values)
        return _GRUBackward.apply(*stacked), (0,) * (len(values) - 5)
