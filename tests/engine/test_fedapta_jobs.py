"""Configurations in jobs/fedapta: each is valid and has the paper's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydfl.engine.config import load_config

JOBS = Path(__file__).resolve().parents[2] / "jobs" / "fedapta"


def test_the_image_job_has_the_papers_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The expected values come from the paper and its code."""
    monkeypatch.setenv("RAYDFL_DATA", str(tmp_path))
    config = load_config(JOBS / "images.yaml", [])
    tasks = config.data.each
    assert {name: data.name for name, data in tasks.items()} == {
        name: name for name in ("mnist", "fashion_mnist", "emnist", "svhn", "cifar10")
    }
    scales = {name: (data.features.mean[0], data.features.deviation[0]) for name, data in tasks.items()}
    assert scales == {
        "mnist": (0.1307, 0.3081),
        "fashion_mnist": (0.286, 0.352),
        "emnist": (0.1307, 0.3081),
        "svhn": (0.4377, 0.1980),
        "cifar10": (0.4914, 0.2470),
    }
    for name, data in tasks.items():
        assert data.first_view.pipeline.shape(data.features.bands) == (3 if name in ("svhn", "cifar10") else 1, 32, 32)
        assert [type(transform).__name__ for transform in data.first_view.pipeline.all] == [
            "RandomCrop",
            "Flip",
            "Cutout",
        ]
        assert (data.partition.clients, data.partition.alpha, data.partition.minimum) == (10, 0.5, 10)
        assert data.profile["pruning_ratio"].values == (0.0, 0.2, 0.4, 0.6, 0.8)
    train, optimiser = config.train, config.train.optimiser
    assert (train.rounds, train.cohort, train.local_epochs, train.batch_size) == (100, 1.0, 5, 64)
    assert (optimiser.name, optimiser.lr, optimiser.decay, optimiser.weight_decay) == ("sgd", 0.1, 0.998, 0.001)


@pytest.mark.parametrize("name", ["images_twin", "audio", "mixed"])
def test_the_other_jobs_are_valid(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAYDFL_DATA", str(tmp_path))
    config = load_config(JOBS / f"{name}.yaml", [])
    assert all(data.profile["pruning_ratio"].values for data in config.data.each.values())
    assert config.method["name"] in ("fedavg", "fedapta")
