from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from raydfl.core.errors import ConfigError, DataError
from raydfl.core.registry import build
from raydfl.data.dataset import Dataset, find_dataset
from raydfl.data.manifest import read_remarks
from raydfl.data.sets.folder import Folder
from raydfl.data.sets.manifest import Manifest

WriteAudio = Callable[..., Path]


def list_columns(dataset: Dataset, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in dataset.manifest().to_pylist()]


# A folder for each class


@pytest.fixture
def tree(tmp_path: Path, write_audio: WriteAudio) -> Path:
    write_audio("tree/dog/anna_1.wav", rate=8000)
    write_audio("tree/dog/outside/bob_1.flac", rate=48000, channels=2)
    write_audio("tree/vacuum cleaner/bob_2.ogg", rate=44100)
    (tmp_path / "tree/dog/notes.txt").touch()
    return tmp_path / "tree"


def test_each_folder_is_a_class(tree: Path) -> None:
    dataset = Folder(root=tree)
    assert list_columns(dataset, "clip", "label", "group", "split") == [
        ("dog/anna_1.wav", "dog", None, None),
        ("dog/outside/bob_1.flac", "dog", None, None),
        ("vacuum cleaner/bob_2.ogg", "vacuum cleaner", None, None),
    ]
    assert [dataset.read(row)[0].shape[1] for row in dataset.manifest().to_pylist()] == [1, 2, 1]
    assert [dataset.read(row)[1] for row in dataset.manifest().to_pylist()] == [8000, 48000, 44100]


def test_links_to_folders_are_followed(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/hound").symlink_to(tree / "dog")
    assert list_columns(Folder(root=tmp_path / "linked"), "clip", "label")[0] == ("hound/anna_1.wav", "hound")


def test_the_pattern_extracts_the_group_below_the_class(tree: Path) -> None:
    by_file = Folder(root=tree, group_pattern=r"(?P<group>[a-z]+)_\d")
    assert list_columns(by_file, "group") == [("anna",), ("bob",), ("bob",)]
    with pytest.raises(DataError, match=r"finds no group in 'anna_1\.wav' \(of 'dog/anna_1\.wav'\)"):
        Folder(root=tree, group_pattern=r"(?P<group>\w+)/").manifest()


def test_owners_may_have_the_outer_folders(tmp_path: Path, write_audio: WriteAudio) -> None:
    for name in ("anna/yes/deep/1.wav", "anna/no/1.wav", "bob/yes/1.wav"):
        write_audio(f"tree/{name}")
        write_audio(f"split/train/{name}")
    expected = [("no", "anna"), ("yes", "anna"), ("yes", "bob")]
    assert list_columns(Folder(root=tmp_path / "tree", owner_folders=True), "label", "group") == expected
    assert list_columns(Folder(root=tmp_path / "split", owner_folders=True), "label", "group") == expected
    write_audio("tree/anna/2.wav")
    with pytest.raises(DataError, match=r"'anna/2\.wav' is outside the folders of the classes"):
        Folder(root=tmp_path / "tree", owner_folders=True).manifest()
    with pytest.raises(ConfigError, match="group_pattern and owner_folders both set the owners"):
        build(find_dataset("folder"), {"root": "x", "group_pattern": "(?P<group>a)", "owner_folders": True}, "data")


def test_a_folder_without_recordings_lists_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("clap/a.mp4", "wave/b.MOV"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    module = "raydfl.data.sets.folder.has_decoder"
    monkeypatch.setattr(module, lambda: True)
    assert list_columns(Folder(root=tmp_path), "clip", "label") == [("clap/a.mp4", "clap"), ("wave/b.MOV", "wave")]
    monkeypatch.setattr(module, lambda: False)
    with pytest.raises(DataError, match=r"To read the videos, install the extra: pip install 'raydfl\[video\]'"):
        Folder(root=tmp_path).manifest()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("(?P<group>", "is not a regular expression"), (r"(\w+)_\d", r"needs a group named group, as in '\(\?P<group>")],
)
def test_invalid_patterns_are_rejected_by_the_configuration(pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"data.group_pattern: .*{message}"):
        build(find_dataset("folder"), {"root": "x", "group_pattern": pattern}, "data")


