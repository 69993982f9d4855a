"""Recordings in larger files: shards, Parquet, Arrow and cuts. The files of ``tests/data/packed`` come from the libraries."""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from commands import Raydfl

from raydfl.core.errors import DataError
from raydfl.core.registry import build
from raydfl.data.audio import read_audio
from raydfl.data.build import build_population
from raydfl.data.dataset import Dataset, find_dataset
from raydfl.data.packed import cell_address, recording_name, span_address, split_address
from raydfl.data.sets import list_contents
from raydfl.data.sets._packed import find_splits
from raydfl.data.sets.huggingface import HuggingFace
from raydfl.data.sets.lhotse import Lhotse
from raydfl.data.sets.webdataset import WebDataset
from raydfl.data.settings import DataSettings
from raydfl.runs.inference.recordings import recordings as recordings_in

PACKED = Path(__file__).parents[1] / "packed"
sys.path.insert(0, str(PACKED))
from write import CLIPS, RATE, encode, make_tone

STEP = 2 / 32768
"""Tolerance of samples that were rounded to 16 bits."""
NAMES = ("hum", "whistle")


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def write_shard(path: Path, **extra: bytes) -> Path:
    """Write a shard with all eight clips and their classes."""
    files = {}
    for label, take in CLIPS:
        name = f"{NAMES[label]}-{take}"
        files |= {f"{name}.wav": encode(make_tone(label, take), "WAV"), f"{name}.cls": str(label).encode()}
    return write_tar(path, files | extra)


def make_clip_table(**columns: Any) -> pa.Table:
    """Make a table of all eight clips, with the recordings as bytes."""
    defaults = {
        "audio": [{"bytes": encode(make_tone(*clip)), "path": None} for clip in CLIPS],
        "label": [NAMES[label] for label, _ in CLIPS],
    }
    return pa.table({name: values for name, values in (defaults | columns).items() if values is not None})


# Files written by the libraries


@pytest.mark.parametrize(
    ("dataset", "first"),
    [
        (WebDataset(root=PACKED / "webdataset", group_column="speaker", names=NAMES), "test-000000.tar/0/3.flac"),
        (HuggingFace(root=PACKED / "hub", group_column="speaker"), "data/test-00000-of-00001.parquet/0"),
        (HuggingFace(root=PACKED / "disk", group_column="speaker"), "test/data-00000-of-00001.arrow/0"),
    ],
)
def test_files_of_the_libraries_are_read_in_place(dataset: Dataset, first: str) -> None:
    """Oracle: the original tones."""
    rows = dataset.manifest().to_pylist()
    assert rows[0]["clip"] == first
    assert {(row["label"], row["group"], row["split"]) for row in rows} == {
        (NAMES[label], f"s{take}", "test" if take == 3 else "train") for label, take in CLIPS
    }
    for row in rows:
        samples, rate = dataset.read(row)
        expected = make_tone(NAMES.index(row["label"]), int(row["group"][1:]))
        assert (rate, samples.shape) == (RATE, (400, 1))
        assert np.abs(samples[:, 0] - expected).max() < STEP
    if isinstance(dataset, WebDataset):
        assert [(row["snr"], row["txt"]) for row in rows[:2]] == [(4.5, "take 3")] * 2


def test_a_single_folder_of_save_to_disk_has_no_split() -> None:
    rows = HuggingFace(root=PACKED / "disk" / "train").manifest().to_pylist()
    assert len(rows) == 6
    assert {row["split"] for row in rows} == {None}
    assert rows[0]["speaker"] == "s0"


@pytest.mark.parametrize("footer", [True, False])
def test_rows_of_arrow_may_name_files(tmp_path: Path, footer: bool) -> None:
    """Without decoding, ``save_to_disk`` writes paths and no bytes."""
    paths = [tmp_path / f"{number}.wav" for number in range(len(CLIPS))]
    for path, clip in zip(paths, CLIPS, strict=True):
        path.write_bytes(encode(make_tone(*clip), "WAV"))
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    audio = pa.array([{"bytes": None, "path": str(path)} for path in paths], kind)
    new = pa.ipc.new_file if footer else pa.ipc.new_stream
    table = make_clip_table(audio=audio)
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    dataset = HuggingFace(root=tmp_path / "rows.arrow")
    rows = dataset.manifest().to_pylist()
    assert [row["path"] for row in rows] == [str(path) for path in paths]
    assert np.abs(dataset.read(rows[5])[0][:, 0] - make_tone(*CLIPS[5])).max() < STEP


