"""The cost of a run: bytes, the time of each round by step, and the actors' work in the last rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.colors import to_rgba
from numpy.typing import NDArray

from raydfl.core.errors import RaydflError
from raydfl.core.words import format_duration, format_size
from raydfl.data import Population
from raydfl.engine import WALL
from raydfl.runs.report.data import RunRecord, align
from raydfl.runs.report.figures import (
    INK,
    SERIES,
    Axes,
    Plot,
    Series,
    label_rounds,
    make_integer_locator,
    plot_curves,
)
from raydfl.runs.report.page import Section

_ACTORS = ("transfer", "wait")
_WORDS = {
    "plan": "planning, sending",
    "fit": "clients: work",
    "transfer": "clients: transfer",
    "wait": "clients: idle actors",
    "aggregate": "aggregation",
    "evaluate": "evaluation",
    "commit_wait": "waiting for the commit",
    "rest": "between rounds",
}
_STEPS = 150
"""Maximum number of steps in the plot of round times. More rounds are averaged over neighbours."""
_USUAL = 4.0
"""Rounds longer than this multiple of the median do not affect the scale."""
_LANES = 32
"""Maximum number of actors in a timeline."""
_LABELLED = 0.06
"""Minimum width of a bar with the client's name, as a fraction of the timeline."""
_VIEWS = "views/"


def show_cost(run: RunRecord) -> Section:
    """Show bytes and times. Runs of older versions have only total times."""
    plots = [*_draw_bytes(run), *_draw_round_times(run), *_draw_timelines(run), *_draw_other_times(run)]
    headings = ("nodes of client actors", "held", "busy", "idle", "received from other nodes", "sent to other nodes")
    rows = [
        (
            name,
            format_duration(use["held"]),
            format_duration(use["busy"]),
            format_duration(use["held"] - use["busy"]),
            format_size(use["bytes_down"]),
            format_size(use["bytes_up"]),
        )
        for name, use in sorted(run.about.get("nodes", {}).items())
    ]
    return Section("Cost", plots, headings if rows else (), rows)


def _draw_bytes(run: RunRecord) -> Iterator[Plot]:
    sent = _make_series(run, {"bytes_down": "to the clients", "bytes_up": "from the clients"})
    if sent:
        parts = [f"{item.label} {format_size(float(item.y.sum()))}" for item in sent]
        sums = [np.cumsum(np.nan_to_num(item.y)) for item in sent]
        largest = max(float(total[-1]) for total in sums)
        unit, scale = next(((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if largest >= s), ("bytes", 1.0))
        scaled = [replace(item, y=total / scale) for item, total in zip(sent, sums, strict=True)]
        yield plot_curves("bytes sent", f"Total: {', '.join(parts)}.", scaled, f"sent so far ({unit})", lowest=0)


def _make_series(run: RunRecord, labels: Mapping[str, str]) -> list[Series]:
    """Return a series of totals by round for each recorded metric in ``labels``."""
    metrics = [(label, *run.totals(name)) for name, label in labels.items()]
    recorded = [(label, rounds, totals) for label, rounds, totals in metrics if len(rounds)]
    return [Series(*values, colour=index, dash=index) for index, values in enumerate(recorded)]


def split_round_times(run: RunRecord) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]] | None:
    """Split each round's wall-clock time ``seconds/round`` into steps.

    Returns:
        The rounds, and the seconds [rounds] of each step: ``plan``, ``fit``, ``transfer``, ``wait``, ``aggregate``, ``evaluate``,
        ``commit_wait`` and ``rest``. The server's time of waiting for clients is split into ``fit``, ``transfer`` and ``wait``
        in proportion to the time of all actors. ``None`` if the run has no times of these steps.
    """
    # Older versions recorded no such times, so all curves are required.
    names = (*WALL, "round", "fit", *_ACTORS)
    recorded = [curve for name in names if (curve := run.curves.get(("server", f"seconds/{name}"))) is not None]
    if len(recorded) < len(names):
        return None
    rounds, _, totals = align(recorded)
    if not len(rounds):
        return None
    total = dict(zip(names, totals, strict=True))
    actor_time = np.maximum(total["fit"] + total["transfer"] + total["wait"], 1e-12)
    parts = {name: total[name] for name in WALL if name != "clients"}
    parts |= {name: total["clients"] * total[name] / actor_time for name in ("fit", *_ACTORS)}
    parts["rest"] = np.maximum(total["round"] - sum(parts.values()), 0.0)
    return rounds, parts


def _draw_round_times(run: RunRecord) -> Iterator[Plot]:
    parts = split_round_times(run)
    if parts is None:
        return
    rounds, seconds = parts

    def draw(axes: Axes) -> None:
        groups = np.array_split(np.arange(len(rounds)), min(_STEPS, len(rounds)))
        edges = np.array([rounds[group[0]] - 0.5 for group in groups] + [rounds[-1] + 0.5])
        heights = np.array([[seconds[part][group].mean() for group in groups] for part in _WORDS])
        colours = [to_rgba(colour, 0.9) for colour in SERIES] + [to_rgba(INK, 0.15)]
        layers = np.c_[heights, heights[:, -1]]
        axes.stackplot(edges, layers, labels=_WORDS.values(), colors=colours, step="post", linewidth=0)
        axes.set_xlim(edges[0], edges[-1])
        # The first round loads data for all later rounds. Its long time must not flatten the later rounds.
        whole = heights.sum(axis=0)
        usual = _USUAL * float(np.median(whole))
        axes.set_ylim(0, 1.1 * max(float(whole[whole <= usual].max(initial=0.0)), 1e-6))
        for step in np.flatnonzero(whole > usual):
            position = ((edges[step] + edges[step + 1]) / 2, 1)
            text = f"{whole[step]:.3g} s"
            axes.annotate(text, position, xycoords=axes.get_xaxis_transform(), ha="center", fontsize=7)
        axes.set_ylabel("time of a round (s)")
        label_rounds(axes)

    share = seconds["fit"].sum() / max(sum(float(values.sum()) for values in seconds.values()), 1e-12)
    caption = (
        "The server's time of waiting for clients is split as the actors spent it. "
        f"Clients' work: {100 * share:.0f} % of the total time."
    )
    yield Plot("where the time goes", caption, draw, 3.1)


