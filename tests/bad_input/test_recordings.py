"""Unusable recordings are reported with the file or the numbers. data.unreadable=skip lists and ignores them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from commands import CommandResult, Raydfl
from safetensors.torch import load_file

from raydfl.core.yaml import to_yaml
from raydfl.engine.config import Config

Tiny = Callable[..., Config]
RATE = 8000
GOOD = 24
"""Sound files that :func:`recordings` writes."""

CONFIGURATION = {
    "method": "fedavg",
    "models": {"model": "linear"},
    "data": {
        "name": "manifest",
        "features": {"sample_rate": RATE, "bands": 8, "seconds": 0.2},
        "split": {"test": {"by": "clip", "fraction": 0.25}},
    },
    "train": {"rounds": 1, "cohort": 2},
    "ray": {"actors": 0},
    "track": {"mlflow": False},
    "run": {"name": "own"},
}


def write_wave(path: Path, seconds: float = 0.2, value: float | None = None) -> None:
    rng = np.random.default_rng(len(path.name))
    wave = 0.1 * rng.standard_normal(int(seconds * RATE))
    if value is not None:
        wave[7] = value
    soundfile.write(path, wave, RATE, subtype="FLOAT")


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Write two speakers with six takes of two words, listed in clips.csv."""
    (tmp_path / "wav").mkdir()
    lines = ["path,label,group"]
    for speaker in ("anna", "bert"):
        for word in ("left", "right"):
            for take in range(6):
                name = f"wav/{speaker}-{word}-{take}.wav"
                write_wave(tmp_path / name)
                lines.append(f"{name},{word},{speaker}")
    (tmp_path / "clips.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture
def training(raydfl: Raydfl, recordings: Path) -> Callable[..., CommandResult]:
    file = recordings / "own.yaml"
    file.write_text(to_yaml(CONFIGURATION, flow=False))

    def train(*overrides: str) -> CommandResult:
        places = [f"data.file={recordings}/clips.csv", f"data.cache={recordings}/cache", f"run.dir={recordings}/runs"]
        return raydfl("run", file, *(overrides if any("data=" in o for o in overrides) else [*places, *overrides]))

    return train


Train = Callable[..., CommandResult]


def rewrite_list(recordings: Path, change: Callable[[list[str]], list[str]]) -> None:
    path = recordings / "clips.csv"
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")


# -- single clips ----------------------------------------------------------------------------------------------------

BROKEN = {
    "empty": "the file is empty (0 bytes)",
    "truncated": "truncated: its header promises 6400 bytes of samples, but the file has",
    "header": "truncated: a wav header without samples",
    "zero length": "the clip has no samples (zero length)",
    "nan": "1 of 1600 samples are NaN or infinite, the first at sample 7",
    "infinite": "1 of 1600 samples are NaN or infinite, the first at sample 7",
    "text": "cannot be read as audio",
    "missing": "cannot be read: No such file or directory",
    "folder": "cannot be read: Is a directory",
}


def damage_file(path: Path, kind: str) -> None:
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:-3000])
    elif kind == "header":
        path.write_bytes(path.read_bytes()[:20])
    elif kind == "zero length":
        write_wave(path, 0.0001)
        soundfile.write(path, np.zeros(0), RATE)
    elif kind in ("nan", "infinite"):
        write_wave(path, value=float(kind[:3]))
    elif kind == "text":
        path.write_text("this is no sound " * 10)
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()


@pytest.mark.parametrize("kind", BROKEN)
def test_an_unreadable_clip_is_reported_with_the_reason(training: Train, recordings: Path, kind: str) -> None:
    path = recordings / "wav/bert-left-3.wav"
    damage_file(path, kind)
    output = training()
    output.refuses(
        f"1 of {GOOD} clips cannot be read:\n  {re.escape(str(path))}: .*{re.escape(BROKEN[kind])}",
        "Repair or remove them, or leave them out with data.unreadable=skip",
    )
    assert not (recordings / "runs").exists()