def test_cuts_have_the_same_samples_as_in_lhotse() -> None:
    """Oracle: ``MonoCut.load_audio``, bit for bit."""
    dataset = Lhotse(root=PACKED / "lhotse")
    rows = dataset.manifest().to_pylist()
    with np.load(PACKED / "lhotse" / "samples.npz") as expected:
        assert {row["clip"] for row in rows} == set(expected.files)
        for row in rows:
            samples, rate = dataset.read(row)
            assert rate == RATE
            assert np.array_equal(samples[:, 0], expected[row["clip"]])
    columns = {row["clip"]: (row["label"], row["group"], row["split"], row["text"], row["snr"]) for row in rows}
    assert columns["cut-0"] == ("hum", "s0", "train", "yes", 3.5)
    assert columns["cut-3"] == ("whistle", "s3", "validation", "no", 3.5)
    assert len({dataset.part(row) for row in rows}) == 4, "the cache keys must be unique"


# Addresses of recordings in larger files


def test_features_match_the_unpacked_recordings(tmp_path: Path) -> None:
    """Oracle: the unpacked files, read from a list of recordings."""
    shard = write_shard(tmp_path / "set" / "a.tar")
    with tarfile.open(shard) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    names = [f"{NAMES[label]}-{take}.wav" for label, take in CLIPS]
    content = [(tmp_path / "unpacked" / name).read_bytes() for name in names]
    table = make_clip_table(audio=content)
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=3)
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    lines = [f"unpacked/{name},{name.partition('-')[0]}" for name in names]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *lines]))
    common: dict[str, Any] = {
        "cache": tmp_path / "cache",
        "features": {"sample_rate": RATE, "bands": 8, "seconds": 0.05},
        "split": {"test": {"by": "clip", "fraction": 0.25}},
        "partition": {"by": "iid", "clients": 2},
    }

    def extract_frames(**options: Any) -> np.ndarray:
        store = build_population(DataSettings(**common, **options), seed=0).stores[0]
        return np.stack([store.clip(number) for number in range(len(store))])

    expected = extract_frames(name="manifest", file=tmp_path / "list.csv")
    assert len({clip.tobytes() for clip in expected}) == 8
    for options in (
        {"name": "webdataset", "root": shard, "names": NAMES},
        {"name": "huggingface", "root": tmp_path / "rows.parquet"},
        {"name": "huggingface", "root": tmp_path / "rows.arrow"},
    ):
        assert np.array_equal(extract_frames(**options), expected), options


def test_addresses_name_a_file_and_a_place_in_it() -> None:
    span = span_address("/a b/C#.tar", "x@1+2/dog.wav", 512, 44)
    assert (split_address(span), recording_name(span)) == (("/a b/C#.tar", "@512+44"), "x@1+2/dog.wav")
    cell = cell_address("rows.parquet", "audio", 12)
    assert (split_address(cell), recording_name(cell)) == (("rows.parquet", "#audio[12]"), "audio")
    for path in ("C#.wav", "take#3[1].wav", "a@1+2", "rows.csv#audio[1]"):
        assert (split_address(path), recording_name(path)) == ((path, None), path)


@pytest.mark.parametrize(("kind", "subtype"), [("WAV", None), ("MP3", None), ("OGG", "OPUS"), ("OGG", "VORBIS")])
def test_recordings_in_a_shard_match_files(tmp_path: Path, kind: str, subtype: str | None) -> None:
    file = tmp_path / f"a.{'opus' if subtype == 'OPUS' else kind.lower()}"
    soundfile.write(file, np.tile(make_tone(0, 0), 20), RATE, format=kind, subtype=subtype)
    shard = write_tar(tmp_path / "a.tar", {file.name: file.read_bytes(), "b.cls": b"1"})
    (address,) = list_contents(shard)
    for part in ((0.0, None), (0.3, 0.45)):
        samples, rate = read_audio(address, *part)
        expected, expected_rate = read_audio(file, *part)
        assert rate == expected_rate
        assert np.array_equal(samples, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.int16])
