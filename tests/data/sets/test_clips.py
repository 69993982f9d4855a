from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import soundfile

from raydfl.core.errors import DataError
from raydfl.data.audio import audio_seconds, read_audio
from raydfl.data.manifest import make_manifest

WriteAudio = Callable[..., Path]
STANDARD = ["clip", "path", "label", "group", "split", "seconds"]


def make_row(clip: str, **values: object) -> dict[str, object]:
    return {"clip": clip, "path": f"/x/{clip}", "label": "yes"} | values


# The manifest


def test_rows_columns_and_tables_make_equal_manifests() -> None:
    rows = [
        make_row("a", group=7, split="train", seconds=1, take=3),
        make_row("b", group=8, split="test", seconds=2, take=4),
    ]
    columns = {name: [r[name] for r in rows] for name in rows[0]}
    from_rows = make_manifest(rows, "here")
    assert from_rows.equals(make_manifest(columns, "here"))
    assert from_rows.equals(make_manifest(pa.table(columns), "here"))
    assert from_rows.column_names == [*STANDARD, "take"]
    assert [str(from_rows.schema.field(name).type) for name in STANDARD] == ["string"] * 5 + ["double"]
    assert from_rows.to_pylist()[1] == make_row("b", group="8", split="test", seconds=2.0, take=4)


def test_missing_columns_are_null_and_the_order_is_preserved() -> None:
    manifest = make_manifest([make_row("b"), make_row("a")], "here")
    assert manifest.column("clip").to_pylist() == ["b", "a"]
    assert [manifest.column(name).null_count for name in ("group", "split", "seconds")] == [2, 2, 2]


