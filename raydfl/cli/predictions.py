"""Output of predictions as a table, CSV or JSON lines."""

from __future__ import annotations

import csv
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raydfl.core.errors import InputError
from raydfl.data import Event, escape_path
from raydfl.runs.inference import Prediction

Form = Literal["table", "csv", "json"]

_UNFOLDED = 10_000
"""Width of tables outside a terminal, in characters."""
_COMPARED = 100
"""Largest number of recordings in a table of pairs."""
_LISTED = 10
"""Largest number of unreadable recordings to name in the error."""


def show(
    results: Iterable[Prediction],
    top: int,
    form: Form,
    heading: str,
    out: TextIO | None = None,
    answers: str = "class",
    several: bool = False,
) -> None:
    """Print predictions. JSON and CSV stream their rows, a table is printed at the end.

    Args:
        results: the predictions.
        top: number of classes to show per recording, at least 1.
        form: output format.
        heading: text above a table.
        out: output stream. Standard output by default.
        answers: type of the predictions: "class", "set", "score", "text", "intervals" or "embedding".
        several: whether to show the model of each prediction. Only for classes.

    Raises:
        InputError: some recordings could not be classified. All predictions have been printed.
    """
    out = out or sys.stdout
    failed: list[Prediction] = []
    total = 0
    writers: dict[str, Callable[[Iterable[Prediction], int, str, TextIO], None]]
    writers = {"json": _write_json, "csv": _write_csv, "table": _write_table}
    if answers == "score":
        writers |= {"csv": _write_score_csv, "table": _write_score_table}
    elif answers == "set":
        writers |= {"csv": _write_set_csv, "table": _write_set_table}
    elif answers == "text":
        writers |= {"csv": _write_text_csv, "table": _write_text_table}
    elif answers == "intervals":
        writers |= {"csv": _write_events_csv, "table": _write_events_table}
    elif answers == "embedding":
        writers |= {"csv": _write_embedding_csv, "table": _write_cosine_table}
    elif several:
        writers |= {"csv": partial(_write_csv, several=True), "table": partial(_write_table, several=True)}

    def count_predictions() -> Iterable[Prediction]:
        nonlocal total
        for prediction in results:
            total += 1
            if prediction.error:
                failed.append(prediction)
            yield prediction

    writers[form](count_predictions(), top, heading, out)
    out.flush()
    if failed:
        errors = [f"  {escape_path(prediction.file)}: {prediction.error}" for prediction in failed[:_LISTED]]
        more = [f"  and {len(failed) - _LISTED} more"] if len(failed) > _LISTED else []
        raise InputError("\n".join([f"{len(failed)} of {total} could not be classified:", *errors, *more]))


def format_answer(prediction: Prediction) -> str:
    """Return a prediction in a few words: ``yes 97 %``, ``dog, rain`` or ``12.3 anomaly``."""
    if prediction.answers == "score":
        return f"{prediction.score:.4g} {prediction.decision}".rstrip()
    if prediction.answers == "set":
        return ", ".join(prediction.labels) or "-"
    if prediction.answers == "text":
        return prediction.text or "-"
    if prediction.answers == "intervals":
        return ", ".join(f"{label} {onset:.2f}-{offset:.2f} s" for onset, offset, label in prediction.intervals) or "-"
    if prediction.answers == "embedding":
        return " ".join(f"{value:.3f}" for value in prediction.embedding)
    return f"{prediction.label} {100 * prediction.probability:.0f} %"


def as_data(prediction: Prediction, top: int) -> dict[str, Any]:
    """Return a prediction as JSON data.

    Args:
        prediction: the prediction.
        top: number of classes in ``top``.

    Returns:
        ``file``, ``label``, ``probability`` and ``top`` for a class; ``file``, ``labels`` and ``top`` for a set of classes;
        ``file`` and ``score`` for a score, with ``decision``, ``threshold`` and ``threshold_origin`` if there is a threshold;
        ``file`` and ``text`` for a transcript; ``file`` and ``events`` (``onset``, ``offset``, ``label``) for events; ``file`` and
        ``embedding`` (a list of numbers) for an embedding; ``file`` and
        ``error`` for an unreadable recording.
    """
    if prediction.error:
        return {"file": escape_path(prediction.file), "error": prediction.error}
    if prediction.answers == "score":
        return {"file": escape_path(prediction.file), "score": prediction.score, **_describe_decision(prediction)}
    if prediction.answers == "text":
        return {"file": escape_path(prediction.file), "text": prediction.text}
    if prediction.answers == "intervals":
        events = [dict(zip(_EVENT, _round(event), strict=True)) for event in prediction.intervals]
        return {"file": escape_path(prediction.file), "events": events}
    if prediction.answers == "embedding":
        return {"file": escape_path(prediction.file), "embedding": prediction.embedding.tolist()}
    answer: dict[str, Any] = {"label": prediction.label, "probability": prediction.probability}
    if prediction.answers == "set":
        answer = {"labels": list(prediction.labels)}
    return {
        "file": escape_path(prediction.file),
        **({"model": prediction.model} if prediction.model else {}),
        **answer,
        "top": [{"label": label, "probability": probability} for label, probability in prediction.top(top)],
    }


