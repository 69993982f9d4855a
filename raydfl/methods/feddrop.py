"""Federated Dropout: every round each client trains a network made of other channels, drawn at random.

S. Caldas, J. Konecny, H. B. McMahan, A. Talwalkar, Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements, 2018, section 2.2:

    client    keeps a fixed share of the filters of each convolution and of the units of each fully connected layer, drawn anew in
              each round, and trains the small dense network that is left
    server    puts what comes back into its place; each element is averaged over those who had it, what nobody had stays

What comes in and what goes out stays whole: the inputs of the first layer and the outputs of the last one. The paper keeps the same
share at all clients, 0.5 to 0.9, of which 0.75 is common there; here a profile may say each client's own (as FedAPTA compares it).

Deviations: the paper draws one set of channels for all clients of a round; here each client has its own. GRUs lose units (a unit
with its three gates, in each direction by itself), which the paper has not. Nothing is scaled while training, as in the paper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.seeds import generator
from raydfl.core.types import BuiltModels, Client, State
from raydfl.methods._cutting import CuttingMethod, Share

_SEED = "channels_seed"


@dataclass(frozen=True, kw_only=True)
class FedDrop(CuttingMethod):
    """FedAvg over parts of the network that are drawn anew for each client and round."""

    share: Annotated[
        Share | str,
        Field(
            description="share of its channels that a client keeps, above 0 and at most 1, or the name under which its profile "
            "says so (data.profile); 1: FedAvg"
        ),
    ] = 0.75

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """FedAvg's state, and what channels are drawn by."""
        state = super().init(clients, models, rng)
        return state if self.share == 1 else dataclasses.replace(state, extra={_SEED: int(rng.integers(2**53))})

    def chosen(self, state: State, client: Client, group: str, channels: int, kept: int) -> np.ndarray:
        """Draw them, without replacement."""
        rng = generator(state.extra[_SEED], state.round_index, client.id, f"channels/{group}")
        return np.sort(rng.choice(channels, size=kept, replace=False))
