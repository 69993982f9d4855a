"""Settings of a study's file. docs/studies.md and docs/studies.md#search explain them with examples."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.metrics import HIGHER_IS_BETTER, SCORES, base_name
from raydfl.core.options import explain
from raydfl.core.settings import Settings
from raydfl.core.yaml import to_yaml
from raydfl.engine import apply_values
from raydfl.experiments.domains import Domain
from raydfl.experiments.protocol import LABELS, MEASURED, SEEDS, make_control_label, read_controls
from raydfl.experiments.schedulers import NoScheduler, PopulationScheduler, Scheduler
from raydfl.runs.report import PlateauSettings

_RENAMED = {"space": "domains", "reference": "control"}
FORMER = (*_RENAMED, "cells")
"""Keys of earlier versions."""
_WHOLE_GROUPS = ("train", "evaluate", "ray", "run", "track")
"""Groups of settings that cannot be replaced as a whole, because a partial group is probably a mistake."""
_Checked = TypeVar("_Checked", bound=Settings)


def check_known(name: str, known: Iterable[str], what: str) -> None:
    """Reject an unknown name.

    Raises:
        ConfigError: The name is unknown. The message has ``what``, the name, and the most similar known name.
    """
    if name not in known:
        raise ConfigError(f"{what} {name!r}. {nearest(name, known)}")


def check_settings(values: Any, settings: type[_Checked], file: Path | str, where: str = "") -> _Checked:
    """Validate values as settings.

    Raises:
        ConfigError: A value is not valid.
    """
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{file}: {explain(error, where, values, settings)}") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def raise_first(faults: Mapping[str, object], where: str = "") -> None:
    """Raise an error with the first message whose condition is true.

    Args:
        faults: Conditions by message.
        where: Prefix of the message.

    Raises:
        ConfigError: A condition is true.
    """
    for message, condition in faults.items():
        if condition:
            raise ConfigError(where + message)


def overlay(values: dict[str, Any], part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Overlay settings by path, as on the command line.

    Args:
        values: Nested settings.
        part: Values by path. Each value replaces the old value.
        where: Prefix of error messages.

    Raises:
        ConfigError: A path passes through a single value, or would replace a whole group.
    """
    for key in part:
        if key in _WHOLE_GROUPS and values.get(key):
            raise ConfigError(
                f"{where}: {key} would replace the whole group. Write single settings, such as {key}.name: value."
            )
    try:
        return apply_values(values, part)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def label_of(value: Any) -> str:
    """Format a setting's value as a label."""
    return value if isinstance(value, str) else to_yaml(value)


def plain_value(value: Any) -> Any:
    """Convert a NumPy value to a Python value."""
    return value.tolist() if hasattr(value, "tolist") else value


class MetricSettings(Settings):
    """A metric of a run's metrics table."""

    score: str = Field(
        "accuracy",
        description="Name of the metric, such as accuracy, macro_f1, auc or loss. If omitted: the headline of the objective.",
    )
    split: str | None = Field(
        None,
        description="Data of the measurement: test, validation, server_validation or triggered; server for values of a round, "
        "such as tasks/rand_index. null: validation (the clients' held-out clips) in a study with domains, otherwise test.",
    )
    model: str | None = Field(
        None, description="Name of the model. null: the method's first model (for FedMLAC its plug-in)."
    )
    mode: Literal["max", "min"] | None = Field(
        None, description="Direction of the metric. null: max for accuracies and F1, min for losses."
    )
    label: str | None = Field(None, description="Name in tables. null: composed from model, score and split.")

    @property
    def title(self) -> str:
        """Name in tables."""
        score = SCORES[self.score].title if self.score in SCORES else self.score.replace("_", " ")
        where = "" if self.split in (None, "test") else f", {self.split}"
        return self.label or f"{self.model + ' ' if self.model else ''}{score}{where}"

    @property
    def unit(self) -> str:
        """Label of a figure's axis."""
        return self.title + (" (%)" if self.scale == 100 else "")

    @property
    def scale(self) -> float:
        """Factor to the unit of tables: per cent for fractions, 1 for losses and seconds."""
        return 1.0 if self.score.endswith(("loss", "seconds")) else 100.0

    @property
    def best(self) -> Literal["max", "min"]:
        """The mode, or the default mode of the score."""
        return self.mode or ("max" if HIGHER_IS_BETTER.get(base_name(self.score), True) else "min")

    @property
    def sign(self) -> float:
        """1 if larger values are better, -1 if smaller ones are."""
        return 1.0 if self.best == "max" else -1.0


