"""Settings groups of the engine: ``evaluate``, ``ray``, ``run`` and ``track``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from raydfl.core.remote import check_uri, is_uri
from raydfl.core.settings import Settings

_LONGEST_NAME = 240
"""Longest name of a run, in bytes. File systems allow 255, and a site's folder appends a suffix."""


_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def _parse_bytes(size: Any) -> int:
    """Parse a number of bytes, or a text with a unit.

    >>> _parse_bytes("1.5 GiB")
    1610612736
    """
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(MiB|GiB|TiB)", size)
    if match is None:
        raise ValueError(
            f"{size!r} is not an amount of memory. Write a number of bytes, a text such as 1.5 GiB, or auto"
        )
    return int(float(match[1]) * _UNITS[match[2]])


class FineTuneSettings(Settings):
    """Fine-tuning of a client's models before its evaluation. The fine-tuned models are discarded."""

    epochs: int = Field(ge=0, description="Passes over the client's training data. 0: no fine-tuning.")
    part: list[str] = Field(
        default_factory=list,
        description="Prefixes of the tensors to train, such as [model/output]. Empty: all trainable tensors.",
    )


class VirtualInterval(Settings):
    """Interval in virtual time (``train.fleet``)."""

    seconds: float = Field(
        gt=0,
        description="Virtual seconds between evaluations: the first round that reaches a multiple of this time is evaluated. Needs "
        "train.fleet.",
    )


class EvaluateSettings(Settings):
    """Settings of the evaluation: its models, its interval and its data."""

    every: Annotated[int, Field(ge=1)] | VirtualInterval = Field(
        5, description="Rounds between evaluations, or {seconds}. The last round is always evaluated."
    )
    server: bool = Field(True, description="Evaluate the shared models on the server's test data.")
    clients: Literal["none", "cohort", "all"] = Field(
        "cohort",
        description="Clients to evaluate on their own held-out clips: none, the cohort of the round, or all.",
    )
    client_test_clips: int = Field(
        200,
        ge=0,
        description="Test clips of the server on which each client's private models are evaluated. 0: none.",
    )
    batch_size: int = Field(64, ge=1, description="Examples in an evaluation batch.")
    fine_tune: FineTuneSettings | None = Field(
        None,
        description="Evaluate clients a second time after fine-tuning, as personal/...: {epochs, part}. null: the method's "
        "default (fedbabu: 5 epochs, others: none).",
    )

    @property
    def interval(self) -> int:
        """Smallest number of rounds between two evaluations."""
        return self.every if isinstance(self.every, int) else 1

    def is_due(self, round_index: int, before: float, now: float) -> bool:
        """Return whether a round is evaluated.

        Args:
            round_index: Number of completed rounds, including this one.
            before: Virtual time before the round in seconds.
            now: Virtual time after the round in seconds.
        """
        if isinstance(self.every, int):
            return round_index % self.every == 0
        return now // self.every.seconds > before // self.every.seconds


_REPLACED = {
    "num_cpus": "Set ray.cpus",
    "num_gpus": "Set ray.gpus",
    "memory": "Set ray.memory",
    "max_restarts": "Set ray.retries",
    "max_task_retries": "Set ray.retries",
    "runtime_env": "Install packages on all nodes, or in their image, because every actor must compute the same",
    **dict.fromkeys(
        (
            *("scheduling_strategy", "placement_group", "placement_group_bundle_index", "fallback_strategy"),
            *("placement_group_capture_child_tasks", "lifetime", "name", "namespace", "get_if_exists"),
            *("max_concurrency", "max_pending_calls", "allow_out_of_order_execution", "concurrency_groups"),
            *("object_store_memory", "enable_task_events", "enable_tensor_transport", "_labels"),
        ),
        "Remove it",
    ),
}
"""Remedy for each of Ray's options that raydfl sets itself."""
_OWN_RESOURCES = {"CPU": "ray.cpus", "GPU": "ray.gpus", "memory": "ray.memory"}
"""Setting of each resource that is not a custom resource."""


