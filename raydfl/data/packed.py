"""Recordings inside larger files: the address of each, reading it, and listing the files of a tar archive.

An address stands wherever the path of a file may stand: in the column ``path`` of a manifest, in the column of a view, on the
command line.

- ``FILE#NAME@OFFSET+LENGTH``: bytes of a file, such as a tar archive. NAME is the recording's name, for people.
- ``FILE.parquet#COLUMN[ROW]``: a cell of a Parquet file, rows counted from 0. It holds an encoded recording (bytes, or a struct
  with ``bytes``), or samples (a struct with ``array``, floats or int16, [samples] or [channels, samples], and ``sampling_rate``).

Memory holds one recording and, of a Parquet file, one page, which is at most a row group.
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
from raydfl.data.manifest import shown_name

_SPAN = re.compile(r"(?P<file>.+)#(?P<name>.*)@(?P<offset>\d{1,18})\+(?P<length>\d{1,18})", re.DOTALL)
_CELL = re.compile(r"(?P<file>.+\.parquet)#(?P<name>.+)\[(?P<row>\d{1,18})\]", re.DOTALL)
_BUFFER = 1 << 20
"""Bytes of a Parquet file that are read at a time."""
_COMPRESSED = {b"\x1f\x8b": "gzip -d", b"BZh": "bzip2 -d", b"\xfd7zXZ": "xz -d", b"\x28\xb5\x2f\xfd": "zstd -d"}
"""First bytes of compressed files, and the command that unpacks each."""
_BLOCK = 512
"""Bytes of a header of a tar archive; a block of zeros is its end."""


def span_address(file: str, name: str, offset: int, length: int) -> str:
    """Return the address of bytes of a file.

    >>> span_address("a.tar", "dog.wav", 512, 1044)
    'a.tar#dog.wav@512+1044'
    """
    return f"{file}#{name.replace('#', '_')}@{offset}+{length}"


def cell_address(file: str, column: str, row: int) -> str:
    """Return the address of a cell of a Parquet file; rows are counted from 0."""
    return f"{file}#{column}[{row}]"


def _parsed(path: str) -> re.Match[str] | None:
    return (_SPAN.fullmatch(path) or _CELL.fullmatch(path)) if "#" in path else None


def file_and_place(path: str) -> tuple[str, str | None]:
    """Split an address into a file and a place inside it; the place of a plain file is ``None``.

    >>> file_and_place("a.tar#dog.wav@512+1044")
    ('a.tar', '@512+1044')
    >>> file_and_place("C#.wav")
    ('C#.wav', None)
    """
    found = _parsed(path)
    if found is None:
        return path, None
    if found.re is _CELL:
        return found["file"], path[found.end("file") :]
    return found["file"], path[found.end("name") :]


def absolute_path(path: str, folder: Path) -> str:
    """Return a path, or an address with its file, relative to a folder as an absolute one.

    >>> absolute_path("a/../b.tar#x/../dog.wav@512+1044", Path("/sets"))
    '/sets/b.tar#x/../dog.wav@512+1044'
    """
    file = file_and_place(path)[0]
    return os.path.normpath(folder / Path(file).expanduser()) + path[len(file) :]


def own_name(path: str) -> str:
    """Return the path of a file, and of an address the recording's own name, which may have an ending."""
    found = _parsed(path)
    return path if found is None else found["name"]


def readable(path: str) -> str | io.BytesIO:
    """Return what a decoder can open: the path of a file as it is, or the bytes that an address names.

    Raises:
        DataError: the file is missing or damaged, or there is no recording at that place.
    """
    found = _parsed(path)
    if found is None:
        try:
            check_regular(Path(path).stat())
        except FileNotFoundError:
            pass  # the decoder reports it
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from error
        return path
    if not Path(found["file"]).is_file():
        raise DataError(f"{path}: there is no such file as {found['file']}")
    try:
        if found.re is _SPAN:
            return io.BytesIO(_span(path, Path(found["file"]), int(found["offset"]), int(found["length"])))
        return io.BytesIO(_encoded(_cell(found["file"], found["name"], int(found["row"])), path))
    except (OSError, pa.ArrowException) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise DataError(f"{path}: cannot be read: {reason}") from error


def _span(path: str, file: Path, offset: int, length: int) -> bytes:
    missing = offset + length - file.stat().st_size
    if missing > 0:  # before reading: Python would reserve memory for as many bytes as the address says
        raise DataError(f"{path}: truncated: {file} ends {missing} bytes before the recording does")
    with file.open("rb") as opened:
        opened.seek(offset)
        return opened.read(length)


def _cell(file: str, column: str, row: int) -> Any:
    """Return an Arrow scalar."""
    status = Path(file).stat()
    with _lock:
        cells = _opened(file, column, status.st_mtime_ns, status.st_size)
        try:
            return cells.at(row)
        except BaseException:
            _opened.cache_clear()  # nobody knows to where it has been read
            raise


def _encoded(value: Any, path: str) -> bytes:
    """Return the bytes of the recording in a cell; samples become a wav file with the same numbers, float32 or int16.

    Raises:
        DataError: the cell is empty, or of another kind.
    """
    if pa.types.is_struct(value.type):
        fields = {field.name for field in value.type}
        if value.is_valid and {"array", "sampling_rate"} <= fields and (array := value["array"]).is_valid:
            nested = pa.types.is_nested(array.values.type)
            samples = array.as_py() if nested else array.values.to_numpy(zero_copy_only=False)
            return samples_as_file(samples, value["sampling_rate"].as_py(), path)
        value = value["bytes"] if value.is_valid and "bytes" in fields else pa.scalar(None)
    if not value.is_valid or not isinstance(value, pa.BinaryScalar | pa.LargeBinaryScalar):
        raise DataError(
            f"{path}: the cell holds {value.type if value.is_valid else 'nothing'}; a recording is bytes, or an array with its "
            f"sampling_rate"
        )
    found: bytes = value.as_py()
    return found


