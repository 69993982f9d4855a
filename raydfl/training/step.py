"""Step: the context of a method's code during a client's task.

It gives no access to the server, the stores or further clients.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from raydfl.core.cuts import Cuts
from raydfl.core.metrics import OF_FIT
from raydfl.core.types import Batch, Client, Metrics, Tensors, Update
from raydfl.data import ClientData
from raydfl.training.clock import Clock
from raydfl.training.execution import Execution
from raydfl.training.replica import check_shape
from raydfl.training.settings import TrainSettings
from raydfl.training.substitute import substitute_tensors, use_eval_mode


@dataclass(slots=True)
class Step:
    """Context of a client's task: models, data, state, settings."""

    client: Client
    models: dict[str, nn.Module]
    """Networks by name, with the received shared tensors and this client's private tensors."""
    received: Mapping[str, Tensors]
    """The server's tensors by key. A copy for this client."""
    data: ClientData
    state: dict[str, Tensor]
    """The method's private tensors for this client, kept between participations. They never leave the client."""
    rng: np.random.Generator
    """Generator seeded with (run seed, round, client, phase)."""
    device: torch.device
    training: TrainSettings
    phase: str
    round_index: int
    """Completed rounds before this one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The task's options."""
    cuts: Cuts = field(default_factory=dict)
    """The task's cuts: this client's slices of the server's tensors, by flat name."""
    shared: Callable[[str], bool] = lambda name: True
    """``Method.shared``: whether a tensor leaves the client."""
    fixed: frozenset[str] = frozenset()
    """Flat names of the fixed tensors, never changed, sent or kept (raydfl.training.ownership)."""
    moments: dict[str, Tensor] = field(default_factory=dict)
    """Optimiser moments kept for this client (``train.optimiser.keep``). They never leave the client."""
    clock: Clock = field(default_factory=Clock)
    """Training time of this client. ``fit`` stops at its deadline."""
    execution: Execution = field(default_factory=Execution)
    """Notes of the executor. Methods do not need them."""

    def __post_init__(self) -> None:
        # A copy of a step records its own training.
        self.execution = dataclasses.replace(self.execution)

    def forward(self, model: str, batch: Batch, tensors: Tensors | None = None) -> Tensor:
        """Compute the logits of a model, with gradients.

        Args:
            model: name of the model.
            batch: batch of examples.
            tensors: substitutes for the model's tensors by flat name, for example ``step.received["teacher"]``. Names of
                different models are ignored.

        Returns:
            Logits [batch, classes], float32 for every ``train.precision``.

        Raises:
            ConfigError: no tensor belongs to this model, or a shape differs from the model's.
        """
        network = self.models[model]
        with contextlib.nullcontext() if tensors is None else substitute_tensors(model, network, tensors):
            logits = cast(Tensor, network(*batch.input_of(network)))
        return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits

    @contextlib.contextmanager
    def teacher(self, model: str, tensors: Tensors) -> Iterator[nn.Module]:
        """Use a model with substitute tensors, in evaluation mode and without gradients, inside a ``with`` block.

        Args:
            model: name of the model.
            tensors: substitutes by flat name, as for :meth:`forward`.

        Yields:
            The network.

        Raises:
            ConfigError: no tensor belongs to this model, or a shape differs from the model's.
        """
        network = self.models[model]
        with torch.no_grad(), substitute_tensors(model, network, tensors), use_eval_mode(network):
            yield network

    def parameters(self, *models: str) -> dict[str, Tensor]:
        """Return the live parameters of the named models (all by default) by flat name, except fixed parameters."""
        return {
            key: parameter
            for name in (models or self.models)
            for key, parameter in self.named_parameters(name).items()
            if key not in self.fixed
        }

    def named_parameters(self, model: str) -> Mapping[str, Tensor]:
        """Return all live parameters of a model by flat name, including fixed parameters."""
        networks = self.execution.find_networks(self.models)
        if networks is not None:
            return networks.parameters[model]
        return {f"{model}/{key}": parameter for key, parameter in self.models[model].named_parameters()}

    def floating_state(self, *models: str) -> dict[str, Tensor]:
        """Return the parameters and floating-point buffers of the named models (all by default) by flat name.

        The tensors are detached views of the live ones. Integer buffers (counters) and fixed tensors are neither sent nor
        kept, and are omitted.
        """
        networks = self.execution.find_networks(self.models)
        if networks is not None:
            return {k: v.detach() for name in (models or self.models) for k, v in networks.floating[name].items()}
        return {
            f"{name}/{key}": value
            for name in (models or self.models)
            for key, value in self.models[name].state_dict().items()
            if value.is_floating_point() and f"{name}/{key}" not in self.fixed
        }

    def reference(self, name: str) -> Tensor:
        """Return a received tensor by flat name, from the first entry with this name.

        Raises:
            KeyError: no received entry has it.
        """
        for tensors in self.received.values():
            if name in tensors:
                return tensors[name]
        raise KeyError(f"{name!r} was not received. Received entries: {list(self.received)}.")

    def load(self, key: str, *models: str) -> None:
        """Copy the received entry ``key`` into the named models (all by default). Missing tensors stay.

        Raises:
            ConfigError: a shape differs from the network's.
        """
        tensors = self.received[key]
        with torch.no_grad():
            for name, value in self.floating_state(*models).items():
                if name in tensors:
                    check_shape(
                        name, tensors[name].shape, value.shape, f"client {self.client.id!r}, step.load({key!r})"
                    )
                    value.copy_(tensors[name])

    def update(
        self,
        metrics: Metrics | None = None,
        *,
        tensors: Tensors | None = None,
        weight: float | Mapping[str, float | Tensor] | None = None,
        key: str | None = None,
        cuts: Cuts | None = None,
        further: Sequence[Update] = (),
    ) -> Update:
        """Create this client's update.

        Args:
            metrics: measured sums and counts by name.
            tensors: tensors by flat name. Default: the current shared tensors of all models.
            weight: weight in the aggregation, one number or by tensor. Default: the number of training examples.
            key: entry of the server's state to update. Default: the first received entry.
            cuts: slices of the server's tensors by name. Default: the received slices.
            further: additional updates, to different keys.
        """
        if tensors is None:
            tensors = {name: value for name, value in self.floating_state().items() if self.shared(name)}
        if key is None:
            key = next(iter(self.received), "global")
        if weight is None:
            weight = float(self.client.num_examples)
        if cuts is None:
            cuts = {name: cut for name, cut in self.cuts.items() if name in tensors}
        return Update(tensors, weight, metrics or {}, key, self.client.id, cuts, tuple(further))


