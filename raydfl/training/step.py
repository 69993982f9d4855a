"""Step: all that a client's code can reach while it carries out one task. No server, no store, no other client."""

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
from raydfl.training.substitute import evaluating, substitute_tensors


@dataclass(slots=True)
class Step:
    """One client carrying out one task."""

    client: Client
    models: dict[str, nn.Module]
    """By name, built and loaded: shared tensors as received, private ones as this client left them."""
    received: Mapping[str, Tensors]
    """The server's tensors as sent, by key; this client's own copy."""
    data: ClientData
    state: dict[str, Tensor]
    """Tensors that the method keeps for this client between its participations, in and out. Never leaves the client."""
    rng: np.random.Generator
    """Seeded by (run seed, round, client, phase)."""
    device: torch.device
    training: TrainSettings
    phase: str
    round_index: int
    """Rounds completed before this one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The task's options."""
    cuts: Cuts = field(default_factory=dict)
    """The task's cuts: of what tensors this client has only a part, and which."""
    shared: Callable[[str], bool] = lambda name: True
    """The method's ``shared``: which tensors leave the client."""
    fixed: frozenset[str] = frozenset()
    """Flat names of the tensors that never change and are neither sent nor kept (raydfl.training.ownership)."""
    moments: dict[str, Tensor] = field(default_factory=dict)
    """The optimiser's moments that ``fit`` keeps for this client with ``train.optimiser.keep``. They never leave the client."""
    clock: Clock = field(default_factory=Clock)
    """The time that this client has trained; ``fit`` stops at its deadline."""
    execution: Execution = field(default_factory=Execution)
    """The executor's values; methods do not need them."""

    def __post_init__(self) -> None:
        # A copy of a step notes its own training.
        self.execution = dataclasses.replace(self.execution)

    def forward(self, model: str, batch: Batch, tensors: Tensors | None = None) -> Tensor:
        """Return logits float32 [batch, classes] of the named model, whatever train.precision it computes in.

        Args:
            model: its name.
            batch: of examples.
            tensors: by flat name; the model computes with them in place of its own of these names (``step.received["teacher"]``,
                say). Those of other models are not looked at.

        Raises:
            ConfigError: none of ``tensors`` is of this model, or one has another shape.
        """
        network = self.models[model]
        with contextlib.nullcontext() if tensors is None else substitute_tensors(model, network, tensors):
            logits = cast(Tensor, network(*batch.input_of(network)))
        return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits

    @contextlib.contextmanager
    def teacher(self, model: str, tensors: Tensors) -> Iterator[nn.Module]:
        """Have the named model compute with other tensors, in evaluation mode and without gradients, inside a ``with`` block.

        Args:
            model: its name.
            tensors: by flat name, as for :meth:`forward`.

        Yields:
            The network.

        Raises:
            ConfigError: none of ``tensors`` is of this model, or one has another shape.
        """
        network = self.models[model]
        with torch.no_grad(), substitute_tensors(model, network, tensors), evaluating(network):
            yield network

    def parameters(self, *models: str) -> dict[str, Tensor]:
        """Return the named models' parameters (all by default) but fixed ones: ``"model/layer.weight"`` -> the live tensor."""
        return {
            key: parameter
            for name in (models or self.models)
            for key, parameter in self.named_parameters(name).items()
            if key not in self.fixed
        }

    def named_parameters(self, model: str) -> Mapping[str, Tensor]:
        """Return one model's parameters by flat name, fixed ones too: the live tensors."""
        known = self.execution.networks_of(self.models)
        if known is not None:
            return known.parameters[model]
        return {f"{model}/{key}": parameter for key, parameter in self.models[model].named_parameters()}

    def floating_state(self, *models: str) -> dict[str, Tensor]:
        """Return the parameters and floating buffers of the named models (all by default), detached views of the live tensors.

        Integer buffers (counters) and fixed tensors are neither sent nor kept, and are not among them.
        """
        known = self.execution.networks_of(self.models)
        if known is not None:
            return {k: v.detach() for name in (models or self.models) for k, v in known.floating[name].items()}
        return {
            f"{name}/{key}": value
            for name in (models or self.models)
            for key, value in self.models[name].state_dict().items()
            if value.is_floating_point() and f"{name}/{key}" not in self.fixed
        }

    def reference(self, name: str) -> Tensor:
        """Return the tensor of that flat name as it was received, from the first key that holds it."""
        for tensors in self.received.values():
            if name in tensors:
                return tensors[name]
        raise KeyError(f"{name!r} was not received; received keys: {list(self.received)}")

    def load(self, key: str, *models: str) -> None:
        """Load the named models (all by default) from the received entry ``key``, where it holds their tensors.

        Raises:
            ConfigError: one of these tensors has another shape than the network's.
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
        """Return this client's update.

        Args:
            metrics: sums and counts of what was measured.
            tensors: by flat name; by default every shared tensor of the models as they are now.
            weight: by default the number of training examples.
            key: the entry of the server's state that it changes; by default the first that was received.
            cuts: what part of the server's tensors these are, by name; by default as the client received them.
            further: updates to other keys, made by this method too.
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
"""A loss's reports of a batch: by name a sum and the count of what was summed up."""

Loss = Callable[[Step, Batch], Tensor | tuple[Tensor, Reported]]
"""The loss of a batch, a scalar; or that and what it reports besides."""


def computed(loss: Loss, step: Step, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss's value, and its reports by name as float32 [2]: sum and count.

    Raises:
        ValueError: a report has a name that ``fit`` uses itself, or is not a sum and a count.
    """
    execution = step.execution
    known, execution.networks = execution.networks, None  # in its networks' place a loss may compute with other tensors
    try:
        found = loss(step, batch)
    finally:
        execution.networks = known
    if not isinstance(found, tuple):
        return found, {}
    value, reported = found
    reports: dict[str, Tensor] = {}
    for name, pair in reported.items():
        if name in OF_FIT or not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                f"a loss reports {name!r}: {type(pair).__name__}; give a pair (sum, count), under another name than loss and steps"
            )
        plain = value.detach().float()
        numbers = [
            number.detach().float().reshape(()) if isinstance(number, Tensor) else plain.new_full((), number)
            for number in pair
        ]
        reports[name] = torch.stack(numbers)
    return value, reports