def test_skipped_clips_are_counted_and_listed(training: Train, recordings: Path) -> None:
    kinds = ["empty", "truncated", "zero length", "nan", "missing"]
    for take, kind in enumerate(kinds):
        damage_file(recordings / f"wav/anna-right-{take}.wav", kind)
    output = training("data.unreadable=skip")
    assert output.code == 0
    assert f"{len(kinds)} of {GOOD} clips cannot be read and are left out, the first wav/anna-right-0.wav" in output.out
    about = json.loads((recordings / "runs/own/run.json").read_text())
    assert [item["clip"] for item in about["skipped"]] == [f"wav/anna-right-{take}.wav" for take in range(len(kinds))]
    for item, kind in zip(about["skipped"], kinds, strict=True):
        assert item["reason"].startswith("there is no such file" if kind == "missing" else BROKEN[kind])
    page = (recordings / "runs/own/report.html").read_text()
    for take in range(len(kinds)):
        assert f"wav/anna-right-{take}.wav" in page
    assert "the file is empty (0 bytes)" in page


def test_skipping_all_clips_is_an_error(training: Train, recordings: Path) -> None:
    for path in (recordings / "wav").iterdir():
        path.write_bytes(b"")
    training("data.unreadable=skip").refuses(
        f"none of {GOOD} clips is readable. The first is wav/anna-left-0.wav: .*is empty"
    )


def test_a_class_without_readable_clips_is_reported(training: Train, recordings: Path) -> None:
    for path in (recordings / "wav").glob("*-left-*.wav"):
        path.write_bytes(b"")
    training("data.unreadable=skip").refuses("no client has a clip of label 'left': of its 12 clips 0 can be read")


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_folders_are_reported_and_not_opened(training: Train, recordings: Path, kind: str) -> None:
    path = recordings / "wav/bert-left-3.wav"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    training().refuses(f"1 of {GOOD} clips cannot be read:\n  {path}: .*it is a pipe, a socket or a device, not a file")
    assert training("data.unreadable=skip").code == 0


@pytest.mark.parametrize("place", ["@0+1000000000000", f"@{10**17}+1", "@0+" + 5000 * "9"])
def test_an_address_beyond_its_file_is_reported_before_allocating_memory(
    training: Train, recordings: Path, place: str
) -> None:
    rewrite_list(
        recordings, lambda lines: [line.replace("bert-left-3.wav", f"bert-left-3.wav#x{place}") for line in lines]
    )
    training().refuses(f"1 of {GOOD} clips cannot be read:\n .*bert-left-3.wav#x@.*(truncated|No such file|too long)")


# -- lists and folders -----------------------------------------------------------------------------------------------


def test_parts_of_a_file_train_like_separate_files(training: Train, recordings: Path) -> None:
    """Oracle: a run on the same clips in separate files gives the same tensors."""
    names = [line.split(",")[0] for line in (recordings / "clips.csv").read_text().splitlines()[1:]]
    waves = [soundfile.read(recordings / name, dtype="float32")[0] for name in names]
    soundfile.write(recordings / "long.wav", np.concatenate(waves), RATE, subtype="FLOAT")
    split = "data.split.test={by: take, values: ['0']}"
    rows = [f"{{}},{name.split('-')[1]},{name[4:8]},{name[-5]}" for name in names]
    header = "path,label,group,take"
    rewrite_list(recordings, lambda _: [header, *(row.format(name) for row, name in zip(rows, names, strict=True))])
    assert training(split, "run.name=files").code == 0
    times = [f",{0.2 * index:.1f},{0.2 * (index + 1):.1f}" for index in range(len(rows))]
    cut = [f"{row.format('long.wav')}{time}" for row, time in zip(rows, times, strict=True)]
    rewrite_list(recordings, lambda _: [f"{header},start,stop", *cut])
    assert training(split, "run.name=parts").code == 0
    finals = [(recordings / "runs" / name / "model.safetensors") for name in ("files", "parts")]
    one, other = (load_file(path) for path in finals)
    assert all(torch.equal(one[key], other[key]) for key in one)
    # A change of the parts changes the features, despite the cache.
    rewrite_list(recordings, lambda lines: [*lines[:-1], lines[-1].replace("4.6,4.8", "4.5,4.7")])
    assert training(split, "run.name=moved").code == 0
    assert any(
        not torch.equal(one[key], moved)
        for key, moved in load_file(finals[1].parents[1] / "moved/model.safetensors").items()
    )
    rewrite_list(recordings, lambda lines: [*lines[:-1], lines[-1].replace("4.5,4.7", "4.5,5.7")])
    training(split, "run.name=beyond").refuses(
        f"1 of {GOOD} clips cannot be read",
        r"long\.wav: the clip's stop, 5\.7 s, is after the end of the file, which is 4\.8 s",
    )