def samples_as_file(samples: Any, rate: Any, where: str) -> bytes:
    """Return samples as the bytes of a wav file with the same numbers.

    Args:
        samples: floats, -1..1, or int16: [samples] or [channels, samples].
        rate: Hz, a whole number.
        where: what messages call the recording.

    Raises:
        DataError: they are something else.
    """
    array = np.asarray(samples)
    whole = array.dtype == np.int16
    known = isinstance(rate, int | np.integer) and rate >= 1
    if array.ndim not in (1, 2) or not (whole or array.dtype.kind == "f") or not known:
        raise DataError(
            f"{where}: its array is {array.dtype} {list(array.shape)} and its sampling_rate {rate!r}; a recording is an array "
            f"[samples] or [channels, samples] of floats, -1..1, or int16, and a whole number of Hz"
        )
    file = io.BytesIO()
    array = array.T if whole else array.T.astype(np.float32)
    soundfile.write(file, array, int(rate), format="WAV", subtype="PCM_16" if whole else "FLOAT")
    return file.getvalue()


class _Cells:
    """A column of a Parquet file that is read forwards: the rows of a row group cannot be reached one by one."""

    def __init__(self, file: str, column: str) -> None:
        import pyarrow.parquet as pq  # helping processes start sooner without it

        self._file = pq.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False)
        self._column = column
        groups = [self._file.metadata.row_group(number).num_rows for number in range(self._file.num_row_groups)]
        self._starts = np.cumsum([0, *groups])
        self._group = -1
        self._next = 0
        self._rows: Iterator[pa.RecordBatch] = iter(())

    def at(self, row: int) -> Any:
        """Return the scalar of a row.

        Raises:
            DataError: there is no such row.
        """
        if not 0 <= row < self._starts[-1]:
            raise DataError(f"the Parquet file has {self._starts[-1]} rows, no row {row}")
        group = int(np.searchsorted(self._starts, row, "right")) - 1
        if group != self._group or row < self._next:
            pa.default_memory_pool().release_unused()  # the last page, which may be a hundred megabytes
            self._rows = self._file.iter_batches(1, row_groups=[group], columns=[self._column], use_threads=False)
            self._group, self._next = group, int(self._starts[group])
        skipped = row - self._next
        value = next(itertools.islice(self._rows, skipped, None)).column(0)[0]
        self._next = row + 1
        if self._next == self._starts[group + 1]:
            self._rows, self._group = iter(()), -1  # its last page is needed no more
        return value


_lock = threading.Lock()


@functools.lru_cache(maxsize=1)  # each keeps a page, and that may be a whole row group
def _opened(file: str, column: str, changed: int, size: int) -> _Cells:
    """Open a column once, as long as the file does not change and no other is read."""
    return _Cells(file, column)


@contextlib.contextmanager
def binary(source: str | io.BytesIO) -> Iterator[tuple[Any, int]]:
    """Open what :func:`readable` gave: a binary file and its size in bytes."""
    if isinstance(source, str):
        with Path(source).open("rb") as file:
            yield file, Path(source).stat().st_size
    else:
        source.seek(0)
        yield source, len(source.getbuffer())
        source.seek(0)


def tar_members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """Yield the files in a tar archive, in their order: name, address, and a function that reads the content.

    Only headers are read. The function works until the next file.

    Args:
        wanted: decides by its name whether a file is listed.

    Raises:
        DataError: the archive is missing, compressed, truncated, or something else; or a listed file is a link, or has a name
            that is not UTF-8.
    """
    try:
        with open_regular(path) as file:
            head = file.read(8)
            for magic, command in _COMPRESSED.items():
                if head.startswith(magic):
                    raise DataError(
                        f"{path}: it is compressed, so a recording in it cannot be read without everything before it; unpack it "
                        f"with {command}, the recordings stay packed"
                    )
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as archive:
                while (info := archive.next()) is not None:
                    archive.members = []  # type: ignore[attr-defined]  # it would keep all of them
                    end = info.offset_data + info.size
                    if end > size:
                        raise DataError(
                            f"{path}: truncated: its member {shown_name(info.name)} ends at byte {end}, and the file has {size}"
                        )
                    if (info.isreg() or info.issym() or info.islnk()) and not info.issparse() and wanted(info.name):
                        _check_member(info, path)
                        address = span_address(str(path), info.name, info.offset_data, info.size)
                        yield (
                            info.name,
                            address,
                            functools.partial(os.pread, file.fileno(), info.size, info.offset_data),
                        )
                file.seek(archive.offset)
                if file.read(_BLOCK) != bytes(_BLOCK):  # the library takes damage for the end
                    raise DataError(
                        f"{path}: truncated or damaged: at byte {archive.offset} stands neither a member nor the end of an archive"
                    )
    except tarfile.TarError as error:
        raise DataError(f"{path}: it is truncated, or no tar archive: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _check_member(info: tarfile.TarInfo, path: Path) -> None:
    name = shown_name(info.name)
    if name != info.name:
        raise DataError(f"{path}: the name of its member {name} is not UTF-8; rename it")
    if not info.isreg():
        raise DataError(
            f"{path}: its member {name} is a link to {shown_name(info.linkname)}, and has no content of its own; pack the files "
            f"again with tar --dereference --hard-dereference"
        )
