"""Recordings inside larger files, such as tar archives and Parquet files.

An address replaces the path of a file in the columns of a manifest and on the command line.

- ``FILE#NAME@OFFSET+LENGTH``: bytes of a file, such as a tar archive. NAME is the name of the recording, for messages.
- ``FILE.parquet#COLUMN[ROW]``: a cell of a Parquet file. Rows count from 0. The cell contains an encoded recording (bytes, or a
  struct with ``bytes``), or samples (a struct with ``array``, floats or int16, [samples] or [channels, samples], and
  ``sampling_rate``).

Reading needs memory for a recording, and for a page of a Parquet file, which is at most a row group.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import re
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import soundfile

from raydfl.core.errors import DataError
from raydfl.core.files import check_regular, open_regular
from raydfl.core.isolation import reading
from raydfl.data.manifest import escape_path

_SPAN = re.compile(r"(?P<file>.+)#(?P<name>.*)@(?P<offset>\d{1,18})\+(?P<length>\d{1,18})", re.DOTALL)
_CELL = re.compile(r"(?P<file>.+\.parquet)#(?P<name>.+)\[(?P<row>\d{1,18})\]", re.DOTALL)
_BUFFER = 1 << 20
"""Read buffer for Parquet files in bytes."""
_COMPRESSED = {b"\x1f\x8b": "gzip -d", b"BZh": "bzip2 -d", b"\xfd7zXZ": "xz -d", b"\x28\xb5\x2f\xfd": "zstd -d"}
"""Magic bytes of compressed files, and the commands to unpack them."""
_BLOCK = 512
"""Bytes of a tar header. A block of zeros marks the end of an archive."""


def span_address(file: str, name: str, offset: int, length: int) -> str:
    """Build the address of a range of bytes in a file.

    >>> span_address("a.tar", "dog.wav", 512, 1044)
    'a.tar#dog.wav@512+1044'
    """
    return f"{file}#{name.replace('#', '_')}@{offset}+{length}"


def cell_address(file: str, column: str, row: int) -> str:
    """Build the address of a cell of a Parquet file. Rows count from 0."""
    return f"{file}#{column}[{row}]"


def _parse(path: str) -> re.Match[str] | None:
    return (_SPAN.fullmatch(path) or _CELL.fullmatch(path)) if "#" in path else None


def split_address(path: str) -> tuple[str, str | None]:
    """Split an address into a file and the place inside it. The place of a plain file is ``None``.

    >>> split_address("a.tar#dog.wav@512+1044")
    ('a.tar', '@512+1044')
    >>> split_address("C#.wav")
    ('C#.wav', None)
    """
    address = _parse(path)
    if address is None:
        return path, None
    if address.re is _CELL:
        return address["file"], path[address.end("file") :]
    return address["file"], path[address.end("name") :]


def resolve_address(path: str, folder: Path) -> str:
    """Make a path or the file of an address absolute. Relative paths refer to a folder.

    >>> resolve_address("a/../b.tar#x/../dog.wav@512+1044", Path("/sets"))
    '/sets/b.tar#x/../dog.wav@512+1044'
    """
    file = split_address(path)[0]
    return os.path.normpath(folder / Path(file).expanduser()) + path[len(file) :]


def recording_name(path: str) -> str:
    """Return the name of a recording, with its suffix: the path of a file, or the name in an address."""
    address = _parse(path)
    return path if address is None else address["name"]


def load_source(path: str) -> str | io.BytesIO:
    """Return a source for decoders: the path of a file, or the bytes at an address.

    Raises:
        DataError: the file is missing or damaged, or the address contains no recording.
    """
    address = _parse(path)
    if address is None:
        with reading(path), contextlib.suppress(FileNotFoundError):  # the decoder reports it
            check_regular(Path(path).stat())
        return path
    if not Path(address["file"]).is_file():
        raise DataError(f"{path}: the file {address['file']} does not exist. Copy it there, or correct the path")
    with reading(path):
        if address.re is _SPAN:
            return io.BytesIO(_read_span(path, Path(address["file"]), int(address["offset"]), int(address["length"])))
        return io.BytesIO(_encode_recording(_read_cell(address["file"], address["name"], int(address["row"])), path))


def _read_span(path: str, file: Path, offset: int, length: int) -> bytes:
    missing = offset + length - file.stat().st_size
    if missing > 0:  # before reading, because Python allocates memory for the length in the address
        raise DataError(
            f"{path}: {file} is truncated: the last {missing} bytes of the recording are missing. Copy the file again"
        )
    with file.open("rb") as stream:
        stream.seek(offset)
        return stream.read(length)


def _read_cell(file: str, column: str, row: int) -> Any:
    """Read a cell of a Parquet file as an Arrow scalar."""
    status = Path(file).stat()
    with _lock:
        reader = _open_column(file, column, status.st_mtime_ns, status.st_size)
        try:
            return reader.read(row)
        except BaseException:
            _open_column.cache_clear()  # after an error, the position of the reader is unknown
            raise


def _encode_recording(value: Any, path: str) -> bytes:
    """Return the recording in a cell as the bytes of an audio file. Samples become a wav file of float32 or int16.

    Raises:
        DataError: the cell is empty, or does not contain a recording.
    """
    if pa.types.is_struct(value.type):
        fields = {field.name for field in value.type}
        if value.is_valid and {"array", "sampling_rate"} <= fields and (array := value["array"]).is_valid:
            nested = pa.types.is_nested(array.values.type)
            samples = array.as_py() if nested else array.values.to_numpy(zero_copy_only=False)
            return encode_wav(samples, value["sampling_rate"].as_py(), path)
        value = value["bytes"] if value.is_valid and "bytes" in fields else pa.scalar(None)
    if not value.is_valid or not isinstance(value, pa.BinaryScalar | pa.LargeBinaryScalar):
        raise DataError(
            f"{path}: the cell contains {value.type if value.is_valid else 'nothing'}. A recording must be bytes, or a struct with "
            f"array and sampling_rate"
        )
    content: bytes = value.as_py()
    return content


def encode_wav(samples: Any, rate: Any, where: str) -> bytes:
    """Encode samples losslessly as a wav file.

    Args:
        samples: floats in -1..1, or int16: [samples] or [channels, samples].
        rate: sampling rate in Hz, an integer.
        where: name of the recording in messages.

    Raises:
        DataError: type or shape of the samples, or the rate, is invalid.
    """
    array = np.asarray(samples)
    is_int16 = array.dtype == np.int16
    valid_rate = isinstance(rate, int | np.integer) and rate >= 1
    if array.ndim not in (1, 2) or not (is_int16 or array.dtype.kind == "f") or not valid_rate:
        raise DataError(
            f"{where}: its array is {array.dtype} {list(array.shape)} and its sampling_rate {rate!r}. A recording must be an array "
            f"[samples] or [channels, samples] of floats in -1..1 or int16, with an integer rate in Hz"
        )
    file = io.BytesIO()
    array = array.T if is_int16 else array.T.astype(np.float32)
    soundfile.write(file, array, int(rate), format="WAV", subtype="PCM_16" if is_int16 else "FLOAT")
    return file.getvalue()


class _ColumnReader:
    """Reader of a column of a Parquet file. It reads forwards, because a row group has no random access to rows."""

    def __init__(self, file: str, column: str) -> None:
        import pyarrow.parquet as pq  # worker processes without Parquet files start faster

        self._file = pq.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False)
        self._column = column
        groups = [self._file.metadata.row_group(number).num_rows for number in range(self._file.num_row_groups)]
        self._starts = np.cumsum([0, *groups])
        self._group = -1
        self._next = 0
        self._rows: Iterator[pa.RecordBatch] = iter(())

    def read(self, row: int) -> Any:
        """Return the scalar of a row.

        Raises:
            DataError: the row does not exist.
        """
        if not 0 <= row < self._starts[-1]:
            raise DataError(
                f"the Parquet file has {self._starts[-1]} rows, no row {row}. Correct the row, counted from 0"
            )
        group = int(np.searchsorted(self._starts, row, "right")) - 1
        if group != self._group or row < self._next:
            pa.default_memory_pool().release_unused()  # frees the last page, which may have a hundred megabytes
            self._rows = self._file.iter_batches(1, row_groups=[group], columns=[self._column], use_threads=False)
            self._group, self._next = group, int(self._starts[group])
        skipped = row - self._next
        value = next(itertools.islice(self._rows, skipped, None)).column(0)[0]
        self._next = row + 1
        if self._next == self._starts[group + 1]:
            self._rows, self._group = iter(()), -1  # frees the last page
        return value


_lock = threading.Lock()


@functools.lru_cache(maxsize=1)  # a reader keeps a page in memory, which may be a whole row group
def _open_column(file: str, column: str, changed: int, size: int) -> _ColumnReader:
    """Open a column. The cache key includes time of change and size, so that a changed file is opened again."""
    return _ColumnReader(file, column)


@contextlib.contextmanager
def open_binary(source: str | io.BytesIO) -> Iterator[tuple[Any, int]]:
    """Open a source of :func:`load_source` as a binary file, and return its size in bytes."""
    if isinstance(source, str):
        with Path(source).open("rb") as file:
            yield file, Path(source).stat().st_size
    else:
        source.seek(0)
        yield source, len(source.getbuffer())
        source.seek(0)


def list_tar(path: Path, accept: Callable[[str], bool]) -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """List the files in a tar archive without reading their contents.

    Args:
        path: the archive.
        accept: returns whether to list the file with a name.

    Yields:
        Name, address, and a function that reads the content. The function is valid until the next file.

    Raises:
        DataError: the archive is missing, compressed, damaged, or not a tar file; or a listed file is a link, or its name is not
            UTF-8.
    """
    with reading(path, "cannot be read as a tar archive"), open_regular(path) as file:
        head = file.read(8)
        for magic, command in _COMPRESSED.items():
            if head.startswith(magic):
                raise DataError(
                    f"{path}: it is compressed, so each access would unpack earlier recordings. Unpack it with {command}; "
                    f"the tar archive itself may stay"
                )
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while (info := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # otherwise the library keeps all headers in memory
                end = info.offset_data + info.size
                if end > size:
                    raise DataError(
                        f"{path}: truncated: its member {escape_path(info.name)} ends at byte {end}, but the file has {size} "
                        f"bytes. Copy the archive again"
                    )
                if (info.isreg() or info.issym() or info.islnk()) and not info.issparse() and accept(info.name):
                    _check_member(info, path)
                    address = span_address(str(path), info.name, info.offset_data, info.size)
                    yield (
                        info.name,
                        address,
                        functools.partial(os.pread, file.fileno(), info.size, info.offset_data),
                    )
            file.seek(archive.offset)
            if file.read(_BLOCK) != bytes(_BLOCK):  # the library treats damage as the end of the archive
                raise DataError(
                    f"{path}: truncated or damaged: byte {archive.offset} starts neither a member nor the end of an archive. "
                    f"Copy the archive again"
                )


def _check_member(info: tarfile.TarInfo, path: Path) -> None:
    name = escape_path(info.name)
    if name != info.name:
        raise DataError(f"{path}: the name of its member {name} is not UTF-8. Rename the member")
    if not info.isreg():
        raise DataError(
            f"{path}: its member {name} is a link to {escape_path(info.linkname)} without content. Pack the files again with tar "
            f"--dereference --hard-dereference"
        )
