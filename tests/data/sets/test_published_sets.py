"""The sets that come as they were published, on the real samples and on small trees in the same layout."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raydfl.cli.describe import describe_data
from raydfl.core.errors import DataError
from raydfl.core.registry import build
from raydfl.core.yaml import parse_yaml
from raydfl.data.dataset import Dataset, find_dataset
from raydfl.data.sets import FileDataset
from raydfl.data.sets.ambient_contexts import AmbientContexts
from raydfl.data.sets.crema_d import CremaD
from raydfl.data.sets.emodb import EmoDB
from raydfl.data.sets.esc import ESC
from raydfl.data.sets.fsd50k import FSD50K
from raydfl.data.sets.fsdd import FSDD
from raydfl.data.sets.iemocap import IEMOCAP
from raydfl.data.sets.ravdess import RAVDESS
from raydfl.data.sets.urbansound8k import UrbanSound8K
from raydfl.data.sets.voxforge import VoxForge
from raydfl.data.settings import DataSettings

WriteAudio = Callable[..., Path]


def rows_of(dataset: Dataset) -> list[dict[str, Any]]:
    """The rows; paths are absolute and below the root, and clips are the paths below it."""
    rows: list[dict[str, Any]] = dataset.manifest().to_pylist()
    root = getattr(dataset, "root").resolve()  # noqa: B009 - the base class has no root
    assert all(row["path"] == str(root / row["clip"]) for row in rows)
    assert [row["clip"] for row in rows] == sorted(row["clip"] for row in rows)
    return rows


def read_all(dataset: Dataset, rows: list[dict[str, Any]]) -> tuple[float, set[tuple[int, int]]]:
    """Total seconds, and the (rate, channels) that occur."""
    total, kinds = 0.0, set()
    for row in rows:
        samples, rate = dataset.read(row)
        assert samples.dtype == np.float32
        assert np.abs(samples).max() <= 1.0
        assert dataset.identity(row) is None
        total += len(samples) / rate
        kinds.add((rate, samples.shape[1]))
    return total, kinds


# Every set that has a root


ROOTED = [
    *("ambient_contexts", "cifar10", "crema_d", "dcase2020_task2", "dcase2023_task2", "emnist", "emodb", "esc"),
    *("fashion_mnist", "folder", "fsd50k", "fsdd", "iemocap", "mimii", "mimii_dg", "mimii_due", "mnist", "ravdess"),
    *("huggingface", "lhotse", "webdataset"),
    *("activitynet", "speech_commands", "svhn", "toyadmos", "ucf101", "urbansound8k", "voxforge"),
]


@pytest.mark.parametrize("name", ROOTED)
def test_a_missing_root_says_what_was_expected(name: str, tmp_path: Path) -> None:
    dataset = build(find_dataset(name), {"root": tmp_path / "none"}, "data")
    with pytest.raises(DataError) as error:
        dataset.manifest()
    assert f"{dataset.card.title}: the root {tmp_path / 'none'} does not exist" in str(error.value)
    assert dataset.card.layout in str(error.value)
    assert dataset.card.url in str(error.value)


@pytest.mark.parametrize("name", [name for name in ROOTED if name not in ("huggingface", "lhotse", "webdataset")])
def test_a_root_that_is_a_file_says_so(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="/file is a file. Expected a folder with "):
        build(find_dataset(name), {"root": tmp_path / "file"}, "data").manifest()


@pytest.mark.parametrize("name", ROOTED)
def test_another_layout_says_what_was_expected_and_found(name: str, tmp_path: Path) -> None:
    (tmp_path / "some folder").mkdir()
    (tmp_path / "notes.txt").touch()
    dataset = build(find_dataset(name), {"root": tmp_path}, "data")
    with pytest.raises(DataError) as error:
        dataset.manifest()
    assert f"in {tmp_path}. Expected {dataset.card.layout}. Found: notes.txt, some folder/" in str(error.value)


def test_a_long_folder_is_not_listed_whole(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number:02d}").touch()
    with pytest.raises(DataError, match=r"Found: 00, 01, 02, 03, 04, 05, 06, 07, \.\.\. \(30 entries\)$"):
        EmoDB(root=tmp_path).manifest()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("fsdd", "recordings/x_george_0.wav"),
        ("emodb", "wav/03a01Xa.wav"),
        ("crema_d", "AudioWAV/1001_IEO_JOY_HI.wav"),
        ("ravdess", "Actor_01/03-01-09-01-01-01-01.wav"),
        ("esc", "001 - Dog bark/dog.ogg"),
        ("ucf101", "UCF-101/Typing/v_Typing_1.avi"),
    ],
)
def test_a_file_name_of_another_form_is_named(name: str, file: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    dataset = build(find_dataset(name), {"root": tmp_path}, "data")
    with pytest.raises(DataError) as error:
        dataset.manifest()
    assert f"the file name {file!r} does not fit the layout {dataset.card.layout}" in str(error.value)


@pytest.mark.parametrize(
    ("files", "dataset", "first"),
    [
        ("esc50", ESC, "3 listed files, such as audio/1-100032-A-0.wav"),
        ("iemocap", IEMOCAP, "5 listed files, such as Session1/sentences/wav/"),
        ("urban", UrbanSound8K, "3 listed files, such as audio/fold1/1-3-0-0.wav"),
    ],
)
def test_a_list_without_its_recordings_is_another_layout(
    files: str, dataset: type[FileDataset], first: str, request: pytest.FixtureRequest
) -> None:
    root: Path = request.getfixturevalue(files)
    for file in root.rglob("*.wav"):
        file.unlink()
    with pytest.raises(DataError, match=f"none of the {re.escape(first)}.*, is in .*Expected"):
        dataset(root=root).manifest()


def test_what_a_mac_leaves_behind_is_no_clip(tmp_path: Path, write_audio: WriteAudio) -> None:
    write_audio("recordings/3_anna_7.wav")
    (tmp_path / "recordings/._3_anna_7.wav").write_text("x")
    write_audio("recordings/.cache/3_anna_8.wav")
    assert [row["clip"] for row in rows_of(FSDD(root=tmp_path))] == ["recordings/3_anna_7.wav"]


# Ambient Acoustic Contexts, VoxForge, FSD50K: built here, for want of a sample


def test_ambient_contexts_are_those_on_the_lists(tmp_path: Path, write_audio: WriteAudio) -> None:
    write_audio("Data/Train/id_a_b-c_10_20_03.wav")
    write_audio("Data/Test/id__x_0_9_00.wav")
    write_audio("Data/Test/id_unlisted_0_9_00.wav")
    (tmp_path / "train_split.txt").write_text("id_a_b-c_10_20_03.wav\t Walk\n")
    (tmp_path / "test_split.txt").write_text("id__x_0_9_00.wav\tCrowd\n\n")
    rows = {row["clip"]: row for row in AmbientContexts(root=tmp_path).manifest().to_pylist()}
    found = {clip: (row["label"], row["split"], row["recording"], row["take"]) for clip, row in rows.items()}
    assert found == {
        "Data/Train/id_a_b-c_10_20_03.wav": ("Walk", "train", "a_b-c", 3),
        "Data/Test/id__x_0_9_00.wav": ("Crowd", "test", "_x", 0),
    }
    (tmp_path / "test_split.txt").write_text("id_gone_0_9_00.wav\tCrowd\n")
    with pytest.raises(DataError, match="'id_gone_0_9_00.wav' of test_split.txt is not there; below"):
        AmbientContexts(root=tmp_path).manifest()
    (tmp_path / "test_split.txt").write_text("id__x_0_9_00.wav\n")
    with pytest.raises(DataError, match="is not a file, a tab and a class"):
        AmbientContexts(root=tmp_path).manifest()


def test_voxforge_is_told_by_language_and_speaker(tmp_path: Path, write_audio: WriteAudio) -> None:
    trunk = "Trunk/Audio/Main/16kHz_16bit"
    spoken = f"en/{trunk}/k-k-20090202-wgd/wav/a0077.wav", f"en/{trunk}/cmu_us_bdl_arctic/wav/arctic_b0111.wav"
    for name in (*spoken, f"de/{trunk}/ich-20120715-csb/wav/de5-056.wav", f"de/{trunk}/ich-20130101/wav/de5-1.wav"):
        write_audio(name)
    rows = rows_of(VoxForge(root=tmp_path))
    assert Counter((row["label"], row["group"]) for row in rows) == {
        ("de", "de/ich"): 2,
        ("en", "en/k-k"): 1,
        ("en", "en/cmu_us_bdl_arctic"): 1,
    }
    assert {row["split"] for row in rows} == {None}
    (tmp_path / "test_split.txt").write_text(f"{spoken[0]}\nen/absent.wav\n")
    split = {row["clip"]: row["split"] for row in VoxForge(root=tmp_path, languages=("en",)).manifest().to_pylist()}
    assert split == {spoken[0]: "test", spoken[1]: "train"}
    with pytest.raises(DataError, match="there is no folder ru/ with recordings"):
        VoxForge(root=tmp_path, languages=("ru",)).manifest()
    (tmp_path / "test_split.txt").write_text("en/absent.wav\n")
    with pytest.raises(DataError, match="none of the recordings in .* is on "):
        VoxForge(root=tmp_path).manifest()


def test_fsd50k_has_sets_of_labels(tmp_path: Path, write_audio: WriteAudio) -> None:
    for name in ("FSD50K.dev_audio/64760.wav", "FSD50K.dev_audio/16399.wav", "FSD50K.eval_audio/37199.wav"):
        write_audio(name)
    truth = tmp_path / "FSD50K.ground_truth"
    truth.mkdir()
    (truth / "dev.csv").write_text(
        'fname,labels,mids,split\n64760,"Guitar,Music","/m/0,/m/1",train\n16399,Dog,/m/2,val\n'
    )
    (truth / "eval.csv").write_text('fname,labels,mids\n37199,"Dog,Music","/m/2,/m/1"\n')
    assert {row["clip"]: (row["label"], row["split"]) for row in rows_of(FSD50K(root=tmp_path))} == {
        "FSD50K.dev_audio/16399.wav": ("Dog", "validation"),
        "FSD50K.dev_audio/64760.wav": ("Guitar,Music", "train"),
        "FSD50K.eval_audio/37199.wav": ("Dog,Music", "test"),
    }
    assert {row["split"] for row in rows_of(FSD50K(root=tmp_path, subset="eval"))} == {None}
    (truth / "eval.csv").unlink()
    assert len(rows_of(FSD50K(root=tmp_path, subset="dev"))) == 2
    with pytest.raises(DataError, match=r"there is no FSD50K.ground_truth/eval.csv in "):
        FSD50K(root=tmp_path).manifest()


# FSDD


def test_fsdd(recordings: Path) -> None:
    dataset = FSDD(root=recordings / "fsdd")
    rows = rows_of(dataset)
    assert Counter(row["group"] for row in rows) == dict.fromkeys(
        ("george", "jackson", "lucas", "nicolas", "theo", "yweweler"), 500
    )
    assert Counter(row["label"] for row in rows) == dict.fromkeys("0123456789", 300)
    assert Counter(row["split"] for row in rows) == {"train": 2700, "test": 300}
    assert {row["take"] for row in rows if row["split"] == "test"} == {0, 1, 2, 3, 4}
    seconds, kinds = read_all(dataset, rows[::10])
    assert kinds == {(8000, 1)}
    assert seconds == pytest.approx(131, rel=0.1)


@pytest.mark.parametrize(("takes", "splits"), [(1, {"test": 60, "train": 2940}), (0, {None: 3000})])
def test_fsdd_with_other_test_takes(recordings: Path, takes: int, splits: dict[str | None, int]) -> None:
    assert Counter(row["split"] for row in rows_of(FSDD(root=recordings / "fsdd", test_takes=takes))) == splits


# CREMA-D

VOTES = (
    '"","FileName","VoiceVote","VoiceLevel","FaceVote","FaceLevel","MultiModalVote","MultiModalLevel"\n'
    '"1","1001_DFA_ANG_XX","N","60","A","65","A","70"\n'
    '"2","1001_DFA_HAP_XX","H","60","H","65","N","70"\n'
    '"3","1002_IEO_FEA_HI","F","60","A:F","65:66","F","70"\n'
    '"4","1002_IEO_SAD_LO","S","60","N","65","N:S","70:71"\n'
    '"5","1003_IEO_SAD_LO","S","60","N","65","S","70"\n'
    '"6","1076_MTI_SAD_XX","S","60","S","65","S","70"\n'
)


@pytest.fixture
def crema(tmp_path: Path, write_audio: WriteAudio) -> Path:
    for line in VOTES.splitlines()[1:]:
        write_audio(f"CREMA-D/AudioWAV/{line.split(',')[1].strip(chr(34))}.wav")
    (tmp_path / "CREMA-D/AudioWAV/1076_MTI_SAD_XX.wav").write_bytes(b"")
    (tmp_path / "CREMA-D/processedResults").mkdir()
    (tmp_path / "CREMA-D/processedResults/summaryTable.csv").write_text(VOTES)
    return tmp_path / "CREMA-D"


def test_crema_d(recordings: Path) -> None:
    dataset = CremaD(root=recordings / "CREMA-D")
    rows = rows_of(dataset)
    assert set(Counter(row["group"] for row in rows).values()) == {6}
    assert Counter(row["label"] for row in rows) == dict.fromkeys(
        ("anger", "disgust", "fear", "happy", "neutral", "sad"), 28
    )
    # 28 actors in five folds, the longer ones first.
    actors = {fold: sorted({row["group"] for row in rows if row["fold"] == fold}) for fold in range(1, 6)}
    assert [len(actors[fold]) for fold in range(1, 6)] == [6, 6, 6, 5, 5]
    assert [actor for fold in actors.values() for actor in fold] == sorted({row["group"] for row in rows})
    seconds, kinds = read_all(dataset, rows)
    assert (round(seconds), kinds) == (418, {(11025, 1)})


def test_crema_d_acted_labels_leave_the_silent_clip_out(crema: Path) -> None:
    rows = rows_of(CremaD(root=crema))
    assert [row["label"] for row in rows] == ["anger", "happy", "fear", "sad", "sad"]


def test_crema_d_voted_labels_and_the_four_classes_of_fedaudio(crema: Path) -> None:
    voted = rows_of(CremaD(root=crema, labels="voted"))
    assert {row["clip"][9:-4]: row["label"] for row in voted} == {
        "1001_DFA_ANG_XX": "anger",
        "1001_DFA_HAP_XX": "neutral",
        "1002_IEO_FEA_HI": "fear",
        "1003_IEO_SAD_LO": "sad",
    }
    four = rows_of(CremaD(root=crema, labels="voted", emotions=("neutral", "happy", "sad", "anger")))
    assert [row["clip"][9:-4] for row in four] == ["1001_DFA_ANG_XX", "1001_DFA_HAP_XX", "1003_IEO_SAD_LO"]


def test_crema_d_folds_of_the_full_set_leave_72_or_73_actors(tmp_path: Path) -> None:
    # FedAudio's five folds over 91 actors train on 72 or 73 of them.
    (tmp_path / "AudioWAV").mkdir()
    for actor in range(1001, 1092):
        (tmp_path / f"AudioWAV/{actor}_DFA_ANG_XX.wav").touch()
    for fold, left in zip(range(1, 6), (72, 73, 73, 73, 73), strict=True):
        rows = rows_of(CremaD(root=tmp_path, test_folds=(fold,)))
        assert Counter(row["split"] for row in rows) == {"train": left, "test": 91 - left}


def test_crema_d_voted_labels_need_the_table(recordings: Path) -> None:
    with pytest.raises(DataError, match=r"labels: voted needs processedResults/summaryTable\.csv, which is not there"):
        CremaD(root=recordings / "CREMA-D", labels="voted").manifest()


def test_crema_d_a_table_without_its_column(crema: Path) -> None:
    (crema / "processedResults/summaryTable.csv").write_text("FileName,VoiceVote\n1001_DFA_ANG_XX,A\n")
    with pytest.raises(
        DataError, match=r"summaryTable\.csv has no column 'MultiModalVote'; its columns: FileName, VoiceVote"
    ):
        CremaD(root=crema, labels="voted").manifest()


def test_crema_d_a_table_with_a_short_line(crema: Path) -> None:
    (crema / "processedResults/summaryTable.csv").write_text("FileName,MultiModalVote\n1001_DFA_ANG_XX\n")
    with pytest.raises(DataError, match=r"line 2 of .*summaryTable\.csv has fewer values than the header"):
        CremaD(root=crema, labels="voted").manifest()


def test_crema_d_a_clip_that_the_table_does_not_have(crema: Path, write_audio: WriteAudio) -> None:
    write_audio("CREMA-D/AudioWAV/1004_DFA_ANG_XX.wav")
    with pytest.raises(DataError, match=r"summaryTable\.csv has no row for 1004_DFA_ANG_XX"):
        CremaD(root=crema, labels="voted").manifest()


def test_a_fold_that_no_clip_is_of(crema: Path) -> None:
    with pytest.raises(DataError, match="CREMA-D: no clip is of fold 6, which is to be tested on; there are 1, 2, 3"):
        CremaD(root=crema, test_folds=(6,)).manifest()


def test_options_that_leave_no_clip(crema: Path) -> None:
    with pytest.raises(DataError, match="CREMA-D in .*: the manifest is empty; check the root folder and the options"):
        CremaD(root=crema, emotions=("disgust",)).manifest()


# EmoDB and RAVDESS


def test_emodb(recordings: Path) -> None:
    dataset = EmoDB(root=recordings / "emodb")
    rows = rows_of(dataset)
    speakers = Counter(row["group"] for row in rows)
    assert (len(rows), len(speakers), set(speakers.values())) == (86, 8, {10, 11})
    assert {row["label"] for row in rows} == {"anger", "boredom", "disgust", "fear", "happiness", "sadness", "neutral"}
    first = rows[0]
    assert (first["clip"], first["label"], first["text"], first["take"]) == ("wav/03a02Fc.wav", "happiness", "a02", "c")
    seconds, kinds = read_all(dataset, rows)
    assert (round(seconds), kinds) == (227, {(11025, 1)})


def test_ravdess(recordings: Path) -> None:
    dataset = RAVDESS(root=recordings / "RAVDESS")
    rows = rows_of(dataset)
    assert {row["group"]: {r["label"] for r in rows if r["group"] == row["group"]} for row in rows} == {
        "01": {"neutral", "happy", "angry", "disgust"},
        "02": {"calm", "sad", "fearful", "surprised"},
    }
    assert read_all(dataset, rows)[1] == {(48000, 1)}


def test_ravdess_channels_in_either_layout(tmp_path: Path, write_audio: WriteAudio) -> None:
    write_audio("both/Audio_Speech_Actors_01-24/Actor_03/03-01-05-02-01-02-03.wav")
    write_audio("both/Audio_Song_Actors_01-24/Actor_03/03-02-06-01-02-01-03.wav")
    write_audio("flat/Actor_03/03-01-05-02-01-02-03.wav")
    for root in ("both", "flat"):
        (row,) = rows_of(RAVDESS(root=tmp_path / root))
        facts = [row[name] for name in ("label", "group", "channel", "intensity", "statement", "repetition")]
        assert facts == ["angry", "03", "speech", "strong", 1, 2]
    assert [row["channel"] for row in rows_of(RAVDESS(root=tmp_path / "both", channel="both"))] == ["song", "speech"]
    assert [row["label"] for row in rows_of(RAVDESS(root=tmp_path / "both", channel="song"))] == ["fearful"]
    with pytest.raises(DataError, match="none of the 1 files is song"):
        RAVDESS(root=tmp_path / "flat", channel="song").manifest()


# IEMOCAP

DIALOGUES = {
    "Session1/dialog/EmoEvaluation/Ses01F_impro01.txt": (
        "% [START_TIME - END_TIME] TURN_NAME EMOTION [V, A, D]\n"
        "\n"
        "[6.2901 - 8.2357]\tSes01F_impro01_F000\tneu\t[2.5000, 2.5000, 2.5000]\n"
        "C-E2:\tNeutral;\t()\n"
        "C-F1:\tNeutral; Surprise;\t(Urgent)\n"
        "A-E3:\tval 3; act 2; dom  2;\t()\n"
        "\n"
        "[10.0100 - 11.3925]\tSes01F_impro01_M001\texc\t[4.0000, 3.5000, 2.5000]\n"
        "[14.8872 - 18.0175]\tSes01F_impro01_F002\txxx\t[2.5000, 2.5000, 2.5000]\n"
        "[19.2900 - 20.7875]\tSes01F_impro01_M003\tfru\t[2.5000, 2.5000, 2.5000]\n"
    ),
    "Session1/dialog/EmoEvaluation/Ses01M_script01_1b.txt": (
        "% [START_TIME - END_TIME] TURN_NAME EMOTION [V, A, D]\n\n"
        "[6.0000 - 8.0000]\tSes01M_script01_1b_M000\thap\t[4.5000, 2.5000, 2.5000]\n"
    ),
    "Session5/dialog/EmoEvaluation/Ses05M_impro07.txt": (
        "% [START_TIME - END_TIME] TURN_NAME EMOTION [V, A, D]\n\n"
        "[1.0000 - 2.5000]\tSes05M_impro07_F010\tang\t[1.5000, 4.5000, 4.5000]\n"
        "[3.0000 - 4.0000]\tSes05M_impro07_MXX0\tsad\t[1.5000, 1.5000, 2.5000]\n"
    ),
}


@pytest.fixture
def iemocap(tmp_path: Path, write_audio: WriteAudio) -> Path:
    for name, text in DIALOGUES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for line in text.splitlines():
            if line.startswith("["):
                turn = line.split("\t")[1]
                write_audio(f"{name.split('/')[0]}/sentences/wav/{path.stem}/{turn}.wav")
    # What the release has beside them.
    (tmp_path / "Session1/dialog/EmoEvaluation/._Ses01F_impro01.txt").write_bytes(b"\xff\x00")
    raters = tmp_path / "Session1/dialog/EmoEvaluation/Categorical"
    raters.mkdir()
    (raters / "Ses01F_impro01_e2_cat.txt").write_text("Ses01F_impro01_F000 :Neutral state; ()\n")
    return tmp_path


def test_iemocap_four_classes(iemocap: Path) -> None:
    dataset = IEMOCAP(root=iemocap)
    rows = dataset.manifest().to_pylist()
    assert [(row["clip"].rpartition("/")[2][:-4], row["label"], row["group"], row["session"]) for row in rows] == [
        ("Ses01F_impro01_F000", "neu", "Ses01F", 1),
        ("Ses01F_impro01_M001", "hap", "Ses01M", 1),
        ("Ses01M_script01_1b_M000", "hap", "Ses01M", 1),
        ("Ses05M_impro07_F010", "ang", "Ses05F", 5),
        ("Ses05M_impro07_MXX0", "sad", "Ses05M", 5),
    ]
    assert rows[0]["seconds"] == pytest.approx(1.9456)
    assert rows[2]["dialogue"] == "Ses01M_script01_1b"
    assert {row["split"] for row in rows} == {None}
    assert read_all(dataset, rows)[1] == {(16000, 1)}


def test_iemocap_improvised_and_all_classes(iemocap: Path) -> None:
    rows = IEMOCAP(root=iemocap, improvised=True, emotions="all").manifest().to_pylist()
    assert [row["label"] for row in rows] == ["neu", "exc", "fru", "ang", "sad"]


def test_iemocap_leaves_a_session_out(iemocap: Path) -> None:
    rows = IEMOCAP(root=iemocap, test_sessions=(5,)).manifest().to_pylist()
    assert [row["split"] for row in rows] == ["train", "train", "train", "test", "test"]
    with pytest.raises(DataError, match="no clip is of session 2, which is to be tested on; there are 1, 5"):
        IEMOCAP(root=iemocap, test_sessions=(2,)).manifest()


def test_iemocap_a_line_that_cannot_be_read_is_named(iemocap: Path) -> None:
    report = iemocap / "Session5/dialog/EmoEvaluation/Ses05M_impro07.txt"
    report.write_text(report.read_text() + "[5.0 - 6.0] Ses05M_impro07_F011\n")
    with pytest.raises(DataError, match=r"line 5 of .*Ses05M_impro07\.txt is no '\[start - end\] turn emotion"):
        IEMOCAP(root=iemocap).manifest()


def test_one_absent_file_of_a_list_is_found_when_it_is_read(iemocap: Path) -> None:
    dataset = IEMOCAP(root=iemocap)
    rows = dataset.manifest().to_pylist()
    Path(rows[1]["path"]).unlink()
    assert dataset.manifest().num_rows == len(rows)
    with pytest.raises(DataError, match=r"Ses01F_impro01_M001\.wav: there is no such file"):
        dataset.read(rows[1])


# ESC

ESC50 = (
    "filename,fold,target,category,esc10,src_file,take\n"
    "1-100032-A-0.wav,1,0,dog,True,100032,A\n"
    "1-100038-A-14.wav,1,14,chirping_birds,False,100038,A\n"
    "5-9032-A-0.wav,5,0,dog,True,9032,A\n"
)


@pytest.fixture
def esc50(tmp_path: Path, write_audio: WriteAudio) -> Path:
    for line in ESC50.splitlines()[1:]:
        write_audio(f"audio/{line.split(',')[0]}", rate=44100)
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/esc50.csv").write_text(ESC50)
    return tmp_path


def test_esc10(recordings: Path) -> None:
    dataset = ESC(root=recordings / "ESC-10")
    rows = rows_of(dataset)
    assert Counter((row["label"], row["fold"]) for row in rows) == {
        (label, fold): 2 for label in {row["label"] for row in rows} for fold in (1, 2, 3, 4)
    }
    assert len({row["label"] for row in rows}) == 10
    assert rows[0]["label"] == "Dog bark"
    assert {row["group"] for row in rows} == {None}
    seconds, kinds = read_all(dataset, rows[::8])
    assert (round(seconds), kinds) == (50, {(44100, 1)})


def test_esc10_leaves_a_fold_out(recordings: Path) -> None:
    rows = rows_of(ESC(root=recordings / "ESC-10", test_folds=(2, 3)))
    assert Counter(row["split"] for row in rows) == {"train": 40, "test": 40}
    with pytest.raises(DataError, match="no clip is of fold 5, which is to be tested on; there are 1, 2, 3, 4"):
        ESC(root=recordings / "ESC-10", test_folds=(5,)).manifest()


@pytest.mark.parametrize("test", ["{by: split}", "{by: group, fraction: 0.2}", "{by: group, values: [x]}", "null"])
def test_what_the_first_message_about_esc10_proposes_works(recordings: Path, test: str) -> None:
    """A set without groups, of which a beginner knows nothing else."""
    values: dict[str, Any] = {
        "name": "esc",
        "root": str(recordings / "ESC-10"),
        "split": {"test": parse_yaml(test, "")},
    }
    with pytest.raises(DataError) as error:
        list(describe_data(DataSettings(**values), 1))
    proposed = dict(re.findall(r"data\.(split\.test|partition)='(\{.*?\})'", str(error.value)))
    if "split.test" in proposed:
        values["split"] = {"test": parse_yaml(proposed["split.test"], "")}
    values["partition"] = parse_yaml(proposed["partition"], "")
    text = "\n".join(describe_data(DataSettings(**values), 1))
    assert "With this configuration:" in text
    assert "clips of 10 of the 10 classes" in text or test == "null"


def test_esc50(esc50: Path) -> None:
    rows = rows_of(ESC(root=esc50))
    assert [(row["label"], row["fold"], row["recording"], row["take"]) for row in rows] == [
        ("dog", 1, "100032", "A"),
        ("chirping_birds", 1, "100038", "A"),
        ("dog", 5, "9032", "A"),
    ]
    assert [row["clip"] for row in rows_of(ESC(root=esc50, esc10_only=True))] == [
        "audio/1-100032-A-0.wav",
        "audio/5-9032-A-0.wav",
    ]


def test_esc50_a_fold_that_is_no_number(esc50: Path) -> None:
    (esc50 / "meta/esc50.csv").write_text(ESC50.replace("wav,5,", "wav,five,"))
    with pytest.raises(DataError, match=r"5-9032-A-0\.wav is of fold 'five' in meta/esc50\.csv"):
        ESC(root=esc50).manifest()


# UrbanSound8K


def test_urbansound8k(recordings: Path) -> None:
    dataset = UrbanSound8K(root=recordings / "UrbanSound8K")
    rows = rows_of(dataset)
    assert Counter(row["fold"] for row in rows) == {1: 12, 2: 10, 10: 1}
    assert len({row["label"] for row in rows}) == 10
    assert all(row["recording"] == row["clip"].rpartition("/")[2].split("-")[0] for row in rows)
    assert {(row["group"], row["split"]) for row in rows} == {(None, None)}
    seconds, kinds = read_all(dataset, rows)
    assert round(seconds) == 87
    assert (22050, 1) in kinds
    assert any(channels == 2 for _, channels in kinds)
    # By the files themselves: copies of the set are about with clips padded to 4 s, and the metadata does not know.
    for row in rows:
        samples, rate = dataset.read(row)
        assert row["seconds"] == pytest.approx(len(samples) / rate)


def test_urbansound8k_leaves_a_fold_out(recordings: Path) -> None:
    rows = rows_of(UrbanSound8K(root=recordings / "UrbanSound8K", test_folds=(10, 1)))
    assert {(row["fold"], row["split"]) for row in rows} == {(1, "test"), (2, "train"), (10, "test")}


@pytest.fixture
def urban(tmp_path: Path, write_audio: WriteAudio) -> Path:
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata/UrbanSound8K.csv").write_text(
        "slice_file_name,fsID,start,end,salience,fold,classID,class\n"
        "1-3-0-0.wav,1,0.0,0.5,1,1,3,dog_bark\n"
        "2-3-0-0.wav,2,0.0,0.05,1,2,3,dog_bark\n"
        "3-3-0-0.wav,3,0.0,0.5,1,2,3,dog_bark\n"
    )
    write_audio("audio/fold1/1-3-0-0.wav", 0.5)
    write_audio("audio/fold2/2-3-0-0.wav", 0.05)
    return tmp_path


def test_urbansound8k_leaves_short_clips_out_and_keeps_absent_ones(urban: Path) -> None:
    dataset = UrbanSound8K(root=urban, shortest_seconds=0.1)
    rows = rows_of(dataset)
    assert [(row["recording"], row["seconds"]) for row in rows] == [("1", 0.5), ("3", None)]
    with pytest.raises(DataError, match=r"fold2/3-3-0-0\.wav: there is no such file"):
        dataset.read(rows[1])
    assert len(rows_of(UrbanSound8K(root=urban, shortest_seconds=0.05))) == 3


def test_urbansound8k_a_class_that_there_is_not(urban: Path) -> None:
    table = urban / "metadata/UrbanSound8K.csv"
    table.write_text(table.read_text().replace("1,2,3,dog", "1,2,12,dog", 1))
    with pytest.raises(DataError, match=r"line 3 of .*UrbanSound8K\.csv has no fold or no class: '12'"):
        UrbanSound8K(root=urban).manifest()
