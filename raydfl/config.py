"""The configuration of a run: typed, validated, read from YAML with ``key=value`` overrides.

Options of methods, data sets and models are the fields of their classes; everything else is here. ``raydfl config FILE`` prints the
resolved configuration with the meaning, unit and range of each field.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from raydfl import registry
from raydfl.aggregate import find_rule
from raydfl.attack import Attack
from raydfl.data.dataset import find_dataset
from raydfl.data.from_file import FileFeatures, needs_waves
from raydfl.data.kinds import kind_of
from raydfl.data.settings import DataSettings
from raydfl.errors import ConfigError, nearest
from raydfl.method import Method
from raydfl.models import check_model
from raydfl.options import explain, path_options, plain, unknown_key
from raydfl.precision import Precision, check_device
from raydfl.remote.place import check_path, check_uri, is_uri
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
    together: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="clients trained in one computation; auto: 1 on the CPU, on a GPU measured when the run begins and kept",
    )
    deadline: float | None = Field(
        None,
        gt=0,
        description="seconds that a client may train in a round, looked at before each batch; null: as long as it takes",
    )
    late: Literal["partial", "drop"] = Field(
        "partial",
        description="a client that is not done at the deadline returns what it has, if that is a step at least, or is left out",
    )
    precision: Precision = Field(
        "float32",
        description="what products, convolutions and recurrent layers compute in; parameters, optimiser and what is sent are "
        "float32. bfloat16 is for GPUs that have it, float16 (with scaled gradients) for any GPU; float16 is refused on the CPU",
    )
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
    gpus: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        0.0,
        description="share of a GPU for each client actor, of its memory too; auto: measured on one client's work before the first "
        "round, such that as many actors share a GPU as fit",
    )
    threads: int = Field(1, ge=1, description="PyTorch threads of each client actor, and of the server")
    address: str | None = Field(None, description="address of a running cluster; null: $RAY_ADDRESS, else a local one")
    ready_timeout: float = Field(
        120.0, gt=0, description="seconds to wait for the actors to start, and for nodes that are missing"
    )
    min_actors: int | None = Field(
        None,
        ge=1,
        description="client actors with which rounds begin, and without which they wait, at most ready_timeout; the others come "
        "and go with their nodes; null: rounds begin with all",
    )
    autoscale: bool = Field(
        False, description="the cluster grows when actors are asked for: nodes that are not there yet are waited for"
    )
    cpu_actors: int = Field(
        0, ge=0, description="further client actors without a share of a GPU, beside those with one"
    )
    retries: int = Field(
        3, ge=0, description="times a client's work is given to another actor after its actor was lost"
    )
    grace: float = Field(
        30.0,
        ge=0,
        description="seconds beyond train.deadline after which an actor that has not answered is ended and its client left out",
    )

    @property
    def gpu_share(self) -> float:
        """The share of a GPU; a whole one while it is not measured."""
        return 1.0 if self.gpus == "auto" else self.gpus

    @field_validator("actors")
    @classmethod
    def _not_negative(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError("the number of actors must be at least 0")
        return value

    @model_validator(mode="after")
    def _actors_fit(self) -> RaySettings:
        if isinstance(self.actors, str) and (self.min_actors is not None or self.cpu_actors):
            raise ValueError("ray.min_actors and ray.cpu_actors need a number of actors, not per_client")
        if self.actors == 0 and self.cpu_actors:
            raise ValueError(
                "ray.actors=0 trains in this process, without Ray; set ray.cpu_actors=0 too, or ray.actors to at least 1"
            )
        if self.actors == 0 and self.min_actors is not None:
            raise ValueError(
                "ray.actors=0 trains in this process, without Ray; leave ray.min_actors out, or set ray.actors"
            )
        if isinstance(self.actors, int) and self.min_actors is not None:
            there = self.actors + self.cpu_actors
            if self.min_actors > there:
                raise ValueError(
                    f"ray.min_actors={self.min_actors} is more than the {there} client actors there will be"
                )
        return self


class RunSettings(Settings):
    """Where the run lives and what decides its random numbers."""

    seed: int = Field(
        1, ge=0, description="the one seed: cohorts, batches, dropout, partition, corruption and initial weights"
    )
    dir: str = Field(
        "runs", description="folder of all runs; or a URI (s3://bucket/runs) that each commit is copied to"
    )
    name: str | None = Field(
        None, coerce_numbers_to_str=True, description="folder of this run; null: method, data set and time of day"
    )

    @field_validator("name")
    @classmethod
    def _one_folder(cls, value: str | None) -> str | None:
        if value is not None and (value in ("", ".", "..") or "/" in value):
            raise ValueError("a run's name is the name of one folder in run.dir: without / and not . or ..")
        return value

    commit_every: int = Field(
        1, ge=1, description="rounds between commits; after a crash a run goes on from the last one"
    )
    keep: int = Field(3, ge=1, description="commits that are kept, for replay and in case the newest is damaged")
    max_failed: float = Field(
        0.5, ge=0, le=1, description="largest share of a cohort that may be left out of a round before the run stops"
    )
    on_error: Literal["stop", "drop"] = Field(
        "stop",
        description="when a client's code raises or its actor is lost too often: the run stops, or the round goes on without it",
    )

    @field_validator("dir")
    @classmethod
    def _known_uri(cls, value: str) -> str:
        if is_uri(value):
            check_uri(value, "run.dir")
        return value


ModelChoice = str | dict[str, Any] | list[str | dict[str, Any]]


class Config(Settings):
    """Everything that decides a run."""

    method: dict[str, Any] = Field(description="name, and the method's own hyperparameters")
    models: dict[str, ModelChoice] = Field(
        default_factory=dict,
        description="architecture of each model of the method: a name, {name, options ...}, or a list that clients draw from",
    )
    data: DataSettings
    attack: dict[str, Any] | None = Field(
        None, description="simulated attackers: name, and the attack's own options; null: every client is honest"
    )
    train: TrainSettings = TrainSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    ray: RaySettings = RaySettings()
    run: RunSettings = RunSettings()
    track: TrackSettings = TrackSettings()

    @field_validator("method", "attack", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _parts_fit(self) -> Config:
        method = self.build_method()
        method.check(self.train)
        if self.ray.actors == 0 or self.ray.gpus == 0 or self.ray.cpu_actors:
            check_device(self.train.precision, torch.device("cpu"))
        rule = find_rule(method.rule, method.default_rule(), "method.rule")
        if rule.relative and method.changes:
            raise ConfigError(
                f"method.rule: {type(rule).__name__} measures how far clients are from the server's tensors, but the clients of "
                f"{self.method['name']!r} also send changes, which are not near them; take a rule that compares clients with each "
                f"other (geometric_median, multi_krum, dnc ...)"
            )
        attack = self.build_attack()
        if isinstance(self.data.features, FileFeatures) and attack is not None and attack.alters:
            raise needs_waves(f"attack {str((self.attack or {})['name'])!r}")
        declared = type(method).models
        for name in self.models:
            if name not in declared:
                raise ConfigError(f"models: {self.method['name']} has no model {name!r}; {nearest(name, declared)}")
        frames = None if self.data.segment is not None else self.data.features.frames
        for name, choices in self.model_choices().items():
            for architecture, options in choices:
                check_model(architecture, options, self.data.features.bands, frames, f"models.{name}")
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
        cls = registry.find("raydfl.methods", options.pop("name"), Method, "method")
        return registry.build(cls, options, "method")

    def build_attack(self) -> Attack | None:
        """The attack with its options; ``None`` when every client is honest.

        Raises:
            ConfigError: unknown attack or option, wrong type, value out of range.
        """
        if self.attack is None:
            return None
        options = dict(self.attack)
        if not isinstance(options.get("name"), str):
            raise ConfigError(f"attack: a name is missing; known: {', '.join(registry.names('raydfl.attacks'))}")
        return registry.build(registry.find("raydfl.attacks", options.pop("name"), Attack, "attack"), options, "attack")

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

        Left out: where and on what the run is computed, how far it goes, and what is measured and tracked.
        """
        parts = self.model_dump(mode="json", exclude={"evaluate", "ray", "run", "track"})
        # With the options that were not given, so that writing a default down changes nothing.
        parts["method"] = {"name": self.method["name"], **plain(self.build_method())}
        parts["models"] = self.model_choices()
        attack = self.build_attack()
        if self.attack is None or attack is None:
            del parts["attack"]  # as in configurations from before there were attacks
        else:
            parts["attack"] = {"name": self.attack["name"], **plain(attack)}
        # In the order given, in which clients are numbered.
        sites = [(name, plain(self.data.at(name).source.open())) for name in self.data.sites]
        if sites:
            parts["data"]["sites"] = sites  # a site's folder, like the cache, is only where things lie
        else:
            del parts["data"]["sites"]  # as in configurations from before there were sites
            parts["data"].update(plain(self.data.source.open()) | self.data.uris)
        parts["train"].pop("rounds")
        if self.train.precision == "float32":  # as in configurations from before there were others
            del parts["train"]["precision"]
        if self.train.deadline is None:  # as in configurations from before there were deadlines
            del parts["train"]["deadline"], parts["train"]["late"]
        parts["data"].pop("cache", None)  # where features lie; what they are decides the numbers
        parts["seed"] = self.run.seed
        parts["threads"] = self.ray.threads
        text = json.dumps(parts, sort_keys=True, default=str)
        text = re.sub(
            r'"[^"]*/([^"/]+\.py:\w+)"', r'"\1"', text
        )  # a job's copy of one's own file lies elsewhere each time
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Loader(yaml.SafeLoader):
    """YAML in which ``1e-3`` is a number, the words yes, no, on and off are words, and a key written twice is an error."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's own way)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(
                    f"the key {key!r} stands twice, the second time in line {key_node.start_mark.line + 1}"
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_EXPONENT = (
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver(*_EXPONENT)


class _Dumper(yaml.SafeDumper):
    """Puts quotes around text that :class:`_Loader` would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver(*_EXPONENT)


