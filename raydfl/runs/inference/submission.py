"""The files that DCASE's task 2 has submitted and its evaluator reads: scores and decisions of each machine's test clips.

``anomaly_score_{machine}_section_{nn}_test.csv`` and ``decision_result_{machine}_section_{nn}_test.csv``, of 2020's clips
``..._id_{nn}.csv``. A line is a file's name and its score, or its name and 0 (normal) or 1; there is no header.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from raydfl.core.errors import InputError
from raydfl.core.files import write_durably
from raydfl.data import shown_name
from raydfl.runs.inference.model import RunModel, load_model, load_models_of
from raydfl.runs.inference.recordings import predictions, recordings
from raydfl.runs.inference.threshold import Threshold

_NAME = re.compile(r"(?:section_(?P<section>\d+)|(?:normal_|anomaly_)?id_(?P<id>\d+))_.+\.wav")
_SPLITS = ("train", "test", "source_test", "target_test")
_NAMED = 3
"""Files that a message names."""


def write_submission(
    run_dir: str | Path,
    files: Sequence[Path],
    folder: Path,
    *,
    model: str | None = None,
    client: str | None = None,
    threshold: Threshold | None = None,
    trust: bool = False,
    best: bool = False,
) -> list[Path]:
    """Write the files of a submission, and return their paths.

    Each machine's clips are scored by the model of the client that is called as it (``fan_00``), with that client's threshold; by
    the shared model where there is no such client.

    Args:
        run_dir: the run's folder.
        files: recordings ``MACHINE/test/section_NN_...wav`` or ``MACHINE/test/..._id_NN_...wav``, and folders of them.
        folder: where to write.
        model: see :func:`raydfl.runs.inference.load_model`.
        client: whose model to take for all machines; ``None``: each one's own.
        threshold: for all machines; ``None``: the recorded ones.
        trust: see :func:`raydfl.runs.inference.load_model`.
        best: see :func:`raydfl.runs.inference.load_model`.

    Raises:
        RunDirectoryError: no run directory, or no round is completed yet.
        InputError: a file's name does not say of what machine it is, one cannot be read, or no threshold is known.
        ResourcesError: the disk is full or the folder cannot be written.
    """
    listed, failures = recordings(files)
    for file, reason in failures.items():
        raise InputError(f"{shown_name(file)}: {reason}")
    machines = _machines(listed)
    names = [f"{machine}_{number}" for machine, _, number in machines]
    if client is None:
        models = load_models_of(run_dir, names, model, trust, best)
    else:
        models = dict.fromkeys(names, load_model(run_dir, model, client, trust, best))
    written = []
    for name, ((machine, word, number), clips) in zip(names, machines.items(), strict=True):
        ending = f"{machine}_{word}_{number}" + ("_test" if word == "section" else "")
        scores, decisions = _scored(_with(models[name], threshold), clips)
        for kind, rows in (("anomaly_score", scores), ("decision_result", decisions)):
            path = folder / f"{kind}_{ending}.csv"
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(rows)
            write_durably(path, text.getvalue().encode(), "make room or name another folder with --dcase")
            written.append(path)
    return written


def _machines(files: Sequence[Path]) -> dict[tuple[str, str, str], list[Path]]:
    """Return recordings by type of machine, "section" or "id", and its number."""
    found: dict[tuple[str, str, str], list[Path]] = {}
    unknown = []
    for file in files:
        name, above = _NAME.fullmatch(file.name), file.absolute().parent
        machine = above.parent.name if above.name in _SPLITS else above.name
        if name is None:
            unknown.append(file)
        else:
            word = "section" if name["section"] else "id"
            found.setdefault((machine, word, name[word]), []).append(file)
    if unknown:
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        raise InputError(
            f"--dcase: the names of {', '.join(shown_name(file) for file in unknown[:_NAMED])}{more} do not say of which machine "
            f"they are; they must be MACHINE/test/section_NN_...wav, or ..._id_NN_...wav"
        )
    return found


def _with(model: RunModel, threshold: Threshold | None) -> RunModel:
    if model.objective.answers != "score":
        raise InputError(
            f"--dcase: model {model.name!r} of {model.run_dir} gives no scores; choose an anomaly objective"
        )
    threshold = model.threshold if threshold is None else threshold
    if threshold is None:
        raise InputError(
            f"--dcase: no threshold of {model.description} is recorded, because clients were not measured; give one with "
            f"--threshold"
        )
    return replace(model, threshold=threshold)


def _scored(model: RunModel, files: Sequence[Path]) -> tuple[list[tuple[str, float]], list[tuple[str, int]]]:
    scores, decisions = [], []
    for found in predictions(model, files):
        if found.error:
            raise InputError(f"{shown_name(found.file)}: {found.error}")
        scores.append((found.file.name, found.score))
        decisions.append((found.file.name, int(found.decision == "anomaly")))
    return sorted(scores), sorted(decisions)
