"""The groups of a configuration that are raydfl's own: training, evaluation, where clients run, and where the run lives."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from raydfl.core.errors import ConfigError
from raydfl.core.settings import Settings

Precision = Literal["float32", "bfloat16", "float16"]


class OptimiserSettings(Settings):
    """The clients' optimiser; it starts afresh at every participation, unless its moments are kept."""

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
    keep: bool = Field(
        False,
        description="keep each client's moments for its next participation, as private state (sgd without momentum has none)",
    )
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


class PhaseOptimiserSettings(Settings):
    """Learning rates of one phase; null: those of train.optimiser."""

    lr: float | None = Field(None, gt=0, description="learning rate of all models")
    models: dict[str, Annotated[float, Field(gt=0)]] | None = Field(
        None, description="learning rates of single models by name, instead of lr"
    )
    decay: float | None = Field(
        None, gt=0, le=1, description="factor on the learning rates for every completed round of the run"
    )


class ClientSettings(Settings):
    """Clients: which of them take part in training, and how a round's are drawn."""

    where: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="by column of the profile, the values that a client must have one of, such as {device: [phone, tablet]}",
    )
    ids: list[str] | None = Field(None, min_length=1, description="the only clients that take part; null: all")
    min_examples: int = Field(0, ge=0, description="training examples that a client must have at least")
    weight: str | None = Field(
        None,
        description="column of the profile with the weight that a client is drawn with, or examples: the number of its training "
        "examples; null: all clients alike",
    )
    strata: str | None = Field(
        None,
        description="column of the profile: each of its values has its share of every round's clients, as exactly as can be; null: "
        "as it comes",
    )

    @field_validator("where", mode="before")
    @classmethod
    def _values(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: each if isinstance(each, list | tuple) else [each] for name, each in value.items()}

    @property
    def columns(self) -> dict[str, str]:
        """The columns of the profile that are asked for, by the setting that asks."""
        found = {f"where.{name}": name for name in self.where}
        found |= {} if self.weight in (None, "examples") else {"weight": str(self.weight)}
        return found | ({} if self.strata is None else {"strata": self.strata})


class PhaseSettings(Settings):
    """One phase of a method that has several; null: as in train."""

    rounds: int | None = Field(
        None,
        ge=1,
        description="rounds of the phase; null: an equal share; the last phase has what is left of train.rounds",
    )
    begin: Literal["last", "best"] = Field(
        "last",
        description="round of the phase before with whose models and private state the phase begins: its last, or its best by "
        "run.best",
    )
    cohort: int | float | None = Field(None, gt=0, description="clients a round, as train.cohort")
    local_epochs: int | None = Field(None, ge=1, description="passes over a client's training data in a round")
    optimiser: PhaseOptimiserSettings = PhaseOptimiserSettings()

    def dump_deciding(self) -> dict[str, Any]:
        """Return what decides numbers, beside when the phase begins, as plain data: ``begin`` only where it is not the last."""
        return self.model_dump(mode="json", exclude={"rounds"} if self.begin == "best" else {"rounds", "begin"})

    @model_validator(mode="before")
    @classmethod
    def _drop_tape(cls, values: Any) -> Any:
        """Accept ``tape`` of earlier versions. It changed the time of a step, never its bits."""
        former = isinstance(values, dict) and isinstance(values.get("tape"), bool)
        return {name: value for name, value in values.items() if name != "tape"} if former else values

    @field_validator("cohort")
    @classmethod
    def _share_at_most_one(cls, value: int | float | None) -> int | float | None:
        return value if value is None else _checked_cohort(value)


def _checked_cohort(value: int | float) -> int | float:
    if isinstance(value, float) and value > 1:
        raise ValueError("a share of the clients must be at most 1.0; for a number of clients write an integer")
    return value


class TrainSettings(Settings):
    """Training: what every round does."""

    rounds: int = Field(20, ge=1, le=1_000_000, description="communication rounds")
    cohort: int | float = Field(
        0.2,
        gt=0,
        description="clients a round: an integer is their number, a number with a decimal point their share (0..1]",
    )
    clients: ClientSettings | None = Field(
        None, description="which clients take part, and how those of a round are drawn; null: all, uniformly"
    )
    local_epochs: int = Field(1, ge=1, description="passes over a client's training data in a round")
    batch_size: int = Field(16, ge=1, description="examples in a training batch")
    together: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="clients trained in one computation; auto: 1 on the CPU, on a GPU measured when the run begins and kept",
    )
    groups: str | dict[str, Any] | None = Field(
        None,
        description="groups of clients that have the method's state for themselves: hdbscan, known, ifca, cfl, none, or {name, "
        "options ...}; null: the method's own (fedapta: hdbscan, the others: none)",
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
    phases: dict[str, PhaseSettings] = Field(
        default_factory=dict, description="what differs in single phases of a method that has several, by their names"
    )

    @field_validator("cohort")
    @classmethod
    def _share_at_most_one(cls, value: int | float) -> int | float:
        return _checked_cohort(value)

    def resolve_phase(self, name: str) -> TrainSettings:
        """Return the settings of one phase; these themselves where it has none of its own."""
        own = self.phases.get(name)
        if own is None:
            return self
        rates = own.optimiser.model_dump(exclude_none=True)
        if own.optimiser.lr is not None and own.optimiser.models is None:
            rates["models"] = {}  # lr is the phase's rate of all models
        changed = own.model_dump(include={"cohort", "local_epochs"}, exclude_none=True)
        return self.model_copy(update={**changed, "optimiser": self.optimiser.model_copy(update=rates)})

    def cohort_size(self, population: int) -> int:
        """Return the number of clients a round, rounded half up, at least 1.

        Args:
            population: clients that may take part.

        Raises:
            ConfigError: more clients asked for than there are.
        """
        size = self.cohort if isinstance(self.cohort, int) else max(1, int(self.cohort * population + 0.5))
        if size > population:
            raise ConfigError(
                f"train.cohort: {size} clients a round, but "
                f"{'the population has' if self.clients is None else 'train.clients leaves'} {population}; "
                f"lower train.cohort or give a share such as 0.2"
            )
        return size