def test_files_of_other_kinds_are_counted_and_listed(raydfl: Raydfl, recordings: Path) -> None:
    tree = recordings / "tree"
    for word in ("left", "right"):
        for take in range(4):
            (tree / word).mkdir(parents=True, exist_ok=True)
            soundfile.write(tree / word / f"anna-{take}.aiff", np.random.default_rng(take).normal(0, 0.1, 1600), RATE)
            (tree / word / f"bert-{take}.m4a").write_bytes(b"no sound" * 10)
    file = recordings / "tree.yaml"
    data = {**CONFIGURATION["data"], "name": "folder", "root": str(tree), "cache": str(recordings / "cache")}  # type: ignore[dict-item]
    data["partition"] = {"by": "iid", "clients": 2}
    file.write_text(to_yaml({**CONFIGURATION, "data": data}, flow=False))
    remark = "left out of .*/tree .no recordings of a supported type.: 8 .m4a .8 in all: left/bert-0.m4a, .*ffmpeg"
    for command in (["run", file, f"run.dir={recordings}/runs"], ["data", "info", file], ["data", "prepare", file]):
        output = raydfl(*command)
        assert output.code == 0
        assert re.search(remark, output.out, re.DOTALL), output.out
    for path in tree.rglob("*.aiff"):
        path.unlink()
    raydfl("run", file).refuses(
        "there are no .wav, .*Found: left/, right/. left out of .*8 .m4a", "\nfind .* -iname '.*m4a'"
    )


@pytest.mark.parametrize(
    "place", ["/proc/none/cache", "/dev/null/cache", "{recordings}/circle", "~nobody-of-that-name/x"]
)
def test_an_impossible_cache_folder_is_rejected(training: Train, recordings: Path, place: str) -> None:
    (recordings / "circle").symlink_to("circle")
    output = training(f"data.cache={place.format(recordings=recordings)}")
    output.refuses(
        "the features cannot be written to .*choose another folder with data.cache|the path .* cannot be found"
    )


def test_a_list_without_a_required_column_reports_its_columns(training: Train, recordings: Path) -> None:
    rewrite_list(recordings, lambda lines: ["path,word,group", *lines[1:]])
    training().refuses(r"clips.csv has no column 'label'; its columns: path, word, group", "label_column")
    assert training("data.label_column=word").code == 0


def test_a_list_without_groups_cannot_be_partitioned_by_group(training: Train, recordings: Path) -> None:
    rewrite_list(recordings, lambda lines: [line.rpartition(",")[0] for line in lines])
    training().refuses("18 of 18 training clips have no 'group', so no client", "choose another data.partition")
    assert training("data.partition={by: iid, clients: 2}").code == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda lines: [*lines[:3], "wav/anna-left-2.wav,,anna", *lines[4:]],
            r"1 of 24 clips have no label, the first wav/anna-left-2.wav. Label them, .*data.unlabelled='\{\}'",
        ),
        (lambda lines: [*lines[:3], ",left,anna", *lines[4:]], "row 3 has no path"),
        (lambda lines: [*lines, lines[1]], "1 clips are named more than once, the first 'wav/anna-left-0.wav'"),
        (
            lambda lines: [*lines[:2], "wav/anna-left-1.wav,left,"],
            "1 of 2 training clips have no 'group'.*wav/anna-left-1.wav",
        ),
        (lambda lines: [lines[0]], "clips.csv"),
        (lambda lines: [*lines[:2], "a,b,c,d,e"], "clips.csv: cannot be read: .*. Expected a CSV"),
        (
            lambda lines: [lines[0], *(line.replace("wav/", "waves/") for line in lines[1:])],
            "none of its 24 files exists.*Set root",
        ),
    ],
)
def test_mistakes_in_a_list_are_reported(
    training: Train, recordings: Path, change: Callable[[list[str]], list[str]], message: str
) -> None:
    rewrite_list(recordings, change)
    training("data.split.test=null").refuses(message)


