"""Common parts of objectives whose answer is how strange a recording is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.types import Metrics, Ratio, Scores
from raydfl.data import Examples
from raydfl.objectives._objective import Objective, mean_over_clips


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

    def normal_examples(self, examples: Examples) -> Examples:
        """Return those of some examples whose labels are normal; all where nothing is known of it."""
        if not self.normal:
            return examples
        normal = np.array([name in self.normal for name in examples.classes])
        of_label = normal if examples.sets is None else ~(examples.sets & ~normal).any(axis=1)
        return examples.take(np.flatnonzero(of_label[examples.labels]))

    def names(self, classes: Sequence[str]) -> tuple[str, ...]:
        """Return the name of the one output."""
        return ("score",)

    def metrics(self, outputs: Tensor, examples: Examples) -> Metrics:
        """Measure ``loss``, the mean score of normal clips, and ``scores``, those of all; a clip's is the mean of its segments'."""
        scores, first = mean_over_clips(outputs[:, 0], examples)
        if not self.normal:
            return {"loss": Ratio(float(scores.sum()), len(scores))}
        strange = np.array([name not in self.normal for name in examples.classes])
        labels = examples.labels[first]
        truth = strange[labels] if examples.sets is None else (examples.sets[labels] & strange).any(axis=1)
        return {
            "loss": Ratio(float(scores[~truth].sum()), int(np.count_nonzero(~truth))),
            "scores": Scores(scores, truth),
        }
