"""Connectionist temporal classification (CTC): the loss of unaligned sequences, batched over clients in a single call.

A. Graves, S. Fernandez, F. Gomez, J. Schmidhuber, Connectionist Temporal Classification: Labelling Unsegmented Sequence Data with
Recurrent Neural Networks, ICML 2006.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raydfl.core.ops._backend import second_derivative_error, stack_clients


def ctc_loss(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """Compute -log p(target) of each example, summed over all alignments: float [batch].

    The loss of a target that is too long for the tokens is 0. Under torch.func.vmap, for which torch's loss has no rule, all
    clients are computed in one call. Its gradient on a GPU is not deterministic.

    Args:
        log_probabilities: float [batch, tokens, outputs], logarithms of probabilities. Output 0 is the blank.
        targets: int64 [batch, longest]: outputs from 1 in order, -1 after the end.
    """
    losses: Tensor = _CTCFunction.apply(log_probabilities, targets)[0]
    return losses


def _compute(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    tokens = log_probabilities.shape[1]
    lengths = torch.full((len(targets),), tokens, device=targets.device)
    # Targets too long for their tokens occur only in padding examples. Their infinite loss would make the mean NaN.
    losses: Tensor = F.ctc_loss(
        log_probabilities.transpose(0, 1),
        targets.clamp_min(0),
        lengths,
        (targets >= 0).sum(dim=1),
        reduction="none",
        zero_infinity=True,
    )
    return losses


class _CTCFunction(torch.autograd.Function):
    @staticmethod
    def forward(log_probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = log_probabilities.detach().requires_grad_()
            losses = _compute(leaf, targets)
            (gradient,) = torch.autograd.grad(losses.sum(), leaf)  # an example's loss depends on its own tokens only
        return losses.detach(), gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1], inputs[0])

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, None]:
        if dlosses is None:
            return None, None
        gradient, log_probabilities = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _CTCBackward.apply(dlosses, gradient, log_probabilities), None
        return dlosses[:, None, None] * gradient, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> tuple[Any, Any]:
        stacked = stack_clients(info.batch_size, in_dims, values)
        outputs = _CTCFunction.apply(*(value.flatten(0, 1) for value in stacked))
        return tuple(output.unflatten(0, (info.batch_size, -1)) for output in outputs), (0, 0)


class _CTCBackward(torch.autograd.Function):
    """The gradient, as a function of the inputs: a second derivative would silently omit its change with them."""

    @staticmethod
    def forward(dlosses: Tensor, gradient: Tensor, log_probabilities: Tensor) -> Tensor:
        return dlosses[..., None, None] * gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing, because backward raises an error."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise second_derivative_error("ctc_loss")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> tuple[Any, Any]:
        stacked = stack_clients(info.batch_size, in_dims, values)
        return _CTCBackward.apply(*stacked), 0