def test_samples_in_a_cell_keep_their_values(tmp_path: Path, dtype: type) -> None:
    wave = make_tone(1, 0) if dtype is np.float32 else np.arange(-200, 200, dtype=np.int16)
    cells = [
        {"array": wave, "sampling_rate": 44100},
        {"array": np.stack([wave, -wave]).tolist(), "sampling_rate": 8000},
    ]
    for number, cell in enumerate(cells):
        pq.write_table(pa.table({"sound": [cell], "label": ["a"]}), tmp_path / f"{number}.parquet")
    scale = 1 if dtype is np.float32 else 32768
    samples, rate = read_audio(list_contents(tmp_path / "0.parquet")[0])
    assert rate == 44100
    assert np.array_equal(samples[:, 0] * scale, wave)
    if dtype is np.float32:  # integers in nested lists are int64, so their scale is unknown
        assert np.array_equal(read_audio(list_contents(tmp_path / "1.parquet")[0])[0], np.stack([wave, -wave], axis=1))


def test_rows_are_read_in_any_order(tmp_path: Path) -> None:
    pq.write_table(make_clip_table(), tmp_path / "rows.parquet", row_group_size=3)
    addresses = list_contents(tmp_path / "rows.parquet")
    for row in (0, 1, 5, 4, 7, 7, 2):
        assert np.abs(read_audio(addresses[row])[0][:, 0] - make_tone(*CLIPS[row])).max() < STEP


def test_a_second_recording_of_a_sample_is_a_view(tmp_path: Path) -> None:
    files = {
        "a.left.wav": encode(make_tone(0, 0), "WAV"),
        "a.right.wav": encode(make_tone(1, 0), "WAV"),
        "a.cls": b"dog",
    }
    shard = write_tar(tmp_path / "a.tar", files)
    with pytest.raises(
        DataError, match=r"a\.tar: the sample a has several recordings: left\.wav, right\.wav\. Set data\.audio_field"
    ):
        WebDataset(root=shard).manifest()
    dataset = WebDataset(root=shard, audio_field="left.wav")
    (row,) = dataset.manifest().to_pylist()
    other = row | {"path": dataset.file_of(row, "right.wav")}
    assert [
        np.abs(dataset.read(entry)[0][:, 0] - make_tone(label, 0)).max() < STEP
        for label, entry in enumerate([row, other])
    ]
    assert (row["clip"], row["label"]) == ("a.tar/a.left.wav", "dog")


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
def test_a_metadata_list_next_to_the_recordings_is_read(tmp_path: Path, name: str) -> None:
    for split in ("train", "dev"):
        (tmp_path / split / "deep").mkdir(parents=True)
        rows = [{"file_name": "deep/test_1.wav", "label": "007", "speaker": "x"}]
        (tmp_path / split / "deep" / "test_1.wav").write_bytes(encode(make_tone(0, 0), "WAV"))
        text = "file_name,label,speaker\ndeep/test_1.wav,a,x\n" if name.endswith("csv") else json.dumps(rows[0])
        (tmp_path / split / name).write_text(text)
    dataset = HuggingFace(root=tmp_path, group_column="speaker")
    rows = dataset.manifest().to_pylist()
    assert [(row["clip"], row["split"], row["group"]) for row in rows] == [
        ("dev/deep/test_1.wav", "validation", "x"),
        ("train/deep/test_1.wav", "train", "x"),
    ]
    assert all(dataset.read(row)[1] == RATE for row in rows)


def test_rows_may_have_paths_instead_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(encode(make_tone(0, 0), "WAV"))
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"audio": pa.array([{"bytes": None, "path": "a.wav"}], kind), "label": ["dog"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    assert [row["path"] for row in HuggingFace(root=tmp_path).manifest().to_pylist()] == [str(tmp_path / "a.wav")]


def test_labels_of_several_kinds_are_decoded(tmp_path: Path) -> None:
    def read_labels(values: pa.Array, feature: dict[str, Any] | None = None) -> list[str | None]:
        table = pa.table({"audio": make_clip_table()["audio"].slice(0, len(values)), "label": values})
        features = {"audio": {"_type": "Audio"}, "label": feature or {"_type": "Value"}}
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "rows.parquet")
        labels: list[str | None] = HuggingFace(root=tmp_path).manifest().column("label").to_pylist()
        return labels

    classes = {"_type": "ClassLabel", "names": ["dog", "cat"]}
    assert read_labels(pa.array([1, 0, -1, None]), classes) == ["cat", "dog", None, None]
    assert read_labels(pa.array([1, 7])) == ["1", "7"]
    assert read_labels(pa.array([[0, 1], [], None]), {"_type": "List", "feature": classes}) == ["dog|cat", "|", None]
    with pytest.raises(DataError, match=r"rows\.parquet: row 1 has the class 7 in column 'label', which has 2 names"):
        read_labels(pa.array([1, 7]), classes)