def _draw_timelines(run: RunRecord) -> Iterator[Plot]:
    """Draw a strip for each of the last rounds, with a lane for each actor."""
    timelines = {number: rows for number, rows in sorted(run.timelines.items()) if len(rows)}
    if not timelines:
        return
    try:
        names: Sequence[str] = Population.load(run.folder / "population").ids
    except (RaydflError, OSError):  # The run's data may be on another machine.
        names = []
    lanes = min(_LANES, 1 + int(max(rows[:, 1].max() for rows in timelines.values())))
    # With train.fleet a client may work before the server step of its arrival.
    first = min(0.0, *(float(rows[:, 2].min()) for rows in timelines.values()))
    width = max(0.0, *(float(rows[:, 3].max()) for rows in timelines.values())) - first or 1.0

    def draw(*strips: Axes) -> None:
        for axes, (round_index, rows) in zip(strips, timelines.items(), strict=True):
            for lane in range(lanes):
                clients, _, begins, ends = rows[rows[:, 1] == lane].T
                bars = list(zip(begins, ends - begins, strict=True))
                colours = [SERIES[int(client) % len(SERIES)] for client in clients]
                style: dict[str, Any] = {"edgecolors": "white", "linewidths": 0.4, "alpha": 0.9}
                axes.broken_barh(bars, (lane - 0.4, 0.8), facecolors=colours, **style)
                for client, (begin, length) in zip(clients.astype(int), bars, strict=True):
                    if length > _LABELLED * width:
                        name = names[client] if client < len(names) else f"client {client}"
                        name = _shorten(name, int(length / width * 80))
                        axes.text(begin + length / 2, lane, name, ha="center", va="center", fontsize=6, color="white")
            axes.set_xlim(first, first + width * 1.01)
            axes.set_ylim(lanes - 0.5, -0.5)
            axes.yaxis.set_major_locator(make_integer_locator(8))
            axes.grid(visible=False)
            axes.set_title(f"round {round_index}", loc="left", fontsize=8, pad=2)
        strips[-1].set_xlabel("seconds since the start of the round")

    caption = "One lane per client actor, one bar per client's training. A client has the same colour in all rounds."
    caption += " Bars before 0: work before the round." * (first < 0)
    height = 0.6 + len(timelines) * (0.45 + 0.22 * lanes)
    yield Plot("who worked when", caption, draw, height, len(timelines), label="actor")


def _shorten(name: str, most: int) -> str:
    """Shorten a name to at most ``most`` letters. The end is kept, because ids often have the same start."""
    return name if len(name) <= most else f"…{name[-max(1, most - 1) :]}"


def _draw_other_times(run: RunRecord) -> Iterator[Plot]:
    parts = split_round_times(run) is not None
    drawn = {"train_and_aggregate", "clients", "round", *WALL, *_ACTORS} if parts else set()
    names = sorted({metric[8:] for _, metric in run.curves if metric.startswith("seconds/")} - drawn)
    lines = _make_series(run, {f"seconds/{name}": name.replace("_", " ") for name in names})
    if lines:
        caption = "Times of parallel actors are added up." if "fit" in names else ""
        title = "other times per round" if parts else "time per round"
        yield plot_curves(title, caption, lines, "time per round (s)", lowest=0)


def show_traffic(run: RunRecord) -> Section:
    """Show the tasks and bytes of each phase and kind of client. Clients of one kind have the same views of ``data.views``."""
    kinds = sorted({name.split("/")[1] for _, name in run.curves if name.startswith(_VIEWS)})
    rows: list[tuple[str, ...]] = []
    phases = list(dict(run.about.get("phases") or {"": 1}).items())
    for (phase, first), last in zip(phases, [*(first - 1 for _, first in phases[1:]), run.done], strict=True):
        for kind in kinds:
            metrics = (run.totals(f"{_VIEWS}{kind}/{name}") for name in ("clients", "bytes_down", "bytes_up"))
            tasks, down, up = (float(totals[(rounds >= first) & (rounds <= last)].sum()) for rounds, totals in metrics)
            if tasks:
                views = "only the first view" if kind == "none" else f"also {kind.replace('+', ', ')}"
                rows.append(
                    (
                        phase,
                        views,
                        f"{tasks:.0f}",
                        format_size(down),
                        format_size(up),
                        format_size(down / tasks),
                        format_size(up / tasks),
                    )
                )
    return Section(
        "Bytes by kind of client",
        headings=("phase", "clients with", "tasks", "bytes down", "bytes up", "down per task", "up per task"),
        rows=rows,
        hint="Bytes of tensors sent in training, by the views of the clients. A task is one client's training in one round.",
    )
