"""Sets with images stored in arrays, thousands in a file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.core.isolation import reading
from raydfl.data.sets._files import FileDataset, make_layout_error

T = TypeVar("T")
_CACHE_SIZE = 8
"""Number of files whose content a process keeps in memory."""


@dataclass(frozen=True, kw_only=True)
class ArraySet(FileDataset):
    """Base class of sets with images stored in arrays. Images have no owner.

    Extra column: ``number`` (int64), the position of the image in its file. The split is official if the root has files of both
    splits.
    """

    images: ClassVar[bool] = True
    parts: ClassVar[Mapping[str, str]] = {}
    """Split by start of a file's name, with options in braces. The set needs all files of a split, or none of them."""
    endings: ClassVar[tuple[str, ...]] = ("",)
    """Alternative endings of the names of image files."""
    below: ClassVar[tuple[str, ...]] = ()
    """Alternative folders of the files below the root, such as torchvision's."""
    published: ClassVar[Sequence[str]] = ()
    """Names of the classes in the order of their numbers. Empty: name the classes by their numbers."""

    names: Annotated[
        tuple[str, ...] | None,
        Field(
            description="Names of the classes in the order of their numbers. null: the published names, or the numbers."
        ),
    ] = None

    def read_arrays(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        """Read a file with images.

        Returns:
            Images, uint8 [images, rows, columns] or [images, rows, columns, 3], and the numbers of their classes, int [images].

        Raises:
            DataError: a file is missing, truncated, or of another type.
        """
        raise NotImplementedError(f"{type(self).__name__} must read a file in read_arrays()")

    def class_names(self) -> Sequence[str]:
        """Return the names of the classes in the order of their numbers. Empty: name the classes by their numbers."""
        return self.published if self.names is None else self.names

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the images, file by file."""
        candidates = ([*self._find_files(root / name)] for name in ("", *self.below))
        files = next(filter(None, candidates), None)
        if files is None:
            raise make_layout_error(root, self.card, "there is no file of images")
        official = len({split for *_, split in files}) > 1
        rows: list[dict[str, Any]] = []
        for file, part, split in files:
            images, labels = self.read_arrays(file)
            if len(labels) != len(images):
                raise DataError(f"{file} has {len(images)} images, but {len(labels)} labels. Download the set again")
            names = {label: self._get_name(label, file) for label in np.unique(labels).tolist()}
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

    def _find_files(self, folder: Path) -> Iterator[tuple[Path, str, str]]:
        """Yield the files with images in a folder, their parts and splits."""
        paths: dict[str, Path | None] = {}
        for part, split in self.parts.items():
            stem = part.format_map(vars(self))
            candidates = (folder / f"{stem}{ending}" for ending in self.endings)
            paths[stem] = next((path for path in candidates if path.is_file()), None)
            if (path := paths[stem]) is not None:
                yield path, stem, split
        for split in set(self.parts.values()):
            stems = [stem for stem, name in zip(paths, self.parts.values(), strict=True) if name == split]
            missing = [stem for stem in stems if paths[stem] is None]
            if 0 < len(missing) < len(stems):
                raise make_layout_error(folder, self.card, f"there is no {missing[0]}")

    def _get_name(self, label: int, file: Path) -> str:
        names = self.class_names()
        if not names:
            return str(label)
        if not 0 <= label < len(names):
            source = "the set" if self.names is None else "data.names"
            raise DataError(
                f"{file} has the label {label}, but {source} has {len(names)} names. Set data.names to a name for each class"
            )
        return names[label]

    def image(self, row: Mapping[str, Any]) -> np.ndarray:
        """Return an image of the file's array."""
        image: np.ndarray = self.read_arrays(Path(row["path"]))[0][row["number"]]
        return image

    def part(self, row: Mapping[str, Any]) -> str | None:
        """Return the number of the image in its file."""
        return str(row["number"])


def read_cached(read: Callable[..., T], path: Path, *options: int) -> T:
    """Call ``read(path, *options)``, and cache the results of the last files. A modified file is read again.

    Raises:
        DataError: the file cannot be opened.
    """
    with reading(path):
        content: T = _read_modified(read, path, path.stat().st_mtime_ns, *options)
    return content


@functools.lru_cache(maxsize=_CACHE_SIZE)  # the time of modification is part of the key
def _read_modified(read: Callable[..., Any], path: Path, modified: int, *options: int) -> Any:
    return read(path, *options)


def check_arrays(path: Path, images: Any, labels: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Check the content of a file with images and labels.

    Args:
        path: the file, for messages.
        images: expected as uint8 [images, *shape].
        labels: expected as integers [images], in an array or a list.
        shape: shape of an image.

    Returns:
        Images (read-only) and labels, int64 [images].

    Raises:
        DataError: images or labels have another type or shape.
    """
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != shape:
        what = f"{images.dtype} {list(images.shape)}" if isinstance(images, np.ndarray) else type(images).__name__
        raise DataError(
            f"{path}: its images are {what}, not bytes [images, {', '.join(map(str, shape))}]. Download the file again"
        )
    if isinstance(labels, list) and all(isinstance(label, int) for label in labels):
        labels = np.asarray(labels)
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise DataError(f"{path}: its labels are not a list of integers. Download the file again")
    images.flags.writeable = False  # read_cached shares the array between its callers
    return images, labels.astype(np.int64)
