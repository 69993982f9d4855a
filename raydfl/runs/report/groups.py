"""Groups of clients over the rounds (``train.groups``): their members, and their agreement with the known true groups."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import ListedColormap, to_rgba
from numpy.typing import NDArray

from raydfl.runs.report.data import RunRecord
from raydfl.runs.report.figures import INK, SERIES, Axes, Plot, Series, label_rounds, plot_curves
from raydfl.runs.report.page import Section


def show_groups(run: RunRecord) -> Section:
    """Show each client's group over the rounds, and the agreement with the true groups."""
    if not run.memberships:
        return Section("Groups of clients")
    rounds = np.array(sorted(run.memberships), np.float64)
    tables = [run.memberships[int(round_index)] for round_index in rounds]
    truth = tables[-1][1]
    groups = np.stack([table[0][np.argsort(truth, kind="stable")] for table in tables], axis=1)
    true_groups = _count_true_groups(run, truth)
    counts = dict(zip(*np.unique(groups[:, -1].astype(int), return_counts=True), strict=True))
    ungrouped = counts.pop(0, 0)
    sizes = [f"group {number}: {count}" for number, count in counts.items()]
    sizes += [f"without a group: {ungrouped}"] * bool(ungrouped)
    caption = f"Clients in round {rounds[-1]:.0f}: {', '.join(sizes)}."
    if true_groups:
        caption += " Lines separate the true groups, which the server does not know."
    plots = [_draw_members(caption, rounds, groups, true_groups)]
    labels = {"purity": "purity", "rand_index": "adjusted Rand index"}
    agreement = {label: run.curves.get(("server", f"tasks/{name}")) for name, label in labels.items()}
    series = [
        Series(label, curve.rounds, curve.values, colour=index, dash=index)
        for index, (label, curve) in enumerate(agreement.items())
        if curve is not None
    ]
    if series:
        ends = ", ".join(f"{item.label} {item.y[-1]:.2f}" for item in series)
        plots.append(plot_curves("agreement with the truth", f"At the end: {ends}.", series, "agreement"))
    return Section("Groups of clients", plots)


def _count_true_groups(run: RunRecord, truth: np.ndarray) -> list[tuple[str, int]]:
    """Return name and number of clients of each true group, ordered by the group's number in ``truth``."""
    numbers, counts = np.unique(truth[truth >= 0].astype(int), return_counts=True)
    parts = run.about.get("parts")
    names = sorted(parts) if isinstance(parts, dict) else []
    known = len(names) == len(numbers)
    return [
        (names[number] if known else f"kind {number + 1}", int(count))
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
    ]


def _draw_members(
    caption: str, rounds: NDArray[np.float64], groups: NDArray[np.float64], true_groups: list[tuple[str, int]]
) -> Plot:
    """Draw a row for each client, coloured by its group from each round until the next."""
    clients, last = len(groups), max(1, int(groups.max(initial=0)))
    colours = [to_rgba(SERIES[n % len(SERIES)], 0.85 / (1 + n // len(SERIES))) for n in range(last)]

    def draw(axes: Axes) -> None:
        edges = [*rounds, rounds[-1] + (rounds[-1] - rounds[-2] if len(rounds) > 1 else 1)]
        cells = np.ma.masked_equal(groups, 0)
        axes.pcolormesh(edges, range(clients + 1), cells, cmap=ListedColormap(colours), vmin=0.5, vmax=last + 0.5)
        for number in np.unique(groups[groups > 0]).astype(int).tolist():
            axes.plot([], [], color=colours[number - 1], linewidth=5, label=f"group {number}")
        axes.set_ylim(clients, 0)
        axes.grid(visible=False)
        axes.set_ylabel("clients")
        ends = np.cumsum([0, *(count for _, count in true_groups)])
        axes.set_yticks((ends[1:] + ends[:-1]) / 2, [name for name, _ in true_groups])
        for end in ends[1:-1].tolist():
            axes.axhline(end, color=INK, linewidth=0.8)
        label_rounds(axes)

    return Plot("who is with whom", caption, draw, min(8.0, max(2.2, 0.12 * clients + 1.2)))