def test_folders_with_names_of_splits_are_splits(tmp_path: Path, write_audio: WriteAudio) -> None:
    for folder in ("Train", "dev", "test"):
        write_audio(f"tree/{folder}/dog/a.wav")
    assert list_columns(Folder(root=tmp_path / "tree"), "clip", "label", "split") == [
        ("Train/dog/a.wav", "dog", "train"),
        ("dev/dog/a.wav", "dog", "validation"),
        ("test/dog/a.wav", "dog", "test"),
    ]
    classes = list_columns(Folder(root=tmp_path / "tree", split_folders=False), "label", "split")
    assert classes == [("Train", None), ("dev", None), ("test", None)]


def test_a_folder_test_is_a_class_without_a_training_folder(tmp_path: Path, write_audio: WriteAudio) -> None:
    write_audio("tree/test/a.wav")
    write_audio("tree/dog/a.wav")
    assert list_columns(Folder(root=tmp_path / "tree"), "label", "split") == [("dog", None), ("test", None)]
    with pytest.raises(DataError, match="'dog/a.wav' is outside the folders of the classes; move it into one"):
        Folder(root=tmp_path / "tree", split_folders=True).manifest()
    write_audio("tree/dog/deeper/a.wav")
    (tmp_path / "tree/dog/a.wav").unlink()
    with pytest.raises(
        DataError, match="split_folders is true, but 'dog' is not the name of a split. Use one of train, training, "
    ):
        Folder(root=tmp_path / "tree", split_folders=True).manifest()


def test_all_audio_formats_are_read_and_skipped_files_are_counted(tmp_path: Path, write_audio: WriteAudio) -> None:
    """Oracle: libsndfile writes and reads the same formats."""
    kinds = ["flac", "ogg", "opus", "mp3", "aiff", "AIF", "au", "caf", "w64", "rf64", "voc"]
    tone, rate = soundfile.read(write_audio("tree/dog/a.wav", rate=48000, seconds=0.2))
    for kind in kinds:
        name = {"opus": "OGG", "AIF": "AIFF"}.get(kind, kind.upper())
        subtype = "OPUS" if kind == "opus" else None
        soundfile.write(tmp_path / f"tree/dog/a.{kind}", tone, rate, format=name, subtype=subtype)
    for name in ("dog/b.m4a", "dog/c.m4a", "dog/notes.txt", "README", "dog/a.wma"):
        (tmp_path / "tree" / name).write_bytes(b"?" * 100)
    dataset = Folder(root=tmp_path / "tree")
    manifest = dataset.manifest()
    assert [row["clip"] for row in manifest.to_pylist()] == sorted(f"dog/a.{kind}" for kind in ["wav", *kinds])
    for row in manifest.to_pylist():
        samples, rate = dataset.read(row)
        assert (len(samples) / rate, np.sqrt(np.mean(samples**2))) == (
            pytest.approx(0.2, abs=0.03),
            pytest.approx(0.25 / np.sqrt(2), rel=0.15),
        )
    (remark,) = read_remarks(manifest)
    assert "2 .m4a, 1 without an ending, 1 .wma, 1 .txt (5 in all: README, dog/a.wma, dog/b.m4a, ...)" in remark
    assert "Convert .m4a to wav files with ffmpeg" in remark, "a.wma needs no conversion, since a.wav exists"
    assert read_remarks(manifest.slice(1)) == [remark]


