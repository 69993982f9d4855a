"""Verify: speaker verification. Do two recordings have the same speaker?

    z_i    output of the network for clip i, scaled to length 1: its embedding
    w_c    row c of a matrix with a row for each class (speaker), scaled to length 1
    t_ic   angle between z_i and w_c
    loss   mean over the batch of -log softmax over c of s cos(t_ic + m [c = y_i]), at c = y_i
           + spread * sum over c of sum over c' != c of max(0, distance - ||w_c - w_c'||)^2
    score  of a pair of clips: z_i . z_j

J. Deng et al., ArcFace: Additive Angular Margin Loss for Deep Face Recognition, CVPR 2019, with s = ``scale`` and m = ``margin``.
As in the authors' code, cos(t + m) becomes cos t - m sin m for t > pi - m, where it would rise again. With the full margin,
training from random weights may diverge. The margin therefore grows linearly over the first ``ramp`` rounds: after r rounds it is
margin min(1, r / ramp).

The second term is the spreadout regulariser of FedAwS (F. X. Yu et al., Federated Learning with Only Positive Labels, ICML 2020). A
client with one speaker sees one label, and its loss falls if all clips of all speakers move to the same point. The term keeps the
rows apart. Deviation: in the paper the server computes it after the aggregation. Here clients compute it in each step, so that it
works with every method.

Tests need no class of training, because they compare clips with each other. The embedding of a clip is the mean over its segments,
scaled to length 1. Trials are all pairs of a test set's clips, or the pairs of ``data.trials``. A test with more than ``pairs``
pairs draws at most half of this number from the pairs of one speaker and half from the rest, equally in all runs. The proportion of
both kinds changes neither score. ``eer`` is the equal error rate. ``min_dcf`` is NIST's minimum detection cost with p = 0.01 and
costs of 1: min over thresholds of (p miss + (1 - p) false alarm) / p.

Privacy: rows w_c are sent and averaged like the network (``model/objective.weight``), so a client's update names its speakers.
Embeddings of test clips never leave a client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.errors import DataError
from raydfl.core.seeds import generator
from raydfl.core.types import Batch, Metrics, ModelSpec, Scores
from raydfl.data import Examples, Population
from raydfl.objectives._objective import Objective, mean_over_clips
from raydfl.training import Step

_BLOCK = 1024
"""Clients whose labels are counted at once."""


@dataclass(frozen=True, kw_only=True)
class Verify(Objective):
    """Speaker verification: embeddings of recordings, trained with an additive angular margin between the speakers."""

    labels: ClassVar[Literal["one", "sets", "sequences", "any"]] = "one"
    headline: ClassVar[str] = "eer"
    answers: ClassVar[Literal["class", "set", "score", "text", "embedding", "none"]] = "embedding"
    compares_clips: ClassVar[bool] = True

    size: Annotated[int, Field(ge=2, description="Outputs of the network for a clip.")] = 64
    scale: Annotated[
        float, Field(gt=0, description="Factor of the cosines in the softmax. Large values separate speakers less.")
    ] = 16.0
    margin: Annotated[
        float,
        Field(
            ge=0,
            lt=math.pi / 2,
            description="Margin between speakers, an angle in radians. 0: no margin.",
        ),
    ] = 0.2
    ramp: Annotated[
        int, Field(ge=0, description="Number of rounds until the margin is full. 0: full from the start.")
    ] = 10
    spread: Annotated[
        float,
        Field(
            ge=0,
            description="Weight of the term against similar rows of the matrix, for clients with a single speaker. 0: off.",
        ),
    ] = 0.0
    distance: Annotated[
        float, Field(gt=0, le=2, description="Distance of two rows below which spread pushes them apart.")
    ] = 1.0
    pairs: Annotated[int, Field(ge=2, description="Maximum number of trials of a test set without data.trials.")] = (
        100_000
    )

    def outputs(self, classes: int) -> int:
        """Return ``size``."""
        return self.size

    def names(self, classes: Sequence[str]) -> tuple[str, ...]:
        """Return the index of each value of the embedding as its name."""
        return tuple(str(index) for index in range(self.size))

    def extension(self, spec: ModelSpec) -> nn.Module:
        """Build the matrix with a row for each class."""
        return nn.Linear(self.size, spec.classes, bias=False)

    def remarks(self, population: Population) -> Sequence[str]:
        """Warn about clients with one speaker, and about client tests without trials.

        Raises:
            DataError: The training clips or all tests have fewer than two speakers, or a test has trials of one kind only.
        """
        if not population.has_clips:
            return []
        if np.count_nonzero(population.class_counts()) < 2:
            raise DataError(
                "objective: verify needs training clips of two or more speakers, but they have a single label. Labels are "
                "speakers: set data.label_from=group, or change data.split."
            )
        remarks = []
        single = _count_clients(population, "train", lambda counts: (counts > 0).sum(axis=1) == 1)
        if single * 2 > len(population) and not self.spread:
            remarks.append(
                f"{single:,} of {len(population):,} clients have clips of one speaker only, so embeddings of all speakers may "
                f"collapse. Set objective.spread above 0, or give clients several speakers with data.partition."
            )
        if len(population.test):
            self._check_test(population.test)
        return [*remarks, *self._check_client_tests(population)]

    def _check_test(self, test: Examples) -> None:
        """Reject a test set of the server without trials of both kinds."""
        *_, same = self.list_trials(test, np.unique(test.clips, return_index=True)[1])
        speakers = np.unique(test.labels)
        if same.any() and not same.all():
            return
        if test.trials is not None:
            raise DataError(
                f"data.trials: {len(same)} trials have both clips in the test set, {int(same.sum())} of them of the same speaker. "
                f"Both kinds are needed. Change data.trials or data.split.test."
            )
        if len(speakers) == 1:
            raise DataError(
                f"data.split: all clips of the test set are of the speaker {test.classes[int(speakers[0])]!r}, so no trial has "
                f"different speakers. Hold out clips of several speakers."
            )
        raise DataError(
            "data.split: no speaker has two clips in the test set, so no trial has the same speaker. Hold out more clips."
        )

    def _check_client_tests(self, population: Population) -> Sequence[str]:
        """Warn about clients whose test has no trials of both kinds.

        Raises:
            DataError: This holds for all clients, and the server has no test.
        """
        tested = _count_clients(population, "client_test", lambda counts: counts.any(axis=1))
        if not tested or population.test.trials is not None:
            return []
        usable = _count_clients(
            population, "client_test", lambda counts: ((counts > 0).sum(axis=1) > 1) & (counts > 1).any(axis=1)
        )
        text = (
            f"{tested - usable:,} of {tested:,} clients have no trials of both kinds in their own test, because these need two "
            f"speakers and two clips of a speaker"
        )
        if not usable and not len(population.test):
            raise DataError(f"data.split.client_test: {text}. Test at the server with data.split.test.")
        return [f"{text}. They do not count in the scores."] * (usable < tested)

    def loss(self, step: Step, name: str, batch: Batch) -> Tensor:
        """Compute the mean cross-entropy with the margin of the round, and the term of ``spread``."""
        weight = cast(Any, step.models[name]).objective.weight
        margin = self.margin * (min(1.0, step.round_index / self.ramp) if self.ramp else 1.0)
        z, rows = F.normalize(step.forward(name, batch), dim=1), F.normalize(weight, dim=1)
        loss = batch.cross_entropy(self.scale * add_margin(z @ rows.T, batch.y, margin))
        return loss + self.spread * measure_closeness(rows, self.distance) if self.spread else loss

    def predictor(self, network: nn.Module) -> nn.Module:
        """Wrap the network to scale its outputs to length 1."""
        return _Embedder(network)

    def averages_logits(self) -> bool:
        """Return true, because the embedding of a clip is the scaled mean of its segments' embeddings."""
        return True

    def answer(self, outputs: Tensor) -> Tensor:
        """Scale mean embeddings to length 1."""
        return F.normalize(outputs, dim=1)

    def metrics(self, outputs: Tensor, examples: Examples) -> Metrics:
        """Compute ``scores``, the cosines of all trials. Return no metrics without trials."""
        embeddings, first = mean_over_clips(self.answer(outputs.double()), examples)
        left, right, same = self.list_trials(examples, first)
        if not len(same):
            return {}
        unit = self.answer(torch.from_numpy(embeddings)).numpy()
        return {"scores": Scores((unit[left] * unit[right]).sum(axis=1), same, of_pairs=True)}

    def list_trials(self, examples: Examples, first: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """List the trials of examples.

        Args:
            examples: The examples.
            first: int64 [clips], the first example of each clip, in ascending order of clips.

        Returns:
            Positions of both clips, int64 [trials] each, and bool [trials]: whether the speakers are equal.
        """
        if examples.trials is not None:
            clips = examples.clips[first]
            pairs, same = examples.trials[:, :2], examples.trials[:, 2] == 1
            present = np.isin(pairs, clips).all(axis=1)
            left, right = np.searchsorted(clips, pairs[present]).T
            return left, right, same[present]
        labelled = np.flatnonzero(examples.labels[first] >= 0)
        order = labelled[np.argsort(examples.labels[first][labelled], kind="stable")]
        labels = examples.labels[first][order]
        place = np.arange(len(order))
        next_speaker = np.searchsorted(labels, labels, side="right")
        count = len(order)
        total = count * (count - 1) // 2
        halves = [self.pairs // 2, self.pairs - self.pairs // 2] if total > self.pairs else [total, total]
        drawn = [
            _draw_pairs(place + 1, next_speaker, halves[0]),
            _draw_pairs(next_speaker, np.full(count, count), halves[1]),
        ]
        left, right = (order[np.concatenate(sides)] for sides in zip(*drawn, strict=True))
        return left, right, np.repeat([True, False], [len(pair) for pair, _ in drawn])


def add_margin(cosine: Tensor, y: Tensor, margin: float) -> Tensor:
    """Add an angle to the angle of each example's own class.

    Args:
        cosine: float [batch, classes], -1 to 1.
        y: int64 [batch], own class.
        margin: Angle in radians, 0 to pi / 2.

    Returns:
        float [batch, classes].
    """
    if margin == 0:
        return cosine
    sine = (1 - cosine.square()).clamp_min(1e-12).sqrt()  # the root has no gradient at 0
    moved = cosine * math.cos(margin) - sine * math.sin(margin)
    moved = torch.where(cosine > -math.cos(margin), moved, cosine - margin * math.sin(margin))
    own = y.unsqueeze(1) == torch.arange(cosine.shape[1], device=cosine.device)
    return torch.where(own, moved, cosine)


def measure_closeness(rows: Tensor, distance: float) -> Tensor:
    """Compute the sum over c and c' != c of max(0, distance - ||w_c - w_c'||)^2.

    Args:
        rows: float [classes, size], of length 1.
        distance: Distance above which rows are far enough apart.
    """
    away = (2 - 2 * rows @ rows.T).clamp_min(1e-12).sqrt()  # the root has no gradient at 0
    others = 1 - torch.eye(len(rows), device=rows.device, dtype=rows.dtype)
    return ((distance - away).relu().square() * others).sum()


def _draw_pairs(first: np.ndarray, stop: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw pairs of a position with the positions of its range, without repetition and equally in all runs.

    Args:
        first: int64 [positions], first partner of each position.
        stop: int64 [positions], position after its last partner.
        limit: Maximum number of pairs.

    Returns:
        int64 [pairs] each, in order.
    """
    ends = np.cumsum(stop - first)
    total = int(ends[-1]) if len(ends) else 0
    numbers = np.arange(total)
    if total > limit:
        numbers = np.sort(generator(0, 0, "", "trials").choice(total, limit, replace=False, shuffle=False))
    left = np.searchsorted(ends, numbers, side="right")
    return left, stop[left] - (ends[left] - numbers)


def _count_clients(population: Population, role: Literal["train", "client_test"], condition: Any) -> int:
    """Count the clients whose clips of a role by class, int64 [clients, classes], meet a condition."""
    blocks = (np.arange(start, min(start + _BLOCK, len(population))) for start in range(0, len(population), _BLOCK))
    return sum(int(condition(population.label_counts(role, block)).sum()) for block in blocks)


class _Embedder(nn.Module):
    """Network with outputs scaled to length 1: float32 [batch, size]."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return F.normalize(self.network(x, lengths).float(), dim=1)
