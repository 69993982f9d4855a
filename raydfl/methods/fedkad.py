r"""FedKAD: clients exchange the mean top-level features of each class, and keep their networks private.

FedKAD (knowledge aggregation and distillation over top-level feature maps) as modified by FedMLAC for its comparison: without
public data and global logits, clients communicate only class-wise aggregated feature maps. The modification's code and equations
are not published. This is a reconstruction:

    f_k(x)       input of the last layer of client k's network (for a CRNN, the mean over time of the GRU's output)
    g_k(x)       P f_k(x), of a common size. P is a fixed linear map, or the identity for networks of this size.
    client       CE + lam mean_i known(y_i) ||g_k(x_i) - K_{y_i}||^2
    sent         k_{k,c} = mean of g_k(x) over its training examples of class c, and their number n_{k,c}
    server       K_c = sum_k n_{k,c} k_{k,c} / sum_k n_{k,c}. A class without examples in the cohort keeps its K_c.

known(c) is 1 once a client has sent a mean of class c, so in the first round clients train with cross-entropy alone. The mean
runs over all examples of the batch, with 0 for unknown classes. P projects orthogonally onto a random subspace, or embeds smaller
networks isometrically. Its singular values are 1, so it never stretches a gradient. It depends only on both sizes, so all clients
and all runs share it. With lam = 0 every client trains alone.

The objective must be ``classify``, without ``data.parts``. Networks may differ between clients. A client sends and receives
(``size`` + 1) values for each class and nothing else. CRNN-Tiny has 32 features, Lite and Mid 64, Base and Deep 256. A network of
your own needs ``embed(x, lengths=None)``, float32 [batch, width], and a last layer ``output`` that ``forward`` applies to its
result.

For a class without local examples, a client returns the received mean with weight 0. A rule that ignores weights thus sees no
change. Class means are computed in evaluation mode.

``weights: true`` also averages the networks' weights, as in FedAvg. It needs one architecture, and yields a global model,
comparable with other methods' on the server's test data. Report it as a variant. Without it, a network that learns from one
client's few clips cannot classify unseen speakers as well as FedKAD in FedMLAC's table.

Without ``weights`` there is no global model. Each client's network is measured on its held-out clips and on sampled test clips
(``evaluate.client_test_clips``). ``prototypes/accuracy`` is the accuracy of predicting the class with the nearest K_c to g_k(x).

    raydfl run jobs/tiny.yaml run.name=fedkad method=fedkad 'models.model=[crnn_tiny, crnn_lite]'
    raydfl run jobs/tiny.yaml run.name=fedkad_weights train.rounds=1 \
      method='{name: fedkad, weights: true}'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import ConfigError
from raydfl.core.options import OURS, PAPER
from raydfl.core.types import BuiltModels, Client, State
from raydfl.methods._prototypes import PrototypeMethod


@dataclass(frozen=True, kw_only=True)
class FedKAD(PrototypeMethod):
    """Private networks with top-level features near common class means."""

    size: Annotated[
        int,
        Field(ge=1, description="Number of features of a class mean. Features of other sizes are projected to it."),
        OURS,
    ] = 64
    weights: Annotated[
        bool,
        Field(description="Also average the networks' weights, as in FedAvg. Needs one architecture for all clients."),
        PAPER,
    ] = False

    def shared(self, name: str) -> bool:
        """Share the class means and counts, and the network only with ``weights``."""
        return self.weights or super().shared(name)

    @property
    def projected_size(self) -> int:
        """Number of features of a class mean."""
        return self.size

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return unknown class means, with ``weights`` also FedAvg's state.

        Raises:
            ConfigError: A network has no ``embed``, or ``weights`` is set and the clients have several architectures.
        """
        shapes = {tuple((k, v.shape) for k, v in built["model"].state_dict().items()) for built in models}
        if self.weights and len(shapes) > 1:
            raise ConfigError(
                f"method.weights: true averages the networks' weights, so all clients must have one architecture, but "
                f"models.model gives them {len(shapes)}. Configure one, or set method.weights=false to exchange only class means."
            )
        return super().init(clients, models, rng)
