"""Results of finished runs as JSON files with provenance: configuration digest, commit, machine, scores and budget.

A study with a folder ``results`` repeats no run that has a file there, so a study continues on a different machine without the
folders of its runs.
"""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raydfl.controls import Control
from raydfl.core.errors import ConfigError, RunDirectoryError, translate_failures
from raydfl.core.files import replace_non_finite, write_durably
from raydfl.core.metrics import base_name
from raydfl.core.version import __version__
from raydfl.experiments.settings import MetricSettings
from raydfl.experiments.study import Study, Trial, list_keys, list_part_keys
from raydfl.runs.report import Curve, RunRecord, align, find_problems, read_run

BUDGET: Mapping[str, tuple[str, float]] = {
    "client steps": ("steps", 1.0),
    "MB down": ("bytes_down", 1e-6),
    "MB up": ("bytes_up", 1e-6),
    "multiply-adds (billions)": ("multiply_adds", 1e-9),
    "client seconds": ("seconds/fit", 1.0),
    "processor seconds": ("seconds/processor", 1.0),
}
"""Columns of a run's budget: metric, and factor of the sum of its totals."""
MEANS: Mapping[str, tuple[str, float]] = {"kept weights (thousands)": ("kept_weights", 1e-3)}
"""Columns of a run's budget: metric, and factor of its mean over the rounds."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Results and provenance of a run."""

    run: str
    """Name of the run's folder."""
    identity: str
    digest: str
    """Digest of the run's configuration without the places of the data sets."""
    labels: dict[str, str]
    """Labels of the cell by axis."""
    values: dict[str, Any]
    """The draw: values by setting."""
    repeat: str
    rounds: int
    every: int
    """Rounds between evaluations."""
    scores: dict[str, list[tuple[int, float]]]
    """Rounds and values by metric, such as ``test model/accuracy``. Values are unscaled."""
    chosen: int = 0
    """The best round by ``run.best``; 0: none."""
    worthless: bool = False
    problems: str = ""
    controls: list[dict[str, Any]] = field(default_factory=list)
    """Controls without training on the headline's split: name, split, metric, value, count of test clips, standard error."""
    budget: dict[str, float] = field(default_factory=dict)
    """Sums over the run, and means over the rounds, by column."""
    provenance: dict[str, Any] = field(default_factory=dict)

    def find_curve(self, trial: Trial, metric: MetricSettings) -> Curve | None:
        """Return the curve of a metric in the table's unit; ``None`` if the run did not measure it."""
        points = next(
            (self.scores[name] for key in list_keys(trial.config, metric) if (name := " ".join(key)) in self.scores),
            None,
        )
        if not points:
            return None
        rounds, values = np.array(points, np.float64).T
        return Curve(rounds, values * metric.scale, np.zeros_like(values))


def make_result(study: Study, trial: Trial) -> RunResult:
    """Make the result of a trial from the folder of its run."""
    record = read_run(trial.run_dir)
    problems, best = find_problems(record), record.curves.get(("server", "best_round"))
    metrics = (
        trial.metric,
        *(study.resolve(metric, trial.config) for metric in study.settings.also),
        study.make_plateau_metric(trial),
    )
    curves = dict(filter(None, (_find_curve(record, trial, metric) for metric in metrics)))
    return RunResult(
        run=trial.run_dir.name,
        identity=trial.result[0],
        digest=trial.result[1],
        labels=dict(zip(study.axes, trial.labels, strict=True)),
        values=dict(trial.values),
        repeat=trial.repeat,
        rounds=record.done,
        every=trial.config.evaluate.interval,
        scores={
            name: [(int(at), float(value)) for at, value in zip(curve.rounds, curve.values, strict=True)]
            for name, curve in curves.items()
        },
        chosen=0 if best is None else int(best.last),
        worthless=any(problem.worthless for problem in problems),
        problems="; ".join(problem.text for problem in problems),
        controls=[
            asdict(control)
            for control in _average_parts(record.controls)
            if control.split == (trial.metric.split or "test")
        ],
        budget=_measure_budget(record),
        provenance={
            "version": __version__,
            "commit": find_commit(),
            "seed": trial.config.run.seed,
            **describe_machine(),
        },
    )


def _find_curve(record: RunRecord, trial: Trial, metric: MetricSettings) -> tuple[str, Curve] | None:
    """Return a metric's name and curve, with several parts of the data the mean over the parts; ``None`` if not measured."""
    for key in list_keys(trial.config, metric):
        for names in ([key], list_part_keys(trial.config, key)):
            if record.curves.keys() >= set(names):
                rounds, values, totals = align([record.curves[name] for name in names])
                return " ".join(key), Curve(rounds, values.mean(axis=0), totals.sum(axis=0))
    return None