def test_the_proposed_conversion_command_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copying program replaces ffmpeg, since ffmpeg may not be installed."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/ffmpeg"
    program.write_text('#!/bin/sh\n[ "$1 $2" = "-nostdin -i" ] && cp "$3" "$4"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    tree = tmp_path / "it's a tree"
    (tree / "dog $x").mkdir(parents=True)
    soundfile.write(tmp_path / "tone.wav", np.full(800, 0.1), 8000)
    for name in ("dog $x/a b.m4a", "dog $x/c.WMA"):
        shutil.copy(tmp_path / "tone.wav", tree / name)
    with pytest.raises(
        DataError, match=r"there are no \.wav, .*left out of .*: 1 \.wma, 1 \.m4a|1 \.m4a, 1 \.wma"
    ) as error:
        Folder(root=tree).manifest()
    command = str(error.value).rpartition("\n")[2]
    subprocess.run(command, shell=True, check=True)
    assert list_columns(Folder(root=tree), "clip") == [("dog $x/a b.wav",), ("dog $x/c.wav",)]
    assert "ffmpeg" not in read_remarks(Folder(root=tree).manifest())[0], "all files have been converted"


def test_a_link_to_a_parent_folder_is_rejected(tree: Path) -> None:
    (tree / "dog/again").symlink_to(tree)
    with pytest.raises(DataError, match=r"tree/dog/again is a link to one of its parent folders. Remove the link"):
        Folder(root=tree).manifest()


def test_a_link_to_itself_is_an_unreadable_file(tree: Path) -> None:
    (tree / "dog/self.wav").symlink_to("self.wav")
    (tree / "dog/other").symlink_to("other")
    dataset = Folder(root=tree)
    row = next(row for row in dataset.manifest().to_pylist() if row["clip"] == "dog/self.wav")
    with pytest.raises(DataError, match=r"dog/self\.wav: cannot be read: Too many levels of symbolic links"):
        dataset.read(row)
    with pytest.raises(DataError, match=r"dog/other cannot be found: Symlink loop"):
        Folder(root=tree / "dog/other").manifest()


def test_inaccessible_folders_are_reported(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is simulated, since permissions do not apply to tests that run as root."""

    def deny_outside(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, **options: Any) -> Any:
            if Path(path).name == "outside":
                raise PermissionError(13, "Permission denied", path)
            return function(path, **options)

        return call

    monkeypatch.setattr(os, "scandir", deny_outside(os.scandir))
    with pytest.raises(
        DataError, match="the folder .*/dog/outside cannot be opened: Permission denied. Make it readable"
    ):
        Folder(root=tree).manifest()
    monkeypatch.setattr(os, "stat", deny_outside(os.stat))
    with pytest.raises(DataError, match="A folder of your own recordings: the root .*dog/outside does not exist"):
        Folder(root=tree / "dog/outside").manifest()


def test_names_outside_utf8_are_rejected(tree: Path) -> None:
    (tree / "dog" / os.fsdecode(b"caf\xe9.txt")).touch()
    assert "(2 in all: dog/caf\\xe9.txt, dog/notes.txt)" in read_remarks(Folder(root=tree).manifest())[0]
    (tree / "dog" / os.fsdecode(b"caf\xe9.wav")).touch()
    with pytest.raises(DataError, match=r"the name of dog/caf\\xe9\.wav in .* is not UTF-8. Rename the file, .*convmv"):
        Folder(root=tree).manifest()


def test_files_outside_the_classes_are_rejected(tree: Path, write_audio: WriteAudio) -> None:
    write_audio("tree/stray.wav")
    with pytest.raises(
        DataError, match=r"'stray\.wav' is outside the folders of the classes; move it into one in .*Found: dog/, "
    ):
        Folder(root=tree).manifest()


# A list


@pytest.fixture
def clips(tmp_path: Path, write_audio: WriteAudio) -> Path:
    write_audio("clips/a.wav", rate=8000)
    write_audio("clips/b.flac", channels=2)
    write_audio("elsewhere/c.ogg")
    return tmp_path


def write_text(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_csv_list_may_have_all_columns(clips: Path) -> None:
    file = write_text(
        clips / "list.csv",
        "path,label,group,split,room,level\n"
        f"clips/a.wav,7,007,Training,hall,1.5\nclips/b.flac,x,1e3,dev,,2\n{clips}/elsewhere/c.ogg,x,,test,hall,3\n",
    )
    dataset = Manifest(file=file)
    assert list_columns(dataset, "clip", "label", "group", "split", "room", "level") == [
        ("clips/a.wav", "7", "007", "train", "hall", 1.5),
        ("clips/b.flac", "x", "1e3", "validation", None, 2.0),
        ("elsewhere/c.ogg", "x", None, "test", "hall", 3.0),
    ]
    rows = dataset.manifest().to_pylist()
    assert [(dataset.read(row)[1], dataset.read(row)[0].shape[1]) for row in rows] == [
        (8000, 1),
        (16000, 2),
        (16000, 1),
    ]
    assert {dataset.identity(row) for row in rows} == {None}


def test_a_parquet_list_matches_a_csv_list(clips: Path) -> None:
    table = pa.table({"path": ["clips/a.wav", "clips/b.flac"], "label": [3, 4], "group": ["x", "y"]})
    pq.write_table(table, clips / "list.parquet")
    assert list_columns(Manifest(file=clips / "list.parquet"), "clip", "label", "group", "split") == [
        ("clips/a.wav", "3", "x", None),
        ("clips/b.flac", "4", "y", None),
    ]


def test_text_outside_utf8_in_a_parquet_list_is_an_error(clips: Path) -> None:
    labels = pa.array([b"dog", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"path": ["clips/a.wav", "clips/b.wav"], "label": labels}), clips / "list.parquet")
    with pytest.raises(DataError, match=r"list\.parquet: cannot be read: .*UTF-?8"):
        Manifest(file=clips / "list.parquet").manifest()


def test_column_names_and_the_root_can_be_chosen(clips: Path) -> None:
    (clips / "lists").mkdir()
    file = write_text(
        clips / "lists/list.csv", "file,sound,who,part,path\na.wav,dog,anna,train,zzz\nb.flac,cat,bob,test,zzz\n"
    )
    dataset = Manifest(
        file=file,
        root=clips / "clips",
        path_column="file",
        label_column="sound",
        group_column="who",
        split_column="part",
    )
    assert list_columns(dataset, "clip", "path", "label", "group", "split") == [
        ("a.wav", str(clips / "clips/a.wav"), "dog", "anna", "train"),
        ("b.flac", str(clips / "clips/b.flac"), "cat", "bob", "test"),
    ]


def test_the_column_separator_is_detected(clips: Path) -> None:
    for mark in (",", ";", "\t"):
        file = write_text(clips / "list.csv", f"path{mark}label{mark}note\nclips/a.wav{mark}dog{mark}x\n")
        assert list_columns(Manifest(file=file), "clip", "label", "note") == [("clips/a.wav", "dog", "x")]


def test_a_file_may_have_several_clips(clips: Path) -> None:
    """Oracle: the same samples, cut from the whole file."""
    file = write_text(
        clips / "list.csv",
        "path,label,group,start,stop\n"
        "long.flac,x,a,0.25,0.5\nlong.flac,y,a,0.5,\nlong.flac,x,b,,0.1\nlong.flac,y,b,0,\nclips/a.wav,x,b,,\n",
    )
    noise = np.random.default_rng(0).integers(-9000, 9000, 8000).astype(np.int16)
    soundfile.write(clips / "long.flac", noise, 8000)
    dataset = Manifest(file=file)
    manifest = dataset.manifest()
    assert list_columns(dataset, "clip", "start", "stop", "seconds") == [
        ("long.flac@0.25-0.5", 0.25, 0.5, 0.25),
        ("long.flac@0.5-", 0.5, None, None),
        ("long.flac@0-0.1", None, 0.1, 0.1),
        ("long.flac", 0.0, None, None),
        ("clips/a.wav", None, None, None),
    ]
    expected = [noise[2000:4000], noise[4000:], noise[:800], noise]
    for row, wave in zip(manifest.to_pylist(), expected, strict=False):
        np.testing.assert_array_equal(dataset.read(row)[0][:, 0], wave.astype(np.float32) / 32768)
    table = pa.table(
        {"path": ["long.flac"], "label": ["x"], "start": [pa.scalar(1, pa.int64()).as_py()], "stop": [1.0009]}
    )
    pq.write_table(table, clips / "list.parquet")
    assert list_columns(Manifest(file=clips / "list.parquet"), "clip") == [("long.flac@1-1.0009",)]


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "opus", "mp3", "aiff"])
def test_parts_of_any_format_match_the_whole_file(tmp_path: Path, suffix: str) -> None:
    """Opus decodes with a memory, so the beginning of a part may differ slightly."""
    rate = 48000
    wave = 0.2 * np.sin(2 * np.pi * np.cumsum(np.linspace(200, 2000, rate)) / rate)
    subtype = {"opus": "OPUS"}.get(suffix)
    soundfile.write(tmp_path / f"a.{suffix}", wave, rate, format="OGG" if suffix == "opus" else None, subtype=subtype)
    (tmp_path / "list.csv").write_text(f"path,label,start,stop\na.{suffix},x,0.3,0.7\na.{suffix},x,,\n")
    dataset = Manifest(file=tmp_path / "list.csv")
    part, whole = (dataset.read(row)[0] for row in dataset.manifest().to_pylist())
    assert part.shape == (round(0.4 * rate), 1)
    np.testing.assert_allclose(
        part, whole[round(0.3 * rate) : round(0.7 * rate)], atol=0.02 if suffix == "opus" else 1e-4
    )


@pytest.mark.parametrize(
    ("start", "stop", "message"),
    [
        ("0.04", "0.2", r"clips/a\.wav: the clip's stop, 0\.2 s, is after the end of the file, which is 0\.05 s long"),
        (
            "0.06",
            "",
            r"clips/a\.wav: no sample is between the clip's start, 0\.06 s, and its stop, the end of the file: .* 0\.05 s",
        ),
        ("0.01", "0.01001", r"no sample is between the clip's start, 0\.01 s, and its stop, 0\.01001 s"),
    ],
)
def test_parts_outside_the_file_are_reported_on_reading(clips: Path, start: str, stop: str, message: str) -> None:
    dataset = Manifest(file=write_text(clips / "list.csv", f"path,label,start,stop\nclips/a.wav,x,{start},{stop}\n"))
    with pytest.raises(DataError, match=message):
        dataset.read(dataset.manifest().to_pylist()[0])


def test_a_stop_rounded_beyond_the_end_is_the_end(clips: Path) -> None:
    dataset = Manifest(file=write_text(clips / "list.csv", "path,label,start,stop\nclips/a.wav,x,0.04,0.055\n"))
    assert len(dataset.read(dataset.manifest().to_pylist()[0])[0]) == 80


def test_a_clip_outside_the_root_keeps_its_path(clips: Path) -> None:
    file = write_text(clips / "clips/list.csv", "path,label\na.wav,x\n../elsewhere/c.ogg,y\n")
    assert list_columns(Manifest(file=file), "clip") == [("a.wav",), (str(clips / "elsewhere/c.ogg"),)]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("path,class\nclips/a.wav,x\n", {}, r"has no column 'label'; its columns: path, class\. Name .* label_column"),
        ("file,label\nclips/a.wav,x\n", {}, r"has no column 'path'; its columns: file, label\. Name .* path_column"),
        ("path,label\nclips/a.wav,x\n", {"group_column": "who"}, r"has no column 'who'; .* group_column"),
        ("path,label\nclips/a.wav,x\n,x\n", {}, r"row 2 has no path \(column 'path' is None\)"),
        ("path,label,split\nclips/a.wav,x,tran\n", {}, r"row 1 has the unknown split 'tran'. Did you mean 'train'\?"),
        ("path,label,split\nclips/a.wav,x,train\nclips/b.flac,x,\n", {}, "has no split. Rows without split: 1 of 2."),
        (
            "path,label\nclips/a.wav,x\nclips/a.wav,y\n",
            {},
            r"1 clips are named more than once, the first 'clips/a\.wav'",
        ),
        ("path,label\n", {}, "the manifest is empty"),
        (
            "path,label,path\nclips/a.wav,x,b\n",
            {},
            r"several columns 'path'; its columns: path, label, path. Rename",
        ),
        ("path,label,n,n\nclips/a.wav,x,1,2\n", {}, r"several columns 'n'; .* Rename or remove one"),
        (
            "path,label,start\nclips/a.wav,x,noon\n",
            {},
            r"row 1 has the start 'noon'. Write the number of seconds .* rename",
        ),
        ("path;label;stop\nclips/a.wav;x;0,5\n", {}, r"row 1 has the stop '0,5'. Write the number .* such as 1\.5"),
        ("path,label,start\nclips/a.wav,x,-1\n", {}, r"row 1 has the start '-1'. Write the number of seconds"),
        ("path,label,stop\nclips/a.wav,x,nan\n", {}, r"row 1 has the stop 'nan'. Write the number of seconds"),
        (
            "path,label,start,stop\nclips/a.wav,x,,\nclips/a.wav,x,2,1.5\n",
            {},
            r"row 2 stops at 1\.5 s, not after its start at 2 s",
        ),
        ("path,label,stop\nclips/a.wav,x,0\n", {}, r"row 1 stops at 0 s, not after its start at 0 s"),
        (
            "path,label,start,stop\nclips/a.wav,x,1,2\nclips/a.wav,y,1.0,2.0\n",
            {},
            r"1 clips are named more than once, the first 'clips/a\.wav@1-2'",
        ),
        ("", {}, r"list\.csv: cannot be read: Empty CSV file"),
        ("path,label\nclips/a.wav,x,y,z\n", {}, r"list\.csv: cannot be read: CSV parse error"),
        (
            "path,label\nq/a.wav,x\nq/b.wav,x\n",
            {},
            r"none of its 2 files exists, the first is .*/q/a\.wav\. Set root to",
        ),
    ],
)
def test_unusable_lists_are_rejected(clips: Path, text: str, options: dict[str, str], message: str) -> None:
    file = write_text(clips / "list.csv", text)
    with pytest.raises(DataError, match=message) as error:
        Manifest(file=file, **options).manifest()
    assert str(file) in str(error.value)


def test_a_missing_file_is_reported_on_reading(clips: Path) -> None:
    dataset = Manifest(file=write_text(clips / "list.csv", "path,label\nclips/a.wav,x\nclips/none.wav,x\n"))
    rows = dataset.manifest().to_pylist()
    with pytest.raises(DataError, match=r"clips/none\.wav: there is no such file"):
        dataset.read(rows[1])


def test_missing_and_unreadable_lists_are_rejected(clips: Path) -> None:
    (clips / "latin.csv").write_bytes(b"p\xe9th,label\na,x\n")
    with pytest.raises(DataError, match=r"latin\.csv is not UTF-8 text. Save it as UTF-8"):
        Manifest(file=clips / "latin.csv").manifest()
    with pytest.raises(DataError, match=r"row 1 has no path \(column 'path' is 'a\\x00b\.wav'\)"):
        Manifest(file=write_text(clips / "null.csv", "path,label\na\0b.wav,x\nclips/a.wav,x\n")).manifest()
    with pytest.raises(DataError, match=r"no list of recordings .*/none\.csv\. Expected a CSV \(header line, UTF-8"):
        Manifest(file=clips / "none.csv").manifest()
    with pytest.raises(DataError, match=r"list\.xlsx is neither \*\.csv nor \*\.parquet"):
        Manifest(file=write_text(clips / "list.xlsx", "x")).manifest()
    with pytest.raises(DataError, match=r"list\.parquet: cannot be read: "):
        Manifest(file=write_text(clips / "list.parquet", "path,label\n")).manifest()
