"""Recordings in files and small finished runs, for tests of trained models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from raydfl.core.metrics import _mean_over_clips
from raydfl.core.seeds import generator
from raydfl.core.tensors import FlatTensors
from raydfl.core.types import Task
from raydfl.data.population import Population
from raydfl.engine.config import Config, make_config
from raydfl.engine.orders import SERVER, Measurement, Order
from raydfl.engine.storage.private import PrivateStore
from raydfl.engine.storage.store import RunStore
from raydfl.engine.worker import Worker
from raydfl.testing import train_federation
from raydfl.training._fit import predict
from raydfl.training.step import Step

RATE = 8000
SPEAKERS, TEST_SPEAKERS, LABELS, TAKES = 5, 2, ("high", "low", "middle"), 3
PITCH = {"low": 300.0, "middle": 700.0, "high": 1500.0}
TINY = {"name": "crnn_tiny", "hidden": 6, "filters": [4]}

FEATURES: dict[str, Any] = {"sample_rate": RATE, "bands": 16, "window_ms": 25, "hop_ms": 10}


def make_wave(speaker: int, label: str, take: int, seconds: float) -> np.ndarray:
    """Return a tone with the loudness of a speaker, float32 [samples]."""
    rng = generator(0, 0, f"{speaker} {label} {take}", "recording")
    time = np.arange(int(seconds * RATE)) / RATE
    loudness = 0.1 * (1 + speaker)
    tone = loudness * np.sin(2 * np.pi * PITCH[label] * (1 + 0.05 * rng.standard_normal()) * time)
    return (tone + 0.02 * rng.standard_normal(len(time))).astype(np.float32)


def write_recordings(root: Path, *, uneven: bool) -> Path:
    """Write ``{train,test}/{label}/speaker{n}_{take}.wav``. The last speakers are the test set. Uneven: 0.2 to 0.6 s."""
    for speaker in range(SPEAKERS):
        part = "test" if speaker >= SPEAKERS - TEST_SPEAKERS else "train"
        for number, label in enumerate(LABELS):
            for take in range(TAKES):
                seconds = 0.2 + 0.05 * ((3 * speaker + 2 * number + take) % 9) if uneven else 0.25
                file = root / part / label / f"speaker{speaker}_{take}.wav"
                file.parent.mkdir(parents=True, exist_ok=True)
                soundfile.write(file, make_wave(speaker, label, take, seconds), RATE, subtype="PCM_16")
    return root


def make_run_config(folder: Path, recordings: Path, **parts: Any) -> Config:
    """Make a configuration of a federation of three speakers on the recordings."""
    features = parts.pop("features", {"seconds": 0.25})
    values: dict[str, Any] = {
        "method": {"name": "fedmlac", "form": "supervised"},
        "models": {"plugin": TINY, "local": [TINY, {**TINY, "hidden": 5}]},
        "data": parts.pop("whole_data", None)
        or {
            "name": "folder",
            "root": str(recordings),
            "group_pattern": "(?P<group>speaker[0-9]+)_",
            "features": {**FEATURES, **features},
            "partition": {"by": "group"},
            "cache": str(folder / "cache"),
            **parts.pop("data", {}),
        },
        "train": {"rounds": 2, "cohort": 2, "batch_size": 4, "optimiser": {"lr": 0.3}},
        "evaluate": {"every": 1, "client_test_clips": 10},
        "ray": {"actors": 0},
        "track": {"mlflow": False},
        "run": {"seed": 1, "name": "run", "dir": str(folder / "runs")},
    }
    return make_config({**values, **parts})


@dataclass(frozen=True)
class Finished:
    """A finished run and the files of its test set, in the order of the examples' clips."""

    config: Config
    recordings: Path

    @property
    def folder(self) -> Path:
        return Path(self.config.run.dir) / "run"

    @property
    def test_files(self) -> list[Path]:
        return sorted((self.recordings / "test").rglob("*.wav"))

    @property
    def labels(self) -> list[str]:
        return [file.parent.name for file in self.test_files]

    @property
    def state(self) -> Any:
        store = RunStore(self.folder)
        return store.load(store.latest())

    def list_trained(self) -> list[str]:
        """Return the ids of participating clients."""
        ids = Population.load(self.folder / "population").ids
        return [ids[index] for index in self.state.private]

    def list_untrained(self) -> list[str]:
        return [name for name in Population.load(self.folder / "population").ids if name not in self.list_trained()]

    def make_step(self, client: str | None) -> Step:
        """Return the engine's step for an evaluation, of the server or a client."""
        commit = self.state
        private = PrivateStore(self.folder / "private")
        worker = Worker(self.folder, self.config, private)
        if client is None:
            specs = tuple(spec for spec in worker.clients[0].models if worker.method.shared(f"{spec.name}/x"))
            order = Order(0, Task(SERVER, phase="evaluate"), 2, 1.0, None, (Measurement("test", ()),), specs)
        else:
            record = commit.private[worker.clients.index_of(client)]
            order = Order(0, Task(client, phase="evaluate"), 2, 1.0, record, (Measurement("validation", ()),))
        return worker.prepare(order, {key: FlatTensors.from_tensors(t) for key, t in commit.state.tensors.items()})

    def evaluate_model(self, model: str, client: str | None = None) -> np.ndarray:
        """Return the probabilities [clips, classes] of the engine's evaluation on the test set."""
        examples = Population.load(self.folder / "population").test
        logits = predict(self.make_step(client), model, examples).double()
        average = self.config.objective.get("average", "probabilities")
        logs, _ = _mean_over_clips(torch.log_softmax(logits, 1).numpy(), examples.labels, examples.clips, average)
        return np.exp(logs)


def execute_run(folder: Path, *, uneven: bool = False, **parts: Any) -> Finished:
    """Execute a run in this process."""
    recordings = write_recordings(folder / "recordings", uneven=uneven)
    config = make_run_config(folder, recordings, **parts)
    train_federation(config)
    return Finished(config, recordings)