class ActorOptions(Settings):
    """Options of Ray for each client actor, which restrict its nodes."""

    label_selector: dict[str, str] = Field(
        default_factory=dict,
        description="Labels of the actors' nodes, such as {ray.io/market-type: on-demand}, with Ray's operators (!a, in(a, b)). "
        "Empty: any node.",
    )
    accelerator_type: str | None = Field(
        None, min_length=1, description="GPU model of actors with a GPU, such as A100. null: any model."
    )
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="Amounts of custom resources for each actor, such as {fast_disk: 1}."
    )

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, value: Any) -> Any:
        for key in value if isinstance(value, dict) else ():
            if key in _REPLACED:
                raise ValueError(f"raydfl sets Ray's option {key} itself. {_REPLACED[key]}")
        return value

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, value: dict[str, float]) -> dict[str, float]:
        for name in value:
            if name in _OWN_RESOURCES:
                raise ValueError(f"{name} is not a custom resource. Set {_OWN_RESOURCES[name]}")
        return value


class RaySettings(Settings):
    """Settings of the client actors and of the Ray cluster."""

    actors: int | Literal["per_client"] = Field(
        2,
        description="Number of client actors. 0: train clients sequentially in this process, without Ray. per_client: an actor "
        "for each client.",
    )
    cpus: float = Field(1.0, ge=0, description="CPUs that Ray reserves for each client actor.")
    gpus: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        0.0,
        description="Fraction of a GPU, and of its memory, for each client actor. auto: measure one client's memory before the "
        "first round, then place as many actors on a GPU as fit.",
    )
    memory: int | str | None = Field(
        None,
        description="Memory that Ray reserves for each client actor: bytes, a text such as 1.5 GiB, or auto. auto: measure the "
        "resident memory of a process that trains the largest client. null: reserve nothing.",
    )
    options: ActorOptions = Field(
        ActorOptions(), description="Ray's options for the client actors, which restrict their nodes."
    )
    cpu_fallback: bool = Field(
        False,
        description="Train on the CPU if gpus is above 0 and an actor's node has no GPU. false: stop with an error.",
    )
    threads: int = Field(
        1, ge=1, le=1024, description="Number of PyTorch threads in the server and in each client actor."
    )
    address: str | None = Field(
        None,
        description="Address of a running Ray cluster. null: $RAY_ADDRESS if it is set, otherwise a local cluster.",
    )
    ready_timeout: float = Field(
        120.0, gt=0, description="Time limit for actors to start and for missing nodes to return, in seconds."
    )
    min_actors: int | None = Field(
        None,
        ge=1,
        description="Minimum number of client actors for a round. With fewer, the run waits for at most ready_timeout seconds. "
        "Further actors may join and leave with their nodes. null: all actors.",
    )
    autoscale: bool = Field(
        False, description="Wait for nodes that the cluster's autoscaler adds for the requested actors."
    )
    queue: bool = Field(
        True,
        description="Wait without a limit while actors of other runs use the resources of the client actors. false: stop after "
        "ready_timeout.",
    )
    cpu_actors: int = Field(0, ge=0, description="Additional client actors without a GPU.")
    retries: int = Field(
        3, ge=0, description="Times that a client's work moves to another actor after the loss of its actor."
    )
    grace: float = Field(
        30.0,
        ge=0,
        description="Seconds after train.deadline until an unresponsive actor is killed and its client is dropped.",
    )

    @property
    def gpu_share(self) -> float:
        """The fraction of a GPU for each actor; 1 until ``auto`` is measured."""
        return 1.0 if self.gpus == "auto" else self.gpus

    @property
    def memory_bytes(self) -> int:
        """Reserved bytes of memory for each actor; 0 without a reservation, and until ``auto`` is measured."""
        return 0 if self.memory in (None, "auto") else _parse_bytes(self.memory)

    @property
    def needs_measurement(self) -> bool:
        """True if client actors exist and a measurement must replace ``auto``."""
        return self.actors != 0 and "auto" in (self.gpus, self.memory)

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, value: int | str | None) -> int | str | None:
        if value not in (None, "auto") and _parse_bytes(value) < _UNITS["MiB"]:
            raise ValueError(
                f"{value} is less than 1 MiB. Numbers are bytes. Write a text such as 2 GiB for larger units"
            )
        return value

    @field_validator("actors")
    @classmethod
    def _check_actors(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError("the number of actors must be at least 0")
        return value

    @model_validator(mode="after")
    def _check_accelerator(self) -> RaySettings:
        if self.options.accelerator_type is not None and self.gpus == 0:
            raise ValueError(
                "ray.options.accelerator_type chooses the model of GPUs, but ray.gpus=0. Set ray.gpus above 0, or "
                "ray.options.accelerator_type=null"
            )
        return self

    @model_validator(mode="after")
    def _check_actor_counts(self) -> RaySettings:
        if isinstance(self.actors, str) and (self.min_actors is not None or self.cpu_actors):
            raise ValueError(
                "ray.min_actors and ray.cpu_actors need a number of actors. Set ray.actors to a number instead of per_client"
            )
        if self.actors == 0 and self.cpu_actors:
            raise ValueError(
                "ray.actors=0 trains in this process, without Ray. Set ray.cpu_actors to 0 too, or ray.actors to at least 1"
            )
        if self.actors == 0 and self.min_actors is not None:
            raise ValueError(
                "ray.actors=0 trains in this process, without Ray. Remove ray.min_actors, or set ray.actors to at least 1"
            )
        if isinstance(self.actors, int) and self.min_actors is not None:
            actors = self.actors + self.cpu_actors
            if self.min_actors > actors:
                raise ValueError(
                    f"ray.min_actors={self.min_actors} exceeds the {actors} client actors of the run. Lower it, or raise ray.actors"
                )
        return self


class MetricChoice(Settings):
    """A metric and its direction (higher or lower is better)."""

    metric: str | dict[str, str] | None = Field(
        None,
        description="Metric with its split, such as 'validation model/accuracy'. Default split: server_validation if it exists, "
        "otherwise validation. With phases: a mapping from phase to metric. null: the objective's headline metric "
        "of the first model.",
    )
    mode: Literal["max", "min"] | None = Field(
        None,
        description="Direction of the metric: max (higher is better) or min. null: inferred from the metric's name.",
    )


class BestSettings(MetricChoice):
    """Criterion of the best round, whose models are kept in addition to the last round's."""


class StopSettings(MetricChoice):
    """Early stopping of the training, or of one of its phases, when a metric stops improving."""

    patience: int = Field(
        5, ge=1, description="Consecutive evaluations without improvement that end the training or its phase."
    )
    min_delta: float = Field(
        0.0, ge=0, description="Smallest change that counts as an improvement, in units of the metric. 0: any change."
    )
    goal: float | None = Field(
        None,
        allow_inf_nan=False,
        description="Value of the metric. The first evaluation that reaches it ends the training or its phase. null: no goal.",
    )

    epsilon: float | None = Field(
        None,
        gt=0,
        description="Largest epsilon of the rule gaussian, or of any client with train.optimiser.private. Training ends before "
        "the first round that would exceed it. Without metric, only epsilon ends the training. null: no limit.",
    )

    seconds: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Virtual time of train.fleet. Training ends with the first round that reaches it. Without metric, only this "
        "time ends it. null: no limit.",
    )

    @property
    def by_metric(self) -> bool:
        """True if a metric may end the training."""
        return self.epsilon is self.seconds is None or self.metric is not None or self.goal is not None