def _describe_decision(prediction: Prediction) -> dict[str, Any]:
    threshold = prediction.threshold
    if threshold is None:
        return {}
    return {"decision": prediction.decision, "threshold": threshold.value, "threshold_origin": threshold.origin}


def _write_json(found: Iterable[Prediction], top: int, _: str, out: TextIO) -> None:
    out.writelines(json.dumps(as_data(prediction, top)) + "\n" for prediction in found)


def _write_csv(found: Iterable[Prediction], top: int, _: str, out: TextIO, several: bool = False) -> None:
    """Write CSV: ``label`` and ``probability`` for each rank, then ``model`` if ``several``, then ``error``."""
    writer = csv.writer(out, lineterminator="\n")
    ranks = [""] + [f"_{rank}" for rank in range(2, top + 1)]
    model = ["model"] * several
    writer.writerow(["file", *(name + rank for rank in ranks for name in ("label", "probability")), *model, "error"])
    for prediction in found:
        cells = [cell for pair in _select_top_classes(prediction, top) for cell in pair]
        cells = [*cells, *[""] * (2 * top - len(cells)), *[prediction.model] * several]
        writer.writerow([escape_path(prediction.file), *cells, prediction.error])


def _write_score_csv(found: Iterable[Prediction], _: int, __: str, out: TextIO) -> None:
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["file", "score", "decision", "threshold", "threshold_origin", "error"])
    for prediction in found:
        score, decision = ("", {}) if prediction.error else (prediction.score, _describe_decision(prediction))
        cells = [decision.get(name, "") for name in ("decision", "threshold", "threshold_origin")]
        writer.writerow([escape_path(prediction.file), score, *cells, prediction.error])


def _write_score_table(found: Iterable[Prediction], _: int, heading: str, out: TextIO) -> None:
    table = Table("file", "score", "decision", box=None, pad_edge=False)
    table.columns[0].overflow = "fold"
    folder, named = _name_files(found)
    for name, prediction in named:
        score = "-" if prediction.error else f"{prediction.score:.4g}"
        table.add_row(Text(name), Text(score), Text(prediction.decision))
    _print(table, heading, folder, out)


def _write_set_csv(found: Iterable[Prediction], top: int, _: str, out: TextIO) -> None:
    """Write CSV: the set of classes, then ``label`` and ``probability`` for each rank, then ``error``."""
    writer = csv.writer(out, lineterminator="\n")
    ranks = [""] + [f"_{rank}" for rank in range(2, top + 1)]
    writer.writerow(["file", "labels", *(name + rank for rank in ranks for name in ("label", "probability")), "error"])
    for prediction in found:
        cells = [cell for pair in _select_top_classes(prediction, top) for cell in pair] or [""] * 2 * top
        writer.writerow([escape_path(prediction.file), "|".join(prediction.labels), *cells, prediction.error])


def _write_set_table(found: Iterable[Prediction], top: int, heading: str, out: TextIO) -> None:
    table = Table("file", "labels", "most probable", box=None, pad_edge=False)
    table.columns[0].overflow = "fold"
    folder, named = _name_files(found)
    for name, prediction in named:
        ranks = ", ".join(f"{label} {probability:.3f}" for label, probability in _select_top_classes(prediction, top))
        table.add_row(*map(Text, (name, ", ".join(prediction.labels) or "-", ranks)))
    _print(table, heading, folder, out)


def _write_text_csv(found: Iterable[Prediction], _: int, __: str, out: TextIO) -> None:
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["file", "text", "error"])
    writer.writerows([escape_path(item.file), item.text, item.error] for item in found)


def _write_text_table(found: Iterable[Prediction], _: int, heading: str, out: TextIO) -> None:
    table = Table("file", "text", box=None, pad_edge=False)
    table.columns[0].overflow = "fold"
    folder, named = _name_files(found)
    for name, prediction in named:
        table.add_row(Text(name), Text(prediction.text or "-"))
    _print(table, heading, folder, out)


