"""Corrections of client drift: control variates (SCAFFOLD) and local drifts (FedDC).

Server and clients keep tensors of the parameters' shapes under names with a prefix: ``control/model/output.weight``. The terms of
the loss are in ``step.state`` while a client trains, because a recorded loss reads tensors from there.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.needs import Needs
from raydfl.core.ops import drift_term
from raydfl.core.part_names import mark_like
from raydfl.core.types import BuiltModels, Client, Metrics, State, Task, Tensors, Update
from raydfl.methods._method import CLIENTS, Method, UpdateCounter
from raydfl.methods._pruning import MASK
from raydfl.training import Step

CONTROL, DRIFT = "control/", "drift/"
"""Prefixes of control variates and of FedDC's local drifts."""

MEAN_EXAMPLES = "mean_examples"
"""Name of a task's option with the mean number of examples of all clients."""

_ANCHOR, _SLOPE, _PULL, _OFFSET = "anchor/", "slope/", "pull", "offset"


def global_parameters(state: State, models: BuiltModels, tied: bool = False) -> dict[str, Tensor]:
    """Return the parameters in the global model, by name; with ``tied`` a tied weight under each of its names."""
    names = {
        f"{name}/{key}"
        for built in models
        for name, model in built.items()
        for key, _ in model.named_parameters(remove_duplicate=not tied)
    }
    return {name: value for name, value in state.tensors["global"].items() if name in names}


def zero_controls(state: State, models: BuiltModels) -> dict[str, Tensor]:
    """Return a control variate of zeros for each parameter of the global model."""
    return {CONTROL + name: torch.zeros_like(value) for name, value in global_parameters(state, models).items()}


@dataclass(frozen=True, kw_only=True)
class ControlMethod(Method, ABC):
    """FedAvg with control variates. The server's change by the mean change times the cohort's fraction of the clients."""

    needs = Needs(optimiser="sgd")

    changes: ClassVar[tuple[str, ...]] = (CONTROL,)

    associative: ClassVar[bool] = True

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return FedAvg's state and the server's control variate, zero."""
        state = super().init(clients, models, rng)
        tensors = {**state.tensors["global"], **zero_controls(state, models)}
        return dataclasses.replace(state, tensors={"global": tensors}, extra={CLIENTS: len(clients)})

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Average the models, and move the control variate by the cohort's share."""
        counter = UpdateCounter(updates)
        averaged, report = super().aggregate(state, counter, rng)
        tensors = {**averaged.tensors, "global": move_controls(state, averaged, counter.senders)}
        return dataclasses.replace(averaged, tensors=tensors), report


def move_controls(state: State, averaged: State, senders: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the global tensors after a round, with the control variates c + |S| / N times their mean change.

    Args:
        state: The state before the round. Its extra ``clients`` is N.
        averaged: The aggregated state, with the mean changes of the control variates.
        senders: |S|, the number of senders of each tensor, by name.
    """
    old, new = state.tensors["global"], dict(averaged.tensors["global"])
    for name, number in senders.items():
        if name.startswith(CONTROL):
            new[name] = old[name] + number / state.extra[mark_like(CLIENTS, name)] * new[name]
    return new


def effective_steps(steps: float, momentum: float) -> float:
    """Return the number of plain SGD steps equivalent to steps with momentum, for a constant gradient."""
    return float((steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum))


def put_drift_terms(step: Step, alpha: float) -> None:
    """Put FedDC's terms of the loss into ``step.state``, masked by the masks in it."""
    scale, offset = client_scale(step), torch.zeros((), device=step.device)
    for name in step.parameters():
        anchor, slope = step.reference(name).clone(), step.reference(CONTROL + name) * scale
        mask, drift = step.state.get(MASK + name), step.state.get(DRIFT + name)
        if drift is not None:  # the client has taken part before
            anchor -= drift
            slope -= step.state[CONTROL + name]
            offset += torch.sum(drift * slope if mask is None else drift * slope * mask)
        if mask is not None:
            anchor *= mask
        step.state[_ANCHOR + name], step.state[_SLOPE + name] = anchor, slope
    step.state[_OFFSET] = offset
    step.state[_PULL] = torch.tensor(alpha * scale, device=step.device)


def drift_penalty(step: Step, parameters: Tensors) -> Tensor:
    """Return FedDC's terms of the loss for (possibly masked) parameters, a scalar."""
    anchors, slopes = ([step.state[prefix + name] for name in parameters] for prefix in (_ANCHOR, _SLOPE))
    return drift_term(list(parameters.values()), step.state[_PULL], anchors, slopes) - step.state[_OFFSET]


def renew_drifts(step: Step, trained: Tensors, masks: Tensors, controls: bool = True) -> dict[str, Tensor]:
    """Renew the client's drift and control variate after training, and return the tensors to send.

    Args:
        step: The client's step.
        trained: The client's trained parameters, by flat name.
        masks: Masks of pruned parameters, by flat name.
        controls: Whether to keep a control variate besides the drift.

    Returns:
        The new drift, and the change of the control variate divided by the client's scale.
    """
    for name in [name for name in step.state if name.startswith((_ANCHOR, _SLOPE, _PULL, _OFFSET))]:
        del step.state[name]
    zero, payload = torch.zeros((), device=step.device), dict[str, Tensor]()
    for name in step.parameters():
        change = trained[name] - step.reference(name)
        if name in masks:
            change *= masks[name]
        step.state[DRIFT + name] = payload[DRIFT + name] = change + step.state.get(DRIFT + name, zero)
        if controls:
            # Reuse the tensor in place for the change of the control variate, divided by the scale.
            change /= -_compute_pace(step) * client_scale(step)
            change -= step.reference(CONTROL + name)
            payload[CONTROL + name] = change
            step.state[CONTROL + name] = torch.add(
                step.state.get(CONTROL + name, zero), change, alpha=client_scale(step)
            )
    return payload


def client_scale(step: Step) -> float:
    """Return s_i, the mean number of examples of all clients divided by this client's."""
    return float(step.options[MEAN_EXAMPLES]) / max(1, step.client.num_examples)


def _compute_pace(step: Step) -> float:
    """Return lr E ceil(mean(n) / B), with momentum lr times the effective number of steps."""
    settings, training = step.training.optimiser, step.training
    steps = training.local_epochs * math.ceil(float(step.options[MEAN_EXAMPLES]) / training.batch_size)
    return settings.models.get("model", settings.lr) * effective_steps(steps, settings.momentum)


def add_mean_examples(tasks: Sequence[Task], clients: Sequence[Client]) -> list[Task]:
    """Add the mean number of examples of all clients to the options of tasks."""
    mean = sum(client.num_examples for client in clients) / len(clients)
    return [dataclasses.replace(task, options={**task.options, MEAN_EXAMPLES: mean}) for task in tasks]
