"""FedSTAR: clients learn from a few clips with labels and from many without, of which they guess the labels themselves.

V. Tsouvalas, A. Saeed, T. Ozcelebi, Federated Self-Training for Semi-Supervised Audio Recognition, ACM TECS 2022. In each step a
client takes clips x_l with labels y and clips x_u without, and computes from one forward pass z = f(x_l, x_u), dropout included:

    guess       argmax z_u, taken where max softmax(z_u / T) >= tau
    L_s         mean of CE(z_l, y)
    L_u         sum of CE(z_u, guess) over the guesses taken, divided by the number of all x_u; no gradient reaches guesses
    loss        (1 - beta) L_s + beta L_u + decay * sum of the squares of all kernels of convolutions
    tau         from ``threshold``'s first to its second value along half a cosine over the rounds, 1 for the first round

The clips without labels are gone through once an epoch, ``train.batch_size`` / 2 in a step; those with labels again and again,
as many in a step. The optimiser is Adam at 0.001 with ``eps: 1e-7``, begun anew in each round.

Readings. The paper and its code differ; the defaults are the code's, which made the paper's tables, but for the weight:

- The paper adds beta L_u to L_s (``mix: added``); the code weights them (``mix: weighted``).
- The paper says T = 4; in the code it stays at 1 (``temperature``).
- The paper weights clients by all their clips (``weight: clips``); the code by the clips without labels, rounded up to whole
  batches (``weight: batches``).
- What the paper leaves out: a client without labels learns from its guesses alone, one that has nothing but labels from these.

``learn_from`` makes the paper's supervised baseline of it, and one that takes as many steps of as many clips as FedSTAR does.

Beyond the paper: ``per_class`` is FlexMatch's curriculum (B. Zhang et al., NeurIPS 2021, equations 6, 7 and 11), with the counts
taken once a round, of the model that a client receives. ``strong`` names a view of the clips whose outputs learn the guesses that
the model makes of its own (FixMatch: K. Sohn et al., NeurIPS 2020).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.needs import Needs
from raydfl.core.types import Batch, Update
from raydfl.data import LABELLED, UNLABELLED
from raydfl.methods._method import Method
from raydfl.training import Plan, Reported, Step, fit, predict

_THRESHOLD = "threshold"

Threshold = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class FedSTAR(Method):
    """Federated self-training."""

    models: ClassVar[Mapping[str, str]] = {"model": "split_cnn"}

    beta: Annotated[
        float, Field(ge=0, le=1, description="weight of what is learnt from guesses; 0: from labels alone")
    ] = 0.5
    mix: Annotated[
        Literal["weighted", "added"],
        Field(description="weighted: (1 - beta) L_s + beta L_u, the code's; added: L_s + beta L_u, the paper's"),
    ] = "weighted"
    temperature: Annotated[
        float, Field(gt=0, description="softening before confidence is read; 1: the code's, 4: the paper's")
    ] = 1.0
    threshold: Annotated[
        tuple[Threshold, Threshold],
        Field(description="confidence from which on a guess is taken, at the beginning and the end; above 1: none is"),
    ] = (0.5, 0.9)
    rising_rounds: Annotated[
        int, Field(ge=1, description="rounds in which the threshold gets from the one to the other; it stays there")
    ] = 100
    kernel_decay: Annotated[
        float, Field(ge=0, description="weight of the sum of the squares of all kernels of convolutions")
    ] = 1e-4
    weight: Annotated[
        Literal["clips", "batches"],
        Field(
            description="what a client counts as: clips, its clips; batches: those of the pool that leads, in whole batches"
        ),
    ] = "clips"
    learn_from: Annotated[
        Literal["all", "labelled", "labelled_as_often"],
        Field(
            description="all: FedSTAR. labelled: the supervised baseline, batch_size clips with labels in a step. "
            "labelled_as_often: the same with FedSTAR's number of steps"
        ),
    ] = "all"
    per_class: Annotated[
        bool, Field(description="lower the threshold for classes of which few clips reach it (FlexMatch)")
    ] = False
    strong: Annotated[
        str | None, Field(description="view of data.views that learns the guesses (FixMatch); null: the model's own")
    ] = None

    @property
    def needs(self) -> Needs:
        """Both pools (the baseline that counts FedSTAR's steps does, too), room for both in a batch, and the strong view."""
        return Needs(
            objectives=("classify",),
            pools=() if self.learn_from == "labelled" else (LABELLED, UNLABELLED),
            views=() if self.strong is None else (self.strong,),
            batch_size=2 if self.learn_from == "all" else 1,
        )

    def self_training(self, step: Step, batch: Batch) -> tuple[Tensor, Reported]:
        """Return the loss of a batch of both kinds, with the reports ``accepted`` and ``pseudo_label_accuracy``.

        The one is the share of the guesses that are taken, the other the share of right ones among these, where the true label
        is known; it is used for nothing else.
        """
        logits = step.forward("model", batch)
        weight = torch.ones_like(logits[:, 0]) if batch.weight is None else batch.weight
        labelled = (batch.columns["pool"] == 0) * weight
        unlabelled = weight - labelled
        confidence, guess = (logits.detach() / self.temperature).softmax(dim=1).max(dim=1)
        taken = unlabelled * (confidence >= step.state[_THRESHOLD][guess])
        hidden = batch.columns.get("hidden_label", batch.y)  # pools that data.pools makes have their labels
        known = taken * (hidden >= 0)
        learning = logits
        if self.strong is not None:
            own, lengths = batch.views[self.strong], batch.view_lengths.get(self.strong)
            learning = step.forward("model", batch.with_input_of(step.models["model"], own, lengths))
        supervised = _share(_cross_entropy(logits, batch.y.clamp_min(0)), labelled, labelled)
        guessed = _share(_cross_entropy(learning, guess), taken, unlabelled)
        share = 1 - self.beta if self.mix == "weighted" else 1.0
        value = share * supervised + self.beta * guessed + self._decay(step)
        return value, {
            "accepted": (taken.sum(), unlabelled.sum()),
            "pseudo_label_accuracy": ((known * (guess == hidden)).sum(), known.sum()),
        }

    def local(self, step: Step) -> Update:
        """Train on both pools, or as a baseline on the first alone."""
        pools = step.data.pools
        half = step.training.batch_size // 2
        rows = {LABELLED: half, UNLABELLED: step.training.batch_size - half}
        if self.learn_from == "labelled":
            clips, size = len(step.data.train), step.training.batch_size
            metrics = fit(step, self._supervised)
        elif self.learn_from == "labelled_as_often":
            clips, size = len(pools[LABELLED]), step.training.batch_size
            leader = UNLABELLED if len(pools[UNLABELLED]) else LABELLED
            steps = max(1, math.ceil(len(pools[leader]) / rows[leader]))
            metrics = fit(step, self._supervised, batches=Plan({LABELLED: size}, steps=steps, repeats=True))
        else:
            leader = UNLABELLED if len(pools[UNLABELLED]) else LABELLED
            clips, size = len(pools[leader]), rows[leader]
            step.state[_THRESHOLD] = self._thresholds(step)
            metrics = fit(step, self.self_training, batches=Plan(rows, leads=UNLABELLED))
            del step.state[_THRESHOLD]
            if self.weight == "clips":
                clips = sum(len(pool) for pool in pools.values())
        counted = clips if self.weight == "clips" else step.training.batch_size * math.ceil(clips / size)
        return step.update(metrics, weight=float(counted))

    def _supervised(self, step: Step, batch: Batch) -> Tensor:
        """Return the loss of the baselines."""
        return batch.mean(_cross_entropy(step.forward("model", batch), batch.y)) + self._decay(step)

    def _decay(self, step: Step) -> Tensor:
        """Return the weighted sum of the squares of all kernels: what has more dimensions than a matrix."""
        kernels = [tensor for tensor in step.parameters("model").values() if tensor.dim() > 2]
        total = [kernel.square().sum() for kernel in kernels if self.kernel_decay]
        return self.kernel_decay * torch.stack(total).sum() if total else torch.zeros((), device=step.device)

    def threshold_in(self, round_index: int) -> float:
        """Return the confidence from which on guesses are taken in a round.

        Args:
            round_index: rounds completed before it.
        """
        first, last = self.threshold
        done = min((round_index + 1) / self.rising_rounds, 1.0)
        return last - (last - first) * (1 + math.cos(math.pi * done)) / 2

    def _thresholds(self, step: Step) -> Tensor:
        """Return the threshold of each class: float32 [classes], on the step's device."""
        classes = next(spec.width for spec in step.client.models if spec.name == "model")
        threshold = self.threshold_in(step.round_index)
        thresholds = torch.full((classes,), threshold)
        clips = step.data.pools[UNLABELLED]
        if self.per_class and len(clips):
            confidence, guess = (predict(step, "model", clips) / self.temperature).softmax(dim=1).max(dim=1)
            sure = confidence >= threshold
            reached = torch.bincount(guess[sure], minlength=classes).float()
            progress = reached / torch.maximum(reached.max(), (~sure).sum())
            thresholds *= progress / (2 - progress)
        return thresholds.to(step.device)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def _share(values: Tensor, counted: Tensor, of: Tensor) -> Tensor:
    """Return the sum of the values that count, divided by the number of others: 0 where there are none."""
    return (values * counted).sum() / of.sum().clamp_min(1.0)
