from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from raydfl.core.errors import DataError
from raydfl.data import assign_clips, list_clips
from raydfl.data.sets.speech_commands import KEYWORDS, WORDS, SpeechCommands
from raydfl.data.settings import DataSettings

WriteAudio = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path, write_audio: WriteAudio) -> Path:
    """Write a small v0.02: three words, two speakers, a clip on each list, lists with missing clips, and noise files."""
    for word in ("yes", "no", "visual"):
        for speaker in ("0a1b2c3d", "ffffffff"):
            write_audio(f"v2/{word}/{speaker}_nohash_0.wav")
    (tmp_path / "v2/validation_list.txt").write_text("yes/0a1b2c3d_nohash_0.wav\nyes/absent00_nohash_0.wav\n")
    (tmp_path / "v2/testing_list.txt").write_text("visual/ffffffff_nohash_0.wav\nhouse/ffffffff_nohash_3.wav\n")
    (tmp_path / "v2/yes/._0a1b2c3d_nohash_0.wav").write_text("left by a Mac")
    (tmp_path / "v2/README.md").write_text("x")
    for name, seconds in (("running_tap.wav", 2.5), ("pink_noise.wav", 3.0), ("doing_the_dishes.wav", 1.7)):
        samples = np.arange(round(seconds * 16000), dtype=np.int16)  # each sample is its own index
        (tmp_path / "v2/_background_noise_").mkdir(exist_ok=True)
        soundfile.write(tmp_path / "v2/_background_noise_" / name, samples, 16000)
    return tmp_path / "v2"


@pytest.fixture
def archive(tmp_path: Path, write_audio: WriteAudio) -> Path:
    for name in (
        "yes/0a1b2c3d_nohash_7.wav",
        "no/0a1b2c3d_nohash_7.wav",
        "_unknown_/bird_0a1b2c3d_nohash_4.wav.wav",
        "_silence_/158.wav",
    ):
        write_audio(f"test_set/{name}")
    return tmp_path / "test_set"


def test_the_words_task_has_all_words_and_the_official_split(tree: Path) -> None:
    rows = SpeechCommands(root=tree).manifest().to_pylist()
    assert len(rows) == 6
    assert Counter(row["label"] for row in rows) == {"yes": 2, "no": 2, "visual": 2}
    assert {row["clip"]: row["split"] for row in rows if row["split"] != "train"} == {
        "yes/0a1b2c3d_nohash_0.wav": "validation",
        "visual/ffffffff_nohash_0.wav": "test",
    }
    assert {row["group"] for row in rows} == {"0a1b2c3d", "ffffffff"}
    assert [row["clip"] for row in rows] == sorted(row["clip"] for row in rows)


def test_the_keywords_task_cuts_silence_and_merges_unknown_words(tree: Path) -> None:
    dataset = SpeechCommands(root=tree, task="keywords", keywords=("yes", "no"))
    rows = dataset.manifest().to_pylist()
    spoken = [row for row in rows if row["label"] != "_silence_"]
    assert Counter(row["label"] for row in spoken) == {"yes": 2, "no": 2, "_unknown_": 2}
    assert {row["word"] for row in spoken if row["label"] == "_unknown_"} == {"visual"}
    silence = [row for row in rows if row["label"] == "_silence_"]
    # A full second every half second: 2.5 s -> 0, 0.5, 1.0; 3 s -> 0 .. 1.5; 1.7 s -> 0, 0.5.
    places: dict[tuple[str, str], list[float]] = {}
    for row in silence:
        places.setdefault((Path(row["path"]).name, row["split"]), []).append(row["start"])
    assert places == {
        ("running_tap.wav", "validation"): [0.0, 0.5, 1.0],
        ("pink_noise.wav", "train"): [0.0, 0.5, 1.0, 1.5],
        ("doing_the_dishes.wav", "train"): [0.0, 0.5],
    }
    assert {(row["group"], row["seconds"]) for row in silence} == {(None, 1.0)}


def test_silence_has_the_published_number_of_clips(tree: Path) -> None:
    # Lengths in samples of the six files of v0.01 and v0.02. The 12-class protocol has 668 and 121 clips.
    lengths = {
        "doing_the_dishes": 1522930,
        "dude_miaowing": 988891,
        "exercise_bike": 980062,
        "pink_noise": 960000,
        "running_tap": 978488,
        "white_noise": 960000,
    }
    for file in (tree / "_background_noise_").iterdir():
        file.unlink()
    for name, length in lengths.items():
        soundfile.write(tree / "_background_noise_" / f"{name}.wav", np.zeros(length, np.int16), 16000)
    rows = SpeechCommands(root=tree, task="keywords", keywords=("yes", "no")).manifest().to_pylist()
    counts = Counter(row["split"] for row in rows if row["label"] == "_silence_")
    assert counts == {"train": 668, "validation": 121}


def test_a_silence_clip_has_the_samples_at_its_start(tree: Path) -> None:
    dataset = SpeechCommands(root=tree, task="keywords", keywords=("yes", "no"))
    rows = {row["clip"]: row for row in dataset.manifest().to_pylist()}
    samples, rate = dataset.read(rows["_background_noise_/pink_noise.wav@1.5"])
    assert (samples.shape, rate) == ((16000, 1), 16000)
    expected = np.arange(48000, dtype=np.int16)[24000:40000].astype(np.float32) / 32768
    np.testing.assert_array_equal(samples[:, 0], expected)


