"""Reading of recordings."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import soundfile

from raydfl.core.errors import DataError
from raydfl.data.manifest import FFMPEG_SUFFIXES, SOUNDFILE_SUFFIXES, escape_path, find_samples
from raydfl.data.packed import load_source, open_binary
from raydfl.data.video import has_decoder, is_video, read_sound

AUDIO_SUFFIXES = tuple(
    suffix
    for kind, suffixes in SOUNDFILE_SUFFIXES.items()
    if kind in soundfile.available_formats()
    for suffix in suffixes
)
"""Suffixes of recordings that the installed libsndfile decodes, in lower case."""

# Some recorders include their headers in the size, so this many missing bytes do not indicate a truncated file.
_HEADER_SLACK = 64
# Programs that write to a pipe do not know the size yet, and use a value of at least 0x7FFFF000.
_UNKNOWN_SIZE = 0x7FFFF000


def read_audio(
    path: str | os.PathLike[str], start: float = 0.0, stop: float | None = None, channel: int | None = None
) -> tuple[npt.NDArray[np.float32], int]:
    """Read the samples of an audio file, or the sound of a video.

    PyAV, if installed, reads formats that libsndfile does not support.

    Args:
        path: a file, or an address in a larger file (:mod:`raydfl.data.packed`).
        start: start of the clip in the file, in seconds.
        stop: end of the clip in seconds; ``None``: the end of the file.
        channel: index of a single channel to return, from 0; ``None``: all channels.

    Returns:
        ``(samples, rate)``: float32 [samples, channels] in -1..1 (a file of floats keeps its own scale), and the rate in Hz.

    Raises:
        DataError: the file is missing, unreadable, empty, truncated, not audio, or a silent video; the clip has no samples or
            exceeds the file; or samples are NaN or infinite. The message names the file.
        NoDecoderError: the file is a video, and PyAV is not installed.
    """
    name = os.fspath(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"{escape_path(name)}: the file's name is not UTF-8. Rename the file") from None
    try:
        source = load_source(name)
        with open_binary(source) as (file, size):
            _check_size(file, size, name)
        if is_video(name):
            return _select_channel(*_decode(name, start, stop), channel, name)
    except FileNotFoundError:
        raise DataError(f"{name}: there is no such file") from None
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror}") from error
    try:
        with soundfile.SoundFile(source) as sound:
            rate = int(sound.samplerate)
            first, last = find_samples(start, stop, len(sound), rate, name)
            promised = last - first
            lead_in = min(first, rate)  # decoders of mp3 and opus need the preceding second
            sound.seek(first - lead_in)
            samples: npt.NDArray[np.float32] = sound.read(lead_in + promised, dtype="float32", always_2d=True)[lead_in:]
    except (soundfile.SoundFileError, OSError, RuntimeError, TypeError) as error:  # TypeError: the suffix .raw
        packed = not isinstance(source, str)  # a packed recording may have no suffix
        foreign = packed or name.lower().endswith(FFMPEG_SUFFIXES)
        if foreign and has_decoder():
            return _select_channel(*_decode(name, start, stop), channel, name)
        if packed:
            raise DataError(
                f"{name}: cannot be read as audio: {getattr(error, 'error_string', error)} If libsndfile does not support the "
                f"format (m4a, mp4 ...), install a decoder with pip install 'raydfl[video]'"
            ) from error
        if foreign:
            wav = shlex.quote(str(Path(name).with_suffix(".wav")))
            raise DataError(
                f"{name}: cannot be read as audio: libsndfile does not decode this format. Install a decoder with pip install "
                f"'raydfl[video]', or convert the file to wav with: ffmpeg -i {shlex.quote(name)} {wav}"
            ) from error
        raise DataError(f"{name}: cannot be read as audio: {error}") from error
    except MemoryError as error:
        raise DataError(
            f"{name}: its header promises {promised} samples, which do not fit in memory. If the file is shorter, it is damaged: "
            f"copy it again"
        ) from error
    if len(samples) < promised:
        raise DataError(
            f"{name}: truncated: its header promises {promised} samples, but only {len(samples)} can be read. Copy the file again"
        )
    check_samples(samples, name)
    return _select_channel(samples, rate, channel, name)


def _select_channel(
    samples: npt.NDArray[np.float32], rate: int, channel: int | None, name: str
) -> tuple[npt.NDArray[np.float32], int]:
    """Return the samples of a channel, float32 [samples, 1]; of all channels for ``None``."""
    if channel is None:
        return samples, rate
    if not (isinstance(channel, int) and 0 <= channel < samples.shape[1]):
        raise DataError(
            f"{name}: the clip needs channel {channel!r}, counted from 0, but the file has {samples.shape[1]} channels. Correct "
            f"the channel"
        )
    return samples[:, channel : channel + 1], rate


def _decode(name: str, start: float, stop: float | None) -> tuple[npt.NDArray[np.float32], int]:
    """Read the sound of a file with PyAV (:func:`read_audio`)."""
    samples, rate = read_sound(name)
    first, last = find_samples(start, stop, len(samples), rate, name)
    check_samples(samples[first:last], name)
    return samples[first:last], rate


def check_samples(samples: npt.NDArray[np.float32], name: str) -> None:
    """Reject a clip without samples, or with NaN or infinite samples.

    Args:
        samples: float32 [samples, channels].
        name: name of the clip in the message.

    Raises:
        DataError: the clip is empty, or not finite.
    """
    if samples.size == 0:
        raise DataError(f"{name}: the clip has no samples (zero length)")
    finite = np.isfinite(samples)
    if not finite.all():
        bad = int(np.argmin(finite.all(axis=1)))
        raise DataError(
            f"{name}: {finite.size - int(finite.sum())} of {finite.size} samples are NaN or infinite, the first at sample {bad}"
        )


def audio_seconds(path: str | os.PathLike[str]) -> float:
    """Read the duration of a recording in seconds from its header.

    Raises:
        DataError: the file is missing, or not audio.
    """
    name = os.fspath(path)
    if not Path(name).is_file():
        raise DataError(f"{name}: there is no such file")
    try:
        return float(soundfile.info(name).duration)
    except (soundfile.SoundFileError, OSError, RuntimeError, TypeError) as error:
        raise DataError(f"{name}: cannot be read as audio: {error}") from error


def _check_size(file: BinaryIO, size: int, name: str) -> None:
    """Reject an empty file, a Git LFS pointer, and a truncated wav, because libsndfile reads truncated files without an error.

    Raises:
        DataError: the file is empty, truncated, or a Git LFS pointer.
    """
    if size == 0:
        raise DataError(f"{name}: the file is empty (0 bytes)")
    head = file.read(12)
    if head.startswith(b"version http"):
        raise DataError(
            f"{name}: the file is a Git LFS pointer, not the recording. Run 'git lfs pull' in the clone of the data set"
        )
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        return
    position = len(head)
    while len(header := file.read(8)) == 8:
        position += 8
        length = int.from_bytes(header[4:], "little")
        if header[:4] == b"data":
            missing = position + length - size
            if missing > _HEADER_SLACK and length < _UNKNOWN_SIZE:
                raise DataError(
                    f"{name}: truncated: its header promises {length} bytes of samples, but the file has {size - position}. Copy "
                    f"the file again"
                )
            return
        position += length + length % 2  # chunks are padded to an even length
        file.seek(position)
    raise DataError(f"{name}: truncated: a wav header without samples ({size} bytes). Copy the file again")
