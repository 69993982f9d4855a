"""Control of speech recognition: the same answer to each clip.

The answer is the training transcript with the lowest character error rate on all training transcripts, or no answer. It needs no
recording, so a model with an equal or a higher error rate has learnt nothing from sound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raydfl.controls._clips import TESTS
from raydfl.controls._control import Control
from raydfl.data import Examples, Population, join_units

_CANDIDATES = 50
"""Maximum number of answers to compare."""
_COMPARED = 1000
"""Maximum number of training transcripts to compare them with."""


def measure_same_answer(data: Population, rng: np.random.Generator) -> tuple[list[Control], str]:
    """Measure the control ``majority`` of a data set with transcripts.

    Args:
        data: population of one part, with clips.
        rng: generator that draws the training transcripts.

    Returns:
        The control of each test set, and the reason for a missing control.
    """
    train = _read_transcripts(data.read_role("train"))
    tests = {split: _read_transcripts(data.read_role(split)) for split in TESTS}
    if not train or not any(tests.values()):
        return [], "The same answer to each clip has no score, because training or test clips are missing."
    candidates = sorted({train[index] for index in rng.permutation(len(train))[:_CANDIDATES].tolist()} | {""})
    compared = [train[index] for index in rng.permutation(len(train))[:_COMPARED].tolist()]
    answer = min(candidates, key=lambda candidate: int(_count_edits(compared, candidate).sum()))
    return [
        Control("majority", split, "cer", float(_count_edits(clips, answer).sum() / characters), len(clips))
        for split, clips in tests.items()
        if (characters := sum(map(len, clips)))
    ], ""


def _read_transcripts(parts: Sequence[Examples]) -> list[str]:
    return [join_units(part.classes, row, part.joint) for part in parts for row in part.targets(part.labels)]


def _count_edits(transcripts: Sequence[str], answer: str) -> np.ndarray:
    """Count the edits from each transcript to the same answer (:func:`raydfl.core.metrics.count_edits`).

    All clips are compared at once, because thousands of pairs of sentences would take minutes.

    Returns:
        int64 [transcripts].
    """
    lengths = np.array([len(text) for text in transcripts], int)
    # [units, transcripts], so that a unit of all transcripts is contiguous
    codes = np.full((int(lengths.max(initial=0)), len(transcripts)), -1, np.int32)
    for column, text in zip(codes.T, transcripts, strict=True):
        column[: len(text)] = [*map(ord, text)]
    row = np.repeat(np.arange(len(answer) + 1, dtype=np.int32)[:, None], len(transcripts), axis=1)
    edits = np.where(lengths == 0, len(answer), 0)
    for number, units in enumerate(codes, 1):
        before, row = row, np.empty_like(row)
        row[0] = number
        for place, unit in enumerate(map(ord, answer), 1):
            changed = before[place - 1] + (units != unit)
            row[place] = np.minimum(np.minimum(before[place], row[place - 1]) + 1, changed)
        edits[lengths == number] = row[-1, lengths == number]
    return edits