def test_a_missing_list_or_root_is_reported(training: Train, recordings: Path) -> None:
    training(f"data.file={recordings}/clip.csv").refuses(r"there is no list of recordings .*clip.csv. Expected a CSV")
    (recordings / "clips.txt").write_text("x")
    training(f"data.file={recordings}/clips.txt").refuses("clips.txt is neither .csv nor .parquet|is neither")
    lost = training(f"data={{name: fsdd, root: {recordings}/gone}}", f"run.dir={recordings}/runs")
    lost.refuses(
        rf"Free Spoken Digit Dataset: the root {recordings}/gone does not exist. Expected a folder with recordings/",
        "Download the set from https://",
    )
    other = training(f"data={{name: fsdd, root: {recordings}}}", f"run.dir={recordings}/runs")
    other.refuses("there is no file of the set in .*Expected .*Found: cache/|Found: clips.csv")


def test_the_data_are_described_even_without_a_valid_partition(
    raydfl: Raydfl, training: Train, recordings: Path
) -> None:
    """The user sees the columns and values to partition by."""
    output = raydfl(
        "data", "info", recordings / "own.yaml", f"data.file={recordings}/clips.csv", "data.split.test={by: split}"
    )
    assert "anna (12), bert (12)" in output.out
    assert "does not fit the clips: data.split.test: no clip has 'test' in column 'split'" in output.out
    assert (output.code, output.err) == (0, "")


# -- partitions and cohorts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.partition={by: iid, clients: 20}",
            "18 clips cannot give 20 clients 1 each .20 needed.. Set at most 18 clients",
        ),
        (
            "data.partition={by: group, shards: 10}",
            "of 20 clients .by 'group', 10 shards each. get fewer than .*minimum 1.*smaller=drop",
        ),
        ("data.partition={by: classes, clients: 4, classes: 3}", "data.partition.classes 3 is more than the 2 labels"),
        (
            "data.partition={by: dirichlet, clients: 6, alpha: 0.001, minimum: 3, balance: false}",
            "none of .* draws with alpha 0.001.*Raise alpha",
        ),
        ("data.partition={by: group, column: speaker}", "data.partition: the recordings have no column 'speaker'"),
        ("data.split.test={by: fold, values: [1]}", "data.split.test: the recordings have no column 'fold'"),
        ("data.split.test={by: split}", "no clip has 'test' in column 'split'. The column is empty."),
        (
            "data.split.test={by: group, values: [carl]}",
            "no clip has 'carl' in column 'group'. Choose one of anna, bert.",
        ),
        (
            "data.split.test={by: label, values: [left]}",
            "no client has a clip of label 'left': of its 12 clips 12 can be read, 12 are in the test",
        ),
        (
            "data.corrupt.labels={rate: 0.5, clients: [ana]}",
            "data.corrupt: unknown client 'ana'. Did you mean 'anna'?",
        ),
        (
            "data.corrupt.labels={rate: 0.5, clients: 3}",
            "data.corrupt: 3 clients are to be corrupted, but the federation has 2",
        ),
        (
            "train.cohort=3",
            "train.cohort: 3 clients a round, but the population has 2. Lower train.cohort, or give a fraction",
        ),
    ],
)
def test_an_impossible_partition_is_explained_with_numbers(
    training: Train, recordings: Path, override: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raydfl.data.steps.dealing._WORK", 30_000)  # stops drawing after a few seconds
    training(override).refuses(message)
    assert not (recordings / "runs").exists()


def test_clips_too_short_for_the_network_are_reported_with_numbers(training: Train) -> None:
    output = training("models.model={name: crnn_deep}", "data.features.seconds=0.05", "data.features.hop_ms=10")
    output.refuses(
        "models.model: crnn_deep: 6 frames are too few: 3 times max pooling by 2 need at least 8. Use longer clips"
    )
    varying = training("models.model={name: crnn_deep}", "data.features.seconds=null", "data.features.hop_ms=40")
    varying.refuses("6 frames are too few")  # known only after reading the clips


@pytest.mark.parametrize("lost", ["wav", "clips.csv"])
def test_damaged_features_without_recordings_are_reported(
    raydfl: Raydfl, training: Train, recordings: Path, lost: str
) -> None:
    assert training().code == 0
    (path,) = (recordings / "cache").glob("*/frames.npy")
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)
    (recordings / lost).rename(recordings / "gone")
    damaged = "cached features in .* cannot be used .the content of frames.npy has changed."
    raydfl("resume", recordings / "runs" / "own", "train.rounds=2").refuses(
        f"{damaged}[.] Rebuilding the features failed: .*{lost}"
    )
    raydfl("replay", recordings / "runs" / "own", "--round", 1, "--client", "anna").refuses(damaged)