Reported = Mapping[str, tuple[Tensor | float, Tensor | float]]
"""Reports of a loss for a batch: a pair (sum, count) by name."""

Loss = Callable[[Step, Batch], Tensor | tuple[Tensor, Reported]]
"""Loss of a batch: a scalar, or a scalar and reports."""


def compute_loss(loss: Loss, step: Step, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute a loss and its reports.

    Returns:
        The scalar loss, and the reports by name as float32 [2]: sum and count.

    Raises:
        ValueError: the name of a report is reserved for ``fit``, or its value is not a pair.
    """
    execution = step.execution
    # Inside a loss, the networks' tensors may be substitutes: the index of the original tensors would be wrong.
    networks, execution.networks = execution.networks, None
    try:
        result = loss(step, batch)
    finally:
        execution.networks = networks
    if not isinstance(result, tuple):
        return result, {}
    value, reported = result
    reports: dict[str, Tensor] = {}
    for name, pair in reported.items():
        if name in OF_FIT or not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                f"Report {name!r} of a loss is a {type(pair).__name__}: give a pair (sum, count), under a name different from "
                "loss and steps."
            )
        detached = value.detach().float()
        scalars = [
            number.detach().float().reshape(()) if isinstance(number, Tensor) else detached.new_full((), number)
            for number in pair
        ]
        reports[name] = torch.stack(scalars)
    return value, reports