def to_yaml(value: Any, flow: bool = True) -> str:
    """A value as YAML that :func:`parse_yaml` reads as the same value; in one line, or in a line for each key."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=flow, sort_keys=False, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").rstrip("\n") if flow else text


def parse_yaml(text: str, where: str) -> Any:
    """YAML text to plain data.

    Raises:
        ConfigError: not YAML (the line is named), or a key stands twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{where} is not valid YAML{place}: {reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error
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
        if "" in keys:
            raise ConfigError(f"override {override!r}: a name is missing in {path!r}, which must be like train.rounds")
        for depth, key in enumerate(keys[:-1]):
            place = ".".join(keys[: depth + 1])
            if isinstance(group.get(key), str) and (place in _NAMED or keys[0] == "models"):
                group[key] = {"name": group[key]}
            inner = group.setdefault(key, {})
            if inner is None:
                inner = group[key] = {}
            if not isinstance(inner, dict):
                raise ConfigError(f"override {override!r}: {place} is {inner!r}, not a group of settings")
            group = inner
        group[keys[-1]] = parse_yaml(text, f"override {override!r}")
    return result


_NAMED = ("method", "method.rule", "data", "attack")
"""Groups that may be given by their name alone."""


def _check_keys(values: Mapping[str, Any], model: type[BaseModel], where: str) -> None:
    """Unknown keys are named together with the nearest known one, which pydantic's own message does not do."""
    for key, value in values.items():
        if key not in model.model_fields:
            raise unknown_key(str(key), model.model_fields, where, Config)
        inner = model.model_fields[key].annotation
        if inner is DataSettings:
            continue  # checks its own keys
        if isinstance(value, Mapping) and isinstance(inner, type) and issubclass(inner, Settings):
            _check_keys(value, inner, f"{where}.{key}" if where else key)


def make_config(values: Any, where: str = "configuration") -> Config:
    """A checked configuration from plain data.

    Raises:
        ConfigError: anything that is not as it should be, with its place, the value and what to do.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{where} is {'empty' if values is None else f'{str(values)[:60]!r}'}; it must hold the groups "
            f"{', '.join(Config.model_fields)}, of which method and data are needed"
        )
    _check_keys(values, Config, "")
    try:
        checked = _absolute(values)
        return Config.model_validate(checked)
    except ValidationError as error:
        raise ConfigError(explain(error, "", checked, Config)) from error


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a YAML file, with overrides.

    Raises:
        ConfigError: the file is missing, unreadable or not a valid configuration.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the configuration {path}: {reason}; {_instead_of(path)}") from error
    values = parse_yaml(text, str(path))
    return make_config(apply_overrides(values, overrides) if isinstance(values, dict) else values, str(path))


def _instead_of(path: Path) -> str:
    """What to do about a configuration that cannot be read."""
    if (path / "config.yaml").exists():
        return f"it is a run directory, to go on with it: raydfl resume {path}"
    if "=" in path.name:
        return "the first argument must be the file, settings come after it"
    there = [file.name for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    hint = nearest(path.name, there) if there else ""
    return hint if hint.startswith("did you mean") else "give a YAML file, such as jobs/quickstart.yaml"


def _absolute(values: Mapping[str, Any]) -> dict[str, Any]:
    """Paths made absolute, so that a run can be resumed from any folder."""
    result: dict[str, Any] = json.loads(json.dumps(values, default=str))
    run = result.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("dir", "runs")
        _resolve(run, ["dir"])
    for group in ("method", "models", "data", "attack"):
        if group in result:
            result[group] = _references_resolved(result[group])
    attack = result.get("attack")
    if isinstance(attack, dict) and isinstance(attack.get("name"), str):
        _resolve(attack, path_options(registry.find("raydfl.attacks", attack["name"], Attack, "attack")))
    data = result.get("data")
    if isinstance(data, dict) and isinstance(data.get("name"), str):
        _resolve(data, ["cache", *path_options(find_dataset(data["name"]))])
    if isinstance(data, dict) and isinstance(data.get("features"), dict):
        _resolve(data["features"], path_options(kind_of(data["features"])))
    return result


def _resolve(group: dict[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        if isinstance(group.get(key), str):
            group[key] = _resolved(group[key])


def _resolved(text: str) -> str:
    check_path(text)
    return text if is_uri(text) else str(Path(os.path.expandvars(text)).expanduser().resolve())


def _references_resolved(value: Any) -> Any:
    """``value`` with every ``my_file.py:Class`` in it made absolute."""
    if isinstance(value, dict):
        return {key: _references_resolved(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_references_resolved(inner) for inner in value]
    if isinstance(value, str) and re.fullmatch(r".+\.py:\w+", value):
        place, _, name = value.rpartition(":")
        return f"{_resolved(place)}:{name}"
    return value
