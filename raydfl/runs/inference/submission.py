"""Submission files for DCASE Task 2: scores and decisions for the test clips of each machine.

The files are ``anomaly_score_{machine}_section_{nn}_test.csv`` and ``decision_result_{machine}_section_{nn}_test.csv``. For clips
of 2020 the names end in ``_id_{nn}.csv``. Each line has a file name and its score or decision (0 normal, 1 anomaly). There is no
header.
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
from raydfl.data import escape_path
from raydfl.runs.inference.model import RunModel, load_client_models, load_model
from raydfl.runs.inference.recordings import predictions, recordings
from raydfl.runs.inference.threshold import Threshold

_NAME = re.compile(r"(?:section_(?P<section>\d+)|(?:normal_|anomaly_)?id_(?P<id>\d+))_.+\.wav")
_SPLITS = ("train", "test", "source_test", "target_test")
_NAMED = 3
"""Maximum number of files in a message."""


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
    """Write the files of a DCASE submission.

    The client with a machine's name (``fan_00``) scores the machine's clips, with its own threshold. Machines without a client use
    the shared model.

    Args:
        run_dir: Run folder.
        files: Recordings ``MACHINE/test/section_NN_...wav`` or ``MACHINE/test/..._id_NN_...wav``, and folders of them.
        folder: Output folder.
        model: Name of the model, as in :func:`raydfl.runs.inference.load_model`.
        client: Id of the client whose model scores all machines. ``None``: each machine's client.
        threshold: Threshold for all machines. ``None``: the recorded thresholds.
        trust: Approve the code named by the run's configuration.
        best: Use the best round by ``run.best`` instead of the last round.

    Returns:
        Paths of the files.

    Raises:
        RunDirectoryError: ``run_dir`` is not a run directory, or has no completed round.
        InputError: A file name without a machine, an unreadable file, or an unknown threshold.
        ResourcesError: The disk is full, or the folder is not writable.
    """
    listed, failures = recordings(files)
    for file, reason in failures.items():
        raise InputError(f"{escape_path(file)}: {reason}")
    machines = _group_machines(listed)
    names = [f"{machine}_{number}" for machine, _, number in machines]
    if client is None:
        models = load_client_models(run_dir, names, model, trust, best)
    else:
        models = dict.fromkeys(names, load_model(run_dir, model, client, trust, best))
    written = []
    for name, ((machine, word, number), clips) in zip(names, machines.items(), strict=True):
        ending = f"{machine}_{word}_{number}" + ("_test" if word == "section" else "")
        scores, decisions = _score_clips(_set_threshold(models[name], threshold), clips)
        for prefix, rows in (("anomaly_score", scores), ("decision_result", decisions)):
            path = folder / f"{prefix}_{ending}.csv"
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(rows)
            write_durably(path, text.getvalue().encode(), "make room or name another folder with --dcase")
            written.append(path)
    return written


def _group_machines(files: Sequence[Path]) -> dict[tuple[str, str, str], list[Path]]:
    """Group recordings by machine type, "section" or "id", and number."""
    machines: dict[tuple[str, str, str], list[Path]] = {}
    unknown = []
    for file in files:
        name, folder = _NAME.fullmatch(file.name), file.absolute().parent
        machine = folder.parent.name if folder.name in _SPLITS else folder.name
        if name is None:
            unknown.append(file)
        else:
            word = "section" if name["section"] else "id"
            machines.setdefault((machine, word, name[word]), []).append(file)
    if unknown:
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        raise InputError(
            f"--dcase: the names of {', '.join(escape_path(file) for file in unknown[:_NAMED])}{more} do not identify a machine. "
            f"Name files MACHINE/test/section_NN_...wav, or ..._id_NN_...wav."
        )
    return machines


def _set_threshold(model: RunModel, threshold: Threshold | None) -> RunModel:
    if model.objective.answers != "score":
        raise InputError(
            f"--dcase: model {model.name!r} of {model.run_dir} returns no scores. Train with an anomaly objective."
        )
    threshold = model.threshold if threshold is None else threshold
    if threshold is None:
        raise InputError(
            f"--dcase: no threshold of {model.description} is recorded, because clients were not evaluated. Pass a threshold "
            f"with --threshold."
        )
    return replace(model, threshold=threshold)


def _score_clips(model: RunModel, files: Sequence[Path]) -> tuple[list[tuple[str, float]], list[tuple[str, int]]]:
    scores, decisions = [], []
    for prediction in predictions(model, files):
        if prediction.error:
            raise InputError(f"{escape_path(prediction.file)}: {prediction.error}")
        scores.append((prediction.file.name, prediction.score))
        decisions.append((prediction.file.name, int(prediction.decision == "anomaly")))
    return sorted(scores), sorted(decisions)
