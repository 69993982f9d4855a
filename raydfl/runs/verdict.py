"""The verdict on a run, without its rules, which are in runs/report/verdict.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from raydfl.core.files import replace_non_finite
from raydfl.core.metrics import SCORES, base_name, model_name
from raydfl.core.part_names import qualify
from raydfl.core.types import Problem
from raydfl.data import Population

CLIPS = {
    "test": "test clips",
    "server_validation": "validation clips of the server",
    "client_test": "clips of the clients' own tests",
    "validation": "held-out clips of the clients",
}
"""Test sets in order of preference, with their clips' names."""


FEW = 50
"""Smallest sufficient number of training clips per class."""


NOT_SPEECH = frozenset(("esc", "urbansound8k", "fsd50k", "ambient_contexts"))
"""Data sets of labelled sounds that an encoder of speech does not know."""


def find_part(metric: str) -> str:
    """Return the part of the data in a metric's name. Empty for a single data set."""
    return model_name(metric).rpartition(":")[0]


def get_title(metric: str) -> str:
    """Return the displayed name of a score."""
    return SCORES[base_name(metric)].title


def find_few_clips(population: Population, features: str | None, dataset: str | None = None) -> Iterator[str]:
    """Yield a remark for each part of the data with few training clips per class.

    Args:
        population: the clients with their clips.
        features: kind of the features. From a pretrained encoder, the remark proposes no encoder.
        dataset: name of the data set. Only speech gets the encoder of speech.
    """
    for part, data in population.parts.items() if population.has_clips else ():
        counts = data.class_counts()
        present, clips = int(np.count_nonzero(counts)), int(counts.sum())
        if present > 1 and clips < FEW * present:
            speech = " (for speech: data.features='{kind: speech_embedding}' models.model=linear)"
            encoder = f"Use a pretrained encoder{speech * (dataset not in NOT_SPEECH)}."
            remedy = "Add clips." if features == "speech_embedding" else encoder
            text = f"{clips} training clips of {present} classes are few: {clips / present:.0f} each. {remedy}"
            yield qualify(part, ": ", text)


@dataclass(frozen=True, slots=True)
class HeadlineScore:
    """The headline score of a part of the data, its interval and its controls. ``None``: unknown."""

    metric: str
    split: str
    value: float
    clips: int | None = None
    low: float | None = None
    high: float | None = None
    chance: float | None = None
    majority: float | None = None
    """Score of the same answer to each clip: the class that is most frequent in training, or a typical transcript."""
    majority_class: str = ""
    """The class of ``majority``. Empty: unknown, or a transcript."""
    raw: float | None = None
    """Best score of raw features without training."""
    raw_name: str = ""

    @property
    def guessing(self) -> float | None:
        """The better of chance and majority."""
        known = [value for value in (self.chance, self.majority) if value is not None]
        return max(known, key=lambda value: self.sign * value, default=None)

    @property
    def sign(self) -> int:
        """1 if larger scores are better, otherwise -1."""
        return 1 if SCORES[base_name(self.metric)].higher_is_better else -1

    @property
    def worst(self) -> float | None:
        """The end of the interval with the worse score."""
        return self.low if self.sign > 0 else self.high

    @property
    def best(self) -> float | None:
        """The end of the interval with the better score."""
        return self.high if self.sign > 0 else self.low

    @property
    def learnt(self) -> bool | None:
        """True if the whole interval is better than chance and majority, False if not, or if the score is not better.

        ``None``: unknown, because the score has no interval or no control.
        """
        if self.guessing is None:
            return None
        if self.worst is None:
            return False if self.sign * self.value <= self.sign * self.guessing else None
        return self.sign * self.worst > self.sign * self.guessing

    def __str__(self) -> str:
        score = f"{get_title(self.metric)} {self.value:.3f}"
        score += "" if self.low is None or self.high is None else f" [{self.low:.3f}, {self.high:.3f}]"
        score += f" on {self.clips or ''} {CLIPS[self.split]}".replace("  ", " ")
        controls = []
        if self.majority is not None:
            both = "chance and " * (self.majority == self.chance)
            controls.append(f"{both}{self._name_majority()} {self.majority:.3f}")
        if self.chance is not None and self.chance != self.majority:
            controls.append(f"chance {self.chance:.3f}")
        if self.raw is not None:
            controls.append(f"raw features {self.raw:.3f} ({self.raw_name})")
        text = "; ".join([score, ", ".join(controls)]) if controls else score
        return text if self.learnt is not False else f"not better than {self._format_guess()}: {text}"

    def _format_guess(self) -> str:
        if self.majority is not None and self.majority == self.guessing:
            return f"{self._name_majority()} ({self.majority:.3f})"
        return f"chance ({self.guessing:.3f})"

    def _name_majority(self) -> str:
        return f"always answering {self.majority_class!r}" if self.majority_class else "always the same answer"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of a run."""

    learnt: bool | None
    """False if the score of a part of the data is not better than guessing, or the training diverged. ``None``: unknown."""
    scores: tuple[HeadlineScore, ...]
    findings: tuple[Problem, ...]
    next: str
    """The next command."""

    @property
    def text(self) -> str:
        """Scores, joined in a line."""
        if not self.scores:
            return "no score was measured"
        return " | ".join(qualify(find_part(score.metric), ": ", str(score)) for score in self.scores)

    @property
    def lines(self) -> list[str]:
        """The scores and the findings for a terminal."""
        return [f"verdict: {self.text}", *(f"  - {finding.text}" for finding in self.findings)]

    def to_dict(self) -> dict[str, Any]:
        """Convert to a mapping for JSON. Values that are not finite become ``None``."""
        scores = [replace_non_finite(asdict(score)) for score in self.scores]
        findings = [{"kind": finding.kind, "text": finding.text} for finding in self.findings]
        return {"learnt": self.learnt, "text": self.text, "scores": scores, "findings": findings, "next": self.next}
