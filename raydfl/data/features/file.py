"""Features from a file of the user's: one matrix of frames x bands for each clip, made with whatever model.

The matrices lie in a file or folder under the clips' ids:

- ``*.safetensors``: a tensor for each clip;
- ``*.npz``: an array for each clip, as ``numpy.savez`` writes them;
- a folder with ``CLIP.npy`` for each clip; an id with slashes is a path within it.

Only one clip's matrix is in memory at a time, whatever the size of the file; recordings are not opened at all.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
from pydantic import Field, model_validator
from safetensors import safe_open

from raydfl.core.errors import ConfigError, DataError
from raydfl.core.files import check_regular
from raydfl.core.progress import Progress
from raydfl.core.settings import Settings
from raydfl.data.features.digests import DIGEST_BYTES, UNREADABLE, file_digests
from raydfl.data.features.wave import Dtype, Frames, GivenNormalise, z_scored
from raydfl.data.noise import NOISELESS, Noise

_WAYS = "a .safetensors file, an .npz file, or a folder of CLIP.npy"
_FLOATS = ("float16", "float32", "float64")
_SHOWN = 3
"""Names of clips in the file that a message gives as examples."""


class FileFeatures(Settings):
    """Features that were made elsewhere: one matrix of frames x bands for each clip."""

    kind: Annotated[Literal["file"], Field(description="file: features that you made.")]
    path: Annotated[
        Path, Field(description=f"{_WAYS[0].upper()}{_WAYS[1:]}: a float array [frames, bands] for each clip id.")
    ]
    noisy_path: Annotated[
        Path | None,
        Field(
            description="The same for the clips with noise in them, of the kind and strength that data.corrupt.noise says; needed "
            "where that is set, and else not read."
        ),
    ] = None
    bands: Annotated[
        int,
        Field(ge=1, le=65_536, description="Numbers of a frame, in all clips. null: as in the file. 1 to 65536."),
    ]
    frames: Frames = None
    normalise: GivenNormalise = "none"
    dtype: Dtype = "float32"

    @model_validator(mode="before")
    @classmethod
    def _bands_of_the_file(cls, values: Any) -> Any:
        """Look into the file once: the configuration that a run keeps has the number."""
        if not isinstance(values, Mapping) or values.get("bands") is not None:
            return values
        if not isinstance(values.get("path"), str | Path):
            raise ConfigError(f"data.features.path is missing; it must be {_WAYS}")
        return {**values, "bands": _open(Path(values["path"])).bands()}

    def frames_of(self, seconds: np.ndarray) -> np.ndarray:
        """Return how many frames clips take in the cache, 0 where only the file knows: int64, of the shape of ``seconds``."""
        return np.full(seconds.shape, self.frames or 0, np.int64)

    def noisy_file(self) -> Path:
        """Return the file of the clips with noise.

        Raises:
            ConfigError: there is none.
        """
        if self.noisy_path is None:
            raise ConfigError(
                "data.corrupt.noise: features from a file come without recordings to add noise to; give the features of the clips "
                "with noise as data.features.noisy_path, or take the kind logmel or model"
            )
        return self.noisy_path

    def key(self) -> dict[str, Any]:
        """Return all that decides the numbers but for the files' content, for the key of the cache."""
        return self.model_dump(exclude={"path", "noisy_path"})


def needs_waves(what: str) -> ConfigError:
    """Return the error for ``what`` ("attack 'backdoor'"), which alters recordings, where there are only features."""
    return ConfigError(
        f"{what} alters recordings, and data.features of the kinds file and image have none: take the kind logmel, or model "
        "with the network that made the features"
    )


