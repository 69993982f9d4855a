"""Pictures of who is with whom over the rounds, where clients are grouped (``train.groups``)."""

from __future__ import annotations

import numpy as np

from raydfl.runs.report import figures as plots
from raydfl.runs.report.data import RunRecord
from raydfl.runs.report.figures import Series
from raydfl.runs.report.page import Picture, Pictures


def group_pictures(run: RunRecord, pictures: Pictures) -> list[Picture]:
    """Return a picture of the groups' members, and one of how well they agree with the truth where that is known."""
    if not run.memberships:
        return []
    rounds = np.array(sorted(run.memberships), np.float64)
    tables = [run.memberships[int(round_index)] for round_index in rounds]
    truth = tables[-1][1]
    order = np.argsort(truth, kind="stable")
    groups = np.stack([table[0][order] for table in tables], axis=1)
    kinds = _kinds(run, truth)
    sizes = [
        f"group {number}: {(groups[:, -1] == number).sum()}"
        for number in np.unique(groups[:, -1]).astype(int)
        if number
    ]
    alone = int((groups[:, -1] == 0).sum())
    caption = f"Clients in round {rounds[-1]:.0f}: {', '.join(sizes)}" + (f", in none: {alone}." if alone else ".")
    if kinds:
        caption += " Lines divide the clients by what they truly are, which the server is not told."
    made = [pictures.add("who is with whom", caption, plots.groups_over_rounds, rounds, groups, kinds)]
    curves = {name: run.curves.get(("server", f"tasks/{name}")) for name in ("purity", "rand_index")}
    labels = {"purity": "purity", "rand_index": "adjusted Rand index"}
    series = [
        Series(labels[name], curve.rounds, curve.values, colour=place, dash=place)
        for place, (name, curve) in enumerate(curves.items())
        if curve is not None
    ]
    if series:
        ends = ", ".join(f"{item.label} {item.y[-1]:.2f}" for item in series)
        made.append(pictures.add("agreement with the truth", f"At the end: {ends}.", plots.curves, series, "agreement"))
    return made


def _kinds(run: RunRecord, truth: np.ndarray) -> list[tuple[str, int]]:
    """Return the names of what clients truly are, and how many of each, in the order of their numbers."""
    numbers, counts = np.unique(truth[truth >= 0].astype(int), return_counts=True)
    parts = run.about.get("parts")
    names = sorted(parts) if isinstance(parts, dict) else []
    known = len(names) == len(numbers)
    return [
        (names[number] if known else f"kind {number + 1}", int(count))
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
    ]
