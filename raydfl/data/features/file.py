"""Features from a user's file: a matrix of frames x bands for each clip, from any model.

A file or folder contains the matrices by clip id:

- ``*.safetensors``: a tensor for each clip;
- ``*.npz``: an array for each clip, in the format of ``numpy.savez``;
- a folder with ``CLIP.npy`` for each clip. An id with slashes is a relative path.

Only one clip's matrix is in memory at a time. Recordings are not opened.
"""

from __future__ import annotations

import functools
import hashlib
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
from pydantic import Field, model_validator
from safetensors import safe_open

from raydfl.core.errors import ConfigError, DataError
from raydfl.core.files import check_regular
from raydfl.core.isolation import call_isolated, reading
from raydfl.core.progress import ProgressReporter
from raydfl.core.settings import Settings
from raydfl.data.features.digests import DIGEST_BYTES, UNREADABLE, digest_files
from raydfl.data.features.wave import Dtype, Frames, GivenNormalise, standardise
from raydfl.data.noise import NOISELESS, ClipNoise

_FORMATS = "a .safetensors file, an .npz file, or a folder of CLIP.npy"
_FLOATS = ("float16", "float32", "float64")
_SHOWN = 3
"""Number of clip names that a message shows."""


class FileFeatures(Settings):
    """Precomputed features: a matrix of frames x bands for each clip."""

    kind: Annotated[Literal["file"], Field(description="file: precomputed features.")]
    path: Annotated[
        Path, Field(description=f"{_FORMATS[0].upper()}{_FORMATS[1:]}: a float array [frames, bands] for each clip id.")
    ]
    noisy_path: Annotated[
        Path | None,
        Field(
            description="The same for clips with noise, of the kind and strength in data.corrupt.noise. Required with this option, "
            "otherwise not read."
        ),
    ] = None
    bands: Annotated[
        int,
        Field(ge=1, le=65_536, description="Features of a frame. null: as in the file. 1 to 65536."),
    ]
    frames: Frames = None
    normalise: GivenNormalise = "none"
    dtype: Dtype = "float32"

    frame_seconds: ClassVar[None] = None
    """The time between frames is unknown."""

    @model_validator(mode="before")
    @classmethod
    def _read_bands(cls, values: Any) -> Any:
        """Read the number of bands from the file, to record it in the run's configuration."""
        if not isinstance(values, Mapping) or values.get("bands") is not None:
            return values
        if not isinstance(values.get("path"), str | Path):
            raise ConfigError(f"data.features.path is missing. It must be {_FORMATS}.")
        path = Path(values["path"])
        return {**values, "bands": call_isolated(_read_bands, path, where=f"data.features: {path}")}

    def noisy_file(self) -> Path:
        """Return the path of the features with noise.

        Raises:
            ConfigError: It is not configured.
        """
        if self.noisy_path is None:
            raise ConfigError(
                "data.corrupt.noise: features from a file have no recordings for noise. Set data.features.noisy_path to the "
                "features of the clips with noise, or choose the kind logmel or model."
            )
        return self.noisy_path

    def key(self) -> dict[str, Any]:
        """Return all settings that affect the values, for the cache key. The files' content is not included."""
        return self.model_dump(exclude={"path", "noisy_path"})


def _read_bands(path: Path) -> int:
    return _open(path).read_bands()


def needs_waves(what: str) -> ConfigError:
    """Return the error for an option that alters recordings, if the features have no recordings.

    Args:
        what: The option, such as "attack 'backdoor'".
    """
    return ConfigError(
        f"{what} alters recordings, but data.features of the kinds file and image have none. Choose the kind logmel, or the kind "
        "model with the features' network."
    )


