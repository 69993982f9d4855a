"""Reading recordings."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import soundfile

from raydfl.core.errors import DataError
from raydfl.data.films import has_decoder, is_film, read_sound
from raydfl.data.manifest import _SUFFIXES, FFMPEG_SUFFIXES, _part, shown_name
from raydfl.data.packed import binary, readable

AUDIO_SUFFIXES = tuple(
    suffix for kind, suffixes in _SUFFIXES.items() if kind in soundfile.available_formats() for suffix in suffixes
)
"""Endings, in lower case, of the recordings that the installed libsndfile decodes."""

# Some recorders write a size that counts their own headers too; fewer missing bytes than that are no lost recording.
_HEADER_SLACK = 64
# What programs that write to a pipe put where the size is not known yet: 0x7FFFF000 and above.
_UNKNOWN_SIZE = 0x7FFFF000


def read_audio(
    path: str | os.PathLike[str], start: float = 0.0, stop: float | None = None, channel: int | None = None
) -> tuple[npt.NDArray[np.float32], int]:
    """Read the samples of an audio file, or of a film with sound, or of a part of it.

    What libsndfile does not decode is read by PyAV, where that is installed.

    Args:
        path: the file, or an address in a larger file (raydfl.data.packed).
        start: where the part begins, in seconds.
        stop: where it ends; ``None``: with the file.
        channel: the only channel to return, counted from 0; ``None``: all.

    Returns:
        ``(samples, rate)``: float32 [samples, channels], -1..1 (a file of floats keeps its own scale), and the rate in Hz.

    Raises:
        DataError: naming the file: it is missing, unreadable, empty, no audio, truncated, or a film without sound; it has no
            samples, or not the part; or it has samples that are NaN or infinite.
        NoDecoderError: it is a film, and PyAV is not installed.
    """
    name = os.fspath(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"{shown_name(name)}: the file's name is not UTF-8; rename it") from None
    try:
        source = readable(name)
        with binary(source) as (file, size):
            _check_size(file, size, name)
        if is_film(name):
            return _select(*_of_film(name, start, stop), channel, name)
    except FileNotFoundError:
        raise DataError(f"{name}: there is no such file") from None
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror}") from error
    try:
        with soundfile.SoundFile(source) as sound:
            rate = int(sound.samplerate)
            first, last = _part(start, stop, len(sound), rate, name)
            promised = last - first
            lead_in = min(first, rate)  # a second: mp3 and opus need what comes before a sample
            sound.seek(first - lead_in)
            samples: npt.NDArray[np.float32] = sound.read(lead_in + promised, dtype="float32", always_2d=True)[lead_in:]
    except (soundfile.SoundFileError, OSError, RuntimeError, TypeError) as error:  # TypeError: a name that ends in .raw
        packed = not isinstance(source, str)  # its name need not say of what kind it is
        foreign = packed or name.lower().endswith(FFMPEG_SUFFIXES)
        if foreign and has_decoder():
            return _select(*_of_film(name, start, stop), channel, name)
        if packed:
            raise DataError(
                f"{name}: cannot be read as audio: {getattr(error, 'error_string', error)} if it is of a kind that libsndfile does "
                f"not decode (m4a, mp4 ...), pip install 'raydfl[video]' brings what does"
            ) from error
        if foreign:
            wav = shlex.quote(str(Path(name).with_suffix(".wav")))
            raise DataError(
                f"{name}: cannot be read as audio: libsndfile does not decode this kind of file; pip install 'raydfl[video]' "
                f"brings what does, or make a wav file of it with: ffmpeg -i {shlex.quote(name)} {wav}"
            ) from error
        raise DataError(f"{name}: cannot be read as audio: {error}") from error
    if len(samples) < promised:
        raise DataError(f"{name}: truncated: its header promises {promised} samples and {len(samples)} can be read")
    check_samples(samples, name)
    return _select(samples, rate, channel, name)


def _select(
    samples: npt.NDArray[np.float32], rate: int, channel: int | None, name: str
) -> tuple[npt.NDArray[np.float32], int]:
    """Return the samples of a channel."""
    if channel is None:
        return samples, rate
    if not (isinstance(channel, int) and 0 <= channel < samples.shape[1]):
        raise DataError(
            f"{name}: the clip is of channel {channel!r}, counted from 0, and the file has {samples.shape[1]} channels"
        )
    return samples[:, channel : channel + 1], rate


def _of_film(name: str, start: float, stop: float | None) -> tuple[npt.NDArray[np.float32], int]:
    """Read the sound of a file that libsndfile does not decode; see :func:`read_audio`."""
    samples, rate = read_sound(name)
    first, last = _part(start, stop, len(samples), rate, name)
    check_samples(samples[first:last], name)
    return samples[first:last], rate


def check_samples(samples: npt.NDArray[np.float32], name: str) -> None:
    """Refuse a clip that has no samples, or samples that are NaN or infinite.

    Args:
        samples: float32 [samples, channels].
        name: what the message calls the clip.

    Raises:
        DataError: as said.
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
    """Read the duration that a file's header states, in seconds, without decoding it.

    Raises:
        DataError: the file is missing or is no audio.
    """
    name = os.fspath(path)
    if not Path(name).is_file():
        raise DataError(f"{name}: there is no such file")
    try:
        return float(soundfile.info(name).duration)
    except (soundfile.SoundFileError, OSError, RuntimeError, TypeError) as error:
        raise DataError(f"{name}: cannot be read as audio: {error}") from error


def _check_size(file: BinaryIO, size: int, name: str) -> None:
    """Refuse an empty file, and a wav that says it is longer than it is: libsndfile silently reads what is there.

    Raises:
        DataError: empty, truncated, or the text that Git LFS leaves in place of a file.
    """
    if size == 0:
        raise DataError(f"{name}: the file is empty (0 bytes)")
    head = file.read(12)
    if head.startswith(b"version http"):
        raise DataError(f"{name}: is a Git LFS pointer, not the recording; run 'git lfs pull' where you cloned the set")
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
                    f"{name}: truncated: its header promises {length} bytes of samples and the file holds {size - position}"
                )
            return
        position += length + length % 2  # chunks are padded to an even length
        file.seek(position)
    raise DataError(f"{name}: truncated: a wav header without samples behind it ({size} bytes)")
