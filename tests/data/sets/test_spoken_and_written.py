"""Spoken digits with images of digits, on tiny files of both sets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from digits import IMAGES, spoken_and_written

from raydfl.core.errors import DataError
from raydfl.data.features.digests import iterate_rows
from raydfl.data.sets.spoken_and_written import SpokenAndWritten
from raydfl.engine.config import Config
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four takes of each digit, the first of each the test."""
    spoken_and_written(tmp_path, takes=4)
    return tmp_path


def test_no_image_is_in_both_training_and_test(folder: Path) -> None:
    """The images of a digit in their order: the test has the first, training the others again and again."""
    rows = list(iterate_rows(SpokenAndWritten(root=folder, pictures=folder, test_takes=1).manifest()))
    assert [row["image_number"] for row in rows] == [1, 2, 4, 2, 0, 3, 3, 3]
    assert [row["split"] for row in rows] == ["test", "train", "train", "train"] * 2
    with pytest.raises(DataError, match="2 images of digit 7, but 2 test recordings"):
        SpokenAndWritten(root=folder, pictures=folder, test_takes=2).manifest()


def test_either_view_is_made_harder_in_training_and_test_alike(folder: Path) -> None:
    """Oracle: the power of what was added, and the deviation of what was."""
    plain = SpokenAndWritten(root=folder, pictures=folder, test_takes=1)
    hard = SpokenAndWritten(root=folder, pictures=folder, test_takes=1, snr_db=0.0, picture_noise=0.1)
    for row in iterate_rows(plain.manifest()):
        (clean, _), (noisy, _) = plain.read(row), hard.read(row)
        assert np.var(noisy - clean) / np.mean(clean**2) == pytest.approx(1, rel=0.2)
        assert np.array_equal(plain.image(row), IMAGES[row["image_number"]])
        inner = (plain.image(row) > 100) & (plain.image(row) < 155)  # far from both ends, where nothing is cut off
        assert np.std((hard.image(row).astype(float) - plain.image(row))[inner]) == pytest.approx(25.5, rel=0.2)
        assert hard.part(row) != plain.part(row)
        assert np.array_equal(hard.image(row), hard.image(row))


def test_it_is_a_federation_of_two_views(tiny: Callable[..., Config], folder: Path) -> None:
    views = "views: {image: {column: image, features: {kind: image, size: 28}}}"
    data = f"{{name: spoken_and_written, root: {folder}, pictures: {folder}, test_takes: 1, partition: {{by: iid, clients: 2}}, "
    data += f"features: {{sample_rate: 8000, bands: 8, seconds: 0.1}}, {views}}}"
    models = "models={audio: {name: crnn_tiny, hidden: 4, filters: [4]}, image: {name: cnn_small, view: image}}"
    create(tiny("method=multifl", models, f"data={data}"), Progress("quiet"))
