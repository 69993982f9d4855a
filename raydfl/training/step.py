"""Step: all that a client's code can reach while it carries out one task. No server, no store, no other client."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from raydfl.core.types import Batch, Client, Metrics, Tensors, Update
from raydfl.data.examples import ClientData
from raydfl.training.clock import Clock
from raydfl.training.replica import check_shape
from raydfl.training.settings import TrainSettings


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
    """What the method keeps for this client between its participations, in and out. Never leaves the client."""
    rng: np.random.Generator
    """Seeded by (run seed, round, client, phase)."""
    device: torch.device
    training: TrainSettings
    phase: str
    round_index: int
    """Rounds completed before this one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The task's options."""
    shared: Callable[[str], bool] = lambda name: True
    """The method's ``shared``: which tensors leave the client."""
    together: int = 1
    """Set by ``fit``: clients, this one included, whose last training was one batched computation; 1: looped."""
    apart: str = ""
    """Set by ``fit``: why this client's last training could not be batched with others' where that was tried."""
    recordings: dict[Hashable, dict[Hashable, Any]] | None = None
    """What was recorded of losses over these networks (tape.py); ``None``: losses run by their code in every step."""
    clock: Clock = field(default_factory=Clock)
    """How long this client has trained; ``fit`` stops at its deadline."""

    def forward(self, model: str, batch: Batch) -> Tensor:
        """Logits float32 [batch, classes] of the named model, whatever train.precision it computes in."""
        network = self.models[model]
        logits = cast(Tensor, network(*batch.input_of(network)))
        return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits

    def parameters(self, *models: str) -> dict[str, Tensor]:
        """The trainable parameters of the named models (all by default) as ``"model/layer.weight"`` -> the live tensor."""
        return {
            f"{name}/{key}": parameter
            for name in (models or self.models)
            for key, parameter in self.models[name].named_parameters()
        }

    def floating_state(self, *models: str) -> dict[str, Tensor]:
        """Parameters and floating buffers of the named models (all by default), detached views of the live tensors.

        Integer buffers (counters) are neither sent nor kept.
        """
        return {
            f"{name}/{key}": value
            for name in (models or self.models)
            for key, value in self.models[name].state_dict().items()
            if value.is_floating_point()
        }

    def reference(self, name: str) -> Tensor:
        """The tensor of that flat name as it was received, from the first key that holds it."""
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
    ) -> Update:
        """What this client returns.

        Args:
            metrics: sums and counts of what was measured.
            tensors: by flat name; by default every shared tensor of the models as they are now.
            weight: by default the number of training examples.
            key: the entry of the server's state that it changes; by default the first that was received.
        """
        if tensors is None:
            tensors = {name: value for name, value in self.floating_state().items() if self.shared(name)}
        if key is None:
            key = next(iter(self.received), "global")
        if weight is None:
            weight = float(self.client.num_examples)
        return Update(tensors=tensors, weight=weight, metrics=metrics or {}, key=key, client_id=self.client.id)


Loss = Callable[[Step, Batch], Tensor]
