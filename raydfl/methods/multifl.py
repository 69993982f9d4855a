"""MultiFL: the server averages encoders over all their owners, and heads and the fusion over their trainers.

MultiFL is a baseline of ModalityMirror, and the first stage of this method (ModalityMirror: Improving Audio Classification in
Modality Heterogeneity Federated Learning with Multimodal Distillation, algorithm 1). A client with all views trains the encoders
and the fusion classifier:

    L_M = CE(fusion(e_A(x_A), e_V(x_V)), y)

A client with a missing view trains the networks of its views, encoder and head:

    L_A = CE(head_A(e_A(x_A)), y)

The server averages each tensor over its senders: encoders over all clients, the fusion over clients with all views, and heads over
the rest.

Readings and deviations:

- The paper does not define who trains which head. Here the audio-only clients train the audio head. If all clients train it,
  accuracy changes by some 50 points (docs/modality_mirror.md).
- The mean is uniform, as in the algorithm. ``rule: weighted_mean`` weights by examples, as in FedAvg.
- The original MultiFL learns autoencoders without labels and a classifier at the server. The paper's baseline does not.
- In a round without clients of a kind, their networks keep their values. ``clients/fused`` and ``clients/apart`` count the clients
  with the fusion and without it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from pydantic.dataclasses import dataclass

from raydfl.core.types import Metrics, State, Update
from raydfl.methods._method import UpdateCounter
from raydfl.methods._views import FUSION, WithViews, collect_fusion_tensors, count_kinds
from raydfl.training import Step, fit


@dataclass(frozen=True, kw_only=True)
class MultiFL(WithViews):
    """FedAvg of each view's encoder, with a fusion at clients with all views."""

    def local(self, step: Step) -> Update:
        """Train the encoders with the fusion if the client has all views, else each view's network."""
        if FUSION in step.models:
            return step.update(fit(step, self.fusion_loss), tensors=collect_fusion_tensors(step))
        return step.update(self.train_views(step))

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Average over the senders, and count the clients with and without the fusion."""
        counter = UpdateCounter(updates)
        new, report = super().aggregate(state, counter, rng)
        return new, {**report, **count_kinds(counter)}
