"""FedKAD: clients exchange the mean top-level features of each class; their networks stay private.

FedKAD (knowledge aggregation and distillation over top-level feature maps) as FedMLAC modified it for its comparison: no public
data, no global logits, only class-wise aggregated feature maps are communicated. Neither that modification's code nor its equations
are published; this is a reconstruction:

    f_k(x)       what the last layer of client k's network sees (for a CRNN, the mean over time of the GRU's output)
    g_k(x)       P f_k(x), of a common size: P is a fixed linear map where the network's own size is another
    client       CE + lam mean_i known(y_i) ||g_k(x_i) - K_{y_i}||^2
    sent         k_{k,c} = mean of g_k(x) over its training examples of class c, and their number n_{k,c}
    server       K_c = sum_k n_{k,c} k_{k,c} / sum_k n_{k,c};  a class that nobody of the cohort holds keeps its K_c

known(c) is 1 once some client has sent a mean of class c, so in the first round clients train with cross-entropy alone. The mean is
taken over all examples of the batch, those of unknown classes counting 0. P projects orthogonally onto a random subspace, or where
the network's size is the smaller one embeds isometrically: its singular values are 1, so it never stretches a gradient. It is a
function of both sizes alone, the same at all clients and in all runs. With lam = 0 every client trains for itself.

``weights: true`` is the variant in which the networks' weights are averaged too, as in FedAvg, so that there is a global model. It
needs one architecture for all clients.

For the classes that it does not hold a client sends back what it received, with no weight: a rule that ignores weights sees no
change there. What is sent is computed in evaluation mode.

Without ``weights`` there is no global model to measure. Each client's own is measured on its hold-out and on the drawn test clips
(``evaluate.client_test_clips``). ``prototypes/accuracy`` is that of taking the class whose K_c is nearest to g_k(x) instead of the
last layer's answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import ConfigError
from raydfl.core.types import BuiltModels, Client, State
from raydfl.methods._prototypes import PrototypeMethod


@dataclass(frozen=True, kw_only=True)
class FedKAD(PrototypeMethod):
    """Private networks that are drawn to common class means of their top features."""

    size: Annotated[
        int, Field(ge=1, description="features of a class mean; networks of another size are mapped to it")
    ] = 64
    weights: Annotated[
        bool, Field(description="average the networks' weights too, as in FedAvg; needs one architecture for all")
    ] = False

    def shared(self, name: str) -> bool:
        """Share the class means and counts; the network only with ``weights``."""
        return self.weights or super().shared(name)

    @property
    def projected_size(self) -> int:
        """Features of a class mean."""
        return self.size

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Class means of which none is known; with ``weights`` also FedAvg's state.

        Raises:
            ConfigError: a network has no ``embed``; or ``weights`` and several architectures.
        """
        shapes = {tuple((k, v.shape) for k, v in built["model"].state_dict().items()) for built in models}
        if self.weights and len(shapes) > 1:
            raise ConfigError(
                f"method.weights: true averages the networks' weights, so all clients must have one architecture, but "
                f"models.model gives them {len(shapes)}; name one, or exchange class means only with method.weights=false"
            )
        return super().init(clients, models, rng)
