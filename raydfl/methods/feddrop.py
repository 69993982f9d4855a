"""Federated Dropout: each client trains a sub-network of random channels, resampled in every round.

S. Caldas, J. Konecny, H. B. McMahan, A. Talwalkar, Expanding the Reach of Federated Learning by Reducing Client Resource
Requirements, 2018, section 2.2:

    client    samples a fixed fraction of each convolution's filters and each fully connected layer's units in every round, and
              trains the smaller dense network
    server    averages each element over its senders. Elements without senders keep their values

The inputs of the first layer and the outputs of the last layer stay complete. The paper uses one fraction for all clients, 0.5 to
0.9, often 0.75. Here a profile (docs/data.md#profiles) may set each client's own fraction, as in FedAPTA's comparison. A layer
loses inputs and outputs, so half of the channels are about a quarter of the weights. FedAPTA's pruning ratio for FedDrop may mean
channels or weights: ``share_of`` has both. docs/cuts.md describes the networks that can be cut, the slices that travel, and the
savings.

Deviations: the paper samples one set of channels for all clients of a round. Here each client has its own. GRUs, absent from the
paper, lose units (with their three gates, separately for each direction). As in the paper, training does not rescale outputs.

    raydfl run jobs/tiny.yaml run.name=feddrop train.rounds=1 method=feddrop method.share=0.5
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.options import PAPER
from raydfl.core.seeds import generator
from raydfl.core.types import BuiltModels, Client, State
from raydfl.methods._cutting import CuttingMethod, Share

_SEED = "channels_seed"


@dataclass(frozen=True, kw_only=True)
class FedDrop(CuttingMethod):
    """FedAvg over random sub-networks, resampled for each client and round."""

    share: Annotated[
        Share | str,
        Field(
            description="Fraction of each layer's channels at a client, in (0, 1], or a profile column with the fraction "
            "(data.profile). 1: FedAvg."
        ),
        PAPER,
    ] = 0.75

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return FedAvg's state with the seed of the channels."""
        state = super().init(clients, models, rng)
        return state if self.share == 1 else dataclasses.replace(state, extra={_SEED: int(rng.integers(2**53))})

    def chosen(self, state: State, client: Client, group: str, channels: int, kept: int) -> np.ndarray:
        """Sample the channels without replacement."""
        rng = generator(state.extra[_SEED], state.round_index, client.id, f"channels/{group}")
        return np.sort(rng.choice(channels, size=kept, replace=False))
