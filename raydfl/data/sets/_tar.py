"""Members of a tar archive and where they lie, without reading more than its headers."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

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
    """A file in an archive, or a link."""

    path: Path
    """The archive."""
    file: BinaryIO
    """The archive, opened; closed when the next member is asked for."""
    info: tarfile.TarInfo

    @property
    def name(self) -> str:
        """Its name in the archive."""
        return self.info.name

    @property
    def address(self) -> str:
        """Its address (raydfl.data.packed).

        Raises:
            DataError: the member is a link.
        """
        self._check()
        return span_address(str(self.path), self.name, self.info.offset_data, self.info.size)

    def content(self) -> bytes:
        """Read the file.

        Raises:
            DataError: the member is a link.
        """
        self._check()
        self.file.seek(self.info.offset_data)
        return self.file.read(self.info.size)

    def _check(self) -> None:
        if not self.info.isreg():
            raise DataError(
                f"{self.path}: its member {self.name} is a link to {shown_name(self.info.linkname)}, and has no content of its "
                f"own; pack the files again with tar --dereference --hard-dereference"
            )


def members(path: Path) -> Iterator[Member]:
    """Yield the files and links in a tar archive, in their order; one at a time is in memory.

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
                    if (info.isreg() and not info.issparse()) or info.issym() or info.islnk():
                        _check_name(path, info.name)
                        yield Member(path, file, info)
                file.seek(archive.offset)
                if file.read(_BLOCK) != bytes(_BLOCK):  # the library takes damage for the end
                    raise DataError(
                        f"{path}: truncated or damaged: at byte {archive.offset} stands neither a member nor the end of an archive"
                    )
    except tarfile.TarError as error:
        raise DataError(f"{path}: it is truncated, or no tar archive: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _check_name(path: Path, name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"{path}: the name of its member {shown_name(name)} is not UTF-8; rename it") from None