def _average_parts(controls: Sequence[Control]) -> list[Control]:
    """Average controls over the parts of the data."""
    groups: dict[tuple[str, str, str], list[Control]] = {}
    for control in controls:
        groups.setdefault((control.name, control.split, base_name(control.metric)), []).append(control)
    averages = []
    for (name, split, metric), parts in groups.items():
        errors = [math.nan if part.standard_error is None else part.standard_error for part in parts]
        value, error = sum(part.value for part in parts) / len(parts), math.hypot(*errors) / len(parts)
        averages.append(
            Control(name, split, metric, value, sum(part.count for part in parts), None if math.isnan(error) else error)
        )
    return averages


def _measure_budget(record: RunRecord) -> dict[str, float]:
    """Measure a run's budget. A column without a value in a round of training is unknown, so it is omitted."""
    sums = {column: record.sum_totals(name) for column, (name, _) in BUDGET.items()}
    trained = len(record.totals("steps")[0])
    budget = {
        column: round(value * BUDGET[column][1], 3)
        for column, value in sums.items()
        if value is not None and len(record.totals(BUDGET[column][0])[0]) >= trained
    }
    for column, (name, factor) in MEANS.items():
        curve = next((curve for (_, metric), curve in record.curves.items() if metric == name), None)
        budget |= {} if curve is None else {column: round(float(curve.trained.mean()) * factor, 3)}
    return budget


@functools.cache
def describe_machine() -> dict[str, Any]:
    """Describe the machine: processor, cores, and the versions of Python and PyTorch."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    processor = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return {
        "processor": processor or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


@functools.cache
def find_commit() -> str:
    """Return the commit of raydfl's source folder, with ``+`` after changes. Empty for an installed package."""
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--abbrev=12",
        "--dirty=+",
        "--exclude=*",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def write_result(study: Study, trial: Trial) -> None:
    """Write the result of a finished trial into the study's folder of results, if the study has a folder.

    Raises:
        ResourcesError: The disk is full, or the folder is not writable.
    """
    if trial.result_file is None or trial.result_file.exists():
        return
    trial.result_file.parent.mkdir(parents=True, exist_ok=True)
    values = replace_non_finite(asdict(make_result(study, trial)))
    write_durably(trial.result_file, (json.dumps(values, indent=1) + "\n").encode())


def read_result(study: Study, trial: Trial) -> RunResult:
    """Read the result of a trial from its JSON file, or make it from the folder of its run.

    Raises:
        RunDirectoryError: The file is damaged.
        ConfigError: The file is the result of a different configuration.
    """
    path = trial.result_file
    if path is None or not path.exists():
        return make_result(study, trial)
    result = load_result(path)
    if result.digest != trial.result[1]:
        raise ConfigError(
            f"{path} is the result of a different configuration (digest {result.digest[:12]} instead of "
            f"{trial.result[1][:12]}). Move the file away to train {trial.name} again, or restore the study's settings."
        )
    return result


def load_result(path: Path) -> RunResult:
    """Load a JSON file with the result of a run.

    Raises:
        RunDirectoryError: The file is damaged.
    """
    with translate_failures(
        lambda reason: RunDirectoryError(
            f"{path} is damaged ({reason}). Restore it from a copy, or remove it to repeat the run."
        )
    ):
        values = json.loads(path.read_text(encoding="utf-8"))
        known = {item.name for item in fields(RunResult)}
        result = RunResult(**{key: value for key, value in values.items() if key in known})
        scores = {
            name: [(int(at), math.nan if value is None else float(value)) for at, value in points]
            for name, points in result.scores.items()
        }
    return RunResult(**{**{item.name: getattr(result, item.name) for item in fields(RunResult)}, "scores": scores})


def check_results(study: Study) -> None:
    """Check the folder of results: each file must belong to a trial of the study, and each file of a trial must be valid.

    Raises:
        ConfigError: A file has an unknown identity, or is the result of a different configuration.
        RunDirectoryError: A file is damaged.
    """
    folder = study.results_folder
    if folder is None:
        return
    for trial in study.trials:
        if trial.result_file is not None and trial.result_file.exists():
            read_result(study, trial)
    if study.only_some:
        return
    known = {trial.result[0] for trial in study.trials}
    foreign = [path for path in sorted(folder.glob("*.json")) if path.stem.rpartition("-")[2] not in known]
    if foreign:
        raise ConfigError(
            f"{foreign[0]} is the result of a configuration outside the study ({len(foreign)} files). Move them away, or "
            f"restore the study's settings."
        )