# Files and splits


def test_a_pattern_selects_files(tmp_path: Path) -> None:
    for name in ("en/train-08", "en/train-09", "en/train-10", "en/test-00", "de/train-08"):
        write_shard(tmp_path / f"{name}.tar")

    def list_files(pattern: str) -> set[str]:
        clips = WebDataset(root=tmp_path, files=pattern).manifest().column("clip").to_pylist()
        return {clip.partition(".tar")[0] for clip in clips}

    assert list_files("**/train-{08..09}.tar") == {"en/train-08", "en/train-09", "de/train-08"}
    assert list_files("en/{train-??,test-*}.tar") == {"en/train-08", "en/train-09", "en/train-10", "en/test-00"}
    with pytest.raises(DataError, match=r"there is no file en/train-11\.tar \(data\.files\) in "):
        list_files("en/train-{08..11}.tar")
    assert WebDataset(root=tmp_path / "de", files="*.tar").manifest().column("split").null_count == 8


@pytest.mark.parametrize(
    ("files", "splits", "expected"),
    [
        (["data/train-00000-of-00002.parquet", "data/test.other-00000-of-00001.parquet"], None, ["train", "test"]),
        (["default/train/0000.parquet", "default/partial-validation/0000.parquet"], None, ["train", "validation"]),
        (["cuts_train-clean-100.jsonl.gz", "cuts_dev-clean.jsonl.gz"], None, ["train", "validation"]),
        (["latest-000.tar", "greatest-000.tar"], None, [None, None]),
        (["train-000.tar", "train-001.tar"], None, [None, None]),
        (["a-0.tar", "b-0.tar", "b-1.tar", "c.tar"], {"a": "train", "b": "test"}, ["train", "test", "test", None]),
    ],
)
def test_file_names_determine_the_split(files: list[str], splits: Any, expected: list[str | None]) -> None:
    result = find_splits(files, splits, "set")
    assert [result.get(file) for file in files] == expected
    assert len(result) == (len(files) if splits is None else len([*filter(None, expected)]))


# Bad input


