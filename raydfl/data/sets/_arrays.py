"""Sets whose images are stored in arrays, thousands in one file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.sets._files import FileDataset, wrong_layout

T = TypeVar("T")
_REMEMBERED = 8
"""Files whose content a process keeps."""


@dataclass(frozen=True, kw_only=True)
class ArraySet(FileDataset):
    """Base of sets whose images are stored in arrays; nobody owns them. Extra column: ``number`` (int64), of the image in its file.

    The split is official if there are files of both.
    """

    images: ClassVar[bool] = True
    parts: ClassVar[Mapping[str, str]] = {}
    """Beginnings of the files' names, and the split of each. The options stand in braces. Files of one split belong together."""
    endings: ClassVar[tuple[str, ...]] = ("",)
    """Endings of the names of files with images; one is enough."""
    below: ClassVar[tuple[str, ...]] = ()
    """Folders below the root that may hold the files as well: torchvision's."""
    published: ClassVar[Sequence[str]] = ()
    """Names of the classes, in the order of their numbers; empty: the numbers."""

    names: Annotated[
        tuple[str, ...] | None,
        Field(
            description="names of the classes, in the order of their numbers; null: the published names, or the numbers"
        ),
    ] = None

    def read_arrays(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        """Read a file with images.

        Returns:
            Images, uint8 [images, rows, columns] or [images, rows, columns, 3], and the numbers of their classes, int [images].

        Raises:
            DataError: a file is missing, truncated, or something else.
        """
        raise NotImplementedError(f"{type(self).__name__} must read a file in read_arrays()")

    def class_names(self) -> Sequence[str]:
        """Return the names of the classes, in the order of their numbers; empty: the numbers."""
        return self.published if self.names is None else self.names

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the images, file by file."""
        found = ([*self._files(root / name)] for name in ("", *self.below))
        files = next(filter(None, found), None)
        if files is None:
            raise wrong_layout(root, self.card, "there is no file of images")
        official = len({split for *_, split in files}) > 1
        rows: list[dict[str, Any]] = []
        for file, part, split in files:
            images, labels = self.read_arrays(file)
            if len(labels) != len(images):
                raise DataError(
                    f"{file} holds {len(images)} images and its labels are {len(labels)}: they do not belong together; fetch the "
                    f"set again"
                )
            names = {label: self._name(label, file) for label in np.unique(labels).tolist()}
            rows += [
                {
                    "clip": f"{part}/{number:05d}",
                    "path": str(file),
                    "label": names[label],
                    "split": split if official else None,
                    "number": number,
                }
                for number, label in enumerate(labels.tolist())
            ]
        return rows

    def _files(self, folder: Path) -> Iterator[tuple[Path, str, str]]:
        """Yield the files with images in a folder, their parts and splits."""
        there: dict[str, Path | None] = {}
        for part, split in self.parts.items():
            stem = part.format_map(vars(self))
            paths = (folder / f"{stem}{ending}" for ending in self.endings)
            there[stem] = next((path for path in paths if path.is_file()), None)
            if (path := there[stem]) is not None:
                yield path, stem, split
        for split in set(self.parts.values()):
            own = [stem for stem, other in zip(there, self.parts.values(), strict=True) if other == split]
            missing = [stem for stem in own if there[stem] is None]
            if 0 < len(missing) < len(own):
                raise wrong_layout(folder, self.card, f"there is no {missing[0]}")

    def _name(self, label: int, file: Path) -> str:
        names = self.class_names()
        if not names:
            return str(label)
        if not 0 <= label < len(names):
            known = "the set" if self.names is None else "data.names"
            raise DataError(
                f"{file} has the label {label}, and {known} has {len(names)} names; give one for each class"
            )
        return names[label]

    def image(self, row: Mapping[str, Any]) -> np.ndarray:
        """See :class:`Dataset`."""
        image: np.ndarray = self.read_arrays(Path(row["path"]))[0][row["number"]]
        return image

    def part(self, row: Mapping[str, Any]) -> str | None:
        """See :class:`Dataset`."""
        return str(row["number"])


def read_once(read: Callable[..., T], path: Path, *options: int) -> T:
    """Return ``read(path, *options)``, remembered for the last files as long as these do not change.

    Raises:
        DataError: the file cannot be opened.
    """
    try:
        found: T = _remembered(read, path, path.stat().st_mtime_ns, *options)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return found


@functools.lru_cache(maxsize=_REMEMBERED)
def _remembered(read: Callable[..., Any], path: Path, changed: int, *options: int) -> Any:
    return read(path, *options)


def check_arrays(path: Path, images: Any, labels: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return images, read-only, and labels, int64 [images].

    Args:
        path: their file, for messages.
        images: bytes [images, *shape].
        labels: an array or a list of whole numbers.
        shape: shape of one image.

    Raises:
        DataError: they are something else.
    """
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != shape:
        what = f"{images.dtype} {list(images.shape)}" if isinstance(images, np.ndarray) else type(images).__name__
        raise DataError(
            f"{path}: its images are {what}, not bytes [images, {', '.join(map(str, shape))}]; fetch it again"
        )
    if isinstance(labels, list) and all(isinstance(label, int) for label in labels):
        labels = np.asarray(labels)
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise DataError(f"{path}: its labels are no list of whole numbers; fetch it again")
    images.flags.writeable = False
    return images, labels.astype(np.int64)