def read_features(settings: FileFeatures, clip: str, noisy: bool) -> np.ndarray:
    """Read one clip: float32 [frames, bands], cut but not padded, normalised where ``normalise`` is ``clip``.

    Raises:
        DataError: the file has no features of that clip, or they are not as they must be.
    """
    path = settings.noisy_file() if noisy else settings.path
    source = _opened(path, *_stamp(path))
    if not isinstance(source, _Folder) and clip not in source.names:
        raise DataError(source.explain_absence(clip))
    found = source.load(clip)
    _check(found.shape, found.dtype.name, settings.bands)
    with np.errstate(over="ignore"):  # found below
        matrix = np.array(found[: settings.frames], np.float32, order="C")
    wrong = int(matrix.size - np.isfinite(matrix).sum())
    if wrong:
        raise DataError(f"{wrong} of its {matrix.size} features in {path} are NaN or infinite")
    return z_scored(matrix) if settings.normalise == "clip" else matrix


def features_digests(
    settings: FileFeatures, clips: Sequence[str], noise: Noise | None, cache: Path, progress: Progress
) -> tuple[list[bytes], dict[int, str]]:
    """Return digests of the clips' features, as :func:`raydfl.data.features.digests.content_digests` does for recordings.

    Args:
        clips: ids.
        noise: which clips are to be noisy.
        cache: folder in which digests of files are remembered.

    Returns:
        Digests of 16 bytes; and by number the reason for clips that have no features.

    Raises:
        DataError: a file that cannot be opened.
    """
    noisy = np.array([False] * len(clips) if noise is None else [seed != NOISELESS for seed in noise.seeds])
    digests = [UNREADABLE] * len(clips)
    missing: dict[int, str] = {}
    for kind in np.unique(noisy).tolist():
        path = settings.noisy_file() if kind else settings.path
        source = _opened(path, *_stamp(path))
        numbers = np.flatnonzero(noisy == kind).tolist()
        for number, found in source.digests({number: clips[number] for number in numbers}, cache, progress).items():
            if isinstance(found, str):
                missing[number] = found
            else:
                digests[number] = found
    return digests, missing


def missing_features(clips: Sequence[str], missing: Mapping[int, str]) -> DataError:
    """Return the error for clips (by number) that have no features."""
    first = min(missing)
    return DataError(
        f"{len(missing)} of {len(clips)} clips have no features, the first {clips[first]!r}: {missing[first]}. Make them, or leave "
        "these clips out with data.unreadable=skip"
    )


def _check(shape: Sequence[int], dtype: str, bands: int) -> None:
    if len(shape) != 2:
        raise DataError(f"its features have the shape {list(shape)}; it must be [frames, bands]")
    if dtype not in _FLOATS:
        raise DataError(f"its features are {dtype}; they must be one of {', '.join(_FLOATS)}")
    if shape[1] != bands:
        raise DataError(f"its frames have {shape[1]} numbers, data.features.bands says {bands}")
    if not shape[0]:
        raise DataError("its features have no frames")


