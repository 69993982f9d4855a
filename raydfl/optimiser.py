"""The clients' optimiser, over one client's parameters or over those of several clients stacked.

All of them act on each element by itself, so that on stacked parameters they do for each client what they do for it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from raydfl.groups import OptimiserSettings


def optimiser_over(
    parameters: Mapping[str, Sequence[Tensor]], settings: OptimiserSettings, round_index: int
) -> torch.optim.Optimizer:
    """A fresh optimiser.

    Args:
        parameters: leaf tensors by the name of their model.
        settings: which one; a model's own learning rate is used where it has one.
        round_index: rounds completed, by which the learning rates are decayed.
    """
    decay = settings.decay**round_index
    groups = [
        {"params": list(tensors), "lr": settings.models.get(name, settings.lr) * decay}
        for name, tensors in parameters.items()
        if tensors
    ]
    if settings.name == "sgd":
        return torch.optim.SGD(
            groups, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay, foreach=True
        )
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return kind(
        groups,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


@torch.no_grad()
def advance(optimiser: torch.optim.Optimizer) -> None:
    """One step of an optimiser of :func:`optimiser_over`: what its ``step`` does.

    For SGD without what ``step`` does around it (hooks, profiling, grouping by device and type), which takes longer than a small
    network's step itself.
    """
    if not isinstance(optimiser, torch.optim.SGD):
        optimiser.step()
        return
    for group in optimiser.param_groups:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters]
        if not parameters:
            continue
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        if group["momentum"]:
            gradients = _with_momentum(optimiser, parameters, gradients, group["momentum"])
        torch._foreach_add_(parameters, gradients, alpha=-group["lr"])


def _with_momentum(
    optimiser: torch.optim.Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor], momentum: float
) -> list[Tensor]:
    """The moments after these gradients, where ``torch.optim.SGD`` keeps them."""
    moments = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        kept = optimiser.state[parameter].get("momentum_buffer")
        moment = gradient.clone() if kept is None else kept.mul_(momentum).add_(gradient)
        optimiser.state[parameter]["momentum_buffer"] = moment
        moments.append(moment)
    return moments


def forget_gradients(optimiser: torch.optim.Optimizer) -> None:
    """What ``zero_grad`` does, without the profiling and grouping around it, which a step of a small network feels."""
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
