"""Settings of training: the group ``train`` of a configuration."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from raydfl.core.errors import ConfigError
from raydfl.core.settings import Settings
from raydfl.training.fleet import FleetSettings

Precision = Literal["float32", "bfloat16", "float16", "tf32"]
_Beta = Annotated[float, Field(ge=0, lt=1)]


def _check_fraction(value: int | float) -> int | float:
    if isinstance(value, float) and value > 1:
        raise ValueError("a fraction of the clients must be at most 1.0; for a number of clients, write an integer")
    return value


_Cohort = Annotated[int | float, Field(gt=0), AfterValidator(_check_fraction)]


class PrivateSettings(Settings):
    """Differential privacy by example: clipped gradients of single clips, and noise."""

    clip: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=True,
        description="Maximum Euclidean norm of a clip's gradient over all trained models. .inf: no clipping, only without noise.",
    )
    noise: float = Field(
        ge=0,
        description="Noise multiplier: standard deviation of the noise in the sum of a step's gradients, divided by clip. 0: no "
        "noise and no guarantee.",
    )

    @model_validator(mode="after")
    def _check_clip(self) -> PrivateSettings:
        if self.clip == math.inf and self.noise:
            raise ValueError("clip is .inf, so no noise can hide a clip. Set clip to a number")
        return self


class OptimiserSettings(Settings):
    """The clients' optimiser. Each participation starts it from zero moments, unless ``keep`` is set."""

    name: Literal["sgd", "adam", "adamw"] = Field("sgd", description="Optimisation algorithm.")
    lr: float = Field(0.1, gt=0, description="Learning rate of all models.")
    models: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="Learning rates by model name. Models without an entry use lr."
    )
    decay: float = Field(
        1.0, gt=0, le=1, description="Factor on the learning rates for every completed round. 1: constant rates."
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum (sgd only). 0 disables it.")
    weight_decay: float = Field(
        0.0, ge=0, description="Weight decay, added to the gradient (adamw: decoupled). 0 disables it."
    )
    betas: tuple[_Beta, _Beta] = Field(
        (0.9, 0.999), description="Decay rates of the first and the second moment (adam, adamw), each in [0, 1)."
    )
    eps: float = Field(1e-8, gt=0, description="Denominator offset (adam, adamw).")
    keep: bool = Field(
        False,
        description="Keep each client's moments for its next participation, as private state. No effect for sgd without "
        "momentum.",
    )
    clip_norm: float | None = Field(
        None, gt=0, description="Largest norm of the gradient over all models. null: no clipping."
    )
    private: PrivateSettings | None = Field(
        None,
        description="Differential privacy of single clips: {clip: 1.0, noise: 1.1}. Each step draws every clip with probability "
        "batch_size / clips, clips the gradient of each, and adds noise to their sum. null: no noise.",
    )

    @model_validator(mode="after")
    def _check_private(self) -> OptimiserSettings:
        if self.private is not None and self.clip_norm is not None:
            raise ValueError("private clips the gradient of each example, so clip_norm has no use. Remove clip_norm")
        return self


class PhaseOptimiserSettings(Settings):
    """Learning rates of a phase. null: the value in ``train.optimiser``."""

    lr: float | None = Field(None, gt=0, description="Learning rate of all models. null: as in train.optimiser.")
    models: dict[str, Annotated[float, Field(gt=0)]] | None = Field(
        None, description="Learning rates by model name. Models without an entry use lr. null: as in train.optimiser."
    )
    decay: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Factor on the learning rates for every completed round of the run. null: as in train.optimiser.",
    )


