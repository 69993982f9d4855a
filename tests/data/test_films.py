"""Videos. Oracle: lossless videos with known frames and samples, and published videos decoded by a plain loop."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import Raydfl
from films import block_module, write_film
from seen_and_heard import NETWORK

from raydfl.cli.describe import describe_data
from raydfl.core.errors import DataError
from raydfl.core.yaml import to_yaml
from raydfl.data.audio import read_audio
from raydfl.data.images import read_image
from raydfl.data.sets.activitynet import ActivityNet
from raydfl.data.settings import DataSettings

av = pytest.importorskip("av", reason="the package of the extra video is not installed")
FOLDER = Path(os.environ.get("RAYDFL_DATA") or Path(__file__).parents[2].parent / "shared" / "data") / "video"
FILMS = {
    "GRID/bbaf2n.mpg": True,
    "activitynet/v_GGSY1Qvo990.mp4": True,
    "UCF-101/SoccerJuggling/v_SoccerJuggling_g23_c01.avi": False,
    "hmdb51/wave/RATRACE_wave_f_nm_np1_fr_goo_37.avi": False,
}
"""Published videos, and whether each has sound."""
GREY = (np.arange(7)[:, None, None] * 30 + np.arange(8)[:, None] * np.ones(6)).astype(np.uint8)
"""Seven frames of 8 rows and 6 columns."""


def test_videos_give_their_middle_frame_and_their_sound(tmp_path: Path) -> None:
    samples = np.random.default_rng(0).integers(-32768, 32768, (5600, 2))
    path = str(write_film(tmp_path / "a.mkv", GREY, samples))  # 0.7 s, one frame every 0.1 s
    assert (read_image(path) == GREY[3][:, :, None]).all()
    assert (read_image(path, 0.35) == GREY[5][:, :, None]).all()  # the middle of frames 4, 5 and 6
    assert (read_image(path, 0.0, 0.4) == GREY[2][:, :, None]).all()  # the middle of frames 0 to 3: number 4 // 2
    actual, rate = read_audio(path)
    assert rate == 8000
    np.testing.assert_array_equal(actual, (samples / 32768).astype(np.float32))
    np.testing.assert_array_equal(read_audio(path, 0.25, 0.5)[0], (samples[2000:4000] / 32768).astype(np.float32))
    with pytest.raises(DataError, match=r"a\.mkv: the video has no frames from 0\.9 s to its end"):
        read_image(path, 0.9)


@pytest.mark.skipif(not FOLDER.is_dir(), reason="no sample films: set RAYDFL_DATA")
@pytest.mark.parametrize("name", FILMS)
def test_published_videos_are_decoded(name: str, tmp_path: Path) -> None:
    path = str(FOLDER / name)
    with av.open(path) as film:
        frames = list(film.decode(video=0))
    np.testing.assert_array_equal(read_image(path), frames[len(frames) // 2].to_ndarray(format="rgb24"))
    if FILMS[name]:
        samples, rate = read_audio(path)
        assert len(samples) / rate == pytest.approx({"G": 2.98, "a": 18.16}[name[0]], abs=0.02)
    else:
        with pytest.raises(DataError, match=f"{path}: the file has no sound"):
            read_audio(path)
    cut = tmp_path / f"cut{Path(name).suffix}"
    cut.write_bytes(Path(path).read_bytes()[: int(0.6 * Path(path).stat().st_size)])
    with pytest.raises(DataError, match=rf"{cut}: (truncated|cannot be decoded. It is damaged, truncated)"):
        read_image(str(cut))
    cut.write_bytes(b"no film" * 100)
    with pytest.raises(DataError, match=f"{cut}: cannot be decoded"):
        read_image(str(cut))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Write the job file of a run on sixteen videos of two classes, with sound and image as two views."""
    rng = np.random.default_rng(0)
    lines = ["path,label,group,split"]
    for number in range(16):
        label, time = number % 2, np.arange(2400) / 8000
        wave = 6000 * np.sin(2 * np.pi * 400 * (1 + label) * time) + 900 * rng.standard_normal(2400)
        grey = (90 * label + rng.integers(0, 90, (3, 8, 8))).astype(np.uint8)
        write_film(tmp_path / f"{number}.mkv", grey, wave[:, None])
        lines.append(f"{number}.mkv,{'ab'[label]},g{number // 2 % 4},{'test' if number < 4 else 'train'}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    (tmp_path / "eye.py").write_text(NETWORK)
    data = {
        "name": "manifest",
        "file": str(tmp_path / "list.csv"),
        "partition": {"by": "group"},
        "features": {"sample_rate": 8000, "bands": 8, "seconds": 0.3},
        "cache": str(tmp_path / "cache"),
        "views": {"video": {"column": "path", "features": {"kind": "image", "size": 8}}},
    }
    models = {
        "audio": {"name": "crnn_tiny", "hidden": 4, "filters": [4]},
        "video": {"name": f"{tmp_path}/eye.py:Eye", "view": "video"},
    }
    settings = {"method": "multifl", "models": models, "data": data, "train": {"rounds": 1, "cohort": 2}}
    surroundings = {
        "track": {"mlflow": False},
        "ray": {"actors": 0},
        "run": {"dir": str(tmp_path / "runs"), "name": "x"},
    }
    (tmp_path / "job.yaml").write_text(to_yaml(settings | surroundings, flow=False))
    return tmp_path / "job.yaml"


@pytest.mark.slow
def test_silent_and_broken_videos_and_a_missing_decoder_are_reported(
    job: Path, raydfl: Raydfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors name the unusable videos. The setting ``skip`` skips and lists them, but never hides a missing decoder."""
    folder = job.parent
    write_film(folder / "14.mkv", np.zeros((2, 8, 8), np.uint8))
    with monkeypatch.context() as patch:
        block_module("av", tmp_path, patch)
        raydfl("run", job, "data.unreadable=skip").refuses(r"needs PyAV, .*pip install 'raydfl\[video\]'")
    raydfl("run", job).refuses(r"1 of 16 clips cannot be read:\n  .*14\.mkv: the file has no sound")
    write_film(folder / "13.mkv", np.zeros((0, 8, 8), np.uint8), np.full((2400, 1), 9))
    assert raydfl("run", job, "data.unreadable=skip").code == 0
    skipped = json.loads((folder / "runs/x/run.json").read_text())["skipped"]
    assert {(entry["clip"], entry["reason"].partition(":")[0]) for entry in skipped} == {
        ("14.mkv", "the file has no sound"),
        ("13.mkv", "view video"),
    }
    result = raydfl(
        "predict", folder / "runs/x", *(folder / f"{n}.mkv" for n in (0, 13, 14)), "--model", "fusion", "--json"
    )
    assert result.code == 2
    complete, unseen, silent = result.events
    assert unseen["model"] == "audio"
    assert (complete["model"], complete["label"] in "ab") == ("fusion", True)
    assert "has no sound" in silent["error"]
    assert [
        len(raydfl("predict", folder / "runs/x", folder / "0.mkv", *options, "--csv").out.splitlines())
        for options in ((), ("--model", "video"))
    ] == [2, 2]
    raydfl("predict", folder / "runs/x", folder / "0.mkv", "--view", "video=x").refuses("--view needs .*--model fusion")
    with monkeypatch.context() as patch:  # sound and images are in the cache
        patch.setitem(sys.modules, "av", None)
        assert raydfl("data", "prepare", job, "data.unreadable=skip").code == 0


def test_activitynet_lists_segments_or_whole_videos(tmp_path: Path) -> None:
    write_film(tmp_path / "v_abc.mkv", GREY, np.arange(5600)[:, None])
    (tmp_path / "more").mkdir()
    for film in ("v_def.mp4", "v_hidden.mp4"):
        (tmp_path / "more" / film).touch()
    marks = [{"label": "Archery", "segment": [0.1, 0.4]}, {"label": "Knitting", "segment": [0.4, 0.75]}]
    database = {
        "abc": {"subset": "training", "annotations": marks},
        "def": {"subset": "validation", "annotations": marks[1:]},
        "hidden": {"subset": "testing", "annotations": []},
        "absent": {"subset": "training", "annotations": marks},
    }
    (tmp_path / "activity_net.v1-3.min.json").write_text(json.dumps({"database": database}))
    dataset = ActivityNet(root=tmp_path)
    rows = dataset.manifest().to_pylist()
    assert [(row["clip"], row["label"], row["group"], row["split"]) for row in rows] == [
        ("v_abc.mkv@0", "Archery", "abc", "train"),
        ("v_abc.mkv@1", "Knitting", "abc", "train"),
        ("more/v_def.mp4@0", "Knitting", "def", "test"),
    ]
    np.testing.assert_array_equal(dataset.read(rows[0])[0][:, 0] * 32768, np.arange(800, 3200))
    assert len(dataset.read(rows[1])[0]) == 2400  # the segment ends after the video
    assert (dataset.image(rows[0]) == GREY[2][:, :, None]).all()
    assert len({dataset.part(row) for row in rows}) == 2
    whole = ActivityNet(root=tmp_path, clips="films").manifest().to_pylist()
    assert [(row["clip"], row["label"]) for row in whole] == [("v_abc.mkv", "Archery"), ("more/v_def.mp4", "Knitting")]
    assert len(ActivityNet(root=tmp_path, clips="films").read(whole[0])[0]) == 5600
    result = " ".join(describe_data(DataSettings(name="activitynet", root=tmp_path, unseen="keep"), 0, True))  # type: ignore[call-arg]
    assert re.search(r"clips +3\b", result), result
    (tmp_path / "activity_net.v1-3.min.json").write_text("{}")
    with pytest.raises(DataError, match=r"min\.json: cannot be read: KeyError"):
        dataset.manifest()