def read_features(settings: FileFeatures, clip: str, noisy: bool) -> np.ndarray:
    """Read a clip's features, float32 [frames, bands], normalised if ``normalise`` is ``clip``.

    Args:
        settings: The features' settings. ``frames`` cuts the clip, but does not pad it.
        clip: The clip's id.
        noisy: Read the features with noise.

    Raises:
        DataError: The file has no features of this clip, or they have another shape or dtype, or are not finite.
    """
    path = settings.noisy_file() if noisy else settings.path
    source = _open_cached(path, *_read_stamp(path))
    if not isinstance(source, _Folder) and clip not in source.names:
        raise DataError(source.explain_absence(clip))
    array = source.load(clip)
    _check(array.shape, array.dtype.name, settings.bands)
    with np.errstate(over="ignore"):  # The check below reports overflows.
        matrix = np.array(array[: settings.frames], np.float32, order="C")
    wrong = int(matrix.size - np.isfinite(matrix).sum())
    if wrong:
        raise DataError(f"{wrong} of its {matrix.size} features in {path} are NaN or infinite")
    return standardise(matrix) if settings.normalise == "clip" else matrix


def digest_features(
    settings: FileFeatures, clips: Sequence[str], noise: ClipNoise | None, cache: Path, progress: ProgressReporter
) -> tuple[list[bytes], dict[int, str]]:
    """Compute digests of clips' features, like :func:`raydfl.data.features.digests.digest_clips` for recordings.

    Args:
        settings: The features' settings.
        clips: Clip ids.
        noise: Selects the clips with noise.
        cache: Folder of the digest table.
        progress: Shows the progress.

    Returns:
        Digests of 16 bytes, and the reasons for missing features by clip number.

    Raises:
        DataError: A file cannot be opened.
    """
    noisy = np.array([False] * len(clips) if noise is None else [seed != NOISELESS for seed in noise.seeds])
    digests = [UNREADABLE] * len(clips)
    missing: dict[int, str] = {}
    for kind in np.unique(noisy).tolist():
        path = settings.noisy_file() if kind else settings.path
        numbers = np.flatnonzero(noisy == kind).tolist()
        reasons = call_isolated(_explain_absences, path, [clips[number] for number in numbers], where=str(path))
        missing |= {number: reason for number, reason in zip(numbers, reasons, strict=True) if reason is not None}
        present = {number: clips[number] for number in numbers if number not in missing}
        folder, whole = path.is_dir(), str(path.absolute())
        files = {
            number: str((path / f"{clip}.npy").absolute()) if folder else whole for number, clip in present.items()
        }
        for number, result in digest_files(files, cache, progress).items() if files else ():
            if isinstance(result, bytes):
                content = hashlib.blake2b(result + clips[number].encode(), digest_size=DIGEST_BYTES).digest()
                digests[number] = result if folder else content
            elif folder:
                missing[number] = f"{files[number]} cannot be read: {result.strerror or result}"
            else:
                with _name_file(path):
                    raise result
    return digests, missing


def _explain_absences(path: Path, clips: Sequence[str]) -> list[str | None]:
    """Return the reason of each clip's absence in a file, or None. A folder is not searched."""
    source = _open(path)
    if isinstance(source, _Folder):
        return [None] * len(clips)
    return [None if clip in source.names else source.explain_absence(clip) for clip in clips]


def explain_missing(clips: Sequence[str], missing: Mapping[int, str]) -> DataError:
    """Return the error for missing features, with their reasons by clip number."""
    first = min(missing)
    return DataError(
        f"{len(missing)} of {len(clips)} clips have no features, the first {clips[first]!r}: {missing[first]}. Make them, or leave "
        "these clips out with data.unreadable=skip."
    )


def _check(shape: Sequence[int], dtype: str, bands: int) -> None:
    if len(shape) != 2:
        raise DataError(f"its features have the shape {list(shape)} instead of [frames, bands]")
    if dtype not in _FLOATS:
        raise DataError(f"its features have the type {dtype}, not one of {', '.join(_FLOATS)}")
    if shape[1] != bands:
        raise DataError(f"its frames have {shape[1]} features, but data.features.bands is {bands}")
    if not shape[0]:
        raise DataError("its features have no frames")