def truncate_file(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def write_unusable_set(folder: Path, kind: str) -> dict[str, Any]:
    """Write an unusable data set and return its options."""
    shard, rows = folder / "a.tar", folder / "rows.parquet"
    wav = encode(make_tone(0, 0), "WAV")
    shard_writers: dict[str, Callable[[], Any]] = {
        "member": lambda: truncate_file(write_shard(shard), 700),
        "header": lambda: truncate_file(write_shard(shard), 512 * 5 + 100),
        "mark": lambda: truncate_file(write_tar(shard, {"a.wav": wav}), 512 * 3),
        "packed": lambda: shard.write_bytes(b"\x1f\x8b" + bytes(100)),
        "text": lambda: shard.write_text("no archive at all"),
        "no samples": lambda: write_tar(shard, {"README": b""}),
        "no recording": lambda: write_tar(shard, {"a.cls": b"1", "a.json": b"{}"}),
        "json": lambda: write_tar(shard, {"a.wav": wav, "a.json": b"{label:"}),
        "no label": lambda: write_tar(shard, {"a.wav": wav, "a.txt": b"yes"}),
        "no name": lambda: write_tar(shard, {"a.wav": wav, "a.cls": b"2"}),
        "deep": lambda: write_tar(shard, {"a.wav": wav, "a.json": b"[" * 100_000}),
        "twice": lambda: write_tar(shard, {"a.wav": wav, "a.WAV": wav}),
        "link": lambda: write_link(shard, tarfile.SYMTYPE),
        "hard link": lambda: write_link(shard, tarfile.LNKTYPE),
        "no shard": (folder / "readme.txt").touch,
        "split": lambda: [write_shard(folder / f"{name}.tar") for name in ("train-0", "other-0")],
        "no such split": lambda: write_shard(folder / "train-0.tar"),
    }
    row_writers: dict[str, Callable[[], Any]] = {
        "parquet": lambda: (pq.write_table(make_clip_table(), rows), truncate_file(rows, 300)),
        "no audio": lambda: pq.write_table(make_clip_table(audio=None, text=["x"] * 8), rows),
        "column": lambda: pq.write_table(make_clip_table(), rows),
        "not audio": lambda: pq.write_table(make_clip_table(), rows),
        "two": lambda: pq.write_table(make_clip_table(audio=None, a=[b"x"] * 8, b=[b"y"] * 8), rows),
        "label": lambda: pq.write_table(make_clip_table(label=None, text=["x"] * 8), rows),
        "empty": lambda: pq.write_table(make_clip_table().slice(0, 0), rows),
        "own split": lambda: pq.write_table(make_clip_table(split=["fold1"] * 8), rows),
        "arrow": lambda: (folder / "a.arrow").write_bytes(b"\xff\xff\xff\xff\x10"),
        "compressed": lambda: write_compressed(folder / "a.arrow"),
    }
    (shard_writers | row_writers)[kind]()
    options = {
        "no name": {"names": ("dog", "cat")},
        "no such split": {"splits": {"train": "train", "tset": "test"}},
        "column": {"group_column": "speaker"},
        "not audio": {"audio_column": "label"},
    }
    return {"name": "webdataset" if kind in shard_writers else "huggingface", "root": folder, **options.get(kind, {})}


def write_link(path: Path, kind: bytes) -> None:
    """Write a shard in which a sample's class is a link to another member, and an irrelevant link."""
    wav = encode(make_tone(0, 0), "WAV")
    write_tar(path, {"a.wav": wav, "a.cls": b"1", "b.wav": wav})
    with tarfile.open(path, "a") as archive:
        for name in ("README", "b.cls"):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.cls"
            archive.addfile(info)


def write_compressed(path: Path) -> None:
    table, options = make_clip_table(), pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema, options=options) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("member", r"a\.tar: truncated: its member hum-0\.wav ends at byte 1356, but the file has 700"),
        ("header", r"a\.tar: truncated or damaged: byte 2560 starts neither a member nor the end"),
        ("mark", r"a\.tar: truncated or damaged: byte 1536 starts neither"),
        ("packed", r"a\.tar: it is compressed, .* Unpack it with gzip -d"),
        ("text", r"a\.tar: cannot be read as a tar archive"),
        ("no samples", r"a\.tar has no samples\. Expected \*\.tar with"),
        (
            "no recording",
            r"a\.tar: the sample a has no recording\. Set data\.audio_field to one of its fields: cls, json",
        ),
        ("json", r"a\.tar: a\.json: cannot be read as JSON: "),
        ("deep", r"a\.tar: a\.json: cannot be read as JSON: "),
        ("no label", r"no clip has a field 'label' \(data\.label_column\)\. .*txt"),
        ("no name", r"a\.tar/a\.wav has the class '2', but data\.names has 2 names"),
        ("twice", r"a\.tar: the sample a has two files a\.wav\. Give them different names"),
        ("link", r"a\.tar: its member b\.cls is a link to a\.cls .*tar --dereference --hard-dereference"),
        ("hard link", r"a\.tar: its member b\.cls is a link to a\.cls"),
        ("no shard", r"there is no file \*\*/\*\.tar \(data\.files\) in .*Found: readme\.txt"),
        ("split", r"the split of other-0\.tar is unknown, .* data\.splits='\{other: train, \.\.\.\}'"),
        ("no such split", r"data\.splits: .* has no files of a split 'tset'"),
        ("parquet", r"rows\.parquet: the file is damaged, truncated, or of another type: "),
        ("no audio", r"rows\.parquet: no column has recordings .* to one of label, text"),
        ("column", r"rows\.parquet: no clip has a field 'speaker' \(data\.group_column\). Choose one of label"),
        ("not audio", r"rows\.parquet: column 'label' has no recordings .*data\.audio_column"),
        ("two", r"rows\.parquet: the columns a, b may all be recordings .*data\.audio_column"),
        ("label", r"rows\.parquet: no clip has a field 'label' \(data\.label_column\). Choose one of text"),
        ("empty", r"the manifest is empty"),
        ("own split", r"rows\.parquet/0 has the unknown split 'fold1'"),
        ("arrow", r"a\.arrow: the file is damaged, truncated, or of another type: "),
        ("compressed", r"a\.arrow: the file is compressed, .* Save it without compression"),
    ],
)
def test_unusable_data_sets_are_rejected(tmp_path: Path, kind: str, message: str) -> None:
    options = write_unusable_set(tmp_path, kind)
    with pytest.raises(DataError, match=re.compile(message, re.DOTALL)):
        build(find_dataset(options.pop("name")), options, "data").manifest()


