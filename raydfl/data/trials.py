"""Trials: pairs of clips of the same speaker or of different speakers, read from a file in VoxCeleb's format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from raydfl.core.errors import DataError
from raydfl.core.files import read_regular
from raydfl.core.isolation import reading

TRIALS = "trials"
"""Name of the array of trials in a population."""


def read_trials(path: Path, clips: Sequence[str]) -> np.ndarray:
    """Read a file of trials. Empty lines are ignored.

    Args:
        path: the file. A line is ``1 CLIP CLIP`` for clips of the same speaker, or ``0 CLIP CLIP``.
        clips: names of all clips in the manifest.

    Returns:
        int32 [trials, 3]: rows of the two clips in the manifest, and 1 for the same speaker.

    Raises:
        DataError: the file is unreadable or has no trial, a line has another form, or a clip is unknown.
    """
    where = f"data.trials: {path}"
    with reading(where):
        lines = read_regular(path).decode("utf-8-sig").splitlines()
    rows = {clip: row for row, clip in enumerate(clips)}
    trials, answers = [], dict[tuple[str, ...], str]()
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words:
            continue
        if len(words) != 3 or words[0] not in ("0", "1"):
            raise DataError(
                f"{where}: line {number} is {line[:80]!r}. Write 1 or 0, and the names of two clips: 1 a.wav b.wav"
            )
        for clip in words[1:]:
            if clip not in rows:
                raise DataError(
                    f"{where}: line {number}: unknown clip {clip!r}. Write names as in the list of clips, such as "
                    f"{clips[0]!r}"
                )
        if words[1] == words[2]:
            raise DataError(f"{where}: line {number} compares the clip {words[1]!r} with itself. Remove the line")
        pair = tuple(sorted(words[1:]))
        if answers.setdefault(pair, words[0]) != words[0]:
            raise DataError(
                f"{where}: line {number}: an earlier line has the other answer for {words[1]!r} and {words[2]!r}. Remove one"
            )
        trials.append((rows[words[1]], rows[words[2]], int(words[0])))
    if not trials:
        raise DataError(f"{where} has no trials. Write a line 1 CLIP CLIP or 0 CLIP CLIP for each pair")
    return np.array(trials, np.int32)