_EVENT = ("onset", "offset", "label")


def _round(event: Event) -> Event:
    return round(event[0], 4), round(event[1], 4), event[2]


def _write_events_csv(found: Iterable[Prediction], _: int, __: str, out: TextIO) -> None:
    """Write CSV: a row for each event, and one without an event for each recording without events."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["file", *_EVENT, "error"])
    for item in found:
        for event in map(_round, item.intervals) if item.intervals else [("", "", "")]:
            writer.writerow([escape_path(item.file), *event, item.error])


def _write_events_table(found: Iterable[Prediction], _: int, heading: str, out: TextIO) -> None:
    table = Table("file", *_EVENT, box=None, pad_edge=False)
    table.columns[0].overflow = "fold"
    folder, named = _name_files(found)
    for name, prediction in named:
        for onset, offset, label in prediction.intervals or [(None, None, "-")]:
            table.add_row(
                *map(Text, (name, *("" if time is None else f"{time:.2f}" for time in (onset, offset)), label))
            )
    _print(table, heading, folder, out)


def _write_embedding_csv(found: Iterable[Prediction], _: int, __: str, out: TextIO) -> None:
    """Write CSV: a column for each value of the embedding."""
    writer = csv.writer(out, lineterminator="\n")
    for number, item in enumerate(found):
        if not number:
            writer.writerow(["file", *item.classes, "error"])
        cells = [""] * len(item.classes) if item.error else item.embedding.tolist()
        writer.writerow([escape_path(item.file), *cells, item.error])


def _write_cosine_table(found: Iterable[Prediction], _: int, heading: str, out: TextIO) -> None:
    """Write the cosine of each pair of recordings, or the embedding of a single recording.

    Raises:
        InputError: too many recordings for a table of pairs.
    """
    folder, named = _name_files(found)
    readable = [(name, item) for name, item in named if not item.error]
    if len(readable) > _COMPARED:
        raise InputError(
            f"{len(readable)} recordings have too many pairs for a table. Write their embeddings with --csv or --json, or name at "
            f"most {_COMPARED} recordings."
        )
    if len(readable) == 1:
        heading += f"\nembedding of {readable[0][0]}: {format_answer(readable[0][1])}"
    table = Table("file", "compared with", "cosine", box=None, pad_edge=False)
    for column in table.columns[:2]:
        column.overflow = "fold"
    for (name, item), (other, compared) in itertools.combinations(readable, 2):
        table.add_row(Text(name), Text(other), Text(f"{item.embedding @ compared.embedding:.3f}"))
    _print(table, heading, folder, out)


def _select_top_classes(prediction: Prediction, top: int) -> Sequence[tuple[str, float]]:
    return [] if prediction.error else prediction.top(top)


def _write_table(found: Iterable[Prediction], top: int, heading: str, out: TextIO, several: bool = False) -> None:
    table = Table("file", "label", "probability", box=None, pad_edge=False)
    if top > 1:
        table.add_column("then")
    if several:
        table.add_column("model")
    table.columns[0].overflow = "fold"
    folder, named = _name_files(found)
    for name, prediction in named:
        cells = [f"{label} {probability:.3f}" for label, probability in _select_top_classes(prediction, top)[1:]]
        first = ["-", ""] if prediction.error else [prediction.label, f"{prediction.probability:.3f}"]
        table.add_row(
            Text(name),
            *map(Text, first),
            *([Text(", ".join(cells))] if top > 1 else []),
            *([Text(prediction.model)] if several else []),
        )
    _print(table, heading, folder, out)


def _name_files(found: Iterable[Prediction]) -> tuple[str, list[tuple[str, Prediction]]]:
    """Return the common folder of all files, and each prediction with its file's name in this folder."""
    predictions = list(found)
    files = [escape_path(prediction.file) for prediction in predictions]
    common = os.path.commonprefix(files)  # noqa: RUF071  # commonpath changes URIs and rejects mixed paths
    folder = common[: common.rfind("/") + 1]
    return folder, [(name[len(folder) :], prediction) for name, prediction in zip(files, predictions, strict=True)]


def _print(table: Table, heading: str, folder: str, out: TextIO) -> None:
    # Long names wrap only on a terminal. Elsewhere every recording must stay on one line.
    console = Console(file=out, highlight=False, width=None if out.isatty() else _UNFOLDED)
    console.print(heading, markup=False, soft_wrap=True)
    if folder:
        console.print(f"folder: {folder}", markup=False, soft_wrap=True)
    console.print(table)
