"""FedRolex: clients train windows of the network's channels, which move on in every round.

S. Alam, L. Liu, M. Yan, M. Zhang, FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction, NeurIPS 2022,
algorithm 1 and equation 3. In round j a client with the share b has of a layer with K channels

    {(j + i) mod K : i = 0 ... ceil(b K) - 1}

and of the next layer the same channels' inputs; inputs of the first layer and outputs of the last one stay whole. Each element
of the server's tensors is averaged over the clients that had it, weighted by their examples; what nobody had stays. ``stride: 0``
leaves the windows where they are: these are the sub-networks of HeteroFL (E. Diao et al., 2021).

As the released code does: ``scaled``, a convolution's outputs are divided by the share while training (and not in evaluation),
which makes up for the inputs that the next layer has not; and ``masked``, the logits of classes of which the client has no example
are 0 in its loss, and of the last layer it sends the rows of its own classes alone. The latter tells the server which they are.

Deviations: means are weighted by examples, where the code counts each client once (``rule: uniform_mean``). GRUs lose units (with
their three gates, each direction by itself), which the paper has not; they are not scaled. Channels stay in the network's order
where a window goes past the end. Only the objective ``classify`` has logits to mask. The settings of the code's runs (SGD with
momentum 0.9, learning rate 2e-4, weight decay 1e-3, batches of 10, one epoch, gradients clipped at 1, shares 1, 1/2, 1/4, 1/8 and
1/16) are for ``train`` and ``data.profile`` to say.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.types import Client, State
from raydfl.methods._cutting import ScaledCutting


@dataclass(frozen=True, kw_only=True)
class FedRolex(ScaledCutting):
    """FedAvg over windows of the network's channels that roll on."""

    stride: Annotated[
        int, Field(ge=0, description="channels by which windows move in a round; 0: they stay, as in HeteroFL")
    ] = 1

    def chosen(self, state: State, client: Client, group: str, channels: int, kept: int) -> np.ndarray:
        """Return the window of the round."""
        return np.sort((state.round_index * self.stride + np.arange(kept)) % channels)