def test_numeric_labels_become_strings() -> None:
    assert make_manifest([make_row("a", label=7)], "here").column("label").to_pylist() == ["7"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"here: the manifest is empty\. Check the root folder"),
        ([{"clip": "a", "label": "x"}], r"here: the manifest has no column 'path'\. Its columns: clip, label"),
        ([{"clip": "a", "path": "a", "lable": "x"}], r"no column 'label'\. Its columns: clip, path, lable"),
        ([make_row("a"), make_row("b", label="")], r"here: row 2 \(clip 'b'\) has no label\. Rows without label: 1\."),
        ([make_row("a"), make_row("")], r"row 2 \(clip ''\) has no clip"),
        ([make_row("a"), make_row("b"), make_row("a")], r"1 clips are named more than once, the first 'a'"),
        ([make_row("a", split="tset")], r"unknown split 'tset'. Did you mean 'test'\?"),
        (
            [make_row("a", split="test"), make_row("b", split=None)],
            r"row 2 \(clip 'b'\) has no split\. Rows without split: 1 of 2\.",
        ),
        ([make_row("a", seconds="long")], r"column 'seconds' cannot be read as double"),
        ([make_row("a", label=[1, 2])], r"column 'label' cannot be read as string"),
        (
            [make_row("a", take=1), make_row("b", take="x")],
            r"here: the manifest has values of several types, or of unequal number",
        ),
    ],
)
def test_invalid_manifests_are_rejected(rows: list[dict[str, object]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_manifest(rows, "here")


def test_columns_of_unequal_length_are_rejected() -> None:
    with pytest.raises(DataError, match="here: the manifest has values of several types, or of unequal number"):
        make_manifest({"clip": ["a", "b"], "path": ["a"], "label": ["x", "y"]}, "here")


# Audio


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg"])
@pytest.mark.parametrize(("rate", "channels"), [(8000, 1), (44100, 2), (48000, 3)])
def test_any_format_rate_and_channel_count_can_be_read(
    write_audio: WriteAudio, suffix: str, rate: int, channels: int
) -> None:
    path = write_audio(f"a.{suffix}", 0.5, rate, channels)
    samples, actual_rate = read_audio(path)
    assert (samples.shape, samples.dtype, actual_rate) == ((rate // 2, channels), np.float32, rate)
    assert np.sqrt(np.mean(samples**2)) == pytest.approx(0.25 / np.sqrt(2), rel=0.02)
    assert audio_seconds(path) == pytest.approx(0.5)


def test_integer_samples_are_divided_by_full_scale(tmp_path: Path) -> None:
    values = np.array([0, 1, -1, 32767, -32768, 12345], np.int16)
    soundfile.write(tmp_path / "a.wav", values, 16000)
    samples, _ = read_audio(tmp_path / "a.wav")
    np.testing.assert_array_equal(samples[:, 0], values.astype(np.float32) / 32768)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.wav", None, r"/none\.wav: there is no such file"),
        ("", None, "cannot be read: Is a directory"),
        ("a.wav", b"", r"/a\.wav: the file is empty \(0 bytes\)"),
        ("a.wav", b"this is no sound, whatever the name says", r"/a\.wav: cannot be read as audio"),
        ("a.raw", bytes(1000), r"/a\.raw: cannot be read as audio: samplerate must be specified"),
        (
            "a.wav",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
            "Git LFS pointer, not the recording. Run 'git lfs pull'",
        ),
    ],
)
def test_unreadable_files_are_rejected(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_audio(tmp_path / name)
    with pytest.raises(DataError, match="there is no such file|cannot be read as audio"):
        audio_seconds(tmp_path / name)


@pytest.mark.parametrize("suffix", ["wav", "flac"])
@pytest.mark.parametrize("fraction", [0.9, 0.5])
def test_files_cut_within_their_samples_are_rejected(write_audio: WriteAudio, suffix: str, fraction: float) -> None:
    path = write_audio(f"a.{suffix}", 1.0)
    content = path.read_bytes()
    path.write_bytes(content[: int(fraction * len(content))])
    with pytest.raises(DataError, match=rf"/a\.{suffix}: (truncated: its header promises|cannot be read as audio)"):
        read_audio(path)


@pytest.mark.parametrize(("suffix", "subtype"), [("mp3", None), ("opus", "OPUS"), ("ogg", "VORBIS")])
def test_truncated_compressed_files_are_rejected(tmp_path: Path, suffix: str, subtype: str | None) -> None:
    path = tmp_path / f"a.{suffix}"
    kind = "MP3" if suffix == "mp3" else "OGG"
    soundfile.write(path, 0.2 * np.sin(np.arange(48000) * 0.05), 48000, format=kind, subtype=subtype)
    assert len(read_audio(path)[0]) == 48000
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=rf"a\.{suffix}: .*(truncated|malformed|no samples)"):
        read_audio(path)


def test_a_header_with_more_samples_than_memory_is_an_error(tmp_path: Path) -> None:
    """The number of frames in an mp3's header, 2**31 - 1, promises 5 TB."""
    path = tmp_path / "a.mp3"
    soundfile.write(path, 0.2 * np.sin(np.arange(8000) * 0.05), 8000)
    content = bytearray(path.read_bytes())
    at = content.find(b"Xing")
    content[at + 8 : at + 12] = (2**31 - 1).to_bytes(4, "big")
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.mp3: its header promises 12369505\d+ samples, which do not fit in memory"):
        read_audio(path)


def test_a_wav_file_cut_within_its_header_is_rejected(write_audio: WriteAudio) -> None:
    path = write_audio("a.wav")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=r"truncated: a wav header without samples \(40 bytes\)"):
        read_audio(path)


def test_the_message_has_the_promised_and_the_actual_length(write_audio: WriteAudio) -> None:
    path = write_audio("a.wav", 1.0)
    path.write_bytes(path.read_bytes()[: 44 + 1000])
    with pytest.raises(DataError, match="promises 32000 bytes of samples, but the file has 1000"):
        read_audio(path)


def test_a_size_that_includes_the_header_is_accepted(write_audio: WriteAudio) -> None:
    path = write_audio("a.wav", 1.0)
    content = bytearray(path.read_bytes())
    content[40:44] = struct.pack("<I", 32000 + 44)
    path.write_bytes(content)
    assert read_audio(path)[0].shape == (16000, 1)


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFF000])
def test_a_wav_file_from_a_pipe_with_a_placeholder_length_is_accepted(write_audio: WriteAudio, size: int) -> None:
    path = write_audio("a.wav", 1.0)
    content = bytearray(path.read_bytes())
    content[4:8] = content[40:44] = struct.pack("<I", size)
    path.write_bytes(content)
    assert read_audio(path)[0].shape == (16000, 1)


def test_chunks_before_the_samples_are_skipped(write_audio: WriteAudio) -> None:
    path = write_audio("a.wav", 1.0)
    content = path.read_bytes()
    odd = b"LIST" + struct.pack("<I", 5) + b"hello" + b"\0"
    longer = content[:4] + struct.pack("<I", len(content) - 8 + len(odd)) + content[8:36] + odd + content[36:]
    path.write_bytes(longer)
    assert read_audio(path)[0].shape == (16000, 1)
    path.write_bytes(longer[:-1000])
    with pytest.raises(DataError, match="promises 32000 bytes of samples, but the file has 31000"):
        read_audio(path)


def test_a_clip_without_samples_is_rejected(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros((0, 1)), 16000)
    with pytest.raises(DataError, match=r"/a\.wav: the clip has no samples \(zero length\)"):
        read_audio(tmp_path / "a.wav")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_samples_are_counted_and_located(tmp_path: Path, value: float) -> None:
    samples = np.zeros((100, 2), np.float32)
    samples[60, 1] = samples[70] = value
    soundfile.write(tmp_path / "a.wav", samples, 16000, subtype="FLOAT")
    with pytest.raises(DataError, match=r"/a\.wav: 3 of 200 samples are NaN or infinite, the first at sample 60"):
        read_audio(tmp_path / "a.wav")