class ClientSettings(Settings):
    """Eligibility and sampling of clients for training."""

    where: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="Accepted values by column of the profile: {device: [phone, tablet]}. An eligible client matches in every "
        "column.",
    )
    ids: list[str] | None = Field(None, min_length=1, description="Ids of the eligible clients. null: all clients.")
    min_examples: int = Field(0, ge=0, description="Least number of training examples of an eligible client.")
    weight: str | None = Field(
        None,
        description="Column of the profile with the sampling weights of clients, or examples: the number of training examples. "
        "A client of weight 0 does not take part. null: equal weights.",
    )
    strata: str | None = Field(
        None,
        description="Column of the profile for stratified sampling: every round's cohort has each value in proportion to its "
        "clients. null: no strata.",
    )

    draw: Literal["fixed", "poisson"] = Field(
        "fixed",
        description="fixed: train.cohort clients in each round. poisson: each eligible client takes part in a round with "
        "probability train.cohort / clients, independently. A round may have no client.",
    )
    rest: int = Field(
        1,
        ge=1,
        description="A client takes part at most once in this number of consecutive rounds. Above 1, the run seed deals the "
        "eligible clients into `rest` groups of equal size, and the groups take turns.",
    )

    @model_validator(mode="after")
    def _check_draw(self) -> ClientSettings:
        if self.draw == "poisson" and (self.weight is not None or self.strata is not None):
            name = "weight" if self.weight is not None else "strata"
            raise ValueError(f"draw: poisson gives all clients equal chances, so {name} has no effect. Remove {name}")
        return self

    @field_validator("where", mode="before")
    @classmethod
    def _values(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: values if isinstance(values, list | tuple) else [values] for name, values in value.items()}

    @property
    def columns(self) -> dict[str, str]:
        """Required columns of the profile by setting (``where.NAME``, ``weight``, ``strata``)."""
        columns = {f"where.{name}": name for name in self.where}
        columns |= {} if self.weight in (None, "examples") else {"weight": str(self.weight)}
        return columns | ({} if self.strata is None else {"strata": self.strata})


class PhaseSettings(Settings):
    """Overrides for a phase of the training. null: the value in ``train``."""

    rounds: int | None = Field(
        None,
        ge=1,
        description="Number of rounds of the phase. The last phase gets the rest of train.rounds. null: an equal share.",
    )
    begin: Literal["last", "best"] = Field(
        "last",
        description="Starting point of the phase: models and private state of the previous phase's last round, or of its best by "
        "run.best.",
    )
    cohort: _Cohort | None = Field(
        None, description="Clients in each round, in the form of train.cohort. null: as in train."
    )
    local_epochs: int | None = Field(
        None, ge=1, description="Passes over a client's training data in a round. null: as in train."
    )
    optimiser: PhaseOptimiserSettings = PhaseOptimiserSettings()

    def dump_deciding(self) -> dict[str, Any]:
        """Dump the settings with an effect on results, as plain data.

        ``rounds`` is missing, because the caller adds the first round of each phase. ``begin`` appears only if it is ``best``,
        so that the configurations of earlier versions keep their digests.
        """
        return self.model_dump(mode="json", exclude={"rounds"} if self.begin == "best" else {"rounds", "begin"})

    @model_validator(mode="before")
    @classmethod
    def _drop_tape(cls, values: Any) -> Any:
        """Accept ``tape`` of earlier versions. It changed the speed of a step, never its bits."""
        former = isinstance(values, dict) and isinstance(values.get("tape"), bool)
        return {name: value for name, value in values.items() if name != "tape"} if former else values