class PaperSettings(Settings):
    """A paper's results, for comparison in tables and figures."""

    source: str = Field(description="Citation of the paper and its table.")
    note: str = Field("", description="Differences that matter for the comparison.")
    values: dict[str, Any] = Field(
        description="Values nested by the labels of the first axis, the second axis, and so on: 80.19 or '80.19±0.53', in the "
        "table's unit."
    )


class StudySettings(Settings):
    """The settings of a study's file."""

    title: str = Field(description="Heading of tables and report.")
    question: str = Field("", description="Question of the study in a sentence.")
    note: str = Field("", description="Paragraph below the heading.")
    base: Path | None = Field(None, description="Common base configuration of all runs, relative to the file.")
    settings: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of all runs on top of the base: {train.rounds: 50}. Without a base: the whole configuration.",
    )
    axes: dict[str, dict[str, dict[str, Any]]] = Field(
        default_factory=dict,
        description="Settings by axis and label. A label may also set base, repeat or metric of its cells, and further or other "
        "domains. An axis with the name of a setting may have a list of values instead of labels.",
    )
    domains: dict[str, Domain] = Field(
        default_factory=dict,
        description="Domains of settings to search: {method.alpha: {uniform: [0.1, 0.9]}}.",
    )
    repeat: dict[str, list[Any]] | None = Field(
        None,
        description="Repeated setting and its values, for mean and spread: {run.seed: [1, 2, 3]}. null: {run.seed: [1]}, or with "
        "domains the seed of the configuration.",
    )
    control: dict[str, str] = Field(
        default_factory=dict,
        description="Labels of the control by axis: {method: FedAvg}. Each cell is compared with the cell with these labels.",
    )
    compare: tuple[tuple[dict[str, str], dict[str, str]], ...] = Field(
        (),
        description="Further pairs to compare, by axis: [[{method: A}, {method: B}]]. Each is the difference A - B, for all labels "
        "of the remaining axes. They are corrected for all comparisons, those with the control for their own number.",
    )
    exploratory: bool | None = Field(
        None,
        description="true: the study draws no conclusions, and its page reports it. false: the study is confirmatory and follows "
        "the protocol. null: confirmatory if question, difference, controls, plateau or tuned is set.",
    )
    difference: float | None = Field(
        None, gt=0, description="Smallest difference of interest, in the table's unit (points of per cent)."
    )
    controls: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Controls in every table: a list of names, or changed settings by name: {chance: {}, compute_matched: "
        "{train.local_epochs: 2}}. The names are chance, majority, raw, untrained, local, centralised, fedavg, fedavg_fine_tuned, "
        "compute_matched and known_groups. A trained control is a label on the axis of control, with the control's settings.",
    )
    plateau: PlateauSettings | None = Field(
        None, description="Rule on the score on held-out data: has training reached its plateau?"
    )
    tuned: Path | None = Field(
        None,
        description="File of a search with the same labels, relative to the file. Each contestant has the best settings of its own "
        "draws; trained controls have the settings of the control.",
    )
    results: Path | None = Field(
        None,
        description="Folder of JSON files with the results of finished runs, relative to the file. Runs with a file are not "
        "repeated. null: results stay in the folders of the runs.",
    )
    metric: MetricSettings = Field(MetricSettings(), description="Headline metric, which selects the best.")
    also: list[MetricSettings] = Field(default_factory=list, description="Further metrics for the table.")
    summary: Literal["tail", "last", "best", "chosen"] | None = Field(
        None,
        description="Evaluation of a run for the headline: tail (mean of the last ten, or of all if fewer), last, best (selected "
        "on the measured data), or chosen (in the round of run.best). null: tail, or with domains last.",
    )
    paper: PaperSettings | None = Field(None, description="A paper's results for the same cells.")
    samples: int | None = Field(
        None, ge=1, description="Number of draws from the domains. null: 10, or with searcher grid all combinations."
    )
    searcher: Literal["random", "grid", "optuna"] = Field(
        "random",
        description="Source of draws: random, grid (all combinations), or optuna (TPE, which learns from earlier trials).",
    )
    scheduler: Scheduler = Field(NoScheduler(), description="Early stopping of trials: none, asha, median or pbt.")
    patience: int | None = Field(
        None,
        ge=1,
        description="run.stop of all trials: end a trial after this many evaluations without an improvement of the metric.",
    )
    rounds: int | None = Field(None, ge=1, description="train.rounds of all runs. null: the configuration's value.")
    seed: int = Field(1, ge=0, description="Seed of the draws. The seed of the runs is run.seed.")
    dir: Path | None = Field(
        None,
        description="Folder of the runs. Studies may share it. null: run.dir in settings, or runs/ and the file's name.",
    )
    parallel: int | None = Field(
        None, ge=1, description="Maximum number of parallel runs. null: as many as CPUs and GPUs allow."
    )
    actors: int | None = Field(
        None,
        ge=0,
        description="Client actors of each run. 0 trains clients in the run's own process. null: ray.actors in settings, or 0.",
    )
    cpus: float = Field(1.0, gt=0, description="CPUs of a run's own process, in addition to its client actors.")
    retries: int = Field(
        3, ge=0, description="Number of losses of its process or node after which a run still resumes elsewhere."
    )

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, values: Any) -> Any:
        """Accept the keys of earlier versions."""
        if not isinstance(values, Mapping):
            return values
        plain = dict(values)
        cells = plain.pop("cells", None)
        if not isinstance(cells, Mapping | None):
            raise ConfigError(f"cells is {cells!r}, but must be a group of settings such as {{actors: 2}}.")
        plain = {**(cells or {}), **plain}
        for former, name in _RENAMED.items():
            if former in plain:
                if name in plain:
                    raise ConfigError(f"{former} is the former name of {name}. Remove {former}.")
                plain[name] = plain.pop(former)
        return plain

    @field_validator("axes", mode="before")
    @classmethod
    def _labels(cls, axes: Any) -> Any:
        """Convert lists of values to labels, labels to text, and labels without settings to empty groups."""
        if not isinstance(axes, Mapping):
            return axes
        plain: dict[str, Any] = {}
        for name, axis in axes.items():
            if isinstance(axis, list):
                plain[str(name)] = {label_of(value): {str(name): value} for value in axis}
            elif isinstance(axis, Mapping):
                plain[str(name)] = {str(label): part if part is not None else {} for label, part in axis.items()}
            else:
                plain[str(name)] = axis
        return plain

    @field_validator("controls", mode="before")
    @classmethod
    def _name_controls(cls, value: Any) -> Any:
        return read_controls(value)

    @field_validator("scheduler", mode="before")
    @classmethod
    def _wrap_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _parts_fit(self) -> StudySettings:
        empty = not self.axes and not self.domains
        raise_first({"the study needs axes (a grid), domains (a search), or both. Add at least one of them.": empty})
        if self.repeat is not None:
            check_repeat(self.repeat, "repeat")
        for name, axis in self.axes.items():
            if not axis:
                raise ConfigError(f"axes.{name} has no labels. Add at least one label, or remove the axis.")
            if name in (*self.domains, "repeat", "trial"):
                raise ConfigError(
                    f"axes.{name}: the name is also a key of domains, or is reserved (repeat, trial). Rename the axis."
                )
            for label, part in axis.items():
                if "repeat" in part:
                    check_repeat(part["repeat"], f"axes.{name}.{label}.repeat")
        for name, label in self.control.items():
            check_known(name, self.axes, "control: there is no axis")
            check_known(label, self.axes[name], f"control.{name}: there is no label")
        self.paper_scores()
        self._check_search()
        self._check_protocol()
        for name in self.trained_controls:
            self._add_control(name)
        self._check_pairs()
        return self

    def _check_pairs(self) -> None:
        """Check that the pairs of ``compare`` name known labels of equal axes."""
        if self.compare and self.domains:
            raise ValueError("compare does not fit a study with domains, whose draws are ranked. Remove compare")
        for number, pair in enumerate(self.compare):
            if not pair[0].keys() == pair[1].keys() != set():
                raise ValueError(
                    f"compare: the pair {number} must name equal axes, such as [{{method: A}}, {{method: B}}]"
                )
            for name, label in (item for side in pair for item in side.items()):
                check_known(name, self.axes, "compare: there is no axis")
                check_known(label, self.axes[name], f"compare: axis {name!r} has no label")

    @property
    def confirmatory(self) -> bool:
        """True if the study follows the protocol and draws conclusions."""
        if self.exploratory is not None:
            return not self.exploratory
        plan = (self.difference, self.plateau, self.tuned)
        asks = self.question and not self.domains
        return bool(asks or self.controls) or any(value is not None for value in plan)

    @property
    def trained_controls(self) -> list[str]:
        """Names of the controls with runs."""
        return [name for name in self.controls if name not in MEASURED]

    def _check_protocol(self) -> None:
        """Check the fields of the protocol.

        Raises:
            ConfigError: A field is missing or does not fit.
        """
        advice = "Set it, or set exploratory: true."
        contestants = len(self.control) == 1
        faults: dict[str, object] = {
            "controls: each trained control is a label on the axis of control. Set control with a single axis: "
            "{method: FedAvg}.": self.trained_controls and not contestants,
            "tuned does not fit a study with domains. Remove tuned.": self.tuned and self.domains,
        }
        if self.confirmatory:
            fewest = min(len(repeat) for repeat in self._repeats())
            faults |= {
                "a study with domains selects settings, so it cannot be confirmatory. Remove difference, controls and plateau, and "
                "name this file as tuned in the study that compares the tuned contestants.": self.domains,
                f"question: a confirmatory study states its question before the first run. {advice}": not self.question,
                f"control: a confirmatory study needs a decisive control: {{method: FedAvg}}. {advice}": not self.control,
                f"difference: a confirmatory study states the smallest difference of interest. {advice}": self.difference is None,
                f"plateau: a confirmatory study needs a rule for the end of learning: {{evaluations: 5, rise: 1}}. {advice}": (
                    self.plateau is None
                ),
                f"repeat: the protocol requires at least {SEEDS} repeats, not {fewest}. Add seeds, or set exploratory: true.": (
                    fewest < SEEDS
                ),
                "summary: best selects evaluations on the test data. Set summary: tail, last or chosen.": self.summary == "best",
            }  # fmt: skip
        raise_first(faults)

    def _repeats(self) -> list[list[Any]]:
        """List the values of each repeated setting: of the study, and of its labels."""
        labels = [part["repeat"] for axis in self.axes.values() for part in axis.values() if "repeat" in part]
        return [list(next(iter(repeat.values()))) for repeat in (self.repeat or {"run.seed": [1]}, *labels)]

    def _add_control(self, name: str) -> None:
        """Add the label of a trained control to the axis of contestants.

        Raises:
            ConfigError: The axis has a different label of this name.
        """
        (axis, control), label = next(iter(self.control.items())), LABELS[name]
        settings = make_control_label(name, self.controls[name], self.axes[axis][control])
        if label == control or self.axes[axis].get(label) == settings:
            return
        if label in self.axes[axis]:
            raise ConfigError(f"axes.{axis}.{label}: controls.{name} has this label too. Rename or remove it.")
        self.axes[axis][label] = settings

    def get_domains(self, labels: Sequence[str]) -> dict[str, Domain]:
        """Return the domains of a cell: the study's, with the further and other domains of its labels.

        Args:
            labels: A label of each axis.

        Raises:
            ConfigError: A domain of a label is not valid.
        """
        domains = dict(self.domains)
        for (name, axis), label in zip(self.axes.items(), labels, strict=True):
            own = axis[label].get("domains", {})
            if not isinstance(own, Mapping):
                raise ConfigError(f"axes.{name}.{label}.domains is {own!r}, but must be a group of domains by setting.")
            for key, domain in own.items():
                domains[key] = check_settings(domain, Domain, f"axes.{name}.{label}.domains.{key}")
        return domains

    def _check_label_domains(self) -> None:
        """Check that the domains of labels belong to a grid, with equally many combinations in every cell."""
        own = [f"axes.{name}.{label}" for name, axis in self.axes.items() for label in axis if "domains" in axis[label]]
        if not own:
            return
        raise_first({
            f"{own[0]}.domains changes the domains of a search. Add domains to the study.": not self.domains,
            f"{own[0]}.domains needs searcher: grid.": self.searcher != "grid",
        })  # fmt: skip
        keys = {key for axis in self.axes.values() for part in axis.values() for key in part.get("domains", {})}
        both = ", ".join(keys.intersection(self.axes))
        raise_first({f"domains: {both} is the name of an axis, too. Rename the axis, or remove the domain.": both})
        counts = dict[int, str]()
        for labels in itertools.product(*self.axes.values()):
            domains = self.get_domains(labels)
            self._check_listed(domains, f"{', '.join(labels)}: domains")
            counts.setdefault(math.prod(len(domain.values) for domain in domains.values()), ", ".join(labels))
        if len(counts) > 1:
            listed = "; ".join(f"{name}: {count}" for count, name in counts.items())
            raise ConfigError(
                f"axes: contestants have unequal numbers of trials ({listed}). Give each as many combinations of its domains."
            )

    def _check_listed(self, domains: Mapping[str, Domain], where: str) -> None:
        """Check that the domains are of the searcher's kind."""
        grid, faults = self.searcher == "grid", dict[str, object]()
        for key, domain in domains.items():
            faults |= {
                f"{where}.{key}: searcher grid needs a list of values, not {domain.kind}. Write {{grid: [...]}}.":
                grid and not domain.listed,
                f"{where}.{key}: grid needs searcher: grid. For searcher {self.searcher} write {{choice: [...]}}.":
                not grid and domain.kind == "grid",
            }  # fmt: skip
        raise_first(faults)

    def _check_search(self) -> None:
        """Reject searchers and schedulers that do not fit the domains."""
        self._check_label_domains()
        if not self.domains:
            scheduled = self.scheduler.name != "none"
            keys = {"samples": self.samples, "scheduler": scheduled, "patience": self.patience}
            raise_first(
                {f"{key} needs a search. Add domains, or remove {key}.": is_set for key, is_set in keys.items()}
            )
            return
        pbt, grid, optuna = self.population is not None, self.searcher == "grid", self.searcher == "optuna"
        several = any(len(values) > 1 for values in (self.repeat or {}).values())
        self._check_listed(self.domains, "domains")
        raise_first({
            "samples: searcher grid trains all combinations. Remove samples.": grid and self.samples,
            f"searcher: {self.searcher} does not fit scheduler pbt. Set searcher: random.": pbt and (grid or optuna),
            "patience does not fit scheduler pbt, which trains all members equally. Remove patience.": pbt and self.patience,
            "axes do not fit searcher optuna or scheduler pbt. Search one cell at a time.": (pbt or optuna) and self.axes,
            "repeat: searcher optuna and scheduler pbt train each trial once. Set a single value.": (pbt or optuna) and several,
        })  # fmt: skip

    @property
    def population(self) -> PopulationScheduler | None:
        """The scheduler if it is population based training, otherwise ``None``."""
        return self.scheduler if isinstance(self.scheduler, PopulationScheduler) else None

    @property
    def sequential(self) -> bool:
        """True if a trial's settings depend on the results of earlier trials."""
        return self.searcher == "optuna" or self.population is not None

    @property
    def summarised(self) -> str:
        """The summary of a run's evaluations."""
        return self.summary or ("last" if self.domains else "tail")

    def paper_scores(self) -> dict[tuple[str, ...], tuple[float, float | None]]:
        """Parse the paper's means and optional spreads, by the labels of the cell."""
        return {} if self.paper is None else dict(_read_paper(self.paper.values, list(self.axes.items()), ()))


