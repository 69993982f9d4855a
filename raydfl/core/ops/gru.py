"""A gated recurrent unit of one layer: all time steps, directions and clients in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raydfl.core.ops import _torch
from raydfl.core.ops._backend import autocast_type, check_group, compiled_for, grouped, once, torch_is_better


def gru(x: Tensor, weights: Sequence[Tensor], lengths: Tensor | None = None) -> Tensor:
    """Return the output of a GRU that starts from 0.

    Args:
        x: float [batch, frames, inputs], or [clients, batch, frames, inputs] with weights and lengths of each client.
        weights: torch.nn.GRU's ``weight_ih, weight_hh, bias_ih, bias_hh`` of the direction from the first frame on; four more
            for the direction from the last one, if there is one.
        lengths: int64 [batch] or [clients, batch]: frames that count. The second direction starts at the last of these; the
            output after it is 0. ``None``: all.

    Returns:
        [..., batch, frames, directions * hidden], as torch.nn.GRU's with ``batch_first``.
    """
    dtype = autocast_type(x)
    if dtype is not None:
        with torch.autocast(x.device.type, enabled=False):
            return gru(x.to(dtype), [weight.to(dtype) for weight in weights], lengths)
    operators = compiled_for(x)
    if operators is None:
        output: Tensor = _Recurrence.apply(x, lengths, *weights)[0]  # type: ignore[no-untyped-call]
    else:
        output = operators.gru_forward(x, lengths, weights)[0]
    return output


class GRU(nn.GRU):
    """torch.nn.GRU; several layers, a start other than 0, packed sequences and time before batch are torch's own."""

    def forward(self, x: Any, hx: Tensor | None = None) -> tuple[Any, Tensor]:
        """Return the output and the last state, see torch.nn.GRU."""
        if not isinstance(x, Tensor) or hx is not None or not self._covered(x) or self._torch_is_better(x):
            output: tuple[Any, Tensor] = nn.GRU.forward(self, x, hx)
            return output
        outputs = gru(x, self._weights())
        last = [outputs[:, -1, : self.hidden_size]]
        if self.bidirectional:
            last.append(outputs[:, 0, self.hidden_size :])
        return outputs, torch.stack(last)

    def outputs(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the output alone, [batch, frames, directions * hidden], for x [batch, frames, inputs]; see :func:`gru`.

        Raises:
            ValueError: the module has more than one layer or wants time before batch.
        """
        if lengths is None and self._torch_is_better(x):
            output: Tensor = nn.GRU.forward(self, x)[0]
            return output
        if not self._covered(x):
            raise ValueError(
                "GRU.outputs needs one layer, batch_first=True and x [batch, frames, inputs] of at least one frame; "
                f"this is {self} with x of shape {list(x.shape)}"
            )
        return gru(x, self._weights(), lengths)

    def _torch_is_better(self, x: Tensor) -> bool:
        """Return whether cuDNN computes it: in evaluation mode it has no gradients."""
        return torch_is_better(x) and (self.training or not torch.is_grad_enabled())

    def _weights(self) -> list[Tensor]:
        """Return one layer's four weights for each direction; by name, because torch.func.functional_call replaces attributes."""
        weights: list[Tensor] = []
        for suffix in ("", "_reverse") if self.bidirectional else ("",):
            weights += [getattr(self, f"weight_{kind}_l0{suffix}") for kind in ("ih", "hh")]
            if self.bias:
                weights += [getattr(self, f"bias_{kind}_l0{suffix}") for kind in ("ih", "hh")]
            else:
                weights += [weights[-1].new_zeros(3 * self.hidden_size)] * 2
        return weights

    def _covered(self, x: Tensor) -> bool:
        return self.num_layers == 1 and self.batch_first and x.dim() == 3 and x.shape[1] > 0


class _Recurrence(torch.autograd.Function):
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
        # Under torch.func a gradient is itself mapped and has to be an operation with a rule; elsewhere a call is enough.
        if torch.is_grad_enabled():
            dx, *dweights = _RecurrenceBackward.apply(needed, dy, y, gates, x, lengths, *weights)  # type: ignore[no-untyped-call]
        else:
            dx, *dweights = _torch.gru_backward(dy, y, gates, x, lengths, weights, needed)
        return dx if needed else None, None, *dweights

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> tuple[Any, Any]:
        stacked = grouped(info.batch_size, in_dims, values)
        check_group("GRU", stacked[0])
        return _Recurrence.apply(*stacked), (0, 0)  # type: ignore[no-untyped-call]


class _RecurrenceBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        needed: bool, dy: Tensor, y: Tensor, gates: Tensor, x: Tensor, lengths: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(_torch.gru_backward(dy, y, gates, x, lengths, weights, needed))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept: see backward."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise once("GRU")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> tuple[Any, Any]:
        stacked = grouped(info.batch_size, in_dims, values)
        return _RecurrenceBackward.apply(*stacked), (0,) * (len(values) - 5)  # type: ignore[no-untyped-call]
