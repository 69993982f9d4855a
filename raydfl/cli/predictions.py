"""Printed predictions: a table, CSV, or one JSON object a line."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raydfl.core.errors import InputError
from raydfl.data import shown_name
from raydfl.runs.inference import Prediction

Form = Literal["table", "csv", "json"]

_UNFOLDED = 10_000
"""Columns of a table that is not printed on a terminal."""
_LISTED = 10
"""Recordings that could not be classified, named in the error."""


def show(
    found: Iterable[Prediction],
    top: int,
    form: Form,
    heading: str,
    out: TextIO | None = None,
    answers: str = "class",
    several: bool = False,
) -> None:
    """Print predictions: JSON and CSV as they come, a table at the end.

    Args:
        found: the predictions.
        top: classes to show for each recording, at least 1.
        form: what is printed.
        heading: above a table.
        out: where to; standard output by default.
        answers: what the predictions say: "class", "set" or "score".
        several: whether it differs which model answered: then that is shown, of classes.

    Raises:
        InputError: some of the recordings could not be classified; all others have been printed.
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
    elif several:
        writers |= {"csv": partial(_write_csv, several=True), "table": partial(_write_table, several=True)}

    def counted() -> Iterable[Prediction]:
        nonlocal total
        for prediction in found:
            total += 1
            if prediction.error:
                failed.append(prediction)
            yield prediction

    writers[form](counted(), top, heading, out)
    out.flush()
    if failed:
        shown = [f"  {shown_name(prediction.file)}: {prediction.error}" for prediction in failed[:_LISTED]]
        more = [f"  and {len(failed) - _LISTED} more"] if len(failed) > _LISTED else []
        raise InputError("\n".join([f"{len(failed)} of {total} could not be classified:", *shown, *more]))


def as_data(prediction: Prediction, top: int) -> dict[str, Any]:
    """Return a prediction as one JSON object: ``file``, ``label``, ``probability``, ``top``; or ``file`` and ``error``.

    Of a set of classes ``labels`` takes the place of ``label`` and ``probability``; of a score, ``score`` that of all, with
    ``decision``, ``threshold`` and ``threshold_origin`` where there is a threshold.
    """
    if prediction.error:
        return {"file": shown_name(prediction.file), "error": prediction.error}
    if prediction.answers == "score":
        return {"file": shown_name(prediction.file), "score": prediction.score, **_decided(prediction)}
    own: dict[str, Any] = {"label": prediction.label, "probability": prediction.probability}
    if prediction.answers == "set":
        own = {"labels": list(prediction.labels)}
    return {
        "file": shown_name(prediction.file),
        **({"model": prediction.model} if prediction.model else {}),
        **own,
        "top": [{"label": label, "probability": probability} for label, probability in prediction.top(top)],
    }


def _decided(prediction: Prediction) -> dict[str, Any]:
    threshold = prediction.threshold
    if threshold is None:
        return {}
    return {"decision": prediction.decision, "threshold": threshold.value, "threshold_origin": threshold.origin}


def _write_json(found: Iterable[Prediction], top: int, _: str, out: TextIO) -> None:
    out.writelines(json.dumps(as_data(prediction, top)) + "\n" for prediction in found)


def _write_csv(found: Iterable[Prediction], top: int, _: str, out: TextIO, several: bool = False) -> None:
    """Print CSV: a column ``label`` and ``probability`` for each rank, then ``model`` where ``several`` answered, and ``error``."""
    writer = csv.writer(out, lineterminator="\n")
    ranks = [""] + [f"_{rank}" for rank in range(2, top + 1)]
    model = ["model"] * several
    writer.writerow(["file", *(name + rank for rank in ranks for name in ("label", "probability")), *model, "error"])
    for prediction in found:
        cells = [cell for pair in _ranked(prediction, top) for cell in pair]
        cells = [*cells, *[""] * (2 * top - len(cells)), *[prediction.model] * several]
        writer.writerow([shown_name(prediction.file), *cells, prediction.error])


def _write_score_csv(found: Iterable[Prediction], _: int, __: str, out: TextIO) -> None:
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["file", "score", "decision", "threshold", "threshold_origin", "error"])
    for prediction in found:
        score, decided = ("", {}) if prediction.error else (prediction.score, _decided(prediction))
        cells = [decided.get(name, "") for name in ("decision", "threshold", "threshold_origin")]
        writer.writerow([shown_name(prediction.file), score, *cells, prediction.error])


def _write_score_table(found: Iterable[Prediction], _: int, heading: str, out: TextIO) -> None:
    table = Table("file", "score", "decision", box=None, pad_edge=False)
    table.columns[0].overflow = "fold"
    for prediction in found:
        score = "-" if prediction.error else f"{prediction.score:.4g}"
        table.add_row(Text(shown_name(prediction.file)), Text(score), Text(prediction.decision))
    _print(table, heading, out)


def _write_set_csv(found: Iterable[Prediction], top: int, _: str, out: TextIO) -> None:
    """Write a column for the classes that it has, then ``label`` and ``probability`` for each rank, then ``error``."""
    writer = csv.writer(out, lineterminator="\n")
    ranks = [""] + [f"_{rank}" for rank in range(2, top + 1)]
    writer.writerow(["file", "labels", *(name + rank for rank in ranks for name in ("label", "probability")), "error"])
    for prediction in found:
        cells = [cell for pair in _ranked(prediction, top) for cell in pair] or [""] * 2 * top
        writer.writerow([shown_name(prediction.file), "|".join(prediction.labels), *cells, prediction.error])


def _write_set_table(found: Iterable[Prediction], top: int, heading: str, out: TextIO) -> None:
    table = Table("file", "labels", "most probable", box=None, pad_edge=False)
    table.columns[0].overflow = "fold"
    for prediction in found:
        ranks = ", ".join(f"{label} {probability:.3f}" for label, probability in _ranked(prediction, top))
        table.add_row(*map(Text, (shown_name(prediction.file), ", ".join(prediction.labels) or "-", ranks)))
    _print(table, heading, out)


def _ranked(prediction: Prediction, top: int) -> Sequence[tuple[str, float]]:
    return [] if prediction.error else prediction.top(top)


def _write_table(found: Iterable[Prediction], top: int, heading: str, out: TextIO, several: bool = False) -> None:
    table = Table("file", "label", "probability", box=None, pad_edge=False)
    if top > 1:
        table.add_column("then")
    if several:
        table.add_column("model")
    table.columns[0].overflow = "fold"
    for prediction in found:
        cells = [f"{label} {probability:.3f}" for label, probability in _ranked(prediction, top)[1:]]
        first = ["-", ""] if prediction.error else [prediction.label, f"{prediction.probability:.3f}"]
        table.add_row(
            Text(shown_name(prediction.file)),
            *map(Text, first),
            *([Text(", ".join(cells))] if top > 1 else []),
            *([Text(prediction.model)] if several else []),
        )
    _print(table, heading, out)


def _print(table: Table, heading: str, out: TextIO) -> None:
    # Long names are folded on a terminal only: elsewhere a line is a recording.
    console = Console(file=out, highlight=False, width=None if out.isatty() else _UNFOLDED)
    console.print(heading, markup=False, soft_wrap=True)
    console.print(table)
