"""Report of a run: its sections, notes and tiles."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.figure import Figure

from raydfl.core.errors import InputError
from raydfl.core.metrics import SCORES, base_name
from raydfl.core.nested import flatten, get_path
from raydfl.core.words import format_duration, format_size
from raydfl.runs.report.cost import show_cost, show_traffic
from raydfl.runs.report.data import RunRecord
from raydfl.runs.report.diagnosis import find_problems
from raydfl.runs.report.groups import show_groups
from raydfl.runs.report.machines import show_machines, show_top_clips
from raydfl.runs.report.mistakes import show_mistakes
from raydfl.runs.report.models import show_models
from raydfl.runs.report.omissions import show_aggregation, show_incidents, show_skipped
from raydfl.runs.report.page import Section, format_value, render_page
from raydfl.runs.report.scores import (
    format_model,
    format_score,
    format_split,
    select_curve,
    show_clients,
    show_confusions,
    show_learning,
    show_results,
)
from raydfl.runs.report.verdict import judge


def show_verdict(run: RunRecord) -> Section:
    """Show the verdict on the run and the next command."""
    if not run.curves:
        return Section("Verdict")
    verdict = judge(run)
    text = verdict.text[:1].upper() + verdict.text[1:] + "."
    return Section("Verdict", text=[text, *(finding.text for finding in verdict.findings)], commands=[verdict.next])


def show_settings(run: RunRecord) -> Section:
    """List all settings of the run, folded."""
    rows = [(key, format_value(value)) for key, value in flatten(run.config).items()]
    return Section("Configuration", headings=("setting", "value"), rows=rows, folded=f"{len(rows)} settings")


_WITH_FIGURES: tuple[Callable[[RunRecord], Section], ...] = (
    *(show_learning, show_results, show_clients, show_groups, show_machines, show_top_clips, show_confusions),
    *(show_aggregation, show_cost),
)
_SECTIONS = (
    show_verdict,
    *_WITH_FIGURES,
    show_mistakes,
    show_traffic,
    show_skipped,
    show_incidents,
    show_models,
    show_settings,
)
"""Sections of a report, in order."""


def render_run(run: RunRecord) -> str:
    """Render the report of a run as an HTML page."""
    notes = [*list_notes(run), *run.remarks]
    return render_page(run.id, _format_subtitle(run), [show(run) for show in _SECTIONS], notes, _make_tiles(run))


def draw_figures(run: RunRecord, title: str = "") -> dict[str, Figure]:
    """Draw the figures of a run's report on white.

    Args:
        run: The run.
        title: Title of a single figure. Empty: all figures.

    Returns:
        Figures by title, in the report's order.

    Raises:
        InputError: The report has no figure with this title.
    """
    plots = {plot.title: plot for show in _WITH_FIGURES for plot in show(run).plots}
    if title and title not in plots:
        choice = f"Choose one of {', '.join(map(repr, plots))}." if plots else "No round is recorded yet."
        raise InputError(f"{run.folder} has no figure {title!r}. {choice}")
    figures = {name: plot.figure() for name, plot in plots.items() if title in ("", name)}
    for figure in figures.values():
        figure.set_facecolor("white")
    return figures


def list_notes(run: RunRecord) -> list[str]:
    """Return remarks on a run's progress, its best round, its problems and its missing files."""
    resume, notes = f"Resume it with: raydfl resume {run.folder}", []
    if not run.curves:
        notes.append(f"No round of this run is recorded yet. {resume}")
    elif run.stopped:
        notes.append(f"Stopped in round {run.done} of {run.total}: {run.stopped}.")
    elif run.done < run.total:
        notes.append(f"This run is not finished: {run.done} of {run.total} rounds are done. {resume}")
    if (epsilon := _find_epsilon(run)) is not None:
        notes.append(_format_privacy(run, epsilon[2]))
    if "phase_stopped" in run.facts:
        notes.append("Phase {2} (in round {0}).".format(*run.facts["phase_stopped"]))
    if "best_round" in run.facts:
        file = " Its models are in model-best.safetensors." if (run.folder / "model-best.safetensors").exists() else ""
        _, best, reason = run.facts["best_round"]
        scores = [
            f"{format_split(split)}, {metric} {format_score(base_name(metric), float(curve.values[curve.rounds == best][0]))}"
            for split, metric in run.sort_scores(run.headline)
            if split != "train" and best in (curve := select_curve(run, (split, metric))).rounds
        ]
        notes.append(f"Best: {reason}.{' Scores of this round: ' * bool(scores)}{'; '.join(scores)}.{file}")
    problems = find_problems(run)
    notes += [f"{'Worthless' if problem.worthless else 'Warning'}: {problem.text}." for problem in problems]
    return [*notes, *run.missing]


