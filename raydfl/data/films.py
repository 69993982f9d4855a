"""Reading films: the picture in the middle, and the sound, by PyAV (``pip install 'raydfl[video]'``).

The middle is found by counting the frames that can be decoded: what headers say of rates and numbers of frames is often wrong. Of n
frames it is number n // 2, counted from 0. The sound keeps its rate and channels.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raydfl.core.errors import ConfigError, DataError
from raydfl.data.manifest import FILM_SUFFIXES
from raydfl.data.packed import own_name, readable

if TYPE_CHECKING:
    from types import ModuleType

_MICROSECONDS = 1_000_000
"""In a second: the unit of a film's times."""
_SLACK_FRAMES, _SLACK_SECONDS, _SLACK_SHARE = 2, 0.5, 0.02
"""Shortfall from its header that a whole film may have: encoders and rounding leave the last frames out."""


class NoDecoderError(ConfigError):
    """The package that decodes films is not installed: no film at all can be read."""


class AbsentError(DataError):
    """A film has no pictures, or no sound."""


def is_film(path: str) -> bool:
    """Return whether a file's name ends like that of a film."""
    return own_name(path).lower().endswith(FILM_SUFFIXES)


def read_frame(path: str, start: float = 0.0, stop: float | None = None) -> npt.NDArray[np.uint8]:
    """Read the frame in the middle of a film, or of a part of it.

    Args:
        path: the film.
        start: where the part begins, in seconds.
        stop: where it ends; ``None``: with the film.

    Returns:
        uint8 [rows, columns, 3], as it is stored: a mark that says how to turn it is not looked at.

    Raises:
        NoDecoderError: PyAV is not installed.
        AbsentError: it has no pictures (there).
        DataError: naming the film: it is missing, damaged or truncated.
    """
    with _opened(path) as film:
        count = sum(1 for _ in _frames(film, "video", path, start, stop))
    if not count:
        where = (
            "" if not start and stop is None else f" from {start:g} s to {'its end' if stop is None else f'{stop:g} s'}"
        )
        raise AbsentError(f"{path}: the film has no pictures{where}")
    with _opened(path) as film:
        frame = next(itertools.islice(_frames(film, "video", path, start, stop), count // 2, None))
        if frame.is_corrupt:
            raise DataError(f"{path}: the frame in the middle is damaged")
        picture: npt.NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
    return picture


def read_sound(path: str) -> tuple[npt.NDArray[np.float32], int]:
    """Read the sound of a film, or a recording that libsndfile does not decode.

    Returns:
        ``(samples, rate)``: float32 [samples, channels], -1..1, and the rate in Hz.

    Raises:
        NoDecoderError: PyAV is not installed.
        AbsentError: it has no sound.
        DataError: naming the film: it is missing, damaged or truncated.
    """
    with _opened(path) as film:
        if not film.streams.audio:
            raise AbsentError(f"{path}: it is silent: the file holds no sound")
        rate = int(film.streams.audio[0].rate)
        resampler = _decoder().AudioResampler(format="fltp", rate=rate)
        parts = [piece.to_ndarray().T for frame in _frames(film, "audio", path) for piece in resampler.resample(frame)]
        parts += [piece.to_ndarray().T for piece in resampler.resample(None)]
    if not parts:
        raise AbsentError(f"{path}: it is silent: the file holds no sound that can be decoded")
    return np.ascontiguousarray(np.concatenate(parts), np.float32), rate


def has_decoder() -> bool:
    """Return whether PyAV is installed."""
    with contextlib.suppress(NoDecoderError):
        return bool(_decoder())
    return False


def _decoder() -> ModuleType:
    try:
        import av
    except ImportError as error:
        raise NoDecoderError(
            f"films are decoded by PyAV, which cannot be imported ({error}): pip install 'raydfl[video]'"
        ) from error
    av.logging.set_level(None)  # what is wrong with a film is told by errors
    return av


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Open a film; what the decoder raises inside names it."""
    av = _decoder()
    source = readable(path)
    if isinstance(source, str) and not Path(source).is_file():
        raise DataError(f"{path}: there is no such file")
    try:
        with av.open(source) as film:
            yield film
    except (av.FFmpegError, ValueError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"{path}: cannot be decoded: it is damaged, truncated, or no film or recording: {reason}"
        ) from error


def _frames(film: Any, kind: str, path: str, start: float = 0.0, stop: float | None = None) -> Iterator[Any]:
    """Yield the decoded frames of a film's first stream of a kind, or those of a part; refuse a truncated film at its end.

    Raises:
        DataError: the film holds less than its header promises, or its last frame or packet is damaged.
    """
    streams = film.streams.video if kind == "video" else film.streams.audio
    if not streams:
        raise AbsentError(f"{path}: the film has no pictures")
    chosen, begin = streams[0], (film.start_time or 0) / _MICROSECONDS
    chosen.codec_context.thread_count = 1  # several films are read at once
    if start:
        film.seek(round((start + begin) * _MICROSECONDS))  # to the key frame before
    count, end, damaged, torn = 0, begin, False, False
    for packet in film.demux():
        if packet.size:
            damaged = packet.is_corrupt
            if packet.pts is not None:
                end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        if packet.stream.index != chosen.index:
            continue
        for frame in packet.decode():
            count += 1
            time = (frame.time or 0.0) - begin
            if stop is not None and time >= stop:
                return
            if time >= start or not start:
                yield frame
            torn = kind == "video" and frame.is_corrupt
    seconds, promised = (film.duration or 0) / _MICROSECONDS, chosen.frames if kind == "video" and not start else 0
    if damaged or torn or _less(count, promised, _SLACK_FRAMES) or _less(end - begin, seconds, _SLACK_SECONDS):
        held = f"{count} of {promised} frames" if promised else f"{end - begin:.1f} of {seconds:.1f} s"
        raise DataError(f"{path}: truncated: it ends with a damaged frame, or before its header says so ({held})")


def _less(found: float, promised: float, slack: float) -> bool:
    return found < promised - max(slack, _SLACK_SHARE * promised)
