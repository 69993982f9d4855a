"""Base class of data sets, which list and read clips.

Define your own data set as a class in a file, and set ``data.name`` to ``my_file.py:MySet``::

    @dataclass(frozen=True, kw_only=True)          # pydantic.dataclasses.dataclass: the fields are the options
    class MySet(Dataset):
        root: Path

        def manifest(self):
            files = sorted(self.root.glob("*.wav"))
            return make_manifest(
                [{"clip": f.name, "path": str(f.absolute()), "label": f.name[0], "group": f.name[1:4]} for f in files], "MySet"
            )
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic.dataclasses import dataclass

from raydfl.core import registry
from raydfl.core.settings import StrictTypes
from raydfl.data.audio import read_audio
from raydfl.data.images import read_image

PACKAGE = "raydfl.data.sets"


@dataclasses.dataclass(frozen=True, slots=True)
class Card:
    """The description of a data set for ``raydfl data list`` and ``info``."""

    title: str
    """Full name."""
    layout: str = ""
    """Files and folders below the root."""
    licence: str = ""
    """Licence of the published data."""
    url: str = ""
    """Address of the download page."""
    classes: int | None = None
    """Number of classes with the default options; ``None`` if it depends on the recordings."""


@dataclass(frozen=True, kw_only=True)
class Dataset(StrictTypes):
    """Base class of data sets. The fields of a subclass (a frozen pydantic dataclass) are its options."""

    card: ClassVar[Card] = Card("a data set of your own")
    images: ClassVar[bool] = False
    """True if the set contains only images, without recordings."""

    def manifest(self) -> pa.Table:
        """List all clips of the set.

        Returns:
            The result of :func:`raydfl.make_manifest`. The order of the clips must depend only on the set and its options.

        Raises:
            DataError: the root is missing, its layout is unknown, or a clip has no valid label.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement manifest(), which lists its clips")

    def read(self, row: Mapping[str, Any]) -> tuple[npt.NDArray[np.float32], int]:
        """Read the samples of a clip.

        Args:
            row: the clip's row of the manifest, by column.

        Returns:
            ``(samples, rate)``: float32 [samples, channels] in -1..1, and the rate in Hz.

        Raises:
            DataError: the clip cannot be read. The message names the file.
        """
        return read_audio(row["path"])

    def image(self, row: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
        """Read an image (``features: {kind: image}``).

        Args:
            row: the clip's row of the manifest, by column.

        Returns:
            uint8 [rows, columns] of a grey image, or [rows, columns, 3].

        Raises:
            DataError: the image cannot be read. The message names the file.
        """
        return read_image(row["path"])

    def file_of(self, row: Mapping[str, Any], column: str) -> str | None:
        """Return the absolute path of a clip's file in a view (``data.views``).

        Args:
            row: the clip's row of the manifest, by column.
            column: column of the view. Its relative paths refer to the option ``root``.

        Returns:
            ``None`` if the clip lacks the view.
        """
        value = row[column]
        return None if not value else os.path.normpath(Path(getattr(self, "root", "")) / Path(str(value)).expanduser())

    def identity(self, row: Mapping[str, Any]) -> str | None:
        """Return a key of a clip's samples for the feature cache.

        Returns:
            ``None`` if the content of the file at ``row["path"]`` determines the samples. For a generated clip: a string that
            changes whenever the samples change.
        """
        return None

    def part(self, row: Mapping[str, Any]) -> str | None:
        """Return a key of the clip's part of the file at ``row["path"]``, for the feature cache.

        With an :meth:`identity` of ``None``, this key and the content of the file determine the samples.

        Returns:
            ``None`` if the clip is the whole file.
        """
        return None


def dataset_names() -> list[str]:
    """List the names of the built-in data sets, sorted."""
    return registry.names(PACKAGE)


def find_dataset(name: str) -> type[Dataset]:
    """Find a data set by name: a built-in, or your own ``my_file.py:Class`` or ``my_module:Class``.

    Raises:
        ConfigError: the data set is unknown. The message suggests the nearest name.
    """
    return registry.find(PACKAGE, name, Dataset, "data set")
