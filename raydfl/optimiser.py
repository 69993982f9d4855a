"""The clients' optimiser, over one client's parameters or over those of several clients stacked.

All of them act on each element by itself, so that on stacked parameters they do for each client what they do for it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from raydfl.config import OptimiserSettings


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
            groups, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay, fused=True
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


def forget_gradients(optimiser: torch.optim.Optimizer) -> None:
    """What ``zero_grad`` does, without the profiling and grouping around it, which a step of a small network feels."""
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
