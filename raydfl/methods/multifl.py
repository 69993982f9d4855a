"""MultiFL: encoders are averaged over all clients that own them, heads over those that train them.

The baseline MultiFL of ModalityMirror, which is that method's first stage alone (ModalityMirror: Improving Audio Classification in
Modality Heterogeneity Federated Learning with Multimodal Distillation, algorithm 1). A client that has all views trains the
encoders and the fusion classifier on them:

    L_M = CE(fusion(e_A(x_A), e_V(x_V)), y)

a client that lacks one trains the network of each view that it has, encoder and head:

    L_A = CE(head_A(e_A(x_A)), y)

and the server averages each tensor over those who sent it: encoders over both kinds, a head over the second, the fusion over the
first.

Readings and deviations:

- The paper does not say who trains which head. Here the audio-only clients train the audio head. If all clients train it, accuracy
  changes by some 50 points (docs/modality_mirror.md).
- The mean is uniform, as in the algorithm; ``rule: weighted_mean`` weighs by examples, as FedAvg does.
- The work that the name comes from learns autoencoders without labels and a classifier at the server; the paper's baseline does
  not.
- In a round without one kind of client, what that kind trains keeps its values; ``clients/fused`` and ``clients/apart`` record
  how many of each kind took part.
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
    """Encoders averaged over their owners, with a fusion at those who have all views."""

    def local(self, step: Step) -> Update:
        """Train encoders and fusion where all views are there, else each network by itself."""
        if FUSION in step.models:
            return step.update(fit(step, self.fusion_loss), tensors=collect_fusion_tensors(step))
        return step.update(self.train_views(step))

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Average over those who sent, and record how many of each kind did."""
        arriving = UpdateCounter(updates)
        new, report = super().aggregate(state, arriving, rng)
        return new, {**report, **count_kinds(arriving)}
