r"""FedPer: the server averages the base layers, and each client keeps its personal layers.

M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary, Federated Learning with Personalization Layers, 2019, algorithms 1-2:
clients train base and personal layers together and send only the base. The server averages it, weighted by examples.

Personal layers start from the same initial values at every client. Deviation: the paper counts personal layers from the output
(K_P). Here name prefixes of tensors select them, in any network.

No model is shared as a whole, so the server evaluates none. Clients evaluate their models on their held-out clips and on sampled
test clips (``evaluate.client_test_clips``).

    raydfl run jobs/tiny.yaml run.name=fedper train.rounds=1 method=fedper \
      method.personal='[model/output, model/gru]'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.options import OURS
from raydfl.core.types import BuiltModels, Client, State
from raydfl.methods._layers import check_prefixes, has_prefix_within
from raydfl.methods._method import Method


@dataclass(frozen=True, kw_only=True)
class FedPer(Method):
    """Federated averaging of all but the personal layers."""

    personal: Annotated[
        tuple[str, ...],
        Field(
            description="Name prefixes of personal tensors, such as [model/output], or of parts of names after a dot, such as "
            "[lora] for adapters. Empty is FedAvg."
        ),
        OURS,
    ] = ("model/output",)

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return FedAvg's state without the personal layers.

        Raises:
            ConfigError: A prefix matches no tensor.
        """
        check_prefixes(models, self.personal, "method.personal", has_prefix_within)
        return super().init(clients, models, rng)

    def shared(self, name: str) -> bool:
        """Share all but the personal layers."""
        return not any(has_prefix_within(name, prefix) for prefix in self.personal)
