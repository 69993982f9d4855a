from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from test_population import many_clients

from raydfl.data.build import build_population
from raydfl.data.population import Population
from raydfl.data.settings import DataSettings
from raydfl.runs.report import partition as plot_module
from raydfl.runs.report.partition import plot_partition


def drawn(population: Population, path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The counts that the picture shows, row by row."""
    shown: list[np.ndarray] = []
    original = plot_module._draw_cells
    monkeypatch.setattr(
        plot_module, "_draw_cells", lambda figure, axes, counts: (shown.append(counts), original(figure, axes, counts))
    )
    plot_partition(population, path)
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[0] > 400
    assert pixels.std() > 0.05  # not a blank page
    return shown[0]


@pytest.mark.parametrize("shards", [1, 4])
def test_few_clients_are_all_drawn_in_order(
    made: Callable[..., DataSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    population = build_population(made(partition={"shards": shards}), 1)
    shown = drawn(population, tmp_path / "new" / "plot.png", monkeypatch)
    np.testing.assert_array_equal(shown, population.label_counts())


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_names_with_dollar_signs_are_names(made: Callable[..., DataSettings], tmp_path: Path, ending: str) -> None:
    population = build_population(made(), 1)
    population.classes = (r"$\frac{$", "$x$", "a$b", "$$")
    plot_partition(population, tmp_path / f"plot.{ending}")
    assert (tmp_path / f"plot.{ending}").stat().st_size > 1000


def test_many_clients_are_drawn_from_most_to_fewest_clips(
    made: Callable[..., DataSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    population = many_clients(2618, build_population(made(), 1).stores[0])
    shown = drawn(population, tmp_path / "plot.png", monkeypatch)
    sizes = shown.sum(axis=1)
    assert len(shown) == 400
    assert (np.diff(sizes) <= 0).all()
    assert (sizes[0], sizes[-1]) == (19, 1)