class ReferenceSettings(Settings):
    """Reference runs after the last round, with the budget of the run."""

    pooled: bool = Field(
        False,
        description="Train one model on the clips of all clients together, with equally many passes over the clips.",
    )
    local: bool = Field(False, description="Train a model for each client on its own clips, without averaging.")


class RunSettings(Settings):
    """Settings of the run: its folder, its seed, its commits and its early stopping."""

    seed: int = Field(
        1,
        ge=0,
        description="Seed of all randomness: cohorts, batches, dropout, partition, corruption, initial weights.",
    )
    dir: str = Field("runs", description="Folder of all runs, or a URI (s3://bucket/runs) that receives each commit.")
    name: str | None = Field(
        None, coerce_numbers_to_str=True, description="Folder name of this run. null: method, data set and time."
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str | None) -> str | None:
        if value is not None and (value in ("", ".", "..") or "/" in value):
            raise ValueError("a run's name must be a valid folder name, without / and neither . nor ..")
        if value is not None and (len(value.encode()) > _LONGEST_NAME or not value.isprintable()):
            raise ValueError(
                f"a run's name must have at most {_LONGEST_NAME} bytes (this has {len(value.encode())}) and no control characters, "
                "because it is the name of a folder"
            )
        return value

    commit_every: int = Field(
        1, ge=1, description="Rounds between commits. After a crash, the run resumes from the last commit."
    )
    keep: int = Field(
        3, ge=1, description="Number of commits to keep, for replay and as a fallback for a damaged commit."
    )
    max_failed: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Largest fraction of a cohort that may fail in a round. Above it, the run stops. 1: never stop.",
    )
    on_error: Literal["stop", "drop"] = Field(
        "stop",
        description="Response to a failing client (its code raises, or its actor is lost too often): stop the run, or drop the "
        "client from the round.",
    )

    best: BestSettings | None = Field(
        None,
        description="Save the models of the best round in model-best.safetensors. null: save only the last models.",
    )
    stop: StopSettings | None = Field(
        None, description="Stop early when a metric stops improving. null: train for train.rounds rounds."
    )
    reference: ReferenceSettings | None = Field(
        None, description="Runs without a federation for comparison in the verdict. null: none."
    )

    @field_validator("best", "stop", mode="before")
    @classmethod
    def _expand_metric(cls, value: Any) -> Any:
        return {"metric": value} if isinstance(value, str) else value

    @field_validator("dir")
    @classmethod
    def _check_dir(cls, value: str) -> str:
        if is_uri(value):
            check_uri(value, "run.dir")
        return value


