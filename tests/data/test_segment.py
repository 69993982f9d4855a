from __future__ import annotations

import numpy as np

from raydfl.data.segment import SegmentSettings, segments


def list_segments(length: int, frames: int, stride: int, keep_last: bool) -> list[tuple[int, int]]:
    if length <= frames:
        return [(0, length)]
    if keep_last:
        return [(start, frames) for start in range(0, length - frames + 1, stride)]
    return [(i * stride, frames) for i in range(max(1, round((length - frames) / stride)))]


def test_segments_match_a_plain_loop() -> None:
    lengths = np.arange(1, 900, 7)
    for frames, stride in ((300, 50), (300, 100), (10, 3), (64, 64), (1, 1)):
        for keep_last in (True, False):
            settings = SegmentSettings(frames=frames, stride=stride, keep_last=keep_last)
            clip, start, count = segments(lengths, settings, None)
            expected = [
                (i, *segment)
                for i, length in enumerate(lengths.tolist())
                for segment in list_segments(length, frames, stride, keep_last)
            ]
            assert list(zip(clip.tolist(), start.tolist(), count.tolist(), strict=True)) == expected
            assert (start + count <= lengths[clip]).all()


def test_segments_match_the_urban_sound_protocol_of_fedaudio() -> None:
    settings = SegmentSettings(frames=300, stride=50, test_stride=100, keep_last=False)
    assert segments(np.array([401]), settings, None)[1].tolist() == [
        0,
        50,
    ]  # 4 s: round(101 / 50), the last segment is lost
    assert segments(np.array([401]), settings, settings.test_stride)[1].tolist() == [0]
    every = settings.model_copy(update={"keep_last": True})
    assert segments(np.array([401]), every, None)[1].tolist() == [0, 50, 100]


def test_each_clip_is_an_example_without_segments() -> None:
    clip, start, count = segments(np.array([5, 900]), None, None)
    assert (clip.tolist(), start.tolist(), count.tolist()) == ([0, 1], [0, 0], [5, 900])
