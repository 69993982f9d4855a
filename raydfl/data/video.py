"""Reading of videos with PyAV (``pip install 'raydfl[video]'``): the middle frame, and the sound.

Of n decodable frames, the middle frame has the index n // 2. Rates and frame counts in headers are often wrong, so they are not
used. The sound keeps its rate and channels.
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
from raydfl.core.isolation import reading
from raydfl.data.manifest import VIDEO_SUFFIXES
from raydfl.data.packed import load_source, recording_name

if TYPE_CHECKING:
    from types import ModuleType

_MICROSECONDS = 1_000_000
"""Microseconds in a second: the time unit of a video."""
_SLACK_FRAMES, _SLACK_SECONDS, _SLACK_SHARE = 2, 0.5, 0.02
"""Tolerated difference of a complete video from its header, because encoders drop the last frames and round durations."""


class NoDecoderError(ConfigError):
    """The video decoder (PyAV) is not installed."""


class AbsentError(DataError):
    """A video has no frames, or no sound."""


def is_video(path: str) -> bool:
    """Return whether a file has the suffix of a video."""
    return recording_name(path).lower().endswith(VIDEO_SUFFIXES)


def read_frame(path: str, start: float = 0.0, stop: float | None = None) -> npt.NDArray[np.uint8]:
    """Read the middle frame of a video, or of a section of it.

    Args:
        path: the video.
        start: start of the section in seconds.
        stop: end of the section in seconds; ``None``: the end of the video.

    Returns:
        uint8 [rows, columns, 3], as stored. Rotation metadata is ignored.

    Raises:
        NoDecoderError: PyAV is not installed.
        AbsentError: the section has no frames.
        DataError: the video is missing, damaged or truncated. The message names it.
    """
    with _open(path) as video:
        count = sum(1 for _ in _read_frames(video, "video", path, start, stop))
    if not count:
        where = (
            "" if not start and stop is None else f" from {start:g} s to {'its end' if stop is None else f'{stop:g} s'}"
        )
        raise AbsentError(f"{path}: the video has no frames{where}")
    with _open(path) as video:
        frame = next(itertools.islice(_read_frames(video, "video", path, start, stop), count // 2, None))
        if frame.is_corrupt:
            raise DataError(f"{path}: the middle frame is damaged")
        image: npt.NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
    return image


def read_sound(path: str) -> tuple[npt.NDArray[np.float32], int]:
    """Read the sound of a video, or a recording in a format that libsndfile does not support.

    Returns:
        ``(samples, rate)``: float32 [samples, channels] in -1..1, and the rate in Hz.

    Raises:
        NoDecoderError: PyAV is not installed.
        AbsentError: the file has no sound.
        DataError: the file is missing, damaged or truncated. The message names it.
    """
    with _open(path) as video:
        if not video.streams.audio:
            raise AbsentError(f"{path}: the file has no sound")
        rate = int(video.streams.audio[0].rate)
        resampler = _import_decoder().AudioResampler(format="fltp", rate=rate)
        frames = _read_frames(video, "audio", path)
        parts = [piece.to_ndarray().T for frame in frames for piece in resampler.resample(frame)]
        parts += [piece.to_ndarray().T for piece in resampler.resample(None)]
    if not parts:
        raise AbsentError(f"{path}: the file has no sound that can be decoded")
    return np.ascontiguousarray(np.concatenate(parts), np.float32), rate


def has_decoder() -> bool:
    """Return whether PyAV is installed."""
    with contextlib.suppress(NoDecoderError):
        return bool(_import_decoder())
    return False


def _import_decoder() -> ModuleType:
    try:
        import av
    except ImportError as error:
        raise NoDecoderError(
            f"Reading videos needs PyAV, but its import failed ({error}). Install it with pip install 'raydfl[video]'"
        ) from error
    av.logging.set_level(None)  # exceptions report the problems of a video
    return av


@contextlib.contextmanager
def _open(path: str) -> Iterator[Any]:
    """Open a video, and convert errors of the decoder to errors with its path."""
    av = _import_decoder()
    source = load_source(path)
    if isinstance(source, str) and not Path(source).is_file():
        raise DataError(f"{path}: there is no such file")
    with (
        reading(path, "cannot be decoded. It is damaged, truncated, or not a video or recording"),
        av.open(source) as video,
    ):
        yield video


def _read_frames(video: Any, kind: str, path: str, start: float = 0.0, stop: float | None = None) -> Iterator[Any]:
    """Yield the decoded frames of a section of the first stream. Detect a truncated video at its end.

    Args:
        video: the open video.
        kind: ``video`` or ``audio``, the kind of the stream.
        path: path of the video, for messages.
        start: start of the section in seconds.
        stop: end of the section in seconds; ``None``: the end of the video.

    Raises:
        DataError: the video is shorter than its header promises, or its last frame or packet is damaged.
    """
    streams = video.streams.video if kind == "video" else video.streams.audio
    if not streams:
        raise AbsentError(f"{path}: the video has no frames")
    stream, first = streams[0], (video.start_time or 0) / _MICROSECONDS
    stream.codec_context.thread_count = 1  # parallelism comes from reading several videos at once
    if start:
        video.seek(round((start + first) * _MICROSECONDS))  # to the preceding key frame
    count, end, damaged, torn = 0, first, False, False
    for packet in video.demux():
        if packet.size:
            damaged = packet.is_corrupt
            if packet.pts is not None:
                end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        if packet.stream.index != stream.index:
            continue
        for frame in packet.decode():
            count += 1
            time = (frame.time or 0.0) - first
            if stop is not None and time >= stop:
                return
            if time >= start or not start:
                yield frame
            torn = kind == "video" and frame.is_corrupt
    seconds, promised = (video.duration or 0) / _MICROSECONDS, stream.frames if kind == "video" and not start else 0
    if damaged or torn or _is_short(count, promised, _SLACK_FRAMES) or _is_short(end - first, seconds, _SLACK_SECONDS):
        length = f"{count} of {promised} frames" if promised else f"{end - first:.1f} of {seconds:.1f} s"
        raise DataError(
            f"{path}: truncated: it ends with a damaged frame, or earlier than its header promises ({length}). Copy the file again"
        )


def _is_short(actual: float, promised: float, slack: float) -> bool:
    return actual < promised - max(slack, _SLACK_SHARE * promised)
