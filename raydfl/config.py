"""The configuration of a run: typed, validated, read from YAML with ``key=value`` overrides.

Options of methods, data sets and models are the fields of their classes; everything else is here. ``raydfl config FILE`` prints the
resolved configuration with the meaning, unit and range of each field.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from raydfl import registry
from raydfl.data.settings import DataSettings
from raydfl.errors import ConfigError, nearest
from raydfl.method import Method
from raydfl.models import architectures
from raydfl.settings import Settings
from raydfl.track import TrackSettings


class OptimiserSettings(Settings):
    """The clients' optimiser; it starts afresh at every participation."""

    name: Literal["sgd", "adam", "adamw"] = Field("sgd", description="which optimiser")
    lr: float = Field(0.1, gt=0, description="learning rate of all models")
    models: dict[str, float] = Field(
        default_factory=dict, description="learning rates of single models by name, instead of lr"
    )
    decay: float = Field(1.0, gt=0, le=1, description="factor on the learning rates for every completed round")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum (sgd only)")
    weight_decay: float = Field(0.0, ge=0, description="weight decay (added to the gradient; decoupled for adamw)")
    betas: tuple[float, float] = Field(
        (0.9, 0.999), description="decay rates of both moments (adam, adamw), each in [0, 1)"
    )
    eps: float = Field(1e-8, gt=0, description="denominator offset (adam, adamw)")
    clip_norm: float | None = Field(None, gt=0, description="largest gradient norm over all models; null: no clipping")

    @field_validator("betas")
    @classmethod
    def _betas_in_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("each beta must be at least 0 and less than 1")
        return value

    @field_validator("models")
    @classmethod
    def _rates_positive(cls, value: dict[str, float]) -> dict[str, float]:
        for name, rate in value.items():
            if rate <= 0:
                raise ValueError(f"the learning rate of {name!r} must be greater than 0")
        return value


class TrainSettings(Settings):
    """What every round does."""

    rounds: int = Field(20, ge=1, description="communication rounds")
    cohort: int | float = Field(
        0.2,
        gt=0,
        description="clients a round: an integer is their number, a number with a decimal point their share (0..1]",
    )
    local_epochs: int = Field(1, ge=1, description="passes over a client's training data in a round")
    batch_size: int = Field(16, ge=1, description="examples in a training batch")
    optimiser: OptimiserSettings = OptimiserSettings()

    @field_validator("cohort")
    @classmethod
    def _share_at_most_one(cls, value: int | float) -> int | float:
        if isinstance(value, float) and value > 1:
            raise ValueError("a share of the clients must be at most 1.0; for a number of clients write an integer")
        return value

    def cohort_size(self, population: int) -> int:
        """Clients a round, rounded half up, at least 1.

        Raises:
            ConfigError: more clients asked for than there are.
        """
        size = self.cohort if isinstance(self.cohort, int) else max(1, int(self.cohort * population + 0.5))
        if size > population:
            raise ConfigError(
                f"train.cohort: {size} clients a round, but the population has {population}; "
                f"lower train.cohort or give a share such as 0.2"
            )
        return size


class EvaluateSettings(Settings):
    """What is measured, when, and on which data."""

    every: int = Field(5, ge=1, description="rounds between evaluations; the last round is always evaluated")
    server: bool = Field(True, description="measure the shared models on the held-out test data")
    clients: Literal["none", "cohort", "all"] = Field(
        "cohort",
        description="whose own hold-out is measured: nobody's, that of the clients of the round, or everybody's",
    )
    client_test_clips: int = Field(
        200,
        ge=0,
        description="held-out test clips that each evaluated client's private models are measured on; 0: none",
    )
    batch_size: int = Field(64, ge=1, description="examples in an evaluation batch")