def _find_epsilon(run: RunRecord) -> tuple[int, float, str] | None:
    """Return the last epsilon of a private run: its round, its value and its description."""
    return run.facts.get("privacy/epsilon", run.facts.get("privacy/epsilon_as_if"))


def _format_privacy(run: RunRecord, description: str) -> str:
    """Describe the guarantee of a private run, and the metrics that it does not cover."""
    text = f"Differential privacy: {description}."
    if get_path(run.config, "privacy.metrics") == "outside":
        text += " The metrics of clients are outside this guarantee (privacy.metrics: outside)."
    return text + " Epsilons of several runs on the same clients add up."


def format_cost(run: RunRecord) -> tuple[str, str]:
    """Format the bytes sent in both directions and the time of all rounds. Missing values become ``-``."""
    sent, seconds = run.sum_totals("bytes_down", "bytes_up"), run.sum_totals("seconds/round")
    return "-" if sent is None else format_size(sent), "-" if seconds is None else format_duration(seconds)


def _format_subtitle(run: RunRecord) -> str:
    parts = [run.method and f"method {run.method}", run.data and f"data {run.data}"]
    seed = get_path(run.config, "run.seed")
    parts += [f"phase {name} from round {first}" for name, first in _find_phase_starts(run).items()]
    parts += [f"seed {seed}" if seed is not None else "", str(run.about.get("created", ""))]
    parts += [f"raydfl {run.about['raydfl']}" if "raydfl" in run.about else ""]
    return " · ".join(filter(None, parts))


def _find_phase_starts(run: RunRecord) -> dict[str, int]:
    """Return the first round of each phase. Future phases have their planned round."""
    starts, numbers = dict(run.about.get("phases", {})), run.curves.get(("server", "phase"))
    if numbers is not None:
        for number, name in enumerate(starts, 1):
            if number in numbers.values:
                starts[name] = int(numbers.rounds[numbers.values == number].min())
    return starts


def _make_tiles(run: RunRecord) -> list[tuple[str, str]]:
    """Return the run's most important values with their meanings."""
    tiles = [
        (
            format_score(run.headline, select_curve(run, key).last),
            f"{SCORES[run.headline].title} of {format_model(key[1])}, {format_split(key[0])}",
        )
        for key in run.sort_scores(run.headline)
        if key[0] != "train"
    ][:4]
    tiles += [
        (format_score("attack_success", select_curve(run, key).last), f"attack success on {format_model(key[1])}")
        for key in run.sort_scores("attack_success")
    ][:2]
    attackers = run.curves.get(("server", "attackers"))
    sent, time = format_cost(run)
    epsilon = _find_epsilon(run)
    unused = run.sum_totals("failed", "rejected")
    tiles += [
        ("" if attackers is None else f"{attackers.values.mean():.3g}", "simulated attackers per round (mean)"),
        (f"{run.done}{f' of {run.total}' * bool(run.total)}" * bool(run.curves), "rounds"),
        (
            "" if epsilon is None else f"{epsilon[1]:.3g}",
            "epsilon, as if more clients took part" if "privacy/epsilon_as_if" in run.facts else "epsilon",
        ),
        (f"{run.facts['best_round'][1]:.0f}" if "best_round" in run.facts else "", "best round"),
        (str(run.about.get("clients", "")), "clients"),
        (sent, "sent in both directions"),
        (time, "time in rounds"),
        ("" if unused is None else f"{unused:.0f}", "unused updates"),
    ]
    return [(value, meaning) for value, meaning in tiles if value not in ("", "-")]
