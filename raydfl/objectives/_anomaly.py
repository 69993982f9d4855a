"""Common parts of objectives whose answer is how strange a recording is.

From which score on a clip is called anomalous nobody can tell without anomalies. The threshold is therefore the ``quantile`` of the
scores of a client's normal training clips, with the model that is measured; it is recorded as ``threshold`` and used for ``f1``.
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
"""Clients that a message names."""


@dataclass(frozen=True, kw_only=True)
class AnomalyObjective(Objective):
    """Base of the objectives whose predictor gives one number for an example, the higher the stranger it is."""

    headline: ClassVar[str] = "auc"
    answers: ClassVar[Literal["class", "set", "score", "none"]] = "score"

    normal: Annotated[
        tuple[str, ...],
        Field(
            description="classes whose clips are normal, those of any other are anomalous; used in tests only; empty: nothing is "
            "known of it, and only the loss is measured"
        ),
    ] = ()
    quantile: Annotated[
        float,
        Field(
            gt=0,
            lt=1,
            description="share of a client's normal training clips whose scores lie below the threshold of anomalies",
        ),
    ] = 0.95

    def check(self, classes: Sequence[str], length: int | None) -> None:
        """Refuse a normal class that is not there, and classes that are all normal."""
        for name in self.normal:
            if name not in classes:
                raise ConfigError(f"objective.normal: there is no class {name!r}; {nearest(name, classes)}")
        if self.normal and set(classes) <= set(self.normal):
            raise ConfigError(
                f"objective.normal names every class of the data ({', '.join(classes)}), so nothing is anomalous; leave some out, "
                f"or set it to []"
            )

    def names(self, classes: Sequence[str]) -> tuple[str, ...]:
        """Return the name of the one output."""
        return ("score",)

    def metrics(self, outputs: Tensor, examples: Examples) -> Metrics:
        """Measure ``loss``, the mean score of normal clips, and ``scores``, those of all; a clip's is the mean of its segments'."""
        scores, first = mean_over_clips(outputs[:, 0], examples)
        codes = {name: column[first] for name, column in examples.columns.items()}
        if not self.normal:
            return {"loss": Ratio(float(scores.sum()), len(scores))}
        strange = np.array([name not in self.normal for name in examples.classes])
        labels = examples.labels[first]
        truth = strange[labels] if examples.sets is None else (examples.sets[labels] & strange).any(axis=1)
        return {
            "loss": Ratio(float(scores[~truth].sum()), int(np.count_nonzero(~truth))),
            "scores": Scores(scores, truth, groups=_groups(codes, len(scores))),
        }

    def evaluate(self, step: Step, name: str, examples: Examples, batch_size: int) -> Metrics:
        """Measure what :meth:`metrics` says, and at a client the ``threshold`` and what it gives."""
        found = dict(super().evaluate(step, name, examples, batch_size))
        normal = self.normal_examples(step.data.train).as_tested()
        if not len(normal):
            return found
        scores, _ = mean_over_clips(self.answers_to(step, name, normal, batch_size)[:, 0], normal)
        threshold = float(np.quantile(scores, self.quantile))
        scored = found.get("scores")
        if isinstance(scored, Scores):
            found["scores"] = replace(scored, threshold=threshold)
        return {**found, "threshold": Ratio(threshold, 1)}

    def normal_examples(self, examples: Examples) -> Examples:
        """Return those of a client's training examples that are normal; all where nothing is known of it."""
        if not self.normal or examples.sets is not None:
            return examples
        numbers = [number for number, name in enumerate(examples.classes) if name in self.normal]
        return examples.take(np.flatnonzero(np.isin(examples.labels, [*numbers, NO_LABEL])))

    def remarks(self, population: Population) -> Sequence[str]:
        """Name the clients of whose tests no AUC can be measured, or a poor one, and count anomalous training clips.

        Raises:
            DataError: a client has no normal clip to train on, or a single clip.
        """
        if not self.normal or population.sets is not None or not population.has_clips:
            return []
        strange = np.array([name not in self.normal for name in population.classes])
        clips = population.label_counts()
        for client in np.flatnonzero((clips.sum(axis=1) > 0) & (clips[:, ~strange].sum(axis=1) == 0)).tolist():
            raise DataError(
                f"client {population.ids[client]!r} has no normal clip to train on: its {clips[client].sum()} are all anomalous, "
                f"that is not of {', '.join(self.normal)} (objective.normal); choose data.split or data.partition differently"
            )
        for client in np.flatnonzero(clips.sum(axis=1) == 1).tolist():
            raise DataError(
                f"client {population.ids[client]!r} has one training clip, which says nothing of how far apart normal clips lie; "
                f"leave such clients out with data.partition='{{minimum: 2, smaller: drop}}'"
            )
        found = []
        if clips[:, strange].any():
            found.append(
                f"{clips[:, strange].sum()} of {clips.sum()} training clips are anomalous, and learnt from like normal ones unless "
                f"the method says otherwise; data.pools or data.split.client_test keep them out"
            )
        return found + self._on_tests(population, strange)

    def _on_tests(self, population: Population, strange: np.ndarray) -> list[str]:
        """Return what is to be said of the clients' tests."""
        tests = population.label_counts("client_test")
        some = np.flatnonzero(tests.sum(axis=1))
        normal, anomalous = tests[some][:, ~strange].sum(axis=1), tests[some][:, strange].sum(axis=1)
        found = []
        for what, lacking in (("anomalous", anomalous == 0), ("normal", normal == 0)):
            if lacking.any():
                found.append(
                    f"{lacking.sum()} of {len(some)} clients have no {what} clip in their own test and are left out of AUC: "
                    f"{_named(population, some[lacking])}; choose data.split.client_test differently"
                )
        few = (normal > 0) & (anomalous > 0) & (normal * MAX_FALSE_POSITIVES < 1)
        if few.any():
            found.append(
                f"{few.sum()} of {len(some)} clients have fewer than {round(1 / MAX_FALSE_POSITIVES)} normal clips in their own "
                f"test, the fewest {normal[few].min()}: up to a false positive rate of {MAX_FALSE_POSITIVES:g} not one of them may "
                f"be taken for anomalous, so their partial AUC says little: {_named(population, some[few])}"
            )
        return found


def _named(population: Population, clients: np.ndarray) -> str:
    """Return the ids of the first of some clients."""
    names = [population.ids[client] for client in clients[:_LISTED].tolist()]
    return ", ".join(names) + (f" and {len(clients) - _LISTED} more" if len(clients) > _LISTED else "")


def _groups(codes: Mapping[str, np.ndarray], clips: int) -> np.ndarray | None:
    """Return the machine and the domain of each clip as numbers, int64 [clips, 2]; ``None`` where no column says either.

    Args:
        codes: int [clips] each, by column.
        clips: how many.
    """
    which = [codes[name] for name in ("machine", "id", "section") if name in codes]
    if not which and "domain" not in codes:
        return None
    machines = np.zeros(clips, np.int64)
    for place, column in enumerate(which):
        machines += column.astype(np.int64) << 20 * place
    return np.stack([machines, codes.get("domain", np.zeros(clips, np.int64))], axis=1)
