"""The table of a report that says which kinds of clients were sent how much, where clients differ in their views."""

from __future__ import annotations

from collections.abc import Iterator

from raydfl.runs.report.data import RunRecord
from raydfl.runs.words import size

_BEGIN = "views/"


def traffic_rows(run: RunRecord) -> list[tuple[str, ...]]:
    """Return for each phase and kind of client: both, the tasks, bytes down and up in all, and a task's mean of both.

    A kind is those of ``data.views`` that clients have.
    """
    kinds = sorted({name.split("/")[1] for _, name in run.curves if name.startswith(_BEGIN)})
    found: list[tuple[str, ...]] = []
    for phase, first, last in _phases(run):
        for kind in kinds:
            tasks, down, up = (
                _sum(run, f"{_BEGIN}{kind}/{what}", first, last) for what in ("clients", "bytes_down", "bytes_up")
            )
            if tasks:
                views = "the first view alone" if kind == "none" else f"also {kind.replace('+', ', ')}"
                found.append((phase, views, f"{tasks:.0f}", size(down), size(up), size(down / tasks), size(up / tasks)))
    return found


def _phases(run: RunRecord) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the first and the last round of each phase."""
    phases = list(dict(run.about.get("phases") or {"": 1}).items())
    ends = [first - 1 for _, first in phases[1:]]
    for (name, first), last in zip(phases, [*ends, run.done], strict=True):
        yield name, first, last


def _sum(run: RunRecord, metric: str, first: int, last: int) -> float:
    curve = run.curves.get(("server", metric))
    if curve is None:
        return 0.0
    return float(curve.totals[(curve.rounds >= first) & (curve.rounds <= last)].sum())
