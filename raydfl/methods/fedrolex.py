r"""FedRolex: clients train windows of the network's channels, and the windows move in every round.

S. Alam, L. Liu, M. Yan, M. Zhang, FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction, NeurIPS 2022,
algorithm 1 and equation 3. In round j, a client with the share b has these channels of a layer with K channels:

    {(j stride + i) mod K : i = 0 ... ceil(b K) - 1}        stride is 1 in the paper

and the next layer's inputs from these channels. The first layer keeps all inputs, the last layer all outputs. Each element of the
server's tensors is averaged over the clients that have it, weighted by their examples. The rest keep their values. With ``stride:
0`` the windows do not move, and the sub-networks are those of HeteroFL (E. Diao et al., 2021).

Two options follow the released code. ``scaled`` divides a convolution's outputs by the share in training, but not in evaluation,
to compensate for the next layer's missing inputs. ``masked`` sets the logits of classes without local examples to 0 in the loss,
and sends only the last layer's rows of the client's own classes. The server thereby learns these classes. docs/cuts.md describes
the networks that can be cut, the slices that travel, and the savings.

Deviations: means are weighted by examples, where the released code counts clients (``rule: uniform_mean``). GRUs lose units with
their three gates, each direction separately. The paper has no GRUs. They are not scaled. Channels keep the network's order if a
window wraps around. Only the objective ``classify`` has logits to mask. The code's runs used SGD with momentum 0.9, learning rate
2e-4, weight decay 1e-3, batches of 10, one epoch, gradients clipped at 1, and shares 1, 1/2, 1/4, 1/8 and 1/16. Set them in
``train`` and ``data.profile``.

    raydfl run jobs/tiny.yaml run.name=fedrolex train.rounds=1 method=fedrolex \
      method.share=capability data.profile='{capability: {values: [1, 0.5, 0.25, 0.125, 0.0625]}}'
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.options import PAPER, RELEASE
from raydfl.core.types import Client, State
from raydfl.methods._cutting import ScaledCutting


@dataclass(frozen=True, kw_only=True)
class FedRolex(ScaledCutting):
    """FedAvg over rolling windows of the network's channels."""

    stride: Annotated[
        int,
        Field(ge=0, description="Shift of the windows per round, in channels. 0: fixed windows, as in HeteroFL."),
        PAPER,
    ] = 1

    scaled: Annotated[
        bool, Field(description="Divide the outputs of convolutions by the fraction during training."), RELEASE
    ] = True
    masked: Annotated[
        bool,
        Field(description="Neither train nor send outputs of classes without local examples (objective classify)."),
        RELEASE,
    ] = True

    def chosen(self, state: State, client: Client, group: str, channels: int, kept: int) -> np.ndarray:
        """Choose the round's window of consecutive channels."""
        return np.sort((state.round_index * self.stride + np.arange(kept)) % channels)
