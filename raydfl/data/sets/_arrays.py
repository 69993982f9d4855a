"""Data sets that store thousands of images in one array file."""

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
"""Number of files that a process caches."""


@dataclass(frozen=True, kw_only=True)
class ArraySet(FileDataset):
    """Base class of sets with images in array files, without owners. Extra column: ``number`` (int64), the index in the file.

    The official split applies if files of both splits exist.
    """

    images: ClassVar[bool] = True
    parts: ClassVar[Mapping[str, str]] = {}
    """Split by stem of the file. Braces contain options. Either all files of a split exist, or none."""
    endings: ClassVar[tuple[str, ...]] = ("",)
    """Accepted suffixes of files with images."""
    below: ClassVar[tuple[str, ...]] = ()
    """Alternative folders below the root, as torchvision creates them."""
    published: ClassVar[Sequence[str]] = ()
    """Class names in the order of the class indices. Empty: use the indices."""

    names: Annotated[
        tuple[str, ...] | None,
        Field(description="Class names in the order of the class indices. null: the published names, or the indices."),
    ] = None

    def read_arrays(self, file: Path) -> tuple[np.ndarray, np.ndarray]:
        """Read a file with images.

        Returns:
            Images, uint8 [images, rows, columns] or [images, rows, columns, 3], and class indices, int [images].

        Raises:
            DataError: a file is missing, truncated, or has another format.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement read_arrays()")

    def class_names(self) -> Sequence[str]:
        """Return the class names in the order of the class indices, or an empty sequence to use the indices."""
        return self.published if self.names is None else self.names

    def rows(self, root: Path) -> list[dict[str, Any]]:
        """List the images, file by file."""
        candidates = ([*self._files(root / name)] for name in ("", *self.below))
        files = next(filter(None, candidates), None)
        if files is None:
            raise wrong_layout(root, self.card, "there is no file of images")
        official = len({split for *_, split in files}) > 1
        rows: list[dict[str, Any]] = []
        for file, part, split in files:
            images, labels = self.read_arrays(file)
            if len(labels) != len(images):
                raise DataError(
                    f"{file} has {len(images)} images, but its label file has {len(labels)} labels. Download both files again."
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
        """Yield path, stem and split of the files with images in a folder."""
        paths_by_stem: dict[str, Path | None] = {}
        for part, split in self.parts.items():
            stem = part.format_map(vars(self))
            candidates = (folder / f"{stem}{ending}" for ending in self.endings)
            paths_by_stem[stem] = next((path for path in candidates if path.is_file()), None)
            if (path := paths_by_stem[stem]) is not None:
                yield path, stem, split
        for split in set(self.parts.values()):
            stems = [stem for stem, of_stem in zip(paths_by_stem, self.parts.values(), strict=True) if of_stem == split]
            missing = [stem for stem in stems if paths_by_stem[stem] is None]
            if 0 < len(missing) < len(stems):
                raise wrong_layout(folder, self.card, f"there is no {missing[0]}")

    def _name(self, label: int, file: Path) -> str:
        names = self.class_names()
        if not names:
            return str(label)
        if not 0 <= label < len(names):
            known = "the set" if self.names is None else "data.names"
            raise DataError(
                f"{file} has the label {label}, but {known} has {len(names)} class names. Name every class in data.names."
            )
        return names[label]

    def image(self, row: Mapping[str, Any]) -> np.ndarray:
        """Read one image: uint8 [rows, columns] or [rows, columns, 3]."""
        image: np.ndarray = self.read_arrays(Path(row["path"]))[0][row["number"]]
        return image

    def part(self, row: Mapping[str, Any]) -> str | None:
        """Return the index of the image in its file."""
        return str(row["number"])


def read_once(read: Callable[..., T], path: Path, *options: int) -> T:
    """Return ``read(path, *options)``, cached for recently read and unchanged files.

    Raises:
        DataError: the file cannot be opened.
    """
    try:
        content: T = _read_cached(read, path, path.stat().st_mtime_ns, *options)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return content


@functools.lru_cache(maxsize=_REMEMBERED)
def _read_cached(read: Callable[..., Any], path: Path, changed: int, *options: int) -> Any:
    return read(path, *options)


def check_arrays(path: Path, images: Any, labels: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Validate images and labels of a file.

    Args:
        path: the file, for messages.
        images: uint8 [images, *shape].
        labels: integers [images], as an array or a list.
        shape: shape of one image.

    Returns:
        Read-only images, and labels as int64 [images].

    Raises:
        DataError: wrong type, dtype or shape.
    """
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != shape:
        what = f"{images.dtype} {list(images.shape)}" if isinstance(images, np.ndarray) else type(images).__name__
        raise DataError(
            f"{path}: its images are {what}, not bytes [images, {', '.join(map(str, shape))}]. Download the file again."
        )
    if isinstance(labels, list) and all(isinstance(label, int) for label in labels):
        labels = np.asarray(labels)
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise DataError(f"{path}: the labels are not a list of integers. Download the file again.")
    images.flags.writeable = False
    return images, labels.astype(np.int64)
