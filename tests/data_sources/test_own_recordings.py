from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raydfl.data.dataset import Dataset, find_dataset
from raydfl.data.sets.folder import Folder
from raydfl.data.sets.manifest import Manifest
from raydfl.errors import ConfigError, DataError
from raydfl.registry import build

WriteAudio = Callable[..., Path]


def facts(dataset: Dataset, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in dataset.manifest().to_pylist()]


# A folder for each class


@pytest.fixture
def tree(tmp_path: Path, write_audio: WriteAudio) -> Path:
    write_audio("tree/dog/anna_1.wav", rate=8000)
    write_audio("tree/dog/outside/bob_1.flac", rate=48000, channels=2)
    write_audio("tree/vacuum cleaner/bob_2.ogg", rate=44100)
    (tmp_path / "tree/dog/notes.txt").touch()
    return tmp_path / "tree"


def test_folders_are_classes(tree: Path) -> None:
    dataset = Folder(root=tree)
    assert facts(dataset, "clip", "label", "group", "split") == [
        ("dog/anna_1.wav", "dog", None, None),
        ("dog/outside/bob_1.flac", "dog", None, None),
        ("vacuum cleaner/bob_2.ogg", "vacuum cleaner", None, None),
    ]
    assert [dataset.read(row)[0].shape[1] for row in dataset.manifest().to_pylist()] == [1, 2, 1]
    assert [dataset.read(row)[1] for row in dataset.manifest().to_pylist()] == [8000, 48000, 44100]


def test_a_sample_with_eight_channels(recordings: Path) -> None:
    dataset = Folder(root=recordings / "mimii/fan/id_00")
    rows = dataset.manifest().to_pylist()
    assert [row["label"] for row in rows] == ["abnormal", "normal"]
    assert {(dataset.read(row)[0].shape, dataset.read(row)[1]) for row in rows} == {((160_000, 8), 16000)}


def test_a_sample_sorted_by_split(recordings: Path) -> None:
    dataset = Folder(root=recordings / "dcase2020_task2/dev_data", group_pattern=r"_(?P<group>id_\d\d)_")
    rows = dataset.manifest().to_pylist()
    assert {row["label"] for row in rows} == {"fan", "pump", "slider", "valve"}
    assert {row["group"] for row in rows} == {"id_00", "id_02"}


def test_suffixes_in_capitals_count(tree: Path) -> None:
    (tree / "dog/anna_1.wav").rename(tree / "dog/anna_1.WAV")
    assert ("dog/anna_1.WAV",) in facts(Folder(root=tree), "clip")


def test_a_folder_that_is_a_link_is_followed(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/hound").symlink_to(tree / "dog")
    assert facts(Folder(root=tmp_path / "linked"), "clip", "label")[0] == ("hound/anna_1.wav", "hound")


def test_the_group_is_what_the_pattern_finds_below_the_class(tree: Path) -> None:
    by_file = Folder(root=tree, group_pattern=r"(?P<group>[a-z]+)_\d")
    assert facts(by_file, "group") == [("anna",), ("bob",), ("bob",)]
    with pytest.raises(DataError, match=r"finds no group in 'anna_1\.wav' \(of 'dog/anna_1\.wav'\)"):
        Folder(root=tree, group_pattern=r"(?P<group>\w+)/").manifest()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("(?P<group>", "is no regular expression"), (r"(\w+)_\d", r"has no part named group, as in '\(\?P<group>")],
)
def test_a_pattern_that_cannot_work_is_refused_at_once(pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"data.group_pattern: .*{message}"):
        build(find_dataset("folder"), {"root": "x", "group_pattern": pattern}, "data")


def test_folders_named_like_splits_are_splits(tmp_path: Path, write_audio: WriteAudio) -> None:
    for folder in ("Train", "dev", "test"):
        write_audio(f"tree/{folder}/dog/a.wav")
    assert facts(Folder(root=tmp_path / "tree"), "clip", "label", "split") == [
        ("Train/dog/a.wav", "dog", "train"),
        ("dev/dog/a.wav", "dog", "validation"),
        ("test/dog/a.wav", "dog", "test"),
    ]
    classes = facts(Folder(root=tmp_path / "tree", split_folders=False), "label", "split")
    assert classes == [("Train", None), ("dev", None), ("test", None)]


def test_a_class_called_test_is_no_split_unless_there_is_a_train(tmp_path: Path, write_audio: WriteAudio) -> None:
    write_audio("tree/test/a.wav")
    write_audio("tree/dog/a.wav")
    assert facts(Folder(root=tmp_path / "tree"), "label", "split") == [("dog", None), ("test", None)]
    with pytest.raises(DataError, match="'dog/a.wav' lies in no class's folder; move it into one"):
        Folder(root=tmp_path / "tree", split_folders=True).manifest()
    write_audio("tree/dog/deeper/a.wav")
    (tmp_path / "tree/dog/a.wav").unlink()
    with pytest.raises(DataError, match="split_folders is true and 'dog' is no split; known names: train, training, "):
        Folder(root=tmp_path / "tree", split_folders=True).manifest()


