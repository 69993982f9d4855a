"""Spoken and written digits: each recording of the Free Spoken Digit Dataset with an image of the same digit from MNIST.

A small set with two views. Test recordings get the first images of their digit, and training recordings the following images. If
MNIST has too few images, training recordings share images, but never with test recordings. Noise in either view, in training and
test alike, controls how much the views can learn from each other.

A single pair of MNIST's files is sufficient. docs/views.md explains views.

    data:
      name: spoken_and_written
      root: PATH/TO/fsdd
      pictures: PATH/TO/mnist
      snr_db: 0
      features: {sample_rate: 8000, seconds: 1.0}
      views: {image: {column: image, features: {kind: image, size: 28}}}
      partition: {by: dirichlet, clients: 20, alpha: 0.5}
    models: {model: {name: cnn_small, view: image}}
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.core.seeds import generator, seed_for
from raydfl.data.dataset import Card
from raydfl.data.noise import add_noise
from raydfl.data.sets.fsdd import FSDD
from raydfl.data.sets.mnist import MNIST, read_idx

_WHITE = 255


@dataclass(frozen=True, kw_only=True)
class SpokenAndWritten(FSDD):
    """Spoken digits with images of the digits.

    Groups are speakers. Extra columns: ``take``, ``image`` and ``image_number``.
    """

    card: ClassVar[Card] = Card(
        title="Free Spoken Digit Dataset with images of MNIST",
        layout=FSDD.card.layout,
        licence="CC BY-SA 4.0 (recordings), CC BY-SA 3.0 (images)",
        url=FSDD.card.url,
        classes=10,
    )

    pictures: Annotated[Path, Field(description="Folder with MNIST's idx files. A single pair is sufficient.")]
    snr_db: Annotated[
        float | None,
        Field(description="Signal-to-noise ratio of white noise in every recording, in dB. null: no noise."),
    ] = None
    picture_noise: Annotated[
        float,
        Field(ge=0, description="Standard deviation of Gaussian noise in every image, relative to white. 0: no noise."),
    ] = 0.0

    def manifest(self) -> pa.Table:
        """List the recordings with their images.

        Extra columns: ``take`` (int64), ``image`` (the file) and ``image_number`` (int64, position of the image in the file).

        Raises:
            DataError: a set is missing or damaged, or has too few images of a digit.
        """
        sounds = super().manifest()
        images = MNIST(root=self.pictures).manifest()
        images_of: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for row in images.select(["path", "label", "number"]).to_pylist():
            images_of[row["label"]].append((row["path"], row["number"]))
        labels = sounds.column("label").to_pylist()
        tests = [split == "test" for split in sounds.column("split").to_pylist()]
        test_counts = Counter(itertools.compress(labels, tests))
        chosen: list[tuple[str, int]] = []
        used: Counter[tuple[str, bool]] = Counter()
        for label, test in zip(labels, tests, strict=True):
            candidates, reserved, number = images_of[label], test_counts[label], used[label, test]
            if len(candidates) <= reserved:
                raise DataError(
                    f"{self.pictures} has {len(candidates)} images of digit {label}, but {reserved} test recordings and the "
                    f"training recordings need different images. Add images, or lower data.test_takes"
                )
            # The first images of a digit are reserved for the test.
            position = number if test else reserved + number % (len(candidates) - reserved)
            chosen.append(candidates[position])
            used[label, test] += 1
        paths, numbers = zip(*chosen, strict=True)
        return sounds.append_column("image", pa.array(paths)).append_column(
            "image_number", pa.array(numbers, pa.int64())
        )

    def read(self, row: Mapping[str, Any]) -> tuple[npt.NDArray[np.float32], int]:
        """Read a recording, with the set's noise."""
        samples, rate = super().read(row)
        if self.snr_db is None:
            return samples, rate
        seed = seed_for(0, 0, row["clip"], "noise of the set")
        columns = [add_noise(channel, self.snr_db, seed) for channel in samples.T]
        return np.stack(columns, axis=1).clip(-1, 1), rate

    def image(self, row: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
        """Read the image of a recording, with the set's noise."""
        image: npt.NDArray[np.uint8] = read_idx(Path(row["image"]), 3)[row["image_number"]]
        if self.picture_noise == 0:
            return image
        noise = generator(0, 0, row["clip"], "noise of the set").standard_normal(image.shape)
        return (image + _WHITE * self.picture_noise * noise).round().clip(0, _WHITE).astype(np.uint8)

    def part(self, row: Mapping[str, Any]) -> str | None:
        """Return the number of an image, or the noise of a recording."""
        if row["path"] == row["image"]:  # the features of the view image are computed
            noisy = f" noise {self.picture_noise} {row['clip']}" if self.picture_noise else ""
            return f"{row['image_number']}{noisy}"
        return None if self.snr_db is None else f"noise {self.snr_db} dB {row['clip']}"
