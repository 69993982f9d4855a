"""Manifest columns that batches carry as integer codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from raydfl.core.errors import DataError
from raydfl.data.build import build_population
from raydfl.data.examples import Examples
from raydfl.data.manifest import make_manifest
from raydfl.data.population import Population
from raydfl.data.settings import DataSettings
from raydfl.data.steps.listing import add_batch_column, make_assignment
from raydfl.engine.config import make_config

Make = Callable[..., DataSettings]


def decode_takes(population: Population, examples: Examples) -> list[str]:
    """Decode the column ``take`` of each example."""
    return [population.columns["take"][code] for code in examples.columns["take"]]


def test_each_example_carries_the_values_of_its_clip(make_data: Make, tmp_path: Path) -> None:
    settings = make_data(columns=["take", "recording"], split={"validation": 0.3})
    population = build_population(settings, 1)
    manifest = settings.source.open().manifest()
    population.save(tmp_path)
    for restored in (population, Population.load(tmp_path)):
        parts = [
            restored.test,
            *(part for i in range(len(restored)) for part in (restored.data(i).train, restored.data(i).validation)),
        ]
        assert sum(map(len, parts)) > 100
        for part in parts:
            truth = manifest.take(part.clips.tolist()).to_pydict()
            assert decode_takes(restored, part) == [str(take) for take in truth["take"]]
            assert [restored.columns["recording"][c] for c in part.columns["recording"]] == truth["recording"]


def test_a_batch_has_the_codes_of_its_examples(make_data: Make) -> None:
    population = build_population(make_data(columns=["take"]), 1)
    train = population.data(0).train
    batch = train.batch(np.array([3, 0]))
    assert batch.columns["take"].tolist() == train.columns["take"][[3, 0]].tolist()
    assert set(batch.tensors()) == {"views/", "y", "columns/take"}


def test_an_unknown_column_is_rejected_before_clips_are_read(make_data: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydfl.data.build.prepare", None)
    with pytest.raises(DataError, match="no column 'takes'. Did you mean 'take'"):
        build_population(make_data(columns=["takes"]), 1)


def test_a_repeated_column_is_rejected(make_data: Make) -> None:
    with pytest.raises(ValidationError, match="'take' is listed more than once"):
        make_data(columns=["take", "recording", "take"])


def test_a_column_with_missing_values_is_rejected() -> None:
    rows = [
        {"clip": f"c{i}", "path": None, "label": "w", "device": device}
        for i, device in enumerate(["b", None, "a10", "a9"])
    ]
    with pytest.raises(DataError, match="1 of 4 clips have no value in column 'device', the first c1"):
        add_batch_column(make_assignment(make_manifest(rows, "rows"), ["w"]), "device")
    tables = add_batch_column(make_assignment(make_manifest(rows[:1] + rows[2:], "rows"), ["w"]), "device")
    codes, values = tables.codes("batch:device"), tables.clips.column("batch:device").dictionary.to_pylist()
    assert (codes.tolist(), values) == ([2, 1, 0], ["a9", "a10", "b"])


def test_empty_columns_leave_the_digest_unchanged(make_data: Make) -> None:
    def digest(**data: Any) -> str:
        return make_config({"method": "fedavg", "data": make_data(**data).model_dump(mode="json")}).digest()

    assert digest(columns=[]) == digest() != digest(columns=["take"])