class _File:
    """Matrices by clip id in a safetensors file. Base class of the further formats."""

    names: Mapping[str, str]
    """Names in the file by clip."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = cast(Any, safe_open(path, "numpy"))
        self.names = {name: name for name in self._file.keys()}  # noqa: SIM118 - It is not a dictionary.

    def load(self, clip: str) -> np.ndarray:
        """Return the array of an existing clip.

        Raises:
            DataError: It cannot be read.
        """
        with _name_file(self.path):
            array: np.ndarray = self._file.get_tensor(clip)
        return array

    def read_bands(self) -> int:
        """Return the number of features of a frame, from the first matrix.

        Raises:
            DataError: There is no matrix.
        """
        clip = next(self.list_clips(), None)
        if clip is None:
            raise DataError(
                f"data.features: there are no features in {self.path}. It must be {_FORMATS}, with clip ids as names."
            )
        shape = self.load(clip).shape
        if len(shape) != 2:
            raise DataError(
                f"data.features: the features of {clip!r} in {self.path} have the shape {list(shape)}. It must be [frames, bands]."
            )
        return int(shape[1])

    def list_clips(self) -> Iterator[str]:
        """Yield the ids of all clips."""
        yield from self.names

    def explain_absence(self, clip: str) -> str:
        """Describe the absence of a clip's features, with examples of available names."""
        names = sorted(self.names)
        examples, more = ", ".join(map(repr, names[:_SHOWN])), " ..." if len(names) > _SHOWN else ""
        return f"{self.path} has no array {clip!r}, but {len(names)} others ({examples}{more})"


class _Npz(_File):
    """An ``.npz`` file, read as a zip archive. ``numpy.load`` searches a list, which is slow for many names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._archive = zipfile.ZipFile(path)
        self.names = {name.removesuffix(".npy"): name for name in self._archive.namelist() if name.endswith(".npy")}

    def load(self, clip: str) -> np.ndarray:
        with _name_file(self.path), self._archive.open(self.names[clip]) as file:
            array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
        return array


class _Folder(_File):
    """A folder with a file for each clip."""

    names: Mapping[str, str] = {}

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, clip: str) -> np.ndarray:
        file = self._path(clip)
        with _name_file(file):
            check_regular(file.stat())
            array: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
        return array

    def list_clips(self) -> Iterator[str]:
        for folder, folders, files in os.walk(self.path):
            folders.sort()
            names = (Path(folder) / name for name in sorted(files) if name.endswith(".npy"))
            yield from (str(name.relative_to(self.path).with_suffix("")) for name in names)

    def _path(self, clip: str) -> Path:
        return self.path / f"{clip}.npy"


def _open(path: Path) -> _File:
    """Open the matrices in a file or folder.

    Raises:
        DataError: The file is missing, or has another format than its name.
    """
    kinds: dict[str, type[_File]] = {".safetensors": _File, ".npz": _Npz}
    if path.suffix not in kinds and not path.is_dir():
        reason = "its name has no known ending" if path.exists() else "there is no such file or folder"
        raise DataError(f"data.features: {path} cannot be used: {reason}. It must be {_FORMATS}.")
    with _name_file(path):
        if path.suffix in kinds:
            check_regular(path.stat())
        return kinds.get(path.suffix, _Folder)(path)


def _name_file(path: Path) -> AbstractContextManager[None]:
    """Name a file in the errors of its reader."""
    return reading(f"data.features: {path}", remedy=f"It must be {_FORMATS}.")


def _read_stamp(path: Path) -> tuple[int, int]:
    """Return a file's size and modification time. They change with the file."""
    with _name_file(path):
        status = path.stat()
    return (0, 0) if path.is_dir() else (status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _open_cached(path: Path, size: int, changed: int) -> _File:
    """Open a file once per process and version, because many names take long to read."""
    return _open(path)
