r"""MultiFL: the server averages encoders over all their owners, and heads and the fusion over their trainers.

MultiFL is a baseline of ModalityMirror, and the first stage of this method (ModalityMirror: Improving Audio Classification in
Modality Heterogeneity Federated Learning with Multimodal Distillation, algorithm 1). A client with all views trains the encoders
and the fusion classifier:

    L_M = CE(fusion(e_A(x_A), e_V(x_V)), y)

A client with a missing view trains the networks of its views, encoder and head:

    L_A = CE(head_A(e_A(x_A)), y)

The server averages each tensor over its senders: encoders over all clients, the fusion over clients with all views, and heads over
the rest. With ``heads: all`` a client with all views trains the heads too, by the loss L_M + sum over its views of L_A, and sends
all of its networks.

Readings and deviations:

- The paper does not define who trains which head. ``heads`` has both readings. The choice decides much of the result
  (docs/modality-mirror.md).
- The mean is uniform (``uniform_mean``), as in the algorithm. ``rule: weighted_mean`` weights by examples, as in FedAvg.
- The original MultiFL learns autoencoders without labels and a classifier at the server. The paper's baseline does not.
- In a round without clients of a kind, their networks keep their values. ``clients/fused`` and ``clients/apart`` count the clients
  with the fusion and without it.

Networks and data are as in all methods of several views (docs/methods.md#methods-of-several-views).

    raydfl run jobs/tiny.yaml run.name=multifl train.rounds=1 method=multifl \
      models='{a: crnn_tiny, b: crnn_tiny}'
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.options import OURS
from raydfl.core.types import Batch, Update
from raydfl.methods._views import FUSION, WithFusion, apply_classifier, embed_views, select_present
from raydfl.training import Step, fit


@dataclass(frozen=True, kw_only=True)
class MultiFL(WithFusion):
    """FedAvg of each view's encoder, with a fusion at clients with all views."""

    heads: Annotated[
        Literal["alone", "all"],
        Field(
            description="Clients that train the heads of single views. alone: clients without all views. all: every client. "
            "Clients with all views then minimise the sum of the fusion's and the heads' cross-entropies."
        ),
        OURS,
    ] = "alone"

    def local(self, step: Step) -> Update:
        """Train the encoders with the fusion if the client has all views, else each view's network."""
        if self.heads == "all" and FUSION in step.models:
            return step.update(fit(step, self.joint_loss))
        return super().local(step)

    def joint_loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the cross-entropy of the fusion plus that of each view's head. Each encoder computes once."""
        features = embed_views(step.models, batch)
        value = batch.cross_entropy(apply_classifier(step.models[FUSION], torch.cat(list(features.values()), dim=1)))
        for name, embedded in features.items():
            logits = apply_classifier(cast(Any, step.models[name]).output, embedded)
            value = value + select_present(step.models[name], batch).cross_entropy(logits)
        return value
