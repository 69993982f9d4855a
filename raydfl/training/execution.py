"""Execution of one client's training, as seen by the executor. Methods do not need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from raydfl.training.networks import Networks
from raydfl.training.withheld import PrivateTask


@dataclass(slots=True)
class Execution:
    """Notes of the executor on a step: reusable networks, and whether the last ``fit`` was batched."""

    together: int = 1
    """Number of clients in the batched computation of the last training. 1: unbatched."""
    looped_because: str = ""
    """Reason why the last training could not be batched. Empty if it was batched, or batching was not tried."""
    kept: Mapping[str, float] = field(default_factory=dict)
    """Share of kept elements of masked tensors in the last training, by flat name."""
    networks: Networks | None = None
    """Parts of the networks as built. ``None``: a user's code may replace them."""
    private: PrivateTask | None = None
    """Differentially private training (``train.optimiser.private``). ``None``: training without noise."""

    def find_networks(self, models: Mapping[str, nn.Module]) -> Networks | None:
        """Return the known parts of a step's models, or ``None`` if they are unknown or replaced."""
        return self.networks if self.networks is not None and self.networks.models == models else None
