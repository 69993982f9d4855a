"""Sets whose images lie in arrays, thousands in one file: their manifest, and reading a file once for all its images."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, TypeVarTuple

import numpy as np
import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import DataError
from raydfl.data.dataset import Dataset
from raydfl.data.manifest import make_manifest
from raydfl.data.sets._files import find_root, wrong_layout

Rest = TypeVarTuple("Rest")
T = TypeVar("T")
_REMEMBERED = 8
"""Files whose content a process keeps."""


@plain_dataclass(frozen=True, slots=True)
class ArrayFile:
    """A file of images, with their labels."""

    images: Path
    labels: Path
    """The file that holds them; it may be the same."""
    clips: str
    """What the images are called, before their number."""
    split: str


@dataclass(frozen=True, kw_only=True)
class ArraySet(Dataset):
    """Base of sets whose images lie in arrays; nobody owns them."""

    images: ClassVar[bool] = True
    below: ClassVar[tuple[str, ...]] = ()
    """Folders below the root in which the files may lie as well: torchvision's."""

    root: Annotated[Path, Field(description="folder that holds the files, or torchvision's folder above it")]
    names: Annotated[
        tuple[str, ...] | None,
        Field(description="names of the classes, in the order of their numbers; null: the published names"),
    ] = None

    @property
    def published(self) -> tuple[str, ...]:
        """The names of the classes, in the order of their numbers; empty: the numbers."""
        return ()

    def files(self, folder: Path) -> Iterable[ArrayFile]:
        """Return the set's files in a folder, in the order in which the manifest has them; none where they are not there.

        Raises:
            DataError: one is there and another that belongs to it is not.
        """
        raise NotImplementedError(f"{type(self).__name__} must say in files() which files it has")

    def read_images(self, file: Path) -> np.ndarray:
        """Return all images of a file: uint8 [images, rows, columns] or [images, rows, columns, 3].

        Raises:
            DataError: it is missing, truncated, or something else.
        """
        raise NotImplementedError(f"{type(self).__name__} must read a file in read_images()")

    def read_labels(self, file: Path) -> np.ndarray:
        """Return the numbers of the classes of a file's images, whole numbers [images]; errors as of :meth:`read_images`."""
        raise NotImplementedError(f"{type(self).__name__} must read a file in read_labels()")

    def manifest(self) -> pa.Table:
        """Extra column: ``number`` (int64), of the image in its file. Official split where there are files of both."""
        root = find_root(self.root, self.card)
        found = [[*self.files(root / name)] for name in ("", *self.below)]
        files = next((each for each in found if each), [])
        if not files:
            raise wrong_layout(root, self.card, "there is no file of images")
        official = len({file.split for file in files}) > 1
        rows: list[dict[str, Any]] = []
        for file in files:
            labels, count = self.read_labels(file.labels), len(self.read_images(file.images))
            if len(labels) != count:
                place = f"{file.images} holds {count} images and"
                raise DataError(
                    f"{place} {file.labels} {len(labels)} labels: they do not belong together; fetch both"
                    if file.labels != file.images
                    else f"{place} {len(labels)} labels; it is damaged: fetch it again"
                )
            texts = {label: self._name(label, file.labels) for label in np.unique(labels).tolist()}
            rows += [
                {
                    "clip": f"{file.clips}/{number:05d}",
                    "path": str(file.images),
                    "label": texts[label],
                    "split": file.split if official else None,
                    "number": number,
                }
                for number, label in enumerate(labels.tolist())
            ]
        return make_manifest(rows, f"{self.card.title} in {root}")

    def _name(self, label: int, file: Path) -> str:
        names = self.published if self.names is None else self.names
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
        image: np.ndarray = self.read_images(Path(row["path"]))[row["number"]]
        return image

    def part(self, row: Mapping[str, Any]) -> str | None:
        """See :class:`Dataset`."""
        return str(row["number"])


def once_for_each_file(read: Callable[[Path, *Rest], T]) -> Callable[[Path, *Rest], T]:
    """Return ``read`` that remembers what it read of the last files, as long as these do not change.

    It then raises a DataError for a file that cannot be opened.
    """

    @functools.lru_cache(maxsize=_REMEMBERED)
    def remembered(path: Path, changed: int, *rest: *Rest) -> T:
        return read(path, *rest)

    @functools.wraps(read)
    def found(path: Path, *rest: *Rest) -> T:
        try:
            return remembered(path, path.stat().st_mtime_ns, *rest)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error

    return found


def checked_images(path: Path, images: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return images, read-only, if they are such.

    Args:
        shape: of one image.

    Raises:
        DataError: they are not an array of bytes of that shape.
    """
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != shape:
        what = f"{images.dtype} {list(images.shape)}" if isinstance(images, np.ndarray) else type(images).__name__
        raise DataError(
            f"{path}: its images are {what}, not bytes [images, {', '.join(map(str, shape))}]; fetch it again"
        )
    images.flags.writeable = False
    return images


def checked_labels(path: Path, labels: Any) -> np.ndarray:
    """Return labels as int64 [images], if they are whole numbers.

    Raises:
        DataError: they are not.
    """
    whole = isinstance(labels, list) and all(isinstance(label, int) for label in labels)
    found = np.asarray(labels) if whole or isinstance(labels, np.ndarray) else np.array(None)
    if found.dtype.kind not in "iu" or found.ndim != 1:
        raise DataError(f"{path}: its labels are no list of whole numbers; fetch it again")
    return found.astype(np.int64)
