"""Import of Ray Data sets: recordings are written once as Parquet files, a format of ``data.name: huggingface``."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydfl.cluster.faults import unwrap_error
from raydfl.core.errors import ConfigError, DataError, nearest
from raydfl.data import encode_wav

if TYPE_CHECKING:  # Importing ray.data takes a second.
    from ray.data import Dataset

_ROWS = 100
"""Recordings in a row group. Readers hold one row group in memory."""


def write_recordings(
    dataset: Dataset,
    folder: str | Path,
    *,
    audio: str = "audio",
    rate: str | None = None,
    label: str = "label",
    group: str | None = None,
) -> dict[str, Any]:
    """Write a ``ray.data.Dataset`` of recordings to a folder, and return the ``data`` settings that read it.

    Ray's workers write Parquet files block by block, without passing rows through the calling process. The order of the rows and
    additional columns are preserved. All nodes must see the folder. Runs read only the folder, so they can be resumed.

    Args:
        dataset: One recording per row.
        folder: Path of a new folder.
        audio: Column of recordings: encoded bytes, a mapping with ``bytes``, or a mapping with ``array`` and ``sampling_rate``.
            With ``rate``, samples instead. Samples are floats in -1..1 or int16, [samples] or [channels, samples].
        rate: Column of sampling rates in Hz.
        label: Column of classes.
        group: Column of the owner of each clip, who becomes its client. ``None``: clips have no owner.

    Returns:
        ``name``, ``root`` and the names of columns. Add features, split, partition and further settings.

    Raises:
        ConfigError: The folder exists.
        DataError: A column is missing, the dataset is empty, or a row contains no recording.
    """
    from ray.exceptions import RayTaskError

    target = Path(folder).expanduser().absolute()
    if target.exists():
        raise ConfigError(
            f"{target} exists already. Remove it, choose another folder, or read it with "
            f"data={{name: huggingface, root: {target}}}."
        )
    columns = dataset.columns() or []
    if not columns:
        raise DataError("the dataset has no rows. Pass a dataset with at least one recording.")
    for name, option in ((audio, "audio"), (rate, "rate"), (label, "label"), (group, "group")):
        if name is not None and name not in columns:
            raise DataError(f"{option}={name}: the dataset has no column of this name. {nearest(name, columns)}")
    new = target.with_name(f".{target.name}.raydfl-unfinished")
    shutil.rmtree(new, ignore_errors=True)  # A killed process may have left it.
    encoded = dataset.map(functools.partial(_encode_audio, audio=audio, rate=rate))
    options = encoded.context.execution_options
    unordered, options.preserve_order = options.preserve_order, True
    try:
        encoded.write_parquet(str(new), row_group_size=_ROWS)
    except RayTaskError as error:
        match = re.search(r"DataError: (.*)", str(error), re.DOTALL)  # Ray Data wraps errors of functions in its own.
        raise DataError(match[1].strip()) if match else unwrap_error(error) from error
    finally:
        options.preserve_order = unordered
    for number, file in enumerate(sorted(new.glob("*.parquet"))):  # Ray's names differ between calls.
        file.rename(new / f"{number:05d}.parquet")
    new.rename(target)
    settings = {"name": "huggingface", "root": str(target), "audio_column": audio, "label_column": label}
    return settings if group is None else settings | {"group_column": group}


def _encode_audio(row: dict[str, Any], audio: str, rate: str | None) -> dict[str, Any]:
    """Encode the recording of a row as the bytes of an audio file, and drop the column of the rate.

    Raises:
        DataError: The row contains no recording.
    """
    value = row[audio]
    rest = {name: cell for name, cell in row.items() if name not in (audio, rate)}
    where = f"the row { ({name: cell for name, cell in rest.items() if isinstance(cell, str | int | float)}) }"
    if rate is not None:
        value = encode_wav(value, row[rate], where)
    elif isinstance(value, Mapping) and value.get("bytes") is not None:
        value = value["bytes"]
    elif isinstance(value, Mapping) and value.get("array") is not None:
        value = encode_wav(value["array"], value.get("sampling_rate"), where)
    if not isinstance(value, bytes):
        raise DataError(
            f"{where} has {type(value).__name__} in column {audio!r}: neither bytes nor an array with its sampling_rate. Set audio "
            f"to the column of recordings, and rate to the column of sampling rates."
        )
    return rest | {audio: {"bytes": value}}
