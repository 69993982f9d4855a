"""Published data sets, on real samples and on small trees in the same layout."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raydfl.cli.describe import describe_data
from raydfl.core.errors import DataError
from raydfl.core.registry import build
from raydfl.core.yaml import parse_yaml
from raydfl.data.dataset import Dataset, find_dataset
from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.settings import DataSettings

Files = dict[str, str | float]
"""File contents by path: a text, or the seconds of a recording."""
Layout = Callable[[Mapping[str, str | float]], Path]


@pytest.fixture
def layout(tmp_path: Path, write_audio: Callable[..., Path]) -> Layout:
    """Return a function that writes files below a root and returns the root."""

    def write(files: Mapping[str, str | float]) -> Path:
        for name, content in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                path.write_text(content)
            else:
                write_audio(f"root/{name}", content)
        return tmp_path / "root"

    return write


def build_dataset(name: str, root: Path, options: Mapping[str, Any]) -> Dataset:
    dataset: Dataset = build(find_dataset(name), {"root": root, **options}, "data")
    return dataset


# All data sets with a root folder


ROOTED = [
    *("ambient_contexts", "cifar10", "crema_d", "dcase2020_task2", "dcase2023_task2", "emnist", "emodb", "esc"),
    *("fashion_mnist", "folder", "fsd50k", "fsdd", "iemocap", "mimii", "mimii_dg", "mimii_due", "mnist", "ravdess"),
    *(
        "huggingface",
        "lhotse",
        "webdataset",
        "librispeech",
        "common_voice",
        "fsdd_strings",
        "grid",
        "soundscapes",
        "desed",
        "voxceleb",
    ),
    *("activitynet", "speech_commands", "svhn", "toyadmos", "ucf101", "urbansound8k", "voxforge"),
]


@pytest.mark.parametrize("name", ROOTED)
def test_messages_about_unusable_roots_describe_the_expected_layout(name: str, layout: Layout) -> None:
    root = layout({"some folder/notes.txt": "", "notes.txt": ""})
    dataset = build_dataset(name, root / "none", {})
    with pytest.raises(DataError) as error:
        dataset.manifest()
    message, card = str(error.value), dataset.card
    assert f"{card.title}: the root {root / 'none'} does not exist. Expected a folder with {card.layout}" in message
    assert card.url in message
    with pytest.raises(DataError) as error:
        build_dataset(name, root, {}).manifest()
    assert f"in {root}. Expected {card.layout}. Found: notes.txt, some folder/" in str(error.value)
    if name not in ("huggingface", "lhotse", "webdataset"):
        with pytest.raises(DataError, match="/notes.txt is a file. Expected a folder with "):
            build_dataset(name, root / "notes.txt", {}).manifest()


def test_long_folder_listings_are_shortened(layout: Layout) -> None:
    root = layout({f"{number:02d}": "" for number in range(30)})
    with pytest.raises(DataError, match=r"Found: 00, 01, 02, 03, 04, 05, 06, 07, \.\.\. \(30 entries\)$"):
        build_dataset("emodb", root, {}).manifest()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("fsdd", "recordings/x_george_0.wav"),
        ("emodb", "wav/03a01Xa.wav"),
        ("crema_d", "AudioWAV/1001_IEO_JOY_HI.wav"),
        ("ravdess", "Actor_01/03-01-09-01-01-01-01.wav"),
        ("esc", "001 - Dog bark/dog.ogg"),
        ("ucf101", "UCF-101/Typing/v_Typing_1.avi"),
        ("grid", "s1/bbaw2n.mpg"),  # w is not a letter of the corpus
        ("grid", "s1/bbaf0n.mpg"),  # zero is z
        ("grid", "s1/bbaf2.wav"),
        ("grid", "s1/bbaf2nn.wav"),
    ],
)
def test_unexpected_file_names_are_rejected(name: str, file: str, layout: Layout) -> None:
    dataset = build_dataset(name, layout({file: ""}), {})
    with pytest.raises(DataError) as error:
        dataset.manifest()
    assert f"the file name {file!r} does not fit the layout {dataset.card.layout}" in str(error.value)


# Small trees


def make_recordings(*names: str) -> Files:
    return dict.fromkeys(names, 0.05)


AMBIENT: Files = {
    **make_recordings(
        "Data/Train/id_a_b-c_10_20_03.wav", "Data/Test/id__x_0_9_00.wav", "Data/Test/id_unlisted_0_9_00.wav"
    ),
    "train_split.txt": "id_a_b-c_10_20_03.wav\t Walk\n",
    "test_split.txt": "id__x_0_9_00.wav\tCrowd\n\n",
}
TRUNK = "Trunk/Audio/Main/16kHz_16bit"
VOXFORGE = make_recordings(
    f"de/{TRUNK}/ich-20120715-csb/wav/de5-056.wav",
    f"de/{TRUNK}/ich-20130101/wav/de5-1.wav",
    f"en/{TRUNK}/cmu_us_bdl_arctic/wav/arctic_b0111.wav",
    f"en/{TRUNK}/k-k-20090202-wgd/wav/a0077.wav",
)
FSD50K: Files = {
    **make_recordings("FSD50K.dev_audio/64760.wav", "FSD50K.dev_audio/16399.wav", "FSD50K.eval_audio/37199.wav"),
    "FSD50K.ground_truth/dev.csv": 'fname,labels,mids,split\n64760,"Guitar,Music","/m/0,/m/1",train\n16399,Dog,/m/2,val\n',
    "FSD50K.ground_truth/eval.csv": 'fname,labels,mids\n37199,"Dog,Music","/m/2,/m/1"\n',
}
FSDD: Files = {  # macOS leaves ._ files behind
    **make_recordings("recordings/3_anna_7.wav", "recordings/9_bob_0.wav", "recordings/.cache/3_anna_8.wav"),
    "recordings/._3_anna_7.wav": "x",
}
LIBRISPEECH: Files = {
    **make_recordings("train-clean-100/19/198/19-198-0000.flac", "test-clean/61/70968/61-70968-0000.flac"),
    "train-clean-100/19/198/19-198.trans.txt": "19-198-0000 NORTHANGER ABBEY\n19-198-0001 IT'S SHE\n",
    "test-clean/61/70968/61-70968.trans.txt": "61-70968-0000 HE BEGAN\n",
}
GRID: Files = {
    **make_recordings("s1/bbaf2n.wav", "s34/audio/pgizzp.wav", "sbwa1s.wav"),
    "s2/video/mpg_6000/lwbsza.mpg": "not opened",
    "s2/align/lwbsza.align": "0 23750 sil\n",
}
VOXCELEB = make_recordings(
    "wav/id10001/1zcIwhmdeo4/00001.wav", "wav/id10270/5r0dWxy17C8/00001.wav", "dev/id00012/21Uxsk56VDQ/00001.flac"
)
COMMON_VOICE: Files = {
    **dict.fromkeys(("clips/a.mp3", "clips/b.mp3", "clips/c.mp3"), "not opened"),
    "train.tsv": 'client_id\tpath\tsentence\tage\nada\ta.mp3\t"Hi", he called.\t\nbo\tb.mp3\tTwo\tteens\n',
    "dev.tsv": "client_id\tpath\tsentence\n",
    "test.tsv": "client_id\tpath\tsentence\ncy\tc.mp3\tThree\n",
    "validated.tsv": "client_id\tpath\tsentence\nada\ta.mp3\tHi\n",
}
DESED: Files = {
    "metadata/train/weak.tsv": "filename\tevent_labels\na.wav\tSpeech,Cat\nb.wav\tDog\n",
    "metadata/train/synthetic21_train/soundscapes.tsv": "filename\tonset\toffset\tevent_label\n0.wav\t3.2\t10.0\tDog\n"
    "0.wav\t0.05\t1.5\tCat\n",
    "metadata/validation/validation.tsv": "filename\tonset\toffset\tevent_label\nv.wav\t0\t0.25\tDog\nw.wav\t\t\t\n",
    **{
        f"audio/{name}": "not opened"
        for name in (
            *("train/weak/a.wav", "train/weak/b.wav", "train/synthetic21_train/soundscapes/0.wav"),
            *("validation/validation/v.wav", "validation/validation/w.wav"),
        )
    },
}
VOTES = (
    '"","FileName","VoiceVote","VoiceLevel","FaceVote","FaceLevel","MultiModalVote","MultiModalLevel"\n'
    '"1","1001_DFA_ANG_XX","N","60","A","65","A","70"\n'
    '"2","1001_DFA_HAP_XX","H","60","H","65","N","70"\n'
    '"3","1002_IEO_FEA_HI","F","60","A:F","65:66","F","70"\n'
    '"4","1002_IEO_SAD_LO","S","60","N","65","N:S","70:71"\n'
    '"5","1003_IEO_SAD_LO","S","60","S","65","S","70"\n'
    '"6","1076_MTI_SAD_XX","S","60","S","65","S","70"\n'
)
TABLE = "processedResults/summaryTable.csv"
CREMA: Files = {
    **make_recordings(*(f"AudioWAV/{line.split(',')[1][1:-1]}.wav" for line in VOTES.splitlines()[1:])),
    TABLE: VOTES,
}
RAVDESS = make_recordings(
    "Audio_Song_Actors_01-24/Actor_03/03-02-06-01-02-01-03.wav",
    "Audio_Speech_Actors_01-24/Actor_03/03-01-05-02-01-02-03.wav",
)
HEADER = "% [START_TIME - END_TIME] TURN_NAME EMOTION [V, A, D]\n\n"
IEMOCAP: Files = {
    "Session1/dialog/EmoEvaluation/Ses01F_impro01.txt": HEADER
    + "[6.2901 - 8.2357]\tSes01F_impro01_F000\tneu\t[2.5000, 2.5000, 2.5000]\n"
    "C-E2:\tNeutral;\t()\nC-F1:\tNeutral; Surprise;\t(Urgent)\nA-E3:\tval 3; act 2; dom  2;\t()\n\n"
    "[10.0100 - 11.3925]\tSes01F_impro01_M001\texc\t[4.0000, 3.5000, 2.5000]\n"
    "[14.8872 - 18.0175]\tSes01F_impro01_F002\txxx\t[2.5000, 2.5000, 2.5000]\n"
    "[19.2900 - 20.7875]\tSes01F_impro01_M003\tfru\t[2.5000, 2.5000, 2.5000]\n",
    "Session1/dialog/EmoEvaluation/Ses01M_script01_1b.txt": HEADER
    + "[6.0000 - 8.0000]\tSes01M_script01_1b_M000\thap\t[4.5000, 2.5000, 2.5000]\n",
    "Session5/dialog/EmoEvaluation/Ses05M_impro07.txt": HEADER
    + "[3.0000 - 4.0000]\tSes05M_impro07_MXX0\tsad\t[1.5000, 1.5000, 2.5000]\n",
    # Further files of the release.
    "Session1/dialog/EmoEvaluation/._Ses01F_impro01.txt": "\0",
    "Session1/dialog/EmoEvaluation/Categorical/Ses01F_impro01_e2_cat.txt": "Ses01F_impro01_F000 :Neutral state; ()\n",
    **make_recordings("Session1/sentences/wav/Ses01F_impro01/Ses01F_impro01_F000.wav"),
}
ESC50: Files = {
    "meta/esc50.csv": "filename,fold,target,category,esc10,src_file,take\n"
    "1-100032-A-0.wav,1,0,dog,True,100032,A\n"
    "1-100038-A-14.wav,1,14,chirping_birds,False,100038,A\n"
    "5-9032-A-0.wav,5,0,dog,True,9032,A\n",
    **make_recordings("audio/1-100032-A-0.wav", "audio/1-100038-A-14.wav"),
}
URBAN_TABLE = "metadata/UrbanSound8K.csv"
URBAN: Files = {
    URBAN_TABLE: "slice_file_name,fsID,start,end,salience,fold,classID,class\n"
    "1-3-0-0.wav,1,0.0,0.5,1,1,3,dog_bark\n"
    "2-3-0-0.wav,2,0.0,0.05,1,2,3,dog_bark\n"
    "3-3-0-0.wav,3,0.0,0.5,1,3,4,drilling\n",
    **make_recordings("audio/fold1/1-3-0-0.wav"),
    "audio/fold3/3-3-0-0.wav": 0.5,
}
MIMII = make_recordings(
    *("-6_dB_fan/fan/id_02/normal/00000003.wav", "0_dB_pump/pump/id_00/abnormal/1.wav"),
    *("6_dB_fan/fan/id_02/normal/00000003.wav", "valve/id_00/normal/0.wav"),
)
SECTIONS = make_recordings(
    "fan/train/section_00_source_train_normal_0000_strength_1_ambient.wav",
    "fan/target_test/section_02_target_test_anomaly_0007.wav",
    "fan/test/section_02_target_test_anomaly_0007.wav",
    "fan/test/section_03_0000.wav",  # an evaluation set without labels
)
TOYS = make_recordings(
    *(f"ToyCar/case1/NormalSound_IND/11_ToyCar_case1_normal_IND_ch{channel}_0001.wav" for channel in (1, 2)),
    *(f"ToyCar/case4/AnomalousSound_IND/14_ToyCar_case4_ab01_IND_ch{channel}_0001.wav" for channel in (1, 2)),
    "ToyCar/case1/NormalSound_CNT/1100110001_ToyCar_case1_normal_CNT_ch1_0001.wav",
)
VIDEOS = ("Archery/v_Archery_g01_c02.avi", "HandstandPushups/v_HandStandPushups_g08_c01.avi", "YoYo/v_YoYo_g09_c01.avi")
UCF101: Files = {
    **{f"UCF-101/{video}": "" for video in VIDEOS},
    "ucfTrainTestlist/testlist01.txt": f"{VIDEOS[0]}\nBowling/v_Bowling_g01_c01.avi\n",
    "ucfTrainTestlist/trainlist01.txt": f"{VIDEOS[1]} 7\r\n{VIDEOS[2]} 7\r\n",
    "ucfTrainTestlist/testlist03.txt": f"{VIDEOS[2]}\n",
    "ucfTrainTestlist/trainlist03.txt": f"{VIDEOS[0]} 1\n{VIDEOS[1]} 2\n",
}
FOUR = {"labels": "voted", "emotions": ("neutral", "happy", "sad", "anger")}


@pytest.mark.parametrize(
    ("name", "files", "options", "columns", "rows"),
    [
        (
            *("ambient_contexts", AMBIENT, {}, "clip label split recording take"),
            [
                ("Data/Test/id__x_0_9_00.wav", "Crowd", "test", "_x", 0),
                ("Data/Train/id_a_b-c_10_20_03.wav", "Walk", "train", "a_b-c", 3),
            ],
        ),
        (
            *("voxforge", VOXFORGE, {}, "label group submission split"),
            [
                ("de", "de/ich", "ich-20120715-csb", None),
                ("de", "de/ich", "ich-20130101", None),
                ("en", "en/cmu_us_bdl_arctic", "cmu_us_bdl_arctic", None),
                ("en", "en/k-k", "k-k-20090202-wgd", None),
            ],
        ),
        (
            *("voxforge", VOXFORGE | {"test_split.txt": f"{[*VOXFORGE][3]}\nen/absent.wav\n"}, {"languages": ("en",)}),
            *("group split", [("en/cmu_us_bdl_arctic", "train"), ("en/k-k", "test")]),
        ),
        (
            *("fsd50k", FSD50K, {}, "clip label split"),
            [
                ("FSD50K.dev_audio/16399.wav", "Dog", "validation"),
                ("FSD50K.dev_audio/64760.wav", "Guitar,Music", "train"),
                ("FSD50K.eval_audio/37199.wav", "Dog,Music", "test"),
            ],
        ),
        ("fsd50k", FSD50K, {"subset": "eval"}, "label split", [("Dog,Music", None)]),
        ("fsd50k", FSD50K, {"subset": "dev"}, "label", [("Dog",), ("Guitar,Music",)]),
        (
            *("fsdd", FSDD, {}, "clip label group split take"),
            [
                ("recordings/3_anna_7.wav", "3", "anna", "train", 7),
                ("recordings/9_bob_0.wav", "9", "bob", "test", 0),
            ],
        ),
        (
            *("librispeech", LIBRISPEECH, {}, "clip label group split chapter subset"),
            [
                ("test-clean/61/70968/61-70968-0000.flac", "HE BEGAN", "61", "test", "70968", "test-clean"),
                (
                    "train-clean-100/19/198/19-198-0000.flac",
                    "NORTHANGER ABBEY",
                    "19",
                    "train",
                    "198",
                    "train-clean-100",
                ),
                ("train-clean-100/19/198/19-198-0001.flac", "IT'S SHE", "19", "train", "198", "train-clean-100"),
            ],
        ),
        (
            *("grid", GRID, {}, "clip label group split"),
            [
                ("s1/bbaf2n.wav", "bin blue at f two now", "s1", None),
                ("s2/video/mpg_6000/lwbsza.mpg", "lay white by s zero again", "s2", None),
                ("s34/audio/pgizzp.wav", "place green in z zero please", "s34", None),
                ("sbwa1s.wav", "set blue with a one soon", None, None),
            ],
        ),
        (
            *("voxceleb", VOXCELEB, {}, "clip label group split video take"),
            [
                ("id00012/21Uxsk56VDQ/00001.flac", "id00012", "id00012", "train", "21Uxsk56VDQ", "00001"),
                ("id10001/1zcIwhmdeo4/00001.wav", "id10001", "id10001", "train", "1zcIwhmdeo4", "00001"),
                ("id10270/5r0dWxy17C8/00001.wav", "id10270", "id10270", "test", "5r0dWxy17C8", "00001"),
            ],
        ),
        (
            *("common_voice", COMMON_VOICE, {}, "clip label group split"),
            [
                ("clips/a.mp3", '"Hi", he called.', "ada", "train"),
                ("clips/b.mp3", "Two", "bo", "train"),
                ("clips/c.mp3", "Three", "cy", "test"),
            ],
        ),
        ("common_voice", COMMON_VOICE, {"lists": ("validated",)}, "label group split", [("Hi", "ada", None)]),
        (
            *("desed", DESED, {}, "clip label split"),
            [
                ("audio/train/weak/a.wav", "Cat|Speech", "train"),
                ("audio/train/weak/b.wav", "Dog", "train"),
                ("audio/train/synthetic21_train/soundscapes/0.wav", "0.05-1.5 Cat|3.2-10 Dog", "train"),
                ("audio/validation/validation/v.wav", "0-0.25 Dog", "test"),
                ("audio/validation/validation/w.wav", "|", "test"),
            ],
        ),
        ("desed", DESED, {"train": ("train/weak",), "test": ()}, "label split", [("Cat|Speech", None), ("Dog", None)]),
        ("fsdd", FSDD, {"test_takes": 0}, "take split", [(7, None), (0, None)]),
        (
            *("crema_d", CREMA, {"test_folds": (2,)}, "label group sentence level fold split"),
            [
                ("anger", "1001", "DFA", "XX", 1, "train"),
                ("happy", "1001", "DFA", "XX", 1, "train"),
                ("fear", "1002", "IEO", "HI", 2, "test"),
                ("sad", "1002", "IEO", "LO", 2, "test"),
                ("sad", "1003", "IEO", "LO", 3, "train"),
            ],
        ),
        (
            *("crema_d", CREMA, {"labels": "voted"}, "group label"),
            [("1001", "anger"), ("1001", "neutral"), ("1002", "fear"), ("1003", "sad")],
        ),
        ("crema_d", CREMA, FOUR, "group label", [("1001", "anger"), ("1001", "neutral"), ("1003", "sad")]),
        (
            *("ravdess", RAVDESS, {"channel": "both"}, "label group channel intensity statement repetition"),
            [("fearful", "03", "song", "normal", 2, 1), ("angry", "03", "speech", "strong", 1, 2)],
        ),
        ("ravdess", RAVDESS, {}, "label channel", [("angry", "speech")]),
        ("ravdess", {"Actor_03/03-01-05-02-01-02-03.wav": 0.05}, {}, "label channel", [("angry", "speech")]),
        (
            *("iemocap", IEMOCAP, {"test_sessions": (5,)}, "label group session dialogue seconds split"),
            [
                ("neu", "Ses01F", 1, "Ses01F_impro01", pytest.approx(1.9456), "train"),
                ("hap", "Ses01M", 1, "Ses01F_impro01", pytest.approx(1.3825), "train"),
                ("hap", "Ses01M", 1, "Ses01M_script01_1b", 2.0, "train"),
                ("sad", "Ses05M", 5, "Ses05M_impro07", 1.0, "test"),
            ],
        ),
        (
            *("iemocap", IEMOCAP, {"improvised": True, "emotions": "all"}, "label split"),
            [("neu", None), ("exc", None), ("fru", None), ("sad", None)],
        ),
        (
            *("esc", ESC50, {}, "clip label fold recording take"),
            [
                ("audio/1-100032-A-0.wav", "dog", 1, "100032", "A"),
                ("audio/1-100038-A-14.wav", "chirping_birds", 1, "100038", "A"),
                ("audio/5-9032-A-0.wav", "dog", 5, "9032", "A"),
            ],
        ),
        ("esc", ESC50, {"esc10_only": True}, "recording", [("100032",), ("9032",)]),
        (
            *("urbansound8k", URBAN, {}, "clip label fold recording seconds"),
            [
                ("audio/fold1/1-3-0-0.wav", "dog_bark", 1, "1", 0.05),
                ("audio/fold2/2-3-0-0.wav", "dog_bark", 2, "2", None),
                ("audio/fold3/3-3-0-0.wav", "drilling", 3, "3", 0.5),
            ],
        ),
        (
            "urbansound8k",
            URBAN,
            {"shortest_seconds": 0.1, "test_folds": (2,)},
            "fold split",
            [(2, "test"), (3, "train")],
        ),
        (
            *("mimii", MIMII, {}, "snr group label recording domain"),
            [
                ("-6", "fan_02", "normal", "fan/id_02/normal/00000003", "source"),
                ("0", "pump_00", "anomaly", "pump/id_00/abnormal/1", "source"),
                ("6", "fan_02", "normal", "fan/id_02/normal/00000003", "source"),
                ("unknown", "valve_00", "normal", "valve/id_00/normal/0", "source"),
            ],
        ),
        ("mimii", MIMII, {"snr": -6}, "group", [("fan_02",)]),
        ("mimii", MIMII, {"machines": ("pump", "valve")}, "group", [("pump_00",), ("valve_00",)]),
        *(
            (
                *(name, SECTIONS, {}, "group section domain split label condition attributes"),
                [
                    *[("fan_02", "02", "target", "test", "anomaly", "anomaly", None)] * 2,
                    ("fan_00", "00", "source", "train", "normal", "normal", "strength_1_ambient"),
                ],
            )
            for name in ("mimii_due", "mimii_dg")
        ),
        ("ucf101", dict([*UCF101.items()][:3]), {}, "label split", [("Archery", None), ("HandstandPushups", None)]),
        (
            *("ucf101", UCF101, {}, "label group number split"),
            [
                ("Archery", "Archery/g01", 2, "test"),
                ("HandstandPushups", "HandstandPushups/g08", 1, "train"),
            ],
        ),
        ("ucf101", UCF101, {"fold": 3, "classes": "all"}, "split", [("train",), ("train",), ("test",)]),
        (
            *("toyadmos", TOYS, {"microphone": 2}, "group label anomaly clip"),
            [
                ("ToyCar_1", "normal", "none", [*TOYS][1]),
                ("ToyCar_4", "anomaly", "ab01", [*TOYS][3]),
            ],
        ),
    ],
)
def test_small_trees_are_listed_in_their_published_layout(
    name: str, files: Files, options: dict[str, Any], columns: str, rows: list[tuple[Any, ...]], layout: Layout
) -> None:
    root = layout(files)
    listed = build_dataset(name, root, options).manifest().to_pylist()
    assert [tuple(row[column] for column in columns.split()) for row in listed] == rows
    paths = [Path(row["path"]) for row in listed]
    if name == "voxceleb":  # the names of clips are those of its lists of trials
        assert all(path.is_file() and str(path).endswith(row["clip"]) for path, row in zip(paths, listed, strict=True))
    else:
        assert paths == [root / row["clip"] for row in listed]


@pytest.mark.parametrize(
    ("name", "files", "options", "message"),
    [
        (
            *("ambient_contexts", AMBIENT | {"test_split.txt": "id_gone_0_9_00.wav\tCrowd\n"}, {}),
            "'id_gone_0_9_00.wav' of test_split.txt is missing. Keep a single copy below",
        ),
        (
            *("ambient_contexts", AMBIENT | {"Data/id__x_0_9_00.wav": 0.05}, {}),
            "'id__x_0_9_00.wav' of test_split.txt is there 2 times: Data/Test/id__x_0_9_00.wav, Data/id__x",
        ),
        (
            *("ambient_contexts", AMBIENT | {"test_split.txt": "id__x_0_9_00.wav\n"}, {}),
            "is not a file, a tab and a class",
        ),
        ("voxforge", VOXFORGE, {"languages": ("ru",)}, "there is no folder ru/ with recordings"),
        ("voxforge", VOXFORGE | {"test_split.txt": "en/absent.wav\n"}, {}, "no recording in .* is on "),
        (
            *("fsd50k", {name: FSD50K[name] for name in [*FSD50K][:4]}, {}),
            r"there is no FSD50K.ground_truth/eval.csv in ",
        ),
        (
            *("crema_d", make_recordings(*[*CREMA][:2]), {"labels": "voted"}),
            r"labels: voted needs processedResults/summaryTable\.csv, but the file is missing",
        ),
        (
            *("crema_d", CREMA | {TABLE: "FileName,VoiceVote\n1001_DFA_ANG_XX,A\n"}, {"labels": "voted"}),
            r"summaryTable\.csv has no column 'MultiModalVote'; its columns: FileName, VoiceVote",
        ),
        (
            *("crema_d", CREMA | {TABLE: "FileName,MultiModalVote\n1001_DFA_ANG_XX\n"}, {"labels": "voted"}),
            r"line 2 of .*summaryTable\.csv has fewer values than the header",
        ),
        (
            *("crema_d", CREMA | {"AudioWAV/1004_DFA_ANG_XX.wav": 0.05}, {"labels": "voted"}),
            r"summaryTable\.csv has no row for 1004_DFA_ANG_XX",
        ),
        (
            *("crema_d", CREMA, {"test_folds": (6,)}),
            "CREMA-D: fold 6 of the test set has no clips. Choose from 1, 2, 3",
        ),
        (
            *("crema_d", CREMA, {"emotions": ("disgust",)}),
            "CREMA-D in .*: the manifest is empty. Check the root folder and the options",
        ),
        ("ravdess", {"Actor_03/03-01-05-02-01-02-03.wav": 0.05}, {"channel": "song"}, "none of the 1 files is song"),
        (
            *("iemocap", IEMOCAP, {"test_sessions": (2,)}),
            "session 2 of the test set has no clips. Choose from 1, 5",
        ),
        (
            *("iemocap", IEMOCAP | {[*IEMOCAP][2]: f"{HEADER}[5.0 - 6.0] Ses05M_impro07_F011\n"}, {}),
            r"line 3 of .*Ses05M_impro07\.txt is not '\[start - end\] turn emotion",
        ),
        (
            *("iemocap", {name: IEMOCAP[name] for name in [*IEMOCAP][:3]}, {}),
            "none of the 4 listed files, such as Session1/sentences/wav/Ses01F_impro01/Ses01F_impro01_F000.wav, is in ",
        ),
        (
            *("esc", {"meta/esc50.csv": ESC50["meta/esc50.csv"]}, {}),
            "none of the 3 listed files, such as audio/1-100032-A-0.wav, is in .*Expected meta/esc50.csv and audio",
        ),
        (
            *("esc", {"meta/esc50.csv": str(ESC50["meta/esc50.csv"]).replace("wav,5,", "wav,five,")}, {}),
            r"5-9032-A-0\.wav has the fold 'five' in meta/esc50\.csv",
        ),
        (
            *("urbansound8k", {URBAN_TABLE: URBAN[URBAN_TABLE]}, {}),
            "none of the 3 listed files, such as audio/fold1/1-3-0-0.wav, is in ",
        ),
        (
            *("urbansound8k", {URBAN_TABLE: str(URBAN[URBAN_TABLE]).replace("1,2,3", "1,2,12")}, {}),
            r"line 3 of .*UrbanSound8K\.csv: it has no fold or no class: KeyError: '12'",
        ),
        ("mimii", MIMII, {"snr": 3}, r"no folder of .* has clips of 3 dB .*Choose from -6, 0, 6, unknown"),
        (
            "mimii",
            MIMII,
            {"machines": ("slider",)},
            "has no machines of the type 'slider'. Choose from fan, pump, valve",
        ),
        (
            *("ucf101", UCF101 | {"ucfTrainTestlist/trainlist01.txt": ""}, {}),
            r"HandstandPushups/v_HandStand.* is on neither list of fold 1",
        ),
        (
            "ucf101",
            {f"UCF-101/{VIDEOS[2]}": ""},
            {},
            "the 1 videos in .* are of classes without sound. .*data.classes=all",
        ),
        (
            "desed",
            DESED,
            {"train": ("train/strong",)},
            r"metadata/train/strong.tsv is missing in .*Expected metadata/train",
        ),
        (
            *(
                "desed",
                DESED | {"metadata/train/weak.tsv": "filename\tonset\toffset\tevent_label\na.wav\t2\t1\tDog\n"},
                {},
            ),
            r"DESED: line 2 of .*weak.tsv: clip 'a.wav': event 'Dog' from 2 s to 1 s has no length",
        ),
        (
            *("grid", GRID | {"video/s1/bbaf2n.mpg": ""}, {}),
            "has two files of the sentence 'bin blue at f two now': s1/bbaf2n.wav and video/s1/bbaf2n.mpg. Set data.root to",
        ),
        ("toyadmos", TOYS, {"microphone": 3}, "has no clips of microphone 3. Choose from 1, 2"),
    ],
)
def test_incomplete_and_damaged_trees_are_rejected(
    name: str, files: Files, options: dict[str, Any], message: str, layout: Layout
) -> None:
    with pytest.raises(DataError, match=message):
        build_dataset(name, layout(files), options).manifest()


def test_a_missing_file_of_a_list_is_reported_on_reading(layout: Layout) -> None:
    dataset = build_dataset("iemocap", layout(IEMOCAP), {})
    present, missing = dataset.manifest().to_pylist()[:2]
    assert dataset.read(present)[1] == 16000
    with pytest.raises(DataError, match=r"Ses01F_impro01_M001\.wav: there is no such file"):
        dataset.read(missing)


def test_folds_of_crema_d_have_72_or_73_training_actors(layout: Layout) -> None:
    # FedAudio's five folds over 91 actors train on 72 or 73 of them.
    root = layout({f"AudioWAV/{actor}_DFA_ANG_XX.wav": "" for actor in range(1001, 1092)})
    for fold, training in zip(range(1, 6), (72, 73, 73, 73, 73), strict=True):
        splits = build_dataset("crema_d", root, {"test_folds": (fold,)}).manifest().column("split").to_pylist()
        assert Counter(splits) == {"train": training, "test": 91 - training}


def test_unpaired_attributes_are_ignored(layout: Layout) -> None:
    root = layout({"gearbox/train/section_00_source_train_normal_0000_0_g_25_mm_2000_mV_none.wav": 0.05})
    columns = build_dataset("mimii_due", root, {}).manifest().column_names
    assert not [name for name in columns if name.startswith("attribute_")]


# The samples


@pytest.mark.parametrize(
    ("name", "folder", "clips", "labels", "groups", "splits", "seconds", "kinds"),
    [
        ("fsdd", "fsdd", 3000, 10, 6, {"train": 2700, "test": 300}, None, {(8000, 1)}),
        ("crema_d", "CREMA-D", 168, 6, 28, {None: 168}, 418, {(11025, 1)}),
        ("emodb", "emodb", 86, 7, 8, {None: 86}, 227, {(11025, 1)}),
        ("ravdess", "RAVDESS", 8, 8, 2, {None: 8}, None, {(48000, 1)}),
        ("esc", "ESC-10", 80, 10, 0, {None: 80}, None, {(44100, 1)}),
        ("urbansound8k", "UrbanSound8K", 23, 10, 0, {None: 23}, 87, None),
        (
            *("speech_commands", "speech_commands_v0.01", 90, 30, 24),
            *({"train": 60, "validation": 19, "test": 11}, None, {(16000, 1)}),
        ),
        ("speech_commands", "speech_commands_test_set_v0.02", 479, 12, 133, {None: 479}, 479, {(16000, 1)}),
        ("mimii", "mimii", 2, 2, 1, {None: 2}, 20, {(16000, 8)}),
        ("dcase2020_task2", "dcase2020_task2", 16, 2, None, {"train": 8, "test": 8}, 160, {(16000, 1)}),
        ("dcase2023_task2", "dcase2023_task2", 20, 2, 5, {"train": 10, "test": 10}, None, {(16000, 1)}),
    ],
)
def test_samples_have_the_published_counts(
    name: str,
    folder: str,
    clips: int,
    labels: int,
    groups: int | None,
    splits: dict[str | None, int],
    seconds: int | None,
    kinds: set[tuple[int, int]] | None,
    recordings: Path,
) -> None:
    """Clips, labels, groups, seconds, sample rates and channels match the publication."""
    dataset = build_dataset(name, recordings / folder, {})
    rows = dataset.manifest().to_pylist()
    assert (len(rows), len({row["label"] for row in rows})) == (clips, labels)
    assert groups in (None, len({row["group"] for row in rows} - {None}))
    assert Counter(row["split"] for row in rows) == splits
    assert [row["clip"] for row in rows] == sorted(row["clip"] for row in rows)
    total, formats = 0.0, set()
    for row in rows if seconds is not None else rows[::8]:
        samples, rate = dataset.read(row)
        assert samples.dtype == np.float32
        assert np.abs(samples).max() <= 1.0
        assert dataset.identity(row) is None
        if name == "urbansound8k":  # some copies of the set have clips padded to 4 s
            assert row["seconds"] == pytest.approx(len(samples) / rate)
        total += len(samples) / rate
        formats.add((rate, samples.shape[1]))
    assert seconds in (None, round(total))
    assert kinds in (None, formats)


def test_each_of_the_eight_channels_of_mimii_can_be_chosen(recordings: Path) -> None:
    dataset = build_dataset("mimii", recordings / "mimii", {})
    samples, rate = dataset.read(dataset.manifest().to_pylist()[0])
    for channel, expected in (("first", samples[:, 0]), (7, samples[:, 7]), ("mean", samples.mean(axis=1))):
        settings = FeatureSettings(channel=channel)  # type: ignore[arg-type]
        assert np.array_equal(FeatureExtractor(settings).wave(samples, rate), expected)
    with pytest.raises(DataError, match="has 8 channels, but data.features.channel is 8, counted from 0"):
        FeatureExtractor(FeatureSettings(channel=8)).wave(samples, rate)


def test_notmnist_is_read_in_the_format_of_mnist(recordings: Path) -> None:
    manifest = build_dataset("mnist", recordings / "notmnist", {"names": tuple("ABCDEFGHIJ")}).manifest()
    assert Counter(manifest.column("label").to_pylist()) == dict.fromkeys("ABCDEFGHIJ", 1000)


def test_sentences_of_grid_are_spelled_by_the_names_of_its_videos(recordings: Path) -> None:
    root = recordings / "video" / "GRID"
    if not root.is_dir():
        pytest.skip(f"no videos in {root}")
    dataset = build_dataset("grid", root, {})
    rows = dataset.manifest().to_pylist()
    assert {row["clip"]: row["label"] for row in rows} == {
        "bbaf2n.mpg": "bin blue at f two now",
        "brbk7n.mpg": "bin red by k seven now",
        "lbax4n.mpg": "lay blue at x four now",
        "lbbc2a.mpg": "lay blue by c two again",
        "lrwp9a.mpg": "lay red with p nine again",
        "lwbsza.mpg": "lay white by s zero again",
    }
    pytest.importorskip("av", reason="the package of the extra video is not installed")
    for row in rows:
        samples, rate = dataset.read(row)
        assert (rate, len(samples) / rate) == (44100, pytest.approx(3.0, abs=0.05))
        assert dataset.image(row).shape == (288, 360, 3)


def test_attributes_of_dcase_2023_are_columns(recordings: Path) -> None:
    root = recordings / "dcase2023_task2"
    assert (
        "attribute_vel" not in build_dataset("dcase2023_task2", root, {}).manifest().column_names
    )  # only bearings have this attribute
    bearings = build_dataset("dcase2023_task2", root, {"machines": ("bearing",)}).manifest().to_pylist()
    assert {(row["domain"], row["section"], row["attribute_vel"], row["attribute_loc"]) for row in bearings} == {
        ("source", "00", "16", "A"),
        ("source", "00", "21", "A"),
        ("source", "00", "9", "A"),
        ("target", "00", "8", "G"),
    }


def test_chosen_folds_are_the_test_set(recordings: Path) -> None:
    dataset = build_dataset("esc", recordings / "ESC-10", {"test_folds": (2, 3)})
    rows = Counter((row["fold"], row["split"]) for row in dataset.manifest().to_pylist())
    assert rows == {(fold, "test" if fold in (2, 3) else "train"): 20 for fold in (1, 2, 3, 4)}


@pytest.mark.parametrize("test", ["{by: split}", "{by: group, fraction: 0.2}", "{by: group, values: [x]}", "null"])
def test_the_proposal_of_the_first_error_about_esc10_works(recordings: Path, test: str) -> None:
    """A beginner starts with a set without groups and follows the message."""
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
