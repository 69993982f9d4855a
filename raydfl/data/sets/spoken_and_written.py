"""Spoken and written digits: each recording of the Free Spoken Digit Dataset with an image of the same digit from MNIST.

A light set of two views. Test recordings get the first images of their digit, training recordings those that follow, each another
one; where there are too few, training recordings share theirs, but never with the test. Either view can be made harder, in training
and test alike, so that one teaches the other something or not.
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
    """Spoken digits with images of them; a group is a speaker."""

    card: ClassVar[Card] = Card(
        title="Free Spoken Digit Dataset with images of MNIST",
        layout=FSDD.card.layout,
        licence="CC BY-SA 4.0 (recordings), CC BY-SA 3.0 (images)",
        url=FSDD.card.url,
        classes=10,
    )

    pictures: Annotated[Path, Field(description="folder that holds MNIST's idx files, of which one pair is enough")]
    snr_db: Annotated[
        float | None, Field(description="white noise in every recording, in dB below its power; null: none")
    ] = None
    picture_noise: Annotated[
        float, Field(ge=0, description="deviation of Gaussian noise in every image, in shares of white; 0: none")
    ] = 0.0

    def manifest(self) -> pa.Table:
        """Extra columns: ``take`` (int64), ``image`` (the file) and ``image_number`` (int64, of the image in it).

        Raises:
            DataError: a set is missing or damaged, or has too few images of a digit.
        """
        sounds = super().manifest()
        images = MNIST(root=self.pictures).manifest()
        of_digit: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for row in images.select(["path", "label", "number"]).to_pylist():
            of_digit[row["label"]].append((row["path"], row["number"]))
        labels = sounds.column("label").to_pylist()
        tests = [split == "test" for split in sounds.column("split").to_pylist()]
        tested = Counter(itertools.compress(labels, tests))
        given: list[tuple[str, int]] = []
        counted: Counter[tuple[str, bool]] = Counter()
        for label, test in zip(labels, tests, strict=True):
            there, held, own = of_digit[label], tested[label], counted[label, test]
            if len(there) <= held:
                raise DataError(
                    f"{self.pictures} has {len(there)} images of digit {label}, but {held} test recordings are of it, and "
                    f"training needs others; get more images, or lower data.test_takes"
                )
            given.append(there[own] if test else there[held + own % (len(there) - held)])
            counted[label, test] += 1
        paths, numbers = zip(*given, strict=True)
        return sounds.append_column("image", pa.array(paths)).append_column(
            "image_number", pa.array(numbers, pa.int64())
        )

    def read(self, row: Mapping[str, Any]) -> tuple[npt.NDArray[np.float32], int]:
        """See :class:`Dataset`."""
        samples, rate = super().read(row)
        if self.snr_db is None:
            return samples, rate
        seed = seed_for(0, 0, row["clip"], "noise of the set")
        columns = [add_noise(channel, self.snr_db, seed) for channel in samples.T]
        return np.stack(columns, axis=1).clip(-1, 1), rate

    def image(self, row: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
        """See :class:`Dataset`."""
        image: npt.NDArray[np.uint8] = read_idx(Path(row["image"]), 3)[row["image_number"]]
        if self.picture_noise == 0:
            return image
        noise = generator(0, 0, row["clip"], "noise of the set").standard_normal(image.shape)
        return (image + _WHITE * self.picture_noise * noise).round().clip(0, _WHITE).astype(np.uint8)

    def part(self, row: Mapping[str, Any]) -> str | None:
        """See :class:`Dataset`."""
        if row["path"] == row["image"]:
            noisy = f" noise {self.picture_noise} {row['clip']}" if self.picture_noise else ""
            return f"{row['image_number']}{noisy}"
        return None if self.snr_db is None else f"noise {self.snr_db} dB {row['clip']}"