class TrackSettings(Settings):
    """Settings of the experiment trackers."""

    mlflow: bool = Field(True, description="Log parameters, metrics and artifacts of the run to MLflow.")
    uri: str | None = Field(
        None,
        description="MLflow tracking server (http://host:5000) or database (sqlite:////absolute/path.db); "
        "null: the database mlflow.db in the folder of all runs.",
    )
    experiment: str = Field("raydfl", min_length=1, max_length=500, description="MLflow experiment of the run.")
    parent: str | None = Field(
        None, description="Id of the parent run in MLflow. A study sets it to its own id. null: no parent."
    )
    also: list[str] = Field(
        default_factory=list,
        description="Additional trackers with files in the run's folder: tensorboard, wandb (offline), or your own class as "
        "my_file.py:Class.",
    )

    @field_validator("uri")
    @classmethod
    def _check_tracking_uri(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if "://" not in value or value.startswith("file:"):
            raise ValueError(
                "MLflow no longer stores runs in plain folders. Set it to a server (http://host:5000), "
                "a database (sqlite:////absolute/path.db), or null"
            )
        if value.startswith("sqlite:") and not value.startswith("sqlite:////"):
            raise ValueError(
                "a relative database path is lost with the job's temporary folder. Write sqlite:////absolute/path.db (four slashes)"
            )
        return value


def hide_passwords(text: str) -> str:
    """Replace user names and passwords in the URLs of a text by ``***``.

    >>> hide_passwords("https://anna:secret@host/path")
    'https://***@host/path'
    """
    return re.sub(r"(?<=://)[^/@\s]+@", "***@", text)