def test_the_identity_of_silence_depends_on_content_and_start(tree: Path) -> None:
    dataset = SpeechCommands(root=tree, task="keywords", keywords=("yes", "no"))
    rows = dataset.manifest().to_pylist()
    silence = [row for row in rows if row["start"] is not None]
    identities = [dataset.identity(row) for row in silence]
    assert len(set(identities)) == len(silence)
    assert {dataset.identity(row) for row in rows if row["start"] is None} == {None}
    # A moved file has the same identity; changed content has a new one.
    moved = Path(shutil.copytree(tree, tree.with_name("moved")))
    row = silence[0]
    assert dataset.identity(row | {"path": str(moved / "_background_noise_" / Path(row["path"]).name)}) == identities[0]
    soundfile.write(row["path"], np.ones(40000, np.int16), 16000)
    assert dataset.identity(row) != identities[0]


def test_no_noise_files_give_no_silence(tree: Path) -> None:
    shutil.rmtree(tree / "_background_noise_")
    rows = SpeechCommands(root=tree, task="keywords", keywords=("yes", "no")).manifest().to_pylist()
    assert {row["label"] for row in rows} == {"yes", "no", "_unknown_"}


def test_the_test_archive_can_be_the_root(archive: Path) -> None:
    rows = SpeechCommands(root=archive).manifest().to_pylist()
    assert {row["clip"]: (row["label"], row["group"], row["word"]) for row in rows} == {
        "_silence_/158.wav": ("_silence_", None, None),
        "_unknown_/bird_0a1b2c3d_nohash_4.wav.wav": ("_unknown_", "0a1b2c3d", "bird"),
        "no/0a1b2c3d_nohash_7.wav": ("no", "0a1b2c3d", "no"),
        "yes/0a1b2c3d_nohash_7.wav": ("yes", "0a1b2c3d", "yes"),
    }
    assert {row["split"] for row in rows} == {None}


def test_the_test_archive_replaces_the_testing_list(tree: Path, archive: Path) -> None:
    dataset = SpeechCommands(root=tree, test_root=archive, task="keywords", keywords=("yes",))
    rows = dataset.manifest().to_pylist()
    assert "visual/ffffffff_nohash_0.wav" not in {row["clip"] for row in rows}
    assert {row["clip"]: row["label"] for row in rows if row["split"] == "test"} == {
        "test_root/_silence_/158.wav": "_silence_",
        "test_root/_unknown_/bird_0a1b2c3d_nohash_4.wav.wav": "_unknown_",
        "test_root/no/0a1b2c3d_nohash_7.wav": "_unknown_",
        "test_root/yes/0a1b2c3d_nohash_7.wav": "yes",
    }
    assert all(len(dataset.read(row)[0]) for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "keywords", "keywords": ("yess",)}, r"no folder for the keyword 'yess'. Did you mean 'yes'\?"),
        ({"test_root": "."}, "test_root is not the test archive: no _unknown_ or _silence_"),
        ({}, r"there is no testing_list\.txt in .*/v2\. Expected a folder for each word with .*Found: README\.md, "),
    ],
)
def test_unsuitable_trees_are_rejected(tree: Path, options: dict[str, Any], message: str) -> None:
    if not options:
        (tree / "testing_list.txt").unlink()
    with pytest.raises(DataError, match=message):
        SpeechCommands(root=tree, **options).manifest()


# The samples


def test_the_samples_form_the_12_class_task(recordings: Path) -> None:
    tree, archive = recordings / "speech_commands_v0.01", recordings / "speech_commands_test_set_v0.02"
    assert set(SpeechCommands(root=tree).manifest().column("label").to_pylist()) == set(WORDS[:30])
    rows = SpeechCommands(root=tree, test_root=archive, task="keywords").manifest().to_pylist()
    assert Counter(row["split"] for row in rows) == {"train": 60, "validation": 19, "test": 479}
    counts = Counter(row["label"] for row in rows if row["split"] == "test")
    assert counts.keys() == {*KEYWORDS, "_unknown_", "_silence_"}
    assert (counts["_unknown_"], counts["_silence_"]) == (36, 12)


def test_silence_can_be_excluded_or_dealt_to_speakers(archive: Path, tmp_path: Path) -> None:
    """Both settings allow a partition by speaker. Without them, the message proposes both."""
    (archive / "_silence_" / "159.wav").write_bytes((archive / "_silence_" / "158.wav").read_bytes())
    for word in ("yes", "no"):
        (archive / word / "ffffffff_nohash_0.wav").write_bytes((archive / word / "0a1b2c3d_nohash_7.wav").read_bytes())
    options = {"name": "speech_commands", "root": str(archive), "split": {"test": None}}

    def count_clips(**extra: Any) -> dict[str, int]:
        data = DataSettings.model_validate({**options, **extra})
        tables = assign_clips(*list_clips(data, 1), data, 1)
        return dict(zip(tables.ids, tables.sizes().tolist(), strict=True))

    assert count_clips(leave_out=["_silence_"]) == {"0a1b2c3d": 3, "ffffffff": 2}
    assert count_clips(ungrouped="deal") == {"0a1b2c3d": 4, "ffffffff": 3}
    message = "2 of 7 training clips have no 'group'.*deal them to the groups with data.ungrouped=deal, leave .* data.leave_out"
    with pytest.raises(DataError, match=message):
        count_clips()