def _read_paper(
    node: Any, axes: Sequence[tuple[str, Mapping[str, Any]]], labels: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], tuple[float, float | None]]]:
    where = ".".join(("paper.values", *labels))
    if not axes:
        number = r"\d+\.?\d*|\.\d+"
        parts = re.fullmatch(rf"({number})(?: ?(?:±|\+-) ?({number}))?", str(node).strip())
        if parts is not None:
            yield labels, (float(parts[1]), None if parts[2] is None else float(parts[2]))
        elif node is not None:
            raise ConfigError(f"{where} is {node!r}, but must be a number, or mean and spread such as '80.19±0.53'.")
        return
    name, known = axes[0]
    if not isinstance(node, Mapping):
        raise ConfigError(f"{where} is {node!r}, but must be a group with labels of axis {name!r}: {', '.join(known)}.")
    for label, inner in node.items():
        check_known(str(label), known, f"{where}: axis {name!r} has no label")
        yield from _read_paper(inner, axes[1:], (*labels, str(label)))


def check_repeat(repeat: Any, where: str) -> None:
    """Check that ``repeat`` has a single setting with distinct values.

    Args:
        repeat: The value to check.
        where: Path of the setting for error messages.

    Raises:
        ConfigError: The check failed.
    """
    fits = isinstance(repeat, Mapping) and len(repeat) == 1 and all(isinstance(v, list) and v for v in repeat.values())
    if not fits:
        raise ConfigError(
            f"{where} must be one setting with a list of values, such as {{run.seed: [1, 2, 3]}}, not {repeat!r}."
        )
    values = [label_of(value) for value in next(iter(repeat.values()))]
    if len(set(values)) < len(values):
        raise ConfigError(f"{where}: a value is listed twice in {values}, so the spread would be too small. Remove it.")
