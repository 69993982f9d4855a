"""Buffer for client updates, in memory up to a limit and in a temporary file beyond it."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from typing import IO

import numpy as np

from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Update

LARGEST = 2 * 2**30
"""Bytes of updates in memory. Further updates go to a temporary file, which the system removes with the process."""


class Spool:
    """Sequence of updates in order of arrival. Iterate over it as often as needed."""

    def __init__(self, largest: int = LARGEST) -> None:
        self._largest = largest
        self._bytes = 0
        self._updates: list[tuple[Update, Layout | None]] = []
        """Updates, and the layout of those with tensors in the file. ``None``: the tensors are in memory."""
        self._file: IO[bytes] | None = None

    def add(self, update: Update) -> None:
        """Append an update."""
        flat = FlatTensors.from_tensors(update.tensors)
        self._bytes += flat.vector.nbytes
        if self._bytes <= self._largest:
            self._updates.append((dataclasses.replace(update, tensors=flat), None))
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="raydfl-updates-")  # noqa: SIM115 - it closes with the spool
        self._file.write(flat.vector.data)
        self._updates.append((dataclasses.replace(update, tensors={}), flat.layout))

    def __len__(self) -> int:
        return len(self._updates)

    def __iter__(self) -> Iterator[Update]:
        if self._file is not None:
            self._file.seek(0)
        for update, layout in self._updates:
            if layout is None or self._file is None:
                yield update
            else:
                vector = np.fromfile(self._file, np.float32, layout.size)
                yield dataclasses.replace(update, tensors=FlatTensors(layout, vector))
