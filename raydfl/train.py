"""fit() and predict(): the only training and inference loops of the project."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raydfl.data.examples import Examples
from raydfl.step import Step
from raydfl.types import Batch, Metrics, Ratio

Loss = Callable[[Step, Batch], Tensor]


def make_optimiser(step: Step, models: tuple[str, ...] = ()) -> torch.optim.Optimizer:
    """The configured optimiser over the named models' parameters (all by default), learning rates decayed to this round."""
    settings = step.training.optimiser
    groups = []
    for name in models or tuple(step.models):
        parameters = [p for p in step.models[name].parameters() if p.requires_grad]
        if parameters:
            rate = settings.models.get(name, settings.lr) * settings.decay**step.round_index
            groups.append({"params": parameters, "lr": rate})
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


def fit(step: Step, *losses: Loss, models: tuple[str, ...] = (), epochs: int | None = None) -> Metrics:
    """Train on the client's training data, batch by batch.

    For each batch, each loss in turn is computed with the parameters as they are then and followed by one optimiser step; a
    parameter that a loss does not depend on does not move.

    Args:
        losses: functions of (step, batch) that return a scalar, normally ending in ``batch.mean(...)``.
        models: names of the models to train; all by default.
        epochs: passes over the data; ``train.local_epochs`` by default.

    Returns:
        ``loss``: the mean per example over all batches (the sum over losses, if there are several); ``steps``: optimiser steps.
    """
    optimiser = make_optimiser(step, models)
    trained = [p for group in optimiser.param_groups for p in group["params"]]
    clip_norm = step.training.optimiser.clip_norm
    for model in step.models.values():
        model.train()
    values: list[Tensor] = []  # read at the end only: on a GPU reading one would wait for it
    sizes: list[int] = []
    for _ in range(step.training.local_epochs if epochs is None else epochs):
        for batch in step.data.train.batches(step.training.batch_size, step.rng, step.device):
            for loss in losses:
                optimiser.zero_grad(set_to_none=True)
                value = loss(step, batch)
                value.backward()  # type: ignore[no-untyped-call]
                if clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(trained, clip_norm)
                optimiser.step()
                values.append(value.detach())
                sizes.append(len(batch.y))
    optimiser.zero_grad(set_to_none=True)
    if not values:
        return {"loss": Ratio(0.0, 0), "steps": Ratio(0, 1)}
    total = torch.stack(values).double().cpu() @ torch.tensor(sizes, dtype=torch.float64)
    return {"loss": Ratio(float(total), sum(sizes) / len(losses)), "steps": Ratio(len(values), 1)}


@torch.no_grad()
def predict(step: Step, model: str, examples: Examples, batch_size: int = 64) -> Tensor:
    """Logits float32 [examples, classes] on the CPU, of the named model in evaluation mode."""
    network = step.models[model]
    network.eval()
    parts = [step.forward(model, batch).cpu() for batch in examples.batches(batch_size, None, step.device)]
    if not parts:
        return torch.zeros((0, next(spec.classes for spec in step.client.models if spec.name == model)))
    return torch.cat(parts)
