"""The groups of a configuration that are raydfl's own: training, evaluation, where clients run, and where the run lives."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from raydfl.errors import ConfigError
from raydfl.precision import Precision
from raydfl.remote.place import check_uri, is_uri
from raydfl.settings import Settings


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
    tape: bool = Field(
        True,
        description="do a step's operations from a recording once they have shown to be the same each time (equal bits, less time)",
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


_LONGEST_NAME = 240
"""Bytes of a run's name: file systems take 255, and a site's folder of the run has some more."""


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
        if value is not None and (len(value.encode()) > _LONGEST_NAME or not value.isprintable()):
            raise ValueError(
                f"a run's name is the name of a folder: at most {_LONGEST_NAME} bytes, this has {len(value.encode())}, "
                "and no control characters"
            )
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
