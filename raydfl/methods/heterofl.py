r"""HeteroFL: each client trains a fixed sub-network of the first channels, as wide as its device allows.

E. Diao, J. Ding, V. Tarokh, HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients, ICLR
2021, algorithm 1 and equations 1 and 2. With the share b, a client has the channels

    {0, ..., ceil(b K) - 1}    of a layer with K channels, nested in the channels of wider sub-networks

and the next layer's inputs from these channels. Each element is averaged over the clients that have it; the rest keep their values.

``scaled`` is the paper's scaler: it divides a convolution's outputs by the share in training. ``masked`` is its masked
cross-entropy: the loss sets the logits of classes without local examples to 0, and the last layer's rows of these classes are not
sent. The server thereby learns a client's classes. docs/cuts.md describes the networks that can be cut, the slices that travel,
and the savings.

Deviations: the mean is weighted by examples, where the released code counts clients (``rule: uniform_mean``). The networks keep
their own normalisation in place of the paper's static batch normalisation.

    raydfl run jobs/tiny.yaml run.name=heterofl train.rounds=1 method=heterofl \
      method.share=capability data.profile='{capability: {values: [1, 0.5, 0.25]}}'
"""

from __future__ import annotations

import numpy as np
from pydantic.dataclasses import dataclass

from raydfl.core.types import Client, State
from raydfl.methods._cutting import ScaledCutting


@dataclass(frozen=True, kw_only=True)
class HeteroFL(ScaledCutting):
    """FedAvg over nested sub-networks of fixed widths."""

    def chosen(self, state: State, client: Client, group: str, channels: int, kept: int) -> np.ndarray:
        """Choose the first channels."""
        return np.arange(kept)
