"""The parts of reports' pages: pictures, templates, and the words for scores and settings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from raydfl.core.metrics import SCORES, base_name, model_name
from raydfl.engine import without_password
from raydfl.runs.report import figures as plots
from raydfl.runs.report.data import SPLITS, Curve, Key, RunRecord
from raydfl.runs.report.diagnosis import problems_of

_Given = ParamSpec("_Given")

UNITS = {name: f"{score.title} ({score.unit})" for name, score in SCORES.items() if score.drawn}
"""The scores that are drawn over the rounds, with the titles of their axes."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure of a page."""

    title: str
    caption: str
    svg: Markup


class Pictures:
    """Makes the pictures of one page, each with a name of its own."""

    def __init__(self) -> None:
        self._count = 0

    def add(
        self, title: str, caption: str, draw: Callable[_Given, Figure], *given: _Given.args, **named: _Given.kwargs
    ) -> Picture:
        """Return the figure that ``draw(*given, **named)`` makes, as part of the page."""
        self._count += 1
        svg = drawn(f"figure-{self._count}", f"{title}. {caption}", functools.partial(draw, *given, **named))
        # Safe as it is: Matplotlib escapes every text of a figure, and to_svg the description.
        return Picture(title, caption, Markup(svg))


class Figures(Pictures):
    """Keeps the figures themselves, in place of pictures for a page.

    Args:
        title: of the only one to draw; empty: all.
    """

    def __init__(self, title: str = "") -> None:
        super().__init__()
        self._title = title
        self.titles: list[str] = []
        """All of them, in the order of the page."""
        self.drawn: dict[str, Figure] = {}

    def add(
        self, title: str, caption: str, draw: Callable[_Given, Figure], *given: _Given.args, **named: _Given.kwargs
    ) -> Picture:
        """Keep the figure that ``draw(*given, **named)`` makes."""
        self.titles.append(title)
        if self._title in ("", title):
            self.drawn[title] = draw(*given, **named)
        return Picture(title, caption, Markup())


def drawn(name: str, description: str, draw: Callable[[], Figure]) -> str:
    """Return a figure as SVG."""
    return plots.to_svg(draw(), name, description)


def render(template: str, **values: Any) -> str:
    """Return a page of raydfl's own templates; every value is escaped."""
    render: Callable[..., str] = _templates().get_template(template).render
    return render(**values)


@functools.cache
def _templates() -> Environment:
    """Return the templates; each is compiled once in a process."""
    return Environment(
        loader=PackageLoader("raydfl.runs.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def split_name(split: str) -> str:
    """Return the name of a split of the record in a report."""
    return SPLITS.get(split, split)


def model_label(metric: str) -> str:
    """Return the model that a metric belongs to; ``-`` when it names none."""
    return model_name(metric) or "-"


def score_text(base: str, value: float | None) -> str:
    """Return a score as a page shows it: shares in per cent, losses as they are."""
    if value is None or not np.isfinite(value):
        return "-" if value is None else str(value)
    if not SCORES[base].share:
        return f"{value:.3f}" if abs(value) < 1e6 else f"{value:.4g}"
    return f"{100 * value:.1f} %"


def mean_and_range(base: str, values: Sequence[float]) -> str:
    """``81.2 % (79.0 to 83.5)``; of one value only itself."""
    mean = score_text(base, float(np.mean(values)))
    low, high = (score_text(base, edge).removesuffix(" %") for edge in (min(values), max(values)))
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


def value_text(value: Any) -> str:
    """Return a setting's value in one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ", ".join(value_text(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {value_text(inner)}" for key, inner in value.items())
    return without_password(str(value))


def shown_curve(run: RunRecord, key: Key) -> Curve:
    """Return the curve of a score; of one that clients measured, their mean, each client counting once."""
    return run.curves.get((key[0], f"{key[1]}_client_mean"), run.curves[key])


def problem_notes(run: RunRecord) -> list[str]:
    """Return sentences about what went wrong with a run."""
    return [f"{'Worthless' if problem.worthless else 'Warning'}: {problem.text}." for problem in problems_of(run)]


def choice_notes(run: RunRecord) -> list[str]:
    """Return sentences about the round in which training stopped early, and about the best one."""
    notes = [f"Stopped in round {run.done} of {run.total}: {run.stopped}."] if run.stopped else []
    if "phase_stopped" in run.facts:
        notes.append("Phase {2} (in round {0}).".format(*run.facts["phase_stopped"]))
    if "best_round" in run.facts:
        file = " Its models are in model-best.safetensors." if (run.folder / "model-best.safetensors").exists() else ""
        chosen = int(run.facts["best_round"][1])
        there = [
            f"{split_name(split)}, {metric} {score_text(base_name(metric), float(curve.values[curve.rounds == chosen][0]))}"
            for split, metric in run.ordered(run.headline)
            if split != "train" and chosen in (curve := shown_curve(run, (split, metric))).rounds
        ]
        notes.append(f"Best: {run.facts['best_round'][2]}.{' In that round: ' * bool(there)}{'; '.join(there)}.{file}")
    return notes


def unfinished(run: RunRecord) -> str:
    """Say what a run lacks, and the command that goes on with it; empty when it lacks nothing."""
    again = f"Go on with: raydfl resume {run.folder}"
    if not run.curves:
        return f"No round of this run is recorded yet. {again}"
    if run.done < run.total and not run.stopped:
        return f"This run is not finished: {run.done} of {run.total} rounds are done. {again}"
    return ""