class RaySettings(Settings):
    """Where the clients run."""

    actors: int | Literal["per_client"] = Field(
        2,
        description="client actors; 0: no Ray, one client after another in this process; per_client: an actor for each client",
    )
    cpus: float = Field(1.0, ge=0, description="CPUs that Ray reserves for each client actor")
    gpus: float = Field(
        0.0, ge=0, description="share of a GPU for each client actor; also its share of the GPU's memory"
    )
    threads: int = Field(1, ge=1, description="PyTorch threads of each client actor, and of the server")
    address: str | None = Field(None, description="address of a running cluster; null: $RAY_ADDRESS, else a local one")
    ready_timeout: float = Field(120.0, gt=0, description="seconds to wait for the actors to start")
    retries: int = Field(
        3, ge=0, description="times a client's work is given to another actor after its actor was lost"
    )

    @field_validator("actors")
    @classmethod
    def _not_negative(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError("the number of actors must be at least 0")
        return value


class RunSettings(Settings):
    """Where the run lives and what decides its random numbers."""

    seed: int = Field(
        1, ge=0, description="the one seed: cohorts, batches, dropout, partition, corruption and initial weights"
    )
    dir: str = Field("runs", description="folder of all runs")
    name: str | None = Field(None, description="folder of this run; null: method, data set and time of day")
    commit_every: int = Field(
        1, ge=1, description="rounds between commits; after a crash a run goes on from the last one"
    )
    keep: int = Field(3, ge=1, description="commits that are kept, for replay and in case the newest is damaged")
    max_failed: float = Field(
        0.5, ge=0, le=1, description="largest share of a cohort whose updates may be rejected before the run stops"
    )


ModelChoice = str | dict[str, Any] | list[str | dict[str, Any]]


class Config(Settings):
    """Everything that decides a run."""

    method: dict[str, Any] = Field(description="name, and the method's own hyperparameters")
    models: dict[str, ModelChoice] = Field(
        default_factory=dict,
        description="architecture of each model of the method: a name, {name, options ...}, or a list that clients draw from",
    )
    data: DataSettings
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    ray: RaySettings = RaySettings()
    run: RunSettings = RunSettings()
    track: TrackSettings = TrackSettings()

    @field_validator("method", mode="before")
    @classmethod
    def _method_by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _parts_fit(self) -> Config:
        method = self.build_method()
        method.check(self.train)
        declared = type(method).models
        for name in self.models:
            if name not in declared:
                raise ConfigError(f"models: {self.method['name']} has no model {name!r}; {nearest(name, declared)}")
        for name, choices in self.model_choices().items():
            for architecture, _ in choices:
                if ":" not in architecture and architecture not in architectures():
                    raise ConfigError(
                        f"models.{name}: unknown architecture {architecture!r}; {nearest(architecture, architectures())}"
                    )
        for name in self.train.optimiser.models:
            if name not in declared:
                raise ConfigError(
                    f"train.optimiser.models: {self.method['name']} has no model {name!r}; {nearest(name, declared)}"
                )
        return self

    def build_method(self) -> Method:
        """The method with its hyperparameters.

        Raises:
            ConfigError: unknown method or hyperparameter, wrong type, value out of range.
        """
        options = dict(self.method)
        if not isinstance(options.get("name"), str):
            raise ConfigError(f"method: a name is missing; known: {', '.join(registry.names('raydfl.methods'))}")
        cls = registry.find("raydfl.methods", options.pop("name"), Method, "method")  # type: ignore[type-abstract]
        return registry.build(cls, options, "method")

    def model_choices(self) -> dict[str, list[tuple[str, dict[str, Any]]]]:
        """For every model of the method, in its order: the architectures that clients draw from, with their options."""
        declared = type(self.build_method()).models
        chosen: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        for name, default in declared.items():
            value = self.models.get(name, default)
            items = value if isinstance(value, list) else [value]
            if not items:
                raise ConfigError(f"models.{name}: the list of architectures is empty")
            chosen[name] = []
            for item in items:
                options = {"name": item} if isinstance(item, str) else dict(item)
                if not isinstance(options.get("name"), str):
                    raise ConfigError(f"models.{name}: an architecture's name is missing in {item!r}")
                chosen[name].append((options.pop("name"), options))
        return chosen

    def digest(self) -> str:
        """Identifies what decides the numbers of a run: two configurations with equal digests give the same bits.

        Left out: where and on what the run is computed, how far it goes, and what is tracked.
        """
        parts = self.model_dump(mode="json", exclude={"ray", "run", "track"})
        parts["train"].pop("rounds")
        parts["seed"] = self.run.seed
        parts["threads"] = self.ray.threads
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


class _Loader(yaml.SafeLoader):
    """YAML in which ``1e-3`` is a number and a key written twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if key in seen:
                raise ConfigError(
                    f"the key {key!r} stands twice, the second time in line {key_node.start_mark.line + 1}"
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def parse_yaml(text: str, where: str) -> Any:
    """YAML text to plain data.

    Raises:
        ConfigError: not YAML (the line is named), or a key stands twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def apply_overrides(values: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """``values`` with each ``a.b.c=value`` set; values are read as YAML.

    Raises:
        ConfigError: an override without ``=``, or one that goes through a value that is not a group.
    """
    result: dict[str, Any] = json.loads(json.dumps(values, default=str))
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ConfigError(f"override {override!r} is not of the form key=value (for instance train.rounds=50)")
        group = result
        keys = path.split(".")
        for depth, key in enumerate(keys[:-1]):
            if isinstance(group.get(key), str) and key == "method":
                group[key] = {"name": group[key]}
            inner = group.setdefault(key, {})
            if inner is None:
                inner = group[key] = {}
            if not isinstance(inner, dict):
                place = ".".join(keys[: depth + 1])
                raise ConfigError(f"override {override!r}: {place} is {inner!r}, not a group of settings")
            group = inner
        value = parse_yaml(text, f"override {override!r}")
        if path == "method" and isinstance(value, str):
            value = {"name": value}
        group[keys[-1]] = value
    return result


def _check_keys(values: Mapping[str, Any], model: type[BaseModel], where: str) -> None:
    """Unknown keys are named together with the nearest known one, which pydantic's own message does not do."""
    for key, value in values.items():
        if key not in model.model_fields:
            place = f"{where}: " if where else ""
            raise ConfigError(f"{place}unknown key {key!r}; {nearest(str(key), model.model_fields)}")
        inner = model.model_fields[key].annotation
        is_group = isinstance(inner, type) and issubclass(inner, Settings) and inner is not DataSettings
        if is_group and isinstance(value, Mapping):
            _check_keys(value, inner, f"{where}.{key}" if where else key)


def make_config(values: Any, where: str = "configuration") -> Config:
    """A checked configuration from plain data.

    Raises:
        ConfigError: anything that is not as it should be, with its place, the value and what to do.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a mapping of method, data, train ..., not {type(values).__name__}")
    _check_keys(values, Config, "")
    try:
        return Config.model_validate(_absolute(values))
    except ValidationError as error:
        raise ConfigError(registry.explain(error, "")) from error


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a YAML file, with overrides.

    Raises:
        ConfigError: the file is missing, unreadable or not a valid configuration.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from error
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of method, data, train ..., not {type(values).__name__}")
    return make_config(apply_overrides(values, overrides), str(path))


def _absolute(values: Mapping[str, Any]) -> dict[str, Any]:
    """Paths made absolute, so that a run can be resumed from any folder."""
    result: dict[str, Any] = json.loads(json.dumps(values, default=str))

    def resolve(text: str) -> str:
        return str(Path(os.path.expandvars(text)).expanduser().resolve())

    def resolve_reference(text: Any) -> Any:
        if isinstance(text, str) and ".py:" in text:
            place, _, name = text.rpartition(":")
            return f"{resolve(place)}:{name}"
        return text

    for group, key in (("data", "root"), ("data", "cache"), ("run", "dir")):
        part = result.get(group)
        if isinstance(part, dict) and isinstance(part.get(key), str) and "://" not in part[key]:
            part[key] = resolve(part[key])
    run = result.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("dir", resolve("runs"))
    for group in ("method", "data"):
        part = result.get(group)
        if isinstance(part, dict) and "name" in part:
            part["name"] = resolve_reference(part["name"])
        elif isinstance(part, str):
            result[group] = resolve_reference(part)
    models = result.get("models")
    if isinstance(models, dict):
        for name, choice in models.items():
            if isinstance(choice, dict) and "name" in choice:
                choice["name"] = resolve_reference(choice["name"])
            elif isinstance(choice, list):
                models[name] = [resolve_reference(item) for item in choice]
            else:
                models[name] = resolve_reference(choice)
    return result


def describe_options(cls: type) -> list[tuple[str, Any, str]]:
    """(name, default, meaning with unit and range) of each option of a method, rule or data set class."""
    from pydantic import TypeAdapter

    schema = TypeAdapter(cls).json_schema()
    properties = schema.get("properties", {})
    rows = []
    for item in dataclasses.fields(cls):
        if item.init:
            about = properties.get(item.name, {})
            rows.append((item.name, about.get("default", "required"), describe_field(about)))
    return rows


def describe_field(about: Mapping[str, Any]) -> str:
    """Meaning and range of a field, from its JSON schema."""
    limits = []
    for part in (about, *about.get("anyOf", ())):
        for key, sign in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<")):
            if key in part:
                limits.append(f"{sign} {part[key]:g}")
        if "enum" in part:
            limits.append("one of " + ", ".join(str(v) for v in part["enum"]))
    text = str(about.get("description", "")).replace("\n", " ")
    return f"{text} ({', '.join(limits)})" if limits else text
