"""The groups of a configuration that the engine reads: evaluate, ray, run and track."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from raydfl.core.remote import check_uri, is_uri
from raydfl.core.settings import Settings

_LONGEST_NAME = 240
"""Bytes of a run's name: file systems take 255, and a site's folder of the run has some more."""


class FineTuneSettings(Settings):
    """Fine-tuning of a client's models before its own held-out examples are measured. Nothing of it is kept."""

    epochs: int = Field(ge=0, description="passes over the client's training data; 0: no fine-tuning")
    part: list[str] = Field(
        default_factory=list,
        description="beginnings of the names of the tensors that train, such as [model/output]; empty: all that train as built",
    )


class EvaluateSettings(Settings):
    """Evaluation: what is measured, when, and on which data."""

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
    fine_tune: FineTuneSettings | None = Field(
        None,
        description="measure clients a second time after fine-tuning, as personal/...: {epochs, part}; null: the method's own "
        "(fedbabu: 5 epochs, the others: none)",
    )


class RaySettings(Settings):
    """The place where the clients run."""

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
    cpu_fallback: bool = Field(
        False,
        description="train on the CPU if gpus is above 0 and PyTorch finds no GPU on an actor's node; false: such a run is refused",
    )
    threads: int = Field(1, ge=1, le=1024, description="PyTorch threads of each client actor, and of the server")
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


class MetricChoice(Settings):
    """A metric of the record, and which of two values of it is the better one."""

    metric: str | dict[str, str] | None = Field(
        None,
        description="metric of the record with its split, such as 'validation model/accuracy'; without a split one of the "
        "validation (server_validation where there is one); of a method with phases one for each, by their names; null: the "
        "headline of the objective, of the first model",
    )
    mode: Literal["max", "min"] | None = Field(
        None, description="whether the larger or the smaller value is better; null: known from the metric's name"
    )


class BestSettings(MetricChoice):
    """The round whose models are kept beside the last one's: the best by a metric."""


class StopSettings(MetricChoice):
    """The end of training, or of one of its phases, before its last round: when a metric no longer gets better."""

    patience: int = Field(
        5, ge=1, description="evaluations in a row that do not get better, after which training or its phase ends"
    )
    min_delta: float = Field(
        0.0, ge=0, description="least difference to the best value so far that counts as better, in units of the metric"
    )


class RunSettings(Settings):
    """The run: its folder, and what decides its random numbers."""

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

    best: BestSettings | None = Field(
        None, description="keep the models of the best round in model-best.safetensors; null: only those of the last"
    )
    stop: StopSettings | None = Field(
        None, description="stop when a metric no longer gets better; null: after train.rounds"
    )

    @field_validator("best", "stop", mode="before")
    @classmethod
    def _metric_alone(cls, value: Any) -> Any:
        return {"metric": value} if isinstance(value, str) else value

    @field_validator("dir")
    @classmethod
    def _known_uri(cls, value: str) -> str:
        if is_uri(value):
            check_uri(value, "run.dir")
        return value


class TrackSettings(Settings):
    """Tracking: where runs are mirrored."""

    mlflow: bool = Field(True, description="mirror parameters, metrics and artifacts of the run in MLflow")
    uri: str | None = Field(
        None,
        description="MLflow tracking server (http://host:5000) or database (sqlite:////absolute/path.db); "
        "null: the database mlflow.db in the folder of all runs",
    )
    experiment: str = Field(
        "raydfl", min_length=1, max_length=500, description="MLflow experiment that the runs belong to"
    )
    parent: str | None = Field(
        None, description="MLflow run below which the run is shown, by its id; a study sets it to its own"
    )
    also: list[str] = Field(
        default_factory=list,
        description="further trackers, each of which writes files into the run's folder: tensorboard, wandb (offline), or your own "
        "as my_file.py:Class",
    )

    @field_validator("uri")
    @classmethod
    def _keeps_runs(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if "://" not in value or value.startswith("file:"):
            raise ValueError(
                "MLflow no longer keeps runs in plain folders; give a server (http://host:5000), "
                "a database (sqlite:////absolute/path.db), or null"
            )
        if value.startswith("sqlite:") and not value.startswith("sqlite:////"):
            raise ValueError(
                "a relative database path is lost with the job's temporary folder; write sqlite:////absolute/path.db (four slashes)"
            )
        return value


def without_password(text: str) -> str:
    """``text`` with user names and passwords in addresses replaced by ``***``.

    >>> without_password("https://anna:secret@host/path")
    'https://***@host/path'
    """
    return re.sub(r"(?<=://)[^/@\s]+@", "***@", text)
