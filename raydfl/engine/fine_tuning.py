"""Fine-tuning of copies of a client's models for an evaluation. The copies are discarded afterwards."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Sequence

from torch import Tensor

from raydfl.core.types import Batch
from raydfl.objectives import Objective
from raydfl.training import Execution, Loss, Step, fit


def fine_tune(
    step: Step,
    objective: Objective,
    epochs: int,
    part: Sequence[str],
    fixed: tuple[str, ...] | None,
    leave_out: Collection[str] = (),
) -> Step:
    """Return a step with fine-tuned copies of the models.

    Args:
        step: Step of the client. Its models remain unchanged.
        objective: Objective of the training.
        epochs: Passes over the client's training data.
        part: Prefixes of the parameters to train, such as ``"model/output"``. Empty: all parameters that are trainable without the
            method's ``fixed``.
        fixed: The method's ``fixed``.
        leave_out: Names of models that read features of another model, which are not trained.
    """
    models = {name: copy.deepcopy(network) for name, network in step.models.items()}
    free: set[str] = set()
    learning = []
    for model, network in models.items():
        for key, parameter in network.named_parameters():
            name = f"{model}/{key}"
            trains = parameter.requires_grad or (name in step.fixed and name.startswith(fixed or ()))
            parameter.requires_grad_(name.startswith(tuple(part)) if part else trains)
            if parameter.requires_grad:
                free.add(name)
        if model not in leave_out and any(parameter.requires_grad for parameter in network.parameters()):
            learning.append(model)
    own = dataclasses.replace(step, models=models, fixed=step.fixed - free, state={}, moments={}, execution=Execution())
    if learning:
        fit(own, *(_make_loss(objective, model) for model in learning), epochs=epochs)
    return dataclasses.replace(own, state=dict(step.state))


def _make_loss(objective: Objective, model: str) -> Loss:
    def loss(step: Step, batch: Batch) -> Tensor:
        return objective.loss(step, model, batch)

    return loss


def personal_name(metric: str, models: int) -> str:
    """Return the name of a fine-tuned model's metric.

    >>> personal_name("model/loss", 1), personal_name("plugin/loss", 2)
    ('personal/loss', 'personal-plugin/loss')
    """
    model, slash, rest = metric.partition("/")
    return f"personal{slash}{rest}" if models == 1 else f"personal-{model}{slash}{rest}"
