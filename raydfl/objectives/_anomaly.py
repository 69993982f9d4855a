"""Base class of objectives for anomaly detection.

Training data without anomalies cannot determine a threshold between normal and anomalous scores. The threshold is therefore
the ``quantile`` of the scores of a client's normal training clips under the evaluated model. The metrics table records it as
``threshold``, and ``f1`` uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.errors import ConfigError, DataError, nearest
from raydfl.core.metrics import MAX_FALSE_POSITIVES
from raydfl.core.types import Metrics, Ratio, Scores
from raydfl.data import NO_LABEL, Examples, Population
from raydfl.objectives._objective import Objective, mean_over_clips
from raydfl.training import Step

_LISTED = 5
"""Maximum number of client ids in a message."""


@dataclass(frozen=True, kw_only=True)
class AnomalyObjective(Objective):
    """Base class of objectives with an anomaly score as their answer. Higher scores are more anomalous."""

    headline: ClassVar[str] = "auc"
    answers: ClassVar[Literal["class", "set", "score", "none"]] = "score"

    normal: Annotated[
        tuple[str, ...],
        Field(
            description="Normal classes. All remaining classes are anomalous. Only evaluations use this option. Empty: unknown, so "
            "only the loss is measured."
        ),
    ] = ()
    quantile: Annotated[
        float,
        Field(
            gt=0,
            lt=1,
            description="Fraction of a client's normal training clips with scores below the threshold.",
        ),
    ] = 0.95

    def check(self, classes: Sequence[str], length: int | None) -> None:
        """Check that the normal classes exist and that an anomalous class remains."""
        for name in self.normal:
            if name not in classes:
                raise ConfigError(f"objective.normal: there is no class {name!r}. {nearest(name, classes)}")
        if self.normal and set(classes) <= set(self.normal):
            raise ConfigError(
                f"objective.normal names every class of the data ({', '.join(classes)}), so no clip is anomalous. Remove the "
                f"anomalous classes, or set it to []."
            )

    def names(self, classes: Sequence[str]) -> tuple[str, ...]:
        """Return the name of the score."""
        return ("score",)

    def metrics(self, outputs: Tensor, examples: Examples) -> Metrics:
        """Compute ``loss``, the mean score of normal clips, and ``scores``, the scores of all clips.

        The score of a clip is the mean of its segments' scores.
        """
        scores, first = mean_over_clips(outputs[:, 0], examples)
        codes = {name: column[first] for name, column in examples.columns.items()}
        if not self.normal:
            return {"loss": Ratio(float(scores.sum()), len(scores))}
        anomalous = np.array([name not in self.normal for name in examples.classes])
        labels = examples.labels[first]
        truth = anomalous[labels] if examples.sets is None else (examples.sets[labels] & anomalous).any(axis=1)
        return {
            "loss": Ratio(float(scores[~truth].sum()), int(np.count_nonzero(~truth))),
            "scores": Scores(scores, truth, groups=_encode_groups(codes, len(scores))),
        }

    def evaluate(self, step: Step, name: str, examples: Examples, batch_size: int) -> Metrics:
        """Compute :meth:`metrics`, and at clients the ``threshold`` and its scores."""
        metrics = dict(super().evaluate(step, name, examples, batch_size))
        normal = self.normal_examples(step.data.train).cut_for_test()
        if not len(normal):
            return metrics
        scores, _ = mean_over_clips(self.answers_to(step, name, normal, batch_size)[:, 0], normal)
        threshold = float(np.quantile(scores, self.quantile))
        test_scores = metrics.get("scores")
        if isinstance(test_scores, Scores):
            metrics["scores"] = replace(test_scores, threshold=threshold)
        return {**metrics, "threshold": Ratio(threshold, 1)}

    def normal_examples(self, examples: Examples) -> Examples:
        """Select the normal training examples of a client, or all if the option ``normal`` is empty."""
        if not self.normal or examples.sets is not None:
            return examples
        normal = [index for index, name in enumerate(examples.classes) if name in self.normal]
        # Unlabelled training clips count as normal.
        return examples.take(np.flatnonzero(np.isin(examples.labels, [*normal, NO_LABEL])))

    def remarks(self, population: Population) -> Sequence[str]:
        """Warn about anomalous training clips, and about client tests without an AUC or with an imprecise AUC.

        Raises:
            DataError: a client has no normal training clip, or a single training clip.
        """
        if not self.normal or population.sets is not None or not population.has_clips:
            return []
        anomalous = np.array([name not in self.normal for name in population.classes])
        clips = population.label_counts()
        for client in np.flatnonzero((clips.sum(axis=1) > 0) & (clips[:, ~anomalous].sum(axis=1) == 0)).tolist():
            raise DataError(
                f"client {population.ids[client]!r} has no normal training clip: all of its {clips[client].sum()} clips are "
                f"anomalous, because objective.normal is {', '.join(self.normal)}. Change data.split or data.partition."
            )
        for client in np.flatnonzero(clips.sum(axis=1) == 1).tolist():
            raise DataError(
                f"client {population.ids[client]!r} has a single training clip, which does not show the variation of normal clips. "
                f"Exclude clients of this size with data.partition='{{minimum: 2, smaller: drop}}'."
            )
        remarks = []
        if clips[:, anomalous].any():
            remarks.append(
                f"{clips[:, anomalous].sum()} of {clips.sum()} training clips are anomalous. Most methods learn from them as from "
                f"normal clips. Use data.pools or data.split.client_test to exclude them."
            )
        return remarks + self._check_tests(population, anomalous)

    def _check_tests(self, population: Population, anomalous: np.ndarray) -> list[str]:
        """Return warnings about the clients' tests. ``anomalous``: bool [classes]."""
        tests = population.label_counts("client_test")
        tested = np.flatnonzero(tests.sum(axis=1))
        normal_clips = tests[tested][:, ~anomalous].sum(axis=1)
        anomalous_clips = tests[tested][:, anomalous].sum(axis=1)
        remarks = []
        for kind, missing in (("anomalous", anomalous_clips == 0), ("normal", normal_clips == 0)):
            if missing.any():
                remarks.append(
                    f"{missing.sum()} of {len(tested)} clients have no {kind} clip in their own test, so their AUC is undefined: "
                    f"{_list_ids(population, tested[missing])}. Change data.split.client_test."
                )
        few = (normal_clips > 0) & (anomalous_clips > 0) & (normal_clips * MAX_FALSE_POSITIVES < 1)
        if few.any():
            remarks.append(
                f"{few.sum()} of {len(tested)} clients have fewer than {round(1 / MAX_FALSE_POSITIVES)} normal clips in their own "
                f"test (minimum {normal_clips[few].min()}): {_list_ids(population, tested[few])}. A false positive rate of "
                f"{MAX_FALSE_POSITIVES:g} then allows no false positive, so their partial AUC is imprecise."
            )
        return remarks


def _list_ids(population: Population, clients: np.ndarray) -> str:
    """Join the ids of the first clients."""
    ids = [population.ids[client] for client in clients[:_LISTED].tolist()]
    return ", ".join(ids) + (f" and {len(clients) - _LISTED} more" if len(clients) > _LISTED else "")


def _encode_groups(codes: Mapping[str, np.ndarray], clips: int) -> np.ndarray | None:
    """Encode the machine and the domain of each clip as integers.

    Args:
        codes: int [clips] for each column.
        clips: number of clips.

    Returns:
        int64 [clips, 2], or ``None`` if the data have none of the columns.
    """
    machine_codes = [codes[name] for name in ("machine", "id", "section") if name in codes]
    if not machine_codes and "domain" not in codes:
        return None
    machines = np.zeros(clips, np.int64)
    for position, column in enumerate(machine_codes):
        machines += column.astype(np.int64) << 20 * position  # 20 bits for each column
    return np.stack([machines, codes.get("domain", np.zeros(clips, np.int64))], axis=1)
