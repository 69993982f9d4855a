"""A data set: who lists its clips, who reads one, and what ``raydfl data list`` and ``info`` say about it.

A set of your own is one class in one file, named in a configuration as ``my_file.py:MySet``::

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
    """A description of a set, known before it is opened."""

    title: str
    """Its full name."""
    layout: str = ""
    """The files and folders that a root must hold."""
    licence: str = ""
    """Under which terms it is published."""
    url: str = ""
    """The page to get it from."""
    classes: int | None = None
    """Number of classes with the default options; ``None`` when the recordings decide."""


@dataclass(frozen=True, kw_only=True)
class Dataset(StrictTypes):
    """Base of every data set. The fields of a subclass (a frozen pydantic dataclass) are its options."""

    card: ClassVar[Card] = Card("a data set of your own")
    images: ClassVar[bool] = False
    """True where it lists images alone, and no recordings."""

    def manifest(self) -> pa.Table:
        """List all clips of the set, as :func:`raydfl.make_manifest` returns them.

        Their order depends on nothing but the set and the options.

        Raises:
            DataError: the root is missing, laid out in another way, or holds clips that cannot be labelled.
        """
        raise NotImplementedError(f"{type(self).__name__} must say in manifest() which clips it has")

    def read(self, row: Mapping[str, Any]) -> tuple[npt.NDArray[np.float32], int]:
        """Read the samples of one clip.

        Args:
            row: the clip's row of the manifest, by column.

        Returns:
            ``(samples, rate)``: float32 [samples, channels], -1..1, and the rate in Hz.

        Raises:
            DataError: the clip cannot be read; the message names the file.
        """
        return read_audio(row["path"])

    def image(self, row: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
        """Read one image (``features: {kind: image}``).

        Args:
            row: the clip's row of the manifest, by column.

        Returns:
            uint8 [rows, columns] of a grey one, or [rows, columns, 3].

        Raises:
            DataError: it cannot be read; the message names the file.
        """
        return read_image(row["path"])

    def file_of(self, row: Mapping[str, Any], column: str) -> str | None:
        """Return the absolute path that a row's column names, for a view of ``data.views``; ``None``: the clip has none.

        Relative paths begin at the option ``root``.
        """
        value = row[column]
        return None if not value else os.path.normpath(Path(getattr(self, "root", "")) / Path(str(value)).expanduser())

    def identity(self, row: Mapping[str, Any]) -> str | None:
        """Return what decides the samples of a clip, for the feature cache.

        ``None`` when that is the content of the file at ``row["path"]``; otherwise (a generated clip, a part of a file) a
        string that changes whenever the samples would.
        """
        return None

    def part(self, row: Mapping[str, Any]) -> str | None:
        """Return which part of the file at ``row["path"]`` the clip is, for the feature cache; ``None``: all of it.

        Asked where :meth:`identity` gives ``None``: the content of the file and this string then decide the samples.
        """
        return None


def dataset_names() -> list[str]:
    """Return the built-in sets' names in a configuration, sorted."""
    return registry.names(PACKAGE)


def find_dataset(name: str) -> type[Dataset]:
    """Find the set called ``name``: a built-in, or the user's ``my_file.py:Class`` or ``my_module:Class``.

    Raises:
        ConfigError: there is none; the nearest name is given.
    """
    return registry.find(PACKAGE, name, Dataset, "data set")
