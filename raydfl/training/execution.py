"""Execution: how the executor computes one client's training. Methods do not need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from raydfl.training.networks import Networks


@dataclass(slots=True)
class Execution:
    """The executor's values for one step: what ``fit`` may reuse, and how the last call of ``fit`` was computed."""

    together: int = 1
    """Clients in the batched computation of the last training, including this one. 1: unbatched."""
    looped_because: str = ""
    """The reason why the last training could not be batched, where that was tried."""
    networks: Networks | None = None
    """The parts of the networks as they were built. ``None``: a user's code can change them."""

    def networks_of(self, models: Mapping[str, nn.Module]) -> Networks | None:
        """Return the parts of a step's models; ``None`` if they are unknown or the models were replaced."""
        return self.networks if self.networks is not None and self.networks.models == models else None
