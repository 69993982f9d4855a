"""Spoken digits with images of digits, on small files of both sets."""

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
    """Write four takes of each digit. The first take is the test set."""
    spoken_and_written(tmp_path, takes=4)
    return tmp_path


def test_training_and_test_images_are_disjoint(folder: Path) -> None:
    """Test recordings use the first images of a digit. Training recordings cycle through the remaining images."""
    rows = list(iterate_rows(SpokenAndWritten(root=folder, pictures=folder, test_takes=1).manifest()))
    assert [row["image_number"] for row in rows] == [1, 2, 4, 2, 0, 3, 3, 3]
    assert [row["split"] for row in rows] == ["test", "train", "train", "train"] * 2
    with pytest.raises(DataError, match="2 images of digit 7, but 2 test recordings"):
        SpokenAndWritten(root=folder, pictures=folder, test_takes=2).manifest()


def test_noise_applies_to_training_and_test_clips_of_both_views(folder: Path) -> None:
    """Oracle: the measured noise power of the sound, and the standard deviation of the image noise."""
    plain = SpokenAndWritten(root=folder, pictures=folder, test_takes=1)
    hard = SpokenAndWritten(root=folder, pictures=folder, test_takes=1, snr_db=0.0, picture_noise=0.1)
    for row in iterate_rows(plain.manifest()):
        (clean, _), (noisy, _) = plain.read(row), hard.read(row)
        assert np.var(noisy - clean) / np.mean(clean**2) == pytest.approx(1, rel=0.2)
        assert np.array_equal(plain.image(row), IMAGES[row["image_number"]])
        inner = (plain.image(row) > 100) & (plain.image(row) < 155)  # far from both limits, so that no noise is clipped
        assert np.std((hard.image(row).astype(float) - plain.image(row))[inner]) == pytest.approx(25.5, rel=0.2)
        assert hard.part(row) != plain.part(row)
        assert np.array_equal(hard.image(row), hard.image(row))


def test_a_federation_of_two_views_is_built(tiny: Callable[..., Config], folder: Path) -> None:
    views = "views: {image: {column: image, features: {kind: image, size: 28}}}"
    data = f"{{name: spoken_and_written, root: {folder}, pictures: {folder}, test_takes: 1, partition: {{by: iid, clients: 2}}, "
    data += f"features: {{sample_rate: 8000, bands: 8, seconds: 0.1}}, {views}}}"
    models = "models={audio: {name: crnn_tiny, hidden: 4, filters: [4]}, image: {name: cnn_small, view: image}}"
    create(tiny("method=multifl", models, f"data={data}"), Progress("quiet"))