CUT = {
    "id": "c1",
    "type": "MonoCut",
    "start": 0.0,
    "duration": 0.5,
    "channel": 0,
    "supervisions": [{"id": "s", "custom": {"label": "dog"}}],
    "recording": {
        "id": "r",
        "sampling_rate": 8000,
        "num_samples": 8000,
        "sources": [{"type": "file", "channels": [0], "source": "a.wav"}],
    },
}
RECORDING: dict[str, Any] = CUT["recording"]  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"type": "MixedCut"},
            r"line 1 \(cut 'c1'\): cannot be read: it is a MixedCut .*\. raydfl reads single-channel cuts",
        ),
        ({"type": "PaddingCut"}, r"it is a PaddingCut"),
        ({"type": "MultiCut", "channel": [0, 1]}, r"it is a MultiCut of the channels \[0, 1\]"),
        ({"recording": None, "features": {"type": "fbank"}}, r"has no recording, at most features"),
        (
            {"recording": RECORDING | {"transforms": [{"name": "Speed", "kwargs": {"factor": 0.9}}]}},
            r"has the transforms .*Speed",
        ),
        (
            {"recording": RECORDING | {"sources": [{"type": "command", "channels": [0], "source": "rm x"}]}},
            r"has no file with channel 0, but .*command",
        ),
        (
            {"recording": RECORDING | {"sources": [{"type": "url", "channels": [0], "source": "http://x"}]}},
            r"has no file with channel 0, but .*url",
        ),
        ({"channel": 1}, r"has no file with channel 1, but "),
        ({"duration": 0.0}, r"it starts at sample 0, and has 0 samples"),
        ({"duration": float("inf")}, r"line 1 \(cut 'c1'\): cannot be read: "),
        ({"recording": {"id": "r"}}, r"cannot be read: KeyError: 'sampling_rate'"),
        (
            {"supervisions": [{"custom": {"label": "dog"}}, {"custom": {"label": "cat"}}]},
            r"the cut c1 has supervisions with different values of 'label'. Make a cut of each",
        ),
        ({"supervisions": []}, r"no clip has a field 'label'"),
    ],
)
def test_unsupported_cuts_are_rejected(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "cuts.jsonl").write_text(json.dumps(CUT | change))
    with pytest.raises(DataError, match=message):
        Lhotse(root=tmp_path).manifest()


def test_a_damaged_list_of_cuts_is_an_error(tmp_path: Path) -> None:
    """Each byte after gzip's header is wrong once. Some errors are found by the checksum alone."""
    content = gzip.compress(json.dumps(CUT).encode() * 3)
    for at in range(10, len(content)):
        (tmp_path / "cuts.jsonl.gz").write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        with pytest.raises(DataError, match=r"cuts\.jsonl\.gz.* cannot be read: "):
            Lhotse(root=tmp_path).manifest()


def test_damaged_recordings_in_a_shard_raise_or_are_skipped(tmp_path: Path, raydfl: Raydfl) -> None:
    shard = write_shard(tmp_path / "a.tar", **{"z.wav": b"RIFF\0\0\0\0WAVE", "z.cls": b"1"})
    (tmp_path / "job.yaml").write_text(
        f"""
        method: fedavg
        models: {{model: crnn_tiny}}
        data:
          name: webdataset
          root: {shard}
          features: {{sample_rate: {RATE}, bands: 8, seconds: 0.05}}
          split: {{test: {{by: clip, fraction: 0.25}}}}
          partition: {{by: iid, clients: 2}}
          cache: {tmp_path / "cache"}
        train: {{rounds: 1, cohort: 1.0}}
        """
    )
    result = raydfl("data", "prepare", str(tmp_path / "job.yaml"))
    assert result.code == 2
    assert "1 of 9 clips cannot be read" in result.err
    assert re.search(r"a\.tar#z\.wav@\d+\+12: truncated: a wav header without samples", result.err)
    assert raydfl("data", "prepare", str(tmp_path / "job.yaml"), "data.unreadable=skip").code == 0


def test_prediction_accepts_shards_and_tables(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.tar")
    pq.write_table(make_clip_table(), tmp_path / "rows.parquet")
    broken = tmp_path / "broken.tar"
    broken.write_text("no archive")
    addresses, failures = recordings_in([shard, tmp_path / "rows.parquet", broken, tmp_path / "a.wav"])
    assert len(addresses) == 17
    for in_shard, in_table in zip(addresses[:8], addresses[8:16], strict=True):
        assert np.abs(read_audio(in_shard)[0] - read_audio(in_table)[0]).max() < STEP
    assert {file.name: reason for file, reason in failures.items()} == {
        "broken.tar": "cannot be read as a tar archive: truncated header"
    }
