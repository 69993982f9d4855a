"""The pictures of a run's page that show where its time went: the parts of each round, and what the actors did in the last ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raydfl.core.errors import RaydflError
from raydfl.data import Population
from raydfl.engine import WALL
from raydfl.runs.report import figures as plots
from raydfl.runs.report import figures_time as plots_time
from raydfl.runs.report.data import RunRecord
from raydfl.runs.report.figures import Series
from raydfl.runs.report.figures_time import Work
from raydfl.runs.report.page import Picture, Pictures

_ACTORS = ("transfer", "wait")
_WORDS = {
    "plan": "planning, sending",
    "fit": "clients: work",
    "transfer": "clients: transfer",
    "wait": "clients: idle actors",
    "aggregate": "aggregation",
    "evaluate": "evaluation",
    "commit_wait": "waiting for the commit",
}


def time_pictures(run: RunRecord, pictures: Pictures) -> list[Picture]:
    """As many as the record allows; one that was made by an older version has only totals."""
    parts = parts_of_rounds(run)
    made = []
    if parts is not None:
        rounds, seconds = parts
        shown = {words: seconds[name] for name, words in _WORDS.items()} | {"_between rounds": seconds["rest"]}
        share = seconds["fit"].sum() / max(sum(float(values.sum()) for values in seconds.values()), 1e-12)
        caption = (
            "While the server waits for clients, its time is shown as the actors spent it: "
            f"{100 * share:.0f} % of all is clients' work."
        )
        made.append(pictures.add("where the time goes", caption, plots_time.round_parts, rounds, shown))
    work = _last_rounds(run)
    if work:
        caption = "A lane for each client actor, a bar for each client's training; a client has the same colour in all rounds."
        made.append(pictures.add("who worked when", caption, plots_time.actors, work))
    told = {"train_and_aggregate", "clients", "round", *WALL, *_ACTORS} if parts is not None else set()
    others = sorted({metric for _, metric in run.curves if metric.startswith("seconds/")})
    labels_of = {metric: metric.removeprefix("seconds/") for metric in others if metric[8:] not in told}
    lines = totals(run, {metric: label.replace("_", " ") for metric, label in labels_of.items()})
    if lines:
        caption = "Work of several actors at once counts for each of them." if "seconds/fit" in labels_of else ""
        title = "time per round" if parts is None else "other times per round"
        made.append(pictures.add(title, caption, plots.round_seconds, lines))
    return made


def parts_of_rounds(run: RunRecord) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]] | None:
    """Return each round's wall-clock seconds in parts that add up to ``seconds/round``; ``None`` when the record does not tell.

    Returns:
        The rounds, and by part seconds [rounds]: ``plan``, ``fit``, ``transfer``, ``wait``, ``aggregate``, ``evaluate``,
        ``commit_wait`` and ``rest``. The time in which the server waited for clients is divided among ``fit``, ``transfer`` and
        ``wait`` as the time of all actors was.
    """
    names = (*WALL, "round", "fit", *_ACTORS)
    found = {name: run.curves.get(("server", f"seconds/{name}")) for name in names}
    curves = {name: curve for name, curve in found.items() if curve is not None}
    if len(curves) < len(names):
        return None
    rounds = curves["round"].rounds
    for curve in curves.values():
        rounds = np.intersect1d(rounds, curve.rounds)
    if not len(rounds):
        return None
    total = {name: curve.totals[np.searchsorted(curve.rounds, rounds)] for name, curve in curves.items()}
    of_actors = np.maximum(total["fit"] + total["transfer"] + total["wait"], 1e-12)
    parts = {name: total[name] for name in WALL if name != "clients"}
    parts |= {name: total["clients"] * total[name] / of_actors for name in ("fit", *_ACTORS)}
    parts["rest"] = np.maximum(total["round"] - sum(parts.values()), 0.0)
    return rounds, parts


def _last_rounds(run: RunRecord) -> list[Work]:
    try:
        names: Sequence[str] = Population.load(run.folder / "population").ids
    except (RaydflError, OSError):  # the page of a run whose data are elsewhere
        names = []
    found = []
    for round_index, rows in sorted(run.timelines.items()):
        bars = [
            (
                int(actor),
                names[int(client)] if int(client) < len(names) else f"client {client:.0f}",
                int(client),
                begin,
                end,
            )
            for client, actor, begin, end in rows.tolist()
        ]
        if bars:
            found.append(Work(round_index, bars))
    return found


def totals(run: RunRecord, labels: dict[str, str]) -> list[Series]:
    """Return the totals by round of the named metrics, those that were recorded."""
    found: list[Series] = []
    for metric, label in labels.items():
        by_round: dict[float, float] = {}
        for (_, name), curve in run.curves.items():
            if name == metric:
                for round_index, total in zip(curve.rounds, curve.totals, strict=True):
                    by_round[float(round_index)] = by_round.get(float(round_index), 0.0) + float(total)
        if by_round:
            x = np.array(sorted(by_round))
            found.append(Series(label, x, np.array([by_round[r] for r in x]), colour=len(found), dash=len(found)))
    return found
