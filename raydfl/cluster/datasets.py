"""A Ray Data set as recordings: written once as Parquet, from where runs read it as they read any other."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydfl.cluster.faults import task_cause
from raydfl.core.errors import ConfigError, DataError, nearest
from raydfl.data import samples_as_file

if TYPE_CHECKING:  # it takes a second to import
    from ray.data import Dataset

_ROWS = 100
"""Recordings in a row group, of which one is in memory where they are read."""


def write_recordings(
    dataset: Dataset,
    folder: str | Path,
    *,
    audio: str = "audio",
    rate: str | None = None,
    label: str = "label",
    group: str | None = None,
) -> dict[str, Any]:
    """Write the rows of a ``ray.data.Dataset`` to a folder, and return the settings ``data`` with which runs read them there.

    Ray's workers write Parquet files, block by block; the calling process sees no row. Further columns and the order of the rows
    are kept. All nodes must see the folder. A run does not need the dataset any more, so it can be resumed like any other.

    Args:
        dataset: a row is a recording.
        folder: a new one.
        audio: the column with the recordings: encoded bytes; a mapping with ``bytes``, or with ``array`` and ``sampling_rate``; or,
            with ``rate``, samples. Samples are floats, -1..1, or int16, [samples] or [channels, samples].
        rate: the column with the rate of samples, in Hz.
        label: the column with the classes.
        group: the column that says whose clip it is, so who its client is; ``None``: nobody's.

    Returns:
        ``name``, ``root`` and the names of columns; features, split, partition ... are to be added.

    Raises:
        ConfigError: the folder is there already.
        DataError: a column is not there, there are no rows, or one holds no recording.
    """
    from ray.exceptions import RayTaskError

    target = Path(folder).expanduser().absolute()
    if target.exists():
        raise ConfigError(
            f"{target} is there already; remove it, give another folder, or use it as it is: "
            f"data={{name: huggingface, root: {target}}}"
        )
    columns = dataset.columns() or []
    if not columns:
        raise DataError("the dataset has no rows")
    for name, option in ((audio, "audio"), (rate, "rate"), (label, "label"), (group, "group")):
        if name is not None and name not in columns:
            raise DataError(f"{option}={name}: the dataset has no such column; {nearest(name, columns)}")
    new = target.with_name(f".{target.name}.raydfl-unfinished")  # a name that nobody else gives
    shutil.rmtree(new, ignore_errors=True)  # left by a process that was killed
    encoded = dataset.map(functools.partial(_encoded, audio=audio, rate=rate))
    options = encoded.context.execution_options
    unordered, options.preserve_order = options.preserve_order, True
    try:
        encoded.write_parquet(str(new), row_group_size=_ROWS)
    except RayTaskError as error:
        found = re.search(r"DataError: (.*)", str(error), re.DOTALL)  # Ray Data wraps what a function raises
        raise DataError(found[1].strip()) if found else task_cause(error) from error
    finally:
        options.preserve_order = unordered
    for number, file in enumerate(sorted(new.glob("*.parquet"))):  # Ray's names differ from time to time
        file.rename(new / f"{number:05d}.parquet")
    new.rename(target)
    settings = {"name": "huggingface", "root": str(target), "audio_column": audio, "label_column": label}
    return settings if group is None else settings | {"group_column": group}


def _encoded(row: dict[str, Any], audio: str, rate: str | None) -> dict[str, Any]:
    """Return a row whose recording is the bytes of a file; the column of the rate is left out.

    Raises:
        DataError: there is no recording in it.
    """
    value = row[audio]
    others = {name: each for name, each in row.items() if name not in (audio, rate)}
    where = f"the row { ({name: each for name, each in others.items() if isinstance(each, str | int | float)}) }"
    if rate is not None:
        value = samples_as_file(value, row[rate], where)
    elif isinstance(value, Mapping) and value.get("bytes") is not None:
        value = value["bytes"]
    elif isinstance(value, Mapping) and value.get("array") is not None:
        value = samples_as_file(value["array"], value.get("sampling_rate"), where)
    if not isinstance(value, bytes):
        raise DataError(
            f"{where} has {type(value).__name__} in column {audio!r}: neither bytes nor an array with its sampling_rate; name the "
            f"column of recordings with audio=, and that of their rate with rate="
        )
    return others | {audio: {"bytes": value}}