def test_a_file_outside_the_classes_is_named(tree: Path, write_audio: WriteAudio) -> None:
    write_audio("tree/stray.wav")
    with pytest.raises(DataError, match=r"'stray\.wav' lies in no class's folder; move it into one in .*Found: dog/, "):
        Folder(root=tree).manifest()


# A list


@pytest.fixture
def clips(tmp_path: Path, write_audio: WriteAudio) -> Path:
    write_audio("clips/a.wav", rate=8000)
    write_audio("clips/b.flac", channels=2)
    write_audio("elsewhere/c.ogg")
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_csv_with_all_columns(clips: Path) -> None:
    file = write(
        clips / "list.csv",
        "path,label,group,split,room,level\n"
        f"clips/a.wav,7,007,Training,hall,1.5\nclips/b.flac,x,1e3,dev,,2\n{clips}/elsewhere/c.ogg,x,,test,hall,3\n",
    )
    dataset = Manifest(file=file)
    assert facts(dataset, "clip", "label", "group", "split", "room", "level") == [
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


def test_parquet_is_the_same(clips: Path) -> None:
    table = pa.table({"path": ["clips/a.wav", "clips/b.flac"], "label": [3, 4], "group": ["x", "y"]})
    pq.write_table(table, clips / "list.parquet")
    assert facts(Manifest(file=clips / "list.parquet"), "clip", "label", "group", "split") == [
        ("clips/a.wav", "3", "x", None),
        ("clips/b.flac", "4", "y", None),
    ]


def test_columns_of_other_names_and_another_root(clips: Path) -> None:
    (clips / "lists").mkdir()
    file = write(
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
    assert facts(dataset, "clip", "path", "label", "group", "split") == [
        ("a.wav", str(clips / "clips/a.wav"), "dog", "anna", "train"),
        ("b.flac", str(clips / "clips/b.flac"), "cat", "bob", "test"),
    ]


def test_a_clip_outside_the_root_keeps_its_path(clips: Path) -> None:
    file = write(clips / "clips/list.csv", "path,label\na.wav,x\n../elsewhere/c.ogg,y\n")
    assert facts(Manifest(file=file), "clip") == [("a.wav",), (str(clips / "elsewhere/c.ogg"),)]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("path,class\nclips/a.wav,x\n", {}, r"has no column 'label'; its columns: path, class\. Name .* label_column"),
        ("file,label\nclips/a.wav,x\n", {}, r"has no column 'path'; its columns: file, label\. Name .* path_column"),
        ("path,label\nclips/a.wav,x\n", {"group_column": "who"}, r"has no column 'who'; .* group_column"),
        ("path,label\nclips/a.wav,x\nclips/b.flac,\n", {}, r"row 2 \(clip 'clips/b\.flac'\) has no label"),
        ("path,label\nclips/a.wav,x\n,x\n", {}, r"row 2 has no path \(column 'path' is None\)"),
        ("path,label,split\nclips/a.wav,x,tran\n", {}, r"row 1 has the unknown split 'tran'; did you mean 'train'\?"),
        ("path,label,split\nclips/a.wav,x,train\nclips/b.flac,x,\n", {}, "has no split while others have; 1 of 2 rows"),
        (
            "path,label\nclips/a.wav,x\nclips/a.wav,y\n",
            {},
            r"1 clips are named more than once, the first 'clips/a\.wav'",
        ),
        ("path,label\n", {}, "the manifest is empty"),
        ("", {}, r"list\.csv cannot be read: Empty CSV file"),
        ("path,label\nclips/a.wav,x,y,z\n", {}, r"list\.csv cannot be read: CSV parse error"),
        (
            "path,label\nq/a.wav,x\nq/b.wav,x\n",
            {},
            r"not one of its 2 files exists, the first is .*/q/a\.wav; set root to",
        ),
    ],
)
def test_a_list_that_cannot_be_used(clips: Path, text: str, options: dict[str, str], message: str) -> None:
    file = write(clips / "list.csv", text)
    with pytest.raises(DataError, match=message) as error:
        Manifest(file=file, **options).manifest()
    assert str(file) in str(error.value)


def test_one_missing_file_is_found_when_it_is_read(clips: Path) -> None:
    dataset = Manifest(file=write(clips / "list.csv", "path,label\nclips/a.wav,x\nclips/none.wav,x\n"))
    rows = dataset.manifest().to_pylist()
    with pytest.raises(DataError, match=r"clips/none\.wav: there is no such file"):
        dataset.read(rows[1])


def test_a_missing_list_and_other_kinds_of_file(clips: Path) -> None:
    with pytest.raises(DataError, match=r"no list of recordings .*/none\.csv; expected a CSV \(comma, header line"):
        Manifest(file=clips / "none.csv").manifest()
    with pytest.raises(DataError, match=r"list\.xlsx is neither \*\.csv nor \*\.parquet"):
        Manifest(file=write(clips / "list.xlsx", "x")).manifest()
    with pytest.raises(DataError, match=r"list\.parquet cannot be read: "):
        Manifest(file=write(clips / "list.parquet", "path,label\n")).manifest()