class _File:
    """Matrices by clip id, all in one file; here a safetensors file."""

    names: Mapping[str, str]
    """The name in the file of each clip."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = cast(Any, safe_open(path, "numpy"))
        self.names = {name: name for name in self._file.keys()}  # noqa: SIM118 - it is no dictionary

    def load(self, clip: str) -> np.ndarray:
        """Return the array of a clip, which is there.

        Raises:
            DataError: it cannot be read.
        """
        with _readable(self.path):
            array: np.ndarray = self._file.get_tensor(clip)
        return array

    def bands(self) -> int:
        """Return the numbers of a frame of the first matrix.

        Raises:
            DataError: there is none.
        """
        clip = next(self.clips(), None)
        if clip is None:
            raise DataError(
                f"data.features: there are no features in {self.path}; it must be {_WAYS}, with a clip's id as name"
            )
        shape = self.load(clip).shape
        if len(shape) != 2:
            raise DataError(
                f"data.features: the features of {clip!r} in {self.path} have the shape {list(shape)}; it must be [frames, bands]"
            )
        return int(shape[1])

    def clips(self) -> Iterator[str]:
        """Yield the clips that there are."""
        yield from self.names

    def explain_absence(self, clip: str) -> str:
        """Say that a clip has no features, with examples of the names that there are."""
        names = sorted(self.names)
        known, more = ", ".join(map(repr, names[:_SHOWN])), " ..." if len(names) > _SHOWN else ""
        return f"{self.path} has no array {clip!r}, but {len(names)} others ({known}{more})"

    def digests(self, clips: Mapping[int, str], cache: Path, progress: Progress) -> dict[int, bytes | str]:
        """Return by number the digest of a clip's features, of the file's content and the name, or why it has none."""
        whole = file_digests({0: str(self.path.absolute())}, cache, progress)[0]
        if isinstance(whole, OSError):
            raise _unusable(self.path, whole)
        return {
            number: hashlib.blake2b(whole + clip.encode(), digest_size=DIGEST_BYTES).digest()
            if clip in self.names
            else self.explain_absence(clip)
            for number, clip in clips.items()
        }


class _Npz(_File):
    """Read as the archive that it is: ``numpy.load`` looks for a name in a list, which takes long where there are many."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._archive = zipfile.ZipFile(path)
        self.names = {name.removesuffix(".npy"): name for name in self._archive.namelist() if name.endswith(".npy")}

    def load(self, clip: str) -> np.ndarray:
        with _readable(self.path), self._archive.open(self.names[clip]) as file:
            array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
        return array


class _Folder(_File):
    """A file for each clip."""

    names: Mapping[str, str] = {}

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, clip: str) -> np.ndarray:
        file = self._path(clip)
        with _readable(file):
            check_regular(file.stat())
            array: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
        return array

    def clips(self) -> Iterator[str]:
        for folder, folders, files in os.walk(self.path):
            folders.sort()
            names = (Path(folder) / name for name in sorted(files) if name.endswith(".npy"))
            yield from (str(name.relative_to(self.path).with_suffix("")) for name in names)

    def digests(self, clips: Mapping[int, str], cache: Path, progress: Progress) -> dict[int, bytes | str]:
        if not self.path.is_dir():
            raise _unusable(self.path, FileNotFoundError(2, os.strerror(2)))
        files = {number: str(self._path(clip).absolute()) for number, clip in clips.items()}
        return {
            number: f"{files[number]} cannot be read: {found.strerror or found}"
            if isinstance(found, OSError)
            else found
            for number, found in file_digests(files, cache, progress).items()
        }

    def _path(self, clip: str) -> Path:
        return self.path / f"{clip}.npy"


def _open(path: Path) -> _File:
    """Open the matrices in a file or folder.

    Raises:
        DataError: there is no such file, or it is not what its name says.
    """
    kinds: dict[str, type[_File]] = {".safetensors": _File, ".npz": _Npz}
    if path.suffix not in kinds and not path.is_dir():
        reason = "the name says nothing about its format" if path.exists() else "there is no such file or folder"
        raise DataError(f"data.features: {path} cannot be used: {reason}; it must be {_WAYS}")
    with _readable(path):
        if path.suffix in kinds:
            check_regular(path.stat())
        return kinds.get(path.suffix, _Folder)(path)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn the errors of a file that cannot be read into one that names it."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # NumPy reads a header as Python code, which fails in many ways
        raise _unusable(path, error) from error


def _unusable(path: Path, error: Exception) -> DataError:
    reason = (error.strerror or "there is no such file") if isinstance(error, OSError) else error
    return DataError(f"data.features: {path} cannot be read: {reason}; it must be {_WAYS}")


def _stamp(path: Path) -> tuple[int, int]:
    """Changes when the file does."""
    try:
        status = path.stat()
    except OSError as error:
        raise _unusable(path, error) from error
    return (0, 0) if path.is_dir() else (status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _opened(path: Path, size: int, changed: int) -> _File:
    """Opened once in each process: the names of many thousand clips take a while."""
    return _open(path)
