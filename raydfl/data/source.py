"""A data set by its name and options. Its files are read in a helper process (raydfl.core.isolation)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from raydfl.core.isolation import call_isolated, map_isolated, start_helper
from raydfl.core.registry import build
from raydfl.data.dataset import PACKAGE, Dataset, find_dataset

_LIST_SECONDS = 3600
"""Time limit for a file of a list, or for a list without files."""


@dataclass(frozen=True)
class Source:
    """Name and options of a data set, to open it in any process."""

    name: str
    """Built-in name, ``my_file.py:Class`` or ``my_module:Class``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the data set's class."""

    def open(self) -> Dataset:
        """Build the data set from its name and options.

        Raises:
            ConfigError: The name or an option is unknown.
        """
        return build(find_dataset(self.name), self.options, "data")

    def list_clips(self) -> pa.Table:
        """Return the data set's manifest. A built-in class lists its files in a helper process, a user's class in this one.

        Raises:
            ConfigError: The name or an option is unknown.
            DataError: A file is missing or damaged, or exceeds a limit.
        """
        if self._is_built_in:
            return list_isolated(self.open, f"data set {self.name}")
        return self.open().manifest()

    def read_clips(self, method: Literal["read", "image"], rows: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
        """Yield the sound or image of each clip, or its error, from a helper process. A user's own method runs in this one.

        Args:
            method: Method of the data set: :meth:`Dataset.read` for samples and rate, :meth:`Dataset.image` for an image.
            rows: Rows of the manifest.
        """
        places = [str(row["path"] or row["clip"]) for row in rows]
        if self._is_built_in:
            return map_isolated(functools.partial(_read_row, self, method), rows, places)
        if getattr(find_dataset(self.name), method) is getattr(Dataset, method):
            return map_isolated(getattr(Dataset(), method), rows, places)
        return map(functools.partial(_try_row, self, method), rows)

    @property
    def _is_built_in(self) -> bool:
        return find_dataset(self.name).__module__.startswith(f"{PACKAGE}.")


def start_reader() -> None:
    """Start the helper process for data sets in the background. Call it before PyTorch's import, which takes longer."""
    start_helper(_list_clips)


def list_isolated(make: Callable[[], Dataset], where: str) -> pa.Table:
    """Return the manifest of a built-in data set, listed in a helper process.

    Args:
        make: Makes the data set. It is pickled.
        where: Name of the data set, for errors.

    Raises:
        DataError: A file is missing or damaged, or exceeds a limit.
    """
    table: pa.Table = call_isolated(_list_clips, make, where=where, seconds=_LIST_SECONDS)
    return table


def _list_clips(make: Callable[[], Dataset]) -> pa.Table:
    return make().manifest()


def _read_row(source: Source, method: str, row: Mapping[str, Any]) -> Any:
    return getattr(_open(source), method)(row)


def _try_row(source: Source, method: str, row: Mapping[str, Any]) -> Any:
    try:
        return _read_row(source, method, row)
    except Exception as error:  # noqa: BLE001  (A user's data set may raise anything.)
        return error


_datasets: dict[str, Dataset] = {}


def _open(source: Source) -> Dataset:
    """Open a data set once per process, because some load voices or tables."""
    key = repr(source)
    if key not in _datasets:
        _datasets[key] = source.open()
    return _datasets[key]
