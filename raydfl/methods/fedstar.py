r"""FedSTAR: clients learn from a few labelled clips, and from pseudo-labels of many unlabelled clips.

V. Tsouvalas, A. Saeed, T. Ozcelebi, Federated Self-Training for Semi-Supervised Audio Recognition, ACM TECS 2022. In each step a
client computes one forward pass z = f(x_l, x_u), with dropout, over clips x_l with labels y and unlabelled clips x_u:

    guess       argmax z_u, accepted if max softmax(z_u / T) >= tau
    L_s         mean of CE(z_l, y)
    L_u         sum of CE(z_u, guess) over accepted guesses, divided by the number of all x_u; no gradient reaches guesses
    loss        (1 - beta) L_s + beta L_u + decay * sum of squares of all convolution kernels
    tau         from threshold's first to its second value along half a cosine over the rounds, 1 for the first round

The objective must be ``classify``, and ``data.unlabelled`` sets the pools (docs/data.md#dataunlabelled).
docs/fedstar.md has the paper's settings and its baselines.

An epoch is one pass over the unlabelled clips, with ``train.batch_size`` / 2 per step. Labelled clips repeat, equally many per
step. The optimiser is Adam at 0.001 with ``eps: 1e-7``, restarted in each round.

Readings. The paper and its code differ. The defaults follow the code, the source of the paper's tables, except for the weight:

- The paper adds beta L_u to L_s (``mix: added``). The code weights both (``mix: weighted``).
- The paper has T = 4, the code T = 1 (``temperature``).
- The paper weights clients by all their clips (``weight: clips``). The code weights them by their unlabelled clips, rounded up to
  whole batches (``weight: batches``).
- The paper assumes both pools. Here a client without labels learns only from pseudo-labels, and a client without unlabelled clips
  only from labels. A batch without labels and accepted pseudo-labels has no decay, so it changes nothing.

``learn_from`` selects the paper's supervised baseline, or a baseline with FedSTAR's number of steps and clips per step.

Beyond the paper: ``per_class`` is FlexMatch's curriculum (B. Zhang et al., NeurIPS 2021, equations 6, 7 and 11), with counts
once a round from the received model. ``strong`` names a view whose outputs learn the pseudo-labels of the model's own view
(FixMatch: K. Sohn et al., NeurIPS 2020).

Each round records ``accepted``, the fraction of pseudo-labels above the threshold, and ``pseudo_label_accuracy``, the correct
fraction of these, where the true label is known. Neither affects the training.

    raydfl run jobs/tiny.yaml run.name=fedstar method=fedstar models.model=split_cnn_tiny \
      data.unlabelled='{keep: 0.4}'
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
from raydfl.core.options import OURS, PAPER, RELEASE
from raydfl.core.types import Batch, Update
from raydfl.data import LABELLED, UNLABELLED
from raydfl.methods._method import Method
from raydfl.training import Plan, Reported, Step, fit, predict

_THRESHOLD = "threshold"

Threshold = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class FedSTAR(Method):
    """Federated self-training on unlabelled clips."""

    models: ClassVar[Mapping[str, str]] = {"model": "split_cnn"}

    beta: Annotated[
        float, Field(ge=0, le=1, description="Weight of the pseudo-labels' loss. 0: learn only from labels."), PAPER
    ] = 0.5
    mix: Annotated[
        Literal["weighted", "added"],
        Field(
            description="Total loss. weighted: (1 - beta) L_s + beta L_u, the code's. added: L_s + beta L_u, the paper's."
        ),
        RELEASE,
    ] = "weighted"
    temperature: Annotated[
        float, Field(gt=0, description="Softmax temperature of the confidence. 1: the code's. 4: the paper's."), RELEASE
    ] = 1.0
    threshold: Annotated[
        tuple[Threshold, Threshold],
        Field(
            description="Confidence threshold for pseudo-labels in the first and the last round. Values above 1 reject all of them."
        ),
        PAPER,
    ] = (0.5, 0.9)
    rising_rounds: Annotated[
        int, Field(ge=1, description="Rounds until the threshold reaches its last value, along half a cosine."), PAPER
    ] = 100
    kernel_decay: Annotated[
        float, Field(ge=0, description="Weight of the sum of squares of all convolution kernels. 0 disables it."), PAPER
    ] = 1e-4
    weight: Annotated[
        Literal["clips", "batches"],
        Field(
            description="Weight of a client. clips: number of its clips. batches: number of its unlabelled clips (labelled "
            "clips if all have labels), rounded up to whole batches."
        ),
        PAPER,
    ] = "clips"
    learn_from: Annotated[
        Literal["all", "labelled", "labelled_as_often"],
        Field(
            description="all: FedSTAR. labelled: the supervised baseline, with batch_size labelled clips per step. "
            "labelled_as_often: the baseline with FedSTAR's number of steps."
        ),
        PAPER,
    ] = "all"
    per_class: Annotated[
        bool, Field(description="Lower the threshold of classes with few accepted clips (FlexMatch)."), OURS
    ] = False
    strong: Annotated[
        str | None,
        Field(description="View of data.views that learns the pseudo-labels (FixMatch). null: the model's view."),
        OURS,
    ] = None

    @property
    def needs(self) -> Needs:
        """The pools of ``learn_from``, a batch with room for both, and the strong view."""
        return Needs(
            objectives=("classify",),
            pools=() if self.learn_from == "labelled" else (LABELLED, UNLABELLED),
            views=() if self.strong is None else (self.strong,),
            batch_size=2 if self.learn_from == "all" else 1,
        )

    def self_training(self, step: Step, batch: Batch) -> tuple[Tensor, Reported]:
        """Return the loss of a batch from both pools, with the metrics ``accepted`` and ``pseudo_label_accuracy``.

        ``accepted`` is the fraction of pseudo-labels above the threshold. ``pseudo_label_accuracy`` is the fraction of those that
        are correct, where the hidden label is known. Hidden labels serve no other purpose.
        """
        logits = step.forward("model", batch)
        weight = torch.ones_like(logits[:, 0]) if batch.weight is None else batch.weight
        labelled = (batch.columns["pool"] == 0) * weight
        unlabelled = weight - labelled
        confidence, guess = (logits.detach() / self.temperature).softmax(dim=1).max(dim=1)
        accepted = unlabelled * (confidence >= step.state[_THRESHOLD][guess])
        hidden = batch.columns.get("hidden_label", batch.y)  # Pools made by data.pools keep their labels.
        known = accepted * (hidden >= 0)
        student = logits
        if self.strong is not None:
            x, lengths = batch.views[self.strong], batch.view_lengths.get(self.strong)
            student = step.forward("model", batch.with_input_of(step.models["model"], x, lengths))
        # Unlabelled clips have label -1. They have weight 0 in the first term.
        supervised = _average(_compute_cross_entropy(logits, batch.y.clamp_min(0)), labelled, labelled)
        guessed = _average(_compute_cross_entropy(student, guess), accepted, unlabelled)
        share = 1 - self.beta if self.mix == "weighted" else 1.0
        # Without a label or a guess to learn, the decay alone would give Adam full steps.
        learns = share * labelled.sum() + self.beta * accepted.sum() > 0
        value = share * supervised + self.beta * guessed + learns * self._compute_decay(step)
        return value, {
            "accepted": (accepted.sum(), unlabelled.sum()),
            "pseudo_label_accuracy": ((known * (guess == hidden)).sum(), known.sum()),
        }

    def local(self, step: Step) -> Update:
        """Train on both pools, or as a baseline only on labelled clips."""
        pools = step.data.pools
        half = step.training.batch_size // 2
        rows = {LABELLED: half, UNLABELLED: step.training.batch_size - half}
        if self.learn_from == "labelled":
            clips, size = len(step.data.train), step.training.batch_size
            metrics = fit(step, self._compute_baseline_loss)
        elif self.learn_from == "labelled_as_often":
            clips, size = len(pools[LABELLED]), step.training.batch_size
            leader = UNLABELLED if len(pools[UNLABELLED]) else LABELLED
            steps = max(1, math.ceil(len(pools[leader]) / rows[leader]))
            metrics = fit(step, self._compute_baseline_loss, batches=Plan({LABELLED: size}, steps=steps, repeats=True))
        else:
            leader = UNLABELLED if len(pools[UNLABELLED]) else LABELLED
            clips, size = len(pools[leader]), rows[leader]
            step.state[_THRESHOLD] = self._thresholds(step)
            metrics = fit(step, self.self_training, batches=Plan(rows, leads=UNLABELLED))
            del step.state[_THRESHOLD]
            if self.weight == "clips":
                clips = sum(len(pool) for pool in pools.values())
        examples = clips if self.weight == "clips" else step.training.batch_size * math.ceil(clips / size)
        return step.update(metrics, weight=float(examples))

    def _compute_baseline_loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the loss of the baselines."""
        return batch.mean(_compute_cross_entropy(step.forward("model", batch), batch.y)) + self._compute_decay(step)

    def _compute_decay(self, step: Step) -> Tensor:
        """Return the weighted sum of squares of all kernels, the tensors with more than two dimensions."""
        kernels = [tensor for tensor in step.parameters("model").values() if tensor.dim() > 2]
        total = [kernel.square().sum() for kernel in kernels if self.kernel_decay]
        return self.kernel_decay * torch.stack(total).sum() if total else torch.zeros((), device=step.device)

    def threshold_in(self, round_index: int) -> float:
        """Return the confidence threshold of a round.

        Args:
            round_index: Number of completed rounds.
        """
        first, last = self.threshold
        progress = min((round_index + 1) / self.rising_rounds, 1.0)
        return last - (last - first) * (1 + math.cos(math.pi * progress)) / 2

    def _thresholds(self, step: Step) -> Tensor:
        """Return the threshold of each class, float32 [classes], on the step's device."""
        classes = next(spec.width for spec in step.client.models if spec.name == "model")
        threshold = self.threshold_in(step.round_index)
        thresholds = torch.full((classes,), threshold)
        clips = step.data.pools[UNLABELLED]
        if self.per_class and len(clips):
            confidence, guess = (predict(step, "model", clips) / self.temperature).softmax(dim=1).max(dim=1)
            sure = confidence >= threshold
            reached = torch.bincount(guess[sure], minlength=classes).float()
            # Equation 11: at first the undecided clips outnumber every class, which lowers all thresholds.
            progress = reached / torch.maximum(reached.max(), (~sure).sum())
            thresholds *= progress / (2 - progress)
        return thresholds.to(step.device)


def _compute_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def _average(values: Tensor, weights: Tensor, total: Tensor) -> Tensor:
    """Return the weighted sum of values, divided by the sum of ``total``. 0 if this sum is 0."""
    return (values * weights).sum() / total.sum().clamp_min(1.0)
