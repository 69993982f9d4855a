"""Tiny federations for everything that computes on a device, to compare CPU and GPU.

The names come from raydfl's registries, so that no built-in component is forgotten; this module adds the options that a
component requires. All random values are drawn on the CPU, or from the step's seed by integer arithmetic with the same
result on every device (including dropout and augmentation), so no randomness had to be switched off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.clips import CLASSES, FEATURES
from raydfl import make_config
from raydfl.core import registry
from raydfl.data.population import Population
from raydfl.engine.config import Config
from raydfl.engine.federation import Federation
from raydfl.engine.pool import SerialPool
from raydfl.engine.storage.private import PrivateStore
from raydfl.engine.storage.store import RunStore
from raydfl.engine.worker import Worker
from raydfl.models import architectures
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress

CRNN: Mapping[str, Any] = {"name": "crnn", "hidden": 6, "filters": [4], "bidirectional": True, "dropout": 0.3}
SMALLER: Mapping[str, Any] = {"name": "crnn_tiny", "hidden": 4, "filters": [4]}
OF_VIEWS = {"audio": SMALLER, "video": {**SMALLER, "view": "video"}, "fusion": {"name": "fusion", "hidden": 4}}
TWO_VIEWS = {"views": {"video": {"column": "far", "features": {**FEATURES, "seconds": 0.2}}}}
COMPACT = {"name": "compact", "size": 4, "normal": [*CLASSES[:2]]}

Values = Mapping[str, Any]
"""Groups that replace the common ones in a configuration; ``data`` and ``train`` are merged by key."""

METHODS: Mapping[str, Values] = {
    "fedbn": {"models": {"model": {"name": "split_cnn", "filters": [4], "groups": 2}}},
    "fedgen": {"method": {"noise": 4, "hidden": 8, "server_steps": 5, "server_batch": 8}},
    "fedkad": {"method": {"size": 8}},
    "fedmlac": {"models": {"plugin": CRNN, "local": [CRNN, SMALLER]}},
    "fedstar": {"data": {"unlabelled": {"keep": 0.4}}, "method": {"threshold": [0.0, 0.0]}},
    "hermes": {"method": {"threshold": 0.0}},
    "profila": {"objective": COMPACT},
    "profila_as_run": {"objective": COMPACT, "method": {"anomalous_share": 0.0}},
    **{name: {"models": OF_VIEWS, "data": TWO_VIEWS} for name in ("multifl", "unifl", "harmony", "modality_mirror")},
}
OBJECTIVES: Mapping[str, Values] = {
    "compact": {"objective": COMPACT},
    "contrast": {"objective": {"name": "contrast", "size": 4, "frames": 8}},
    "identify": {
        "objective": {"name": "identify", "size": 4, "column": "labels", "machines": 8},
        "data": {"columns": ["labels"]},
    },
    "multi_label": {"data": {"label_column": "labels", "label_sets": {"separator": "|"}}},
    "events": {"data": {"events": {}}},
    "transcribe": {"data": {"label_sequences": {"units": "characters"}}},
    "reconstruct": {"objective": {"name": "reconstruct", "size": 4, "bins": 3, "hidden": 8}},
}
PICTURES = {"path_column": "picture", "features": {"kind": "image", "size": [16, 16]}}
CALM = {"optimiser": {"lr": 0.0003}}
"""For batch norm over few clips: at the common rate, differences of 1e-6 grow to 1e-2 in two rounds, on a CPU too."""
NETWORKS: Mapping[str, Values] = {
    "cnn": {"models": {"model": {"name": "cnn", "filters": [4, 8], "hidden": 8}}, "data": PICTURES},
    "cnn_small": {"data": PICTURES},
    "crnn": {
        "models": {"model": {"name": "crnn", "dropout": 0.0}},
        "data": {"features": {**FEATURES, "seconds": None}},
    },
    "film_cnn_tiny": {"train": CALM},
}
TRANSFORMS: Mapping[str, Values] = {
    "flip": {"data": {**PICTURES, "transforms": [{"name": "flip"}]}, "models": {"model": {"name": "cnn_small"}}},
    "gain": {"data": {"transforms": [{"name": "gain"}], "features": {**FEATURES, "seconds": 0.2, "normalise": "none"}}},
    "noise": {"data": {"transforms": [{"name": "noise", "snr_db": [0, 20]}]}},
    "random_crop": {"data": {"transforms": [{"name": "random_crop", "size": 12}]}},
    "reverberation": {"data": {"transforms": [{"name": "reverberation", "seconds": [0.05, 0.2]}]}},
    "shift": {"data": {"transforms": [{"name": "shift", "frames": 2}]}},
    "cutout": {"data": {"transforms": [{"name": "cutout", "size": 2}]}},
    "spec_augment": {"data": {"transforms": [{"name": "spec_augment", "frames": 4, "bands": 3}]}},
}
ATTACKS: Mapping[str, Values] = {"backdoor": {"attack": {"target": CLASSES[0], "hz": 900}}}
SETTINGS: Mapping[str, Values] = {
    "adam": {"train": {"optimiser": {"name": "adam", "lr": 0.01, "eps": 1e-3}}},
    "adamw, kept": {"train": {"optimiser": {"name": "adamw", "lr": 0.01, "eps": 1e-3, "keep": True}}},
    "momentum, clipped": {"train": {"optimiser": {"lr": 0.05, "momentum": 0.9, "clip_norm": 0.5}}},
    "recorded steps": {"train": {"local_epochs": 24}, "models": {"model": {"name": "mlp", "hidden": 4}}},
    "batch norm of a teacher": {
        "method": {"name": "fedntd"},
        "models": {"model": {"name": "film_cnn_tiny"}},
        "train": CALM,
    },
    "bfloat16": {"train": {"precision": "bfloat16"}},
    "float16": {"train": {"precision": "float16"}, "ray": {"actors": 1, "gpus": 1}},  # else it is rejected
    "tf32": {"train": {"precision": "tf32"}, "ray": {"actors": 1, "gpus": 1}},
}
SHORT = ("bfloat16", "float16", "tf32")
"""Settings compared with float32."""
LARGE = ("ssast_small", "ssast_base", "film_cnn", "film_cnn_small")
"""Networks with a smaller one of the same code beside them."""

SLOW = ("crnn_base", "crnn_deep", "resnet18", "ssast_tiny")


@dataclass(frozen=True)
class Case:
    """A federation to be trained on two devices."""

    kind: str
    name: str
    values: Values

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def cases(dry: bool = False) -> list[Case]:
    """Return all cases: every method and objective, family of networks, transform and attack, and training settings.

    Args:
        dry: without the networks that take seconds on a CPU.
    """
    found = [Case("method", name, METHODS.get(name, {})) for name in registry.names("raydfl.methods")]
    found += [
        Case("objective", name, {"objective": {"name": name}, **OBJECTIVES.get(name, {})})
        for name in registry.names("raydfl.objectives")
    ]
    found += [
        Case("network", name, {"models": {"model": {"name": name}}, **NETWORKS.get(name, {})})
        for name in architectures()
        if name not in ("fusion", "pretrained")  # several views' methods cover fusion; the other needs a folder
        and name not in (*LARGE, *(SLOW if dry else ()))
    ]
    found += [
        Case("transform", name, {"data": {"transforms": [{"name": name}]}, **TRANSFORMS.get(name, {})})
        for name in registry.names("raydfl.data.transforms")
    ]
    found += [Case("attack", name, ATTACKS.get(name, {})) for name in registry.names("raydfl.attacks")]
    without = ("float16", "tf32") if dry else ()  # a CPU rejects them
    return [*found, *(Case("setting", name, values) for name, values in SETTINGS.items() if name not in without)]


def configuration(case: Case, clips: Path, folder: Path, name: str, together: int = 1) -> Config:
    """Return a case as a configuration.

    Args:
        case: the federation.
        clips: the list of clips.
        folder: for runs and the cache.
        name: of the run.
        together: clients in one computation.
    """
    own = {group: dict(values) for group, values in case.values.items()}
    method = case.name if case.kind == "method" else "fedavg"
    attack = {"attack": {"name": case.name, "clients": 0.5, **own.pop("attack", {})}} if case.kind == "attack" else {}
    objective = {"objective": {"name": case.name, **own.pop("objective", {})}} if case.kind == "objective" else {}
    data = {
        "name": "manifest",
        "file": str(clips),
        "features": {**FEATURES, "seconds": 0.2},
        "partition": {"by": "group"},
        "split": {"validation": 0.2},
        "cache": str(folder / "cache"),
        **own.pop("data", {}),
    }
    train = {
        "rounds": 2,
        "cohort": 1.0,
        "batch_size": 4,
        "together": together,
        "optimiser": {"lr": 0.05},
        **own.pop("train", {}),
    }
    return make_config(
        {
            "method": {"name": method, **own.pop("method", {})},
            "models": own.pop("models", {"model": dict(CRNN)}),
            "data": data,
            "train": train,
            "evaluate": {"every": 2, "clients": "cohort"},
            "ray": own.pop("ray", {"actors": 0}),
            "track": {"mlflow": False},
            "run": {"seed": 1, "dir": str(folder / "runs"), "name": name},
            **attack,
            **objective,
            **own,
        }
    )


@contextlib.contextmanager
def open_federation(config: Config, device: str) -> Iterator[tuple[Federation, Worker]]:
    """Open a run in this process, with its clients on a device.

    Args:
        config: of the run.
        device: ``"cpu"`` or ``"cuda"``.
    """
    run_dir = create(config, Progress("quiet"))
    population = Population.load(run_dir / "population")
    worker = Worker(run_dir, config, PrivateStore(run_dir / "private"), device, population=population)
    with (
        contextlib.closing(SerialPool(worker)) as pool,
        contextlib.closing(Federation(config, population, RunStore(run_dir), pool)) as federation,
    ):
        yield federation, worker


def train(config: Config, device: str) -> tuple[dict[str, Any], int]:
    """Train a run to its end.

    Args:
        config: of the run.
        device: ``"cpu"`` or ``"cuda"``.

    Returns:
        All tensors of the server and the clients, by ``"server KEY NAME"`` and ``"client NUMBER NAME"``, and the
        largest number of clients trained in one computation.
    """
    together = 1
    with open_federation(config, device) as (federation, worker):
        carry_out = worker.carry_out

        def watch(*arguments: Any) -> Any:
            nonlocal together
            results = carry_out(*arguments)
            together = max([together, *(result.together for result in results)])
            return results

        worker.carry_out = watch  # type: ignore[method-assign]
        for _ in range(config.train.rounds):
            report = federation.round()
        federation.finish(report)
    return tensors_of(federation.store), together


def tensors_of(store: RunStore) -> dict[str, Any]:
    """Return the tensors of :func:`train` from a run's last commit."""
    latest = store.latest()
    if latest is None:
        raise RuntimeError(f"{store.folder} has no commit")
    commit = store.load(latest)
    private = PrivateStore(store.folder / "private")
    found = {f"server {key} {n}": t for key, tensors in commit.state.tensors.items() for n, t in tensors.items()}
    for index, place in commit.private.items():
        found.update((f"client {index} {name}", tensor.clone()) for name, tensor in private.read(place).items())
    private.close()
    return found


def names(kind: str, of: Sequence[Case]) -> list[str]:
    """Return the names of one kind's cases, sorted."""
    return sorted(case.name for case in of if case.kind == kind)