class TrainSettings(Settings):
    """Training: rounds, cohorts and local training."""

    rounds: int = Field(20, ge=1, le=1_000_000, description="Number of communication rounds.")
    cohort: _Cohort = Field(
        0.2,
        description="Clients in each round: an integer is a count, a number with a decimal point a fraction of the eligible "
        "clients. 1: one client. 1.0: all clients.",
    )
    clients: ClientSettings | None = Field(
        None, description="Eligibility and sampling of clients. null: all clients, drawn uniformly."
    )
    local_epochs: int = Field(1, ge=1, description="Passes over a client's training data in a round.")
    batch_size: int = Field(
        16, ge=1, description="Examples in a training batch. The last batch of an epoch may be smaller."
    )
    class_weights: Literal["none", "balanced"] = Field(
        "none",
        description="Weights of training examples in the loss. balanced: each class of a client's clips counts equally, for labels "
        "of one class. none: each example counts equally.",
    )
    together: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="Clients trained in one batched computation. 1: unbatched. auto: 1 on the CPU; on a GPU the fastest "
        "number, measured at the start of the run and kept.",
    )
    block: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="Clients in a block, whose updates are added before they reach the server. 1: single updates. auto: cohort / "
        "256, at least 1 and at most 16, and 1 if the server needs single updates. Chosen at the start of the run and kept.",
    )
    groups: str | dict[str, Any] | None = Field(
        None,
        description="Rule that groups clients, each group with its own state of the method: hdbscan, known, ifca, cfl, none, or "
        "{name, options ...}. null: the method's default (fedapta: hdbscan, all else: none).",
    )
    fleet: FleetSettings | None = Field(
        None, description="Asynchronous training in virtual time. null: rounds without virtual time."
    )
    deadline: float | None = Field(
        None,
        gt=0,
        description="Time limit for a client's training in a round in seconds, checked before each batch. With train.fleet: in "
        "virtual seconds. null: no limit.",
    )
    late: Literal["partial", "drop"] = Field(
        "partial",
        description="Treatment of a client at the deadline. partial: its update counts after at least one step. drop: the "
        "client is left out of the round.",
    )
    precision: Precision = Field(
        "float32",
        description="Number format of matrix products, convolutions and recurrent layers. Parameters, optimiser and messages are "
        "float32. bfloat16 needs hardware support. float16 scales the gradients and needs a GPU. tf32 rounds the factors of "
        "float32 products to 10 bits and needs a GPU.",
    )
    optimiser: OptimiserSettings = OptimiserSettings()
    phases: dict[str, PhaseSettings] = Field(
        default_factory=dict,
        description="Overrides for phases of the training, by the phase's name: phases of the method, or your own.",
    )

    def resolve_phase(self, name: str) -> TrainSettings:
        """Return the settings with the overrides of a phase."""
        phase = self.phases.get(name)
        if phase is None:
            return self
        rates = phase.optimiser.model_dump(exclude_none=True)
        if phase.optimiser.lr is not None and phase.optimiser.models is None:
            rates["models"] = {}  # the phase's lr applies to all models
        changed = phase.model_dump(include={"cohort", "local_epochs"}, exclude_none=True)
        return self.model_copy(update={**changed, "optimiser": self.optimiser.model_copy(update=rates)})

    @property
    def real_deadline(self) -> float | None:
        """The deadline on the clock of the machine in seconds. ``None``: no deadline, or one in virtual time."""
        return None if self.fleet is not None else self.deadline

    @property
    def draw(self) -> str:
        """Sampling of cohorts: ``"fixed"`` or ``"poisson"``."""
        return "fixed" if self.clients is None else self.clients.draw

    def cohort_size(self, population: int) -> int:
        """Return the number of clients in each round: at least 1, fractions rounded half up.

        Args:
            population: number of eligible clients.

        Raises:
            ConfigError: the cohort exceeds the population.
        """
        size = self.cohort if isinstance(self.cohort, int) else max(1, int(self.cohort * population + 0.5))
        rest = 1 if self.clients is None else self.clients.rest
        if size <= population < size * rest:
            raise ConfigError(
                f"train.cohort: {size} clients a round, but train.clients.rest={rest} divides the {population} clients into groups "
                f"of {population // rest}. Lower train.cohort, or train.clients.rest."
            )
        if size > population:
            raise ConfigError(
                f"train.cohort: {size} clients a round, but "
                f"{'the population has' if self.clients is None else 'train.clients leaves'} {population}. "
                f"Lower train.cohort, or give a fraction such as 0.2."
            )
        return size
