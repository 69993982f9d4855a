"""FedBN: normalisation layers stay with each client, all other layers are averaged.

X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou, FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021,
algorithm 1:

    server   w_l <- sum_k n_k w_k,l / sum_k n_k    for each layer l except batch normalisation
    client   keeps scales, shifts and running statistics of its batch normalisation

Deviations: the paper's mean over clients is uniform (``rule: uniform_mean``). Words in tensors' names select the normalisation
layers, so that layer and group normalisation can be personal, too. A network is rejected if it has no normalisation layers, or a
shared batch normalisation. ``film_cnn`` has batch normalisation, ``split_cnn`` group normalisation, the CRNNs none.

No model is shared as a whole, so the server evaluates none. Clients evaluate their models on their held-out clips and on sampled
test clips (``evaluate.client_test_clips``).

    raydfl run jobs/tiny.yaml run.name=fedbn train.rounds=1 method=fedbn models.model=film_cnn_tiny
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import nn

from raydfl.core.errors import ConfigError
from raydfl.core.options import OURS
from raydfl.core.types import BuiltModels, Client, State
from raydfl.methods._method import Method


@dataclass(frozen=True, kw_only=True)
class FedBN(Method):
    """Federated averaging with personal normalisation layers."""

    layers: Annotated[
        tuple[str, ...], Field(description="Words in the names of personal tensors. Empty is FedAvg."), OURS
    ] = (
        "norm",
        "bn",
    )

    def shared(self, name: str) -> bool:
        """Share all tensors except normalisation layers."""
        return not any(word in name for word in self.layers)

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return FedAvg's state without the normalisation layers.

        Raises:
            ConfigError: No tensor is personal, or a batch normalisation is shared.
        """
        tensors = [f"{n}/{key}" for built in models for n, model in built.items() for key in model.state_dict()]
        norms = [
            f"{n}/{path}.weight"
            for built in models
            for n, model in built.items()
            for path, layer in model.named_modules()
            if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        ]
        missed = [name for name in norms if self.shared(name)]
        if self.layers and (missed or all(map(self.shared, tensors))):
            raise ConfigError(
                f"method.layers: no word of {', '.join(self.layers)} is in the names of "
                f"{', '.join(missed) or 'any tensor'}. Add a word from the names of the normalisation layers, or choose a network "
                f"with normalisation layers, such as film_cnn."
            )
        return super().init(clients, models, rng)
