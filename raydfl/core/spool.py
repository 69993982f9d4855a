"""Updates that have to be read twice: kept in memory, and beyond some size in a file."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from typing import IO

import numpy as np

from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Update

LARGEST = 2 * 2**30
"""Bytes of updates that are kept in memory; more go into a temporary file, which is gone when the process ends."""


class Spool:
    """Updates in the order in which they came."""

    def __init__(self, largest: int = LARGEST) -> None:
        self._largest = largest
        self._bytes = 0
        self._kept: list[tuple[Update, Layout | None]] = []
        """Each without its tensors where these are in the file, and then with their layout."""
        self._file: IO[bytes] | None = None

    def add(self, update: Update) -> None:
        """Keep an update."""
        flat = FlatTensors.of(update.tensors)
        self._bytes += flat.vector.nbytes
        if self._bytes <= self._largest:
            self._kept.append((dataclasses.replace(update, tensors=flat), None))
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="raydfl-updates-")  # noqa: SIM115 - it is closed with the spool
        self._file.write(flat.vector.data)
        self._kept.append((dataclasses.replace(update, tensors={}), flat.layout))

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Update]:
        if self._file is not None:
            self._file.seek(0)
        for update, layout in self._kept:
            if layout is None or self._file is None:
                yield update
            else:
                vector = np.fromfile(self._file, np.float32, layout.size)
                yield dataclasses.replace(update, tensors=FlatTensors(layout, vector))
