"""The memory of each process stays constant over many rounds, by benchmarks/soak.py with fewer rounds."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

import pytest
from soak import growth, soak, write


def test_growth_is_between_the_first_and_the_last_quarter() -> None:
    flat = [(50 * number, 100.0 + number % 2) for number in range(200)]
    assert abs(growth(flat)) <= 1
    leaking = [(50 * number, 100.0 + 0.1 * number) for number in range(200)]
    assert growth(leaking) == pytest.approx(0.1 * (174.5 - 29.5))
    warming = [(50 * number, 50.0 if number < 10 else 100.0) for number in range(200)]
    assert growth(warming) == 0
    merging = [(10 * number, 50.0 if number <= 10 else 60.0) for number in range(1, 31)]
    assert growth(merging) == 0  # the first 100 rounds are always excluded
    assert growth([(1, 5.0), (2, 6.0)]) == 1.0


def test_readings_are_written_and_drawn(tmp_path: Path) -> None:
    write({"driver": [(10, 5.0), (20, 5.25)], "raylet": [(10, 1.0), (20, 1.0)]}, tmp_path / "memory")
    rows = list(csv.reader((tmp_path / "memory.csv").open()))
    assert rows[0] == ["process", "round", "unique_mb"]
    assert rows[2] == ["driver", "20", "5.25"]
    assert len(rows) == 5
    assert "<svg" in (tmp_path / "memory.svg").read_text()
    assert (tmp_path / "memory.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("espeakng_loader") is None, reason="the package espeakng-loader is not installed"
)
def test_memory_is_flat_over_three_hundred_rounds(tmp_path: Path) -> None:
    readings = soak(tmp_path, 300, 10)
    assert {"driver", "server actor", "client actor 1", "client actor 2", "raylet"} <= readings.keys()
    assert all(len(each) >= 20 for each in readings.values())
    grown = {name: round(growth(each), 1) for name, each in readings.items()}
    assert max(grown.values()) < 8, grown
