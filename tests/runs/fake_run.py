"""Run directories with known metrics, in the format of a real run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from raydfl.core.metrics import classification_metrics, summarise
from raydfl.core.types import Metrics, Ratio
from raydfl.engine.storage.record import MetricRow, rows_from_clients, rows_from_metrics, rows_path, write_rows

CLASSES = ["zero", "one", "two", "three"]
LAYERS = ["conv.0", "conv.1", "gru", "output"]


def config(method: str = "fedmlac", seed: int = 1, rounds: int = 20, **method_options: Any) -> dict[str, Any]:
    """A resolved configuration."""
    return {
        "method": {"name": method, **method_options},
        "models": {"plugin": "crnn_lite"} if method == "fedmlac" else {},
        "data": {"name": "fsdd", "features": {"kind": "logmel", "bands": 64}},
        "train": {"rounds": rounds, "cohort": 0.2, "optimiser": {"name": "sgd", "lr": 0.2}},
        "ray": {"actors": 2},
        "run": {"seed": seed, "dir": "runs"},
        "track": {"mlflow": True, "uri": "https://anna:secret@tracking.example"},
    }


def draw_predictions(
    rng: np.random.Generator, skill: float, examples: int, classes: int
) -> dict[str, Ratio | np.ndarray]:
    """Metrics of a model that is right with probability ``skill``."""
    labels = rng.integers(classes, size=examples)
    predicted = np.where(rng.random(examples) < skill, labels, rng.integers(classes, size=examples))
    logits = rng.normal(size=(examples, classes)) + 4.0 * np.eye(classes)[predicted]
    return classification_metrics(logits.astype(np.float32), labels, None, classes)


def name_metrics(model: str, metrics: Metrics) -> dict[str, Ratio | np.ndarray]:
    """Metrics as the metrics of a model."""
    return {f"{model}/{name}": value for name, value in metrics.items()}


def make_round_rows(
    round_index: int,
    rng: np.random.Generator,
    *,
    clients: Sequence[str],
    evaluate: bool,
    skill: float,
    heterogeneous: bool,
    classes: int,
    lpa: bool,
) -> list[MetricRow]:
    """Rows of the metrics table for one round."""
    rows = rows_from_clients(
        round_index, "train", "train", {c: {"loss": Ratio(float(40 * (1.6 - skill)), 40)} for c in clients}
    )
    server: dict[str, Ratio | np.ndarray] = {
        "bytes_down": Ratio(1000.0 * len(clients), 1),
        "bytes_up": Ratio(500.0 * len(clients), 1),
        "failed": Ratio(float(round_index % 7 == 3), 1),
        "seconds/fit": Ratio(0.5 * len(clients), len(clients)),
        "seconds/evaluate": Ratio(1.5 if evaluate else 0.0, 1),
        "seconds/round": Ratio(4.0, 1),
    }
    if lpa:
        server |= {
            f"lpa/pruned/plugin/{layer}": Ratio(float(2 + (round_index + i) % 2), 1) for i, layer in enumerate(LAYERS)
        }
    rows += rows_from_metrics(round_index, "train", "", "server", server)
    if evaluate:
        model = "plugin" if heterogeneous else "model"
        measured = name_metrics(model, draw_predictions(rng, skill, 400, classes))
        rows += rows_from_metrics(round_index, "evaluate", "", "test", {**measured, **summarise(measured)})
        own: dict[str, Metrics] = {}
        for index, client in enumerate(clients):
            better = min(1.0, skill * (0.3 + 0.8 * index / len(clients)))
            own[client] = name_metrics(
                "local" if heterogeneous else "model", draw_predictions(rng, better, 30, classes)
            )
        rows += rows_from_clients(round_index, "evaluate", "validation", own)
    return rows


def make_run(
    folder: Path,
    settings: Mapping[str, Any] | None = None,
    *,
    done: int | None = None,
    clients: int = 12,
    classes: Sequence[str] = tuple(CLASSES),
    about: Mapping[str, Any] | None = None,
) -> list[MetricRow]:
    """Write a run directory with ``done`` completed rounds (default: all), and return its rows."""
    settings = settings or config()
    total = settings["train"]["rounds"]
    done = total if done is None else done
    heterogeneous = settings["method"]["name"] == "fedmlac"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    (folder / "run.json").write_text(
        json.dumps(
            {
                "id": folder.name,
                "created": "2026-01-02 03:04:05",
                "raydfl": "0.1.0",
                "method": settings["method"]["name"],
                "data": settings["data"]["name"],
                "classes": list(classes),
                "clients": clients,
                "models": {
                    "plugin": {"architecture": "crnn_lite", "parameters": 36515, "shared": True},
                    "local": [
                        {"architecture": "crnn_tiny", "parameters": 12115, "shared": False, "clients": 7},
                        {"architecture": "crnn_base", "parameters": 194979, "shared": False, "clients": 5},
                    ],
                }
                if heterogeneous
                else {"model": {"architecture": "crnn_base", "parameters": 194979, "shared": True}},
                **(about or {}),
            }
        ),
        encoding="utf-8",
    )
    rng = np.random.default_rng([settings["run"]["seed"], len(settings["method"]["name"])])
    top = 0.9 if heterogeneous else 0.8
    everything = []
    for round_index in range(1, done + 1):
        rows = make_round_rows(
            round_index,
            rng,
            clients=[f"client-{index:03d}" for index in range(clients)],
            evaluate=round_index % 5 == 0 or round_index == total,
            skill=top * round_index / (round_index + 3),
            heterogeneous=heterogeneous,
            classes=len(classes),
            lpa=heterogeneous,
        )
        write_rows(rows_path(folder, round_index), rows)
        everything += rows
    (folder / "LATEST").write_text(f"{done:06d}-00000000.safetensors", encoding="utf-8")
    return everything
