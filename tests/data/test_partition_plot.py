from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from test_population import make_many_clients

from raydfl.data.build import build_population
from raydfl.data.population import Population
from raydfl.data.settings import DataSettings
from raydfl.runs.report import partition as plot_module
from raydfl.runs.report.partition import plot_partition


def capture_counts(population: Population, path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Plot the partition and return the plotted counts [clients, classes]."""
    captured: list[np.ndarray] = []
    original = plot_module._draw_cells
    monkeypatch.setattr(
        plot_module,
        "_draw_cells",
        lambda figure, axes, counts: (captured.append(counts), original(figure, axes, counts)),
    )
    plot_partition(population, path)
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[0] > 400
    assert pixels.std() > 0.05  # not a blank page
    return captured[0]


@pytest.mark.parametrize("shards", [1, 4])
def test_few_clients_are_all_plotted_in_order(
    make_data: Callable[..., DataSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    population = build_population(make_data(partition={"shards": shards}), 1)
    counts = capture_counts(population, tmp_path / "new" / "plot.png", monkeypatch)
    np.testing.assert_array_equal(counts, population.label_counts())


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_dollar_signs_in_names_are_plotted_literally(
    make_data: Callable[..., DataSettings], tmp_path: Path, ending: str
) -> None:
    population = build_population(make_data(), 1)
    population.classes = (r"$\frac{$", "$x$", "a$b", "$$")
    plot_partition(population, tmp_path / f"plot.{ending}")
    assert (tmp_path / f"plot.{ending}").stat().st_size > 1000


def test_many_clients_are_sampled_and_sorted_by_size(
    make_data: Callable[..., DataSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    population = make_many_clients(2618, build_population(make_data(), 1).stores[0])
    counts = capture_counts(population, tmp_path / "plot.png", monkeypatch)
    sizes = counts.sum(axis=1)
    assert len(counts) == 400
    assert (np.diff(sizes) <= 0).all()
    assert (sizes[0], sizes[-1]) == (19, 1)
