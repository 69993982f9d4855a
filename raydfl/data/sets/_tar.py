"""Members of a tar archive and where they lie, without reading more than its headers."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from raydfl.core.errors import DataError
from raydfl.core.files import open_regular
from raydfl.data.manifest import shown_name
from raydfl.data.packed import span_address

_COMPRESSED = {b"\x1f\x8b": "gzip -d", b"BZh": "bzip2 -d", b"\xfd7zXZ": "xz -d", b"\x28\xb5\x2f\xfd": "zstd -d"}
"""First bytes of compressed files, and the command that unpacks each."""
_BLOCK = 512
"""Bytes of a header; zeros are the end."""


@dataclass(frozen=True, slots=True)
class Member:
    """A file in an archive."""

    name: str
    address: str
    """See raydfl.data.packed."""
    content: Callable[[], bytes]
    """Reads it; only until the next member is asked for."""


def members(path: Path) -> Iterator[Member]:
    """Yield the files in a tar archive, in their order; one at a time is in memory.

    Raises:
        DataError: it is missing, compressed, truncated, or no tar archive; or a member's name is not UTF-8.
    """
    try:
        with open_regular(path) as file:
            head = file.read(8)
            for magic, command in _COMPRESSED.items():
                if head.startswith(magic):
                    raise DataError(
                        f"{path}: it is compressed: what lies in it can only be reached by reading all that stands before; unpack "
                        f"it with {command}, the recordings in it stay packed"
                    )
            size = file.seek(0, 2)
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as archive:
                while (info := archive.next()) is not None:
                    archive.members = []  # type: ignore[attr-defined]  # it would keep all of them
                    end = info.offset_data + info.size
                    if end > size:
                        raise DataError(
                            f"{path}: truncated: its member {shown_name(info.name)} ends at byte {end}, and the file has {size}"
                        )
                    if info.isreg() and not info.issparse():
                        yield _member(path, archive, info)
                file.seek(archive.offset)
                if file.read(_BLOCK) != bytes(_BLOCK):  # the library takes damage for the end
                    raise DataError(
                        f"{path}: truncated or damaged: at byte {archive.offset} stands neither a member nor the end of an archive"
                    )
    except tarfile.TarError as error:
        raise DataError(f"{path}: it is truncated, or no tar archive: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _member(path: Path, archive: tarfile.TarFile, info: tarfile.TarInfo) -> Member:
    try:
        info.name.encode()
    except UnicodeEncodeError:
        raise DataError(f"{path}: the name of its member {shown_name(info.name)} is not UTF-8; rename it") from None
    address = span_address(str(path), info.name, info.offset_data, info.size)

    def content() -> bytes:
        opened = archive.extractfile(info)
        return b"" if opened is None else opened.read()

    return Member(info.name, address, content)
