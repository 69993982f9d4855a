"""Recordings behind a URI: copied once into the cache, resumable, with the same federation as local recordings."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.fs as fs
import pytest
import soundfile
from failing import Failing

from raydfl.cli.describe import describe_data
from raydfl.cli.explain import explain_config
from raydfl.core import remote as place
from raydfl.core.errors import ConfigError, DataError, ResourcesError, RunDirectoryError
from raydfl.core.seeds import generator
from raydfl.data.build import build_population
from raydfl.data.remote import fetch_recordings, local_copy
from raydfl.data.settings import DataSettings
from raydfl.engine.config import Config, make_config
from raydfl.engine.storage.folder import check_same
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress

Tiny = Callable[..., Config]


@pytest.fixture(autouse=True)
def skip_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_PAUSES", (0.0, 0.0))


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Make a root like the spoken digits': 2 digits, 2 speakers, 7 takes."""
    folder = tmp_path / "far" / "fsdd" / "recordings"
    folder.mkdir(parents=True)
    rng = generator(0, 0, "", "digits")
    for digit in range(2):
        for speaker in ("anna", "ben"):
            for take in range(7):
                wave = 0.1 * rng.standard_normal(2000)
                soundfile.write(folder / f"{digit}_{speaker}_{take}.wav", wave.astype(np.float32), 8000)
    return folder.parent


def settings(root: str, cache: Path) -> DataSettings:
    features = {"sample_rate": 8000, "bands": 16, "window_ms": 25, "hop_ms": 10, "seconds": 0.25}
    split = {"test": {"by": "split"}}
    return DataSettings.model_validate(
        {
            "name": "fsdd",
            "root": root,
            "features": features,
            "split": split,
            "partition": {"by": "group"},
            "cache": cache,
        }
    )


def fail(monkeypatch: pytest.MonkeyPatch, fails: Callable[[str, str], bool]) -> Failing:
    handler = Failing(fails)
    monkeypatch.setattr(place, "open_file_system", lambda uri: (fs.PyFileSystem(handler), uri.partition("://")[2]))
    return handler


def test_recordings_behind_a_uri_give_the_same_federation(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = build_population(settings(str(digits), tmp_path / "near"), 1)
    handler = fail(monkeypatch, lambda call, path: False)
    data = settings(f"file://{digits}", tmp_path / "cache")
    far = build_population(data, 1)
    assert list(far.ids) == list(near.ids)
    assert far.classes == near.classes
    for index in range(len(near)):
        one, other = far.data(index).train, near.data(index).train
        np.testing.assert_array_equal(one.batch(np.arange(len(one))).x, other.batch(np.arange(len(other))).x)
    assert {path.parent.name for path in (tmp_path / "cache").glob("*/store.json")} == {
        path.parent.name for path in (tmp_path / "near").glob("*/store.json")
    }, "features are known by their content"
    read = [path for call, path in handler.calls if call == "read"]
    assert len(read) == 28
    assert any(line.strip().startswith("clips") and "28" in line for line in describe_data(data, 1))
    build_population(data, 1)
    assert len([path for call, path in handler.calls if call == "read"]) == 28, "copied once"


def test_parts_of_recordings_behind_a_uri(digits: Path, tmp_path: Path) -> None:
    """The list and the recordings have different URIs."""
    (tmp_path / "lists").mkdir()
    rows = [
        f"{path.name},{path.name[0]},{path.stem[2:-2]},0,0.125\n" for path in sorted((digits / "recordings").iterdir())
    ]
    rows += [row.replace("0,0.125", "0.125,") for row in rows]
    (tmp_path / "lists/parts.csv").write_text("path,label,group,start,stop\n" + "".join(rows))
    near = {"file": str(tmp_path / "lists/parts.csv"), "root": str(digits / "recordings")}
    populations = []
    for places in (near, {key: f"file://{path}" for key, path in near.items()}):
        values = {"name": "manifest", **places, "features": {"sample_rate": 8000}, "cache": tmp_path / "cache"}
        data = DataSettings.model_validate(values | {"split": {"test": {"by": "clip", "fraction": 0.25}}})
        populations.append(build_population(data, 1))
    assert list(populations[0].ids) == ["anna", "ben"]
    one, other = (population.data(0).train for population in populations)
    assert one.first_view.store.folder == other.first_view.store.folder, "found in the cache"
    np.testing.assert_array_equal(one.first_view.starts, other.first_view.starts)


def test_an_impossible_cache_folder_is_rejected(digits: Path) -> None:
    with pytest.raises(ResourcesError, match="the recordings cannot be written to /proc/none.*choose another folder"):
        fetch_recordings(f"file://{digits}", Path("/proc/none"))


def test_an_interrupted_copy_resumes(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, cache = f"file://{digits}", tmp_path / "cache"
    lock = threading.Lock()
    reads = 0

    def fail_late(call: str, path: str) -> bool:
        nonlocal reads
        with lock:
            reads += call == "read"
            return call == "read" and reads > 10

    with monkeypatch.context() as patched:
        fail(patched, fail_late)
        with pytest.raises(
            ResourcesError, match=r"recordings/\w+.wav cannot be read, after 3 tries: no answer to read; check the URI"
        ):
            fetch_recordings(uri, cache)
    copied = list(local_copy(uri, cache).rglob("*.wav"))
    assert len(copied) == 10
    copied[0].write_bytes(b"half")  # an outside change is noticed
    handler = fail(monkeypatch, lambda call, path: False)
    copy = fetch_recordings(uri, cache)
    assert len([call for call, _ in handler.calls if call == "read"]) == 28 - 10 + 1
    assert {p.name: p.read_bytes() for p in copy.rglob("*.wav")} == {
        p.name: p.read_bytes() for p in digits.rglob("*.wav")
    }
    assert not list(copy.parent.rglob("*.part"))


def test_a_uri_may_name_a_single_file(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path,label\n")
    copy = fetch_recordings(f"file://{tmp_path}/list.csv", tmp_path / "cache")
    assert copy.name == "list.csv"
    assert copy.read_text() == "path,label\n"


def test_a_uri_without_files_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is nothing at file://\S+/none\. Check the URI"):
        fetch_recordings(f"file://{tmp_path}/none", tmp_path / "cache")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"there are no files at file://\S+/empty"):
        fetch_recordings(f"file://{tmp_path}/empty", tmp_path / "cache")


def test_two_processes_copy_recordings_once(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = fail(monkeypatch, lambda call, path: False)
    threads = [
        threading.Thread(target=fetch_recordings, args=(f"file://{digits}", tmp_path / "cache")) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([call for call, _ in handler.calls if call == "read"]) == 28


def test_a_run_stores_the_uri_instead_of_the_copy(tmp_path: Path, tiny: Tiny) -> None:
    def config(root: str, cache: str) -> Config:
        data = {"name": "fsdd", "root": root, "cache": cache, "features": {"sample_rate": 8000, "seconds": 1.0}}
        return make_config({**tiny().model_dump(mode="json"), "models": {}, "data": data})

    one = config("s3://bucket/fsdd", "/first")
    assert one.data.source.options["root"].startswith("/first/recordings/")
    assert one.digest() == config("s3://bucket/fsdd", "/second").digest()
    assert one.digest() != config("s3://bucket/other", "/first").digest()
    assert "root: s3://bucket/fsdd" in explain_config(one)
    with pytest.raises(ConfigError, match=r"data.root: ftp://host/fsdd is not a supported kind of URI"):
        config("ftp://host/fsdd", "/first")
    with pytest.raises(ConfigError, match=r"data.cache: s3://bucket/cache is a URI, but features are memory-mapped"):
        config("/data", "s3://bucket/cache")


@pytest.fixture
def config(tmp_path: Path, tiny: Tiny) -> Callable[..., Config]:
    """Make a tiny configuration over the digits."""

    def configure(root: Path, *overrides: str) -> Config:
        values = tiny(*overrides).model_dump(mode="json")
        values["data"] = settings(str(root), tmp_path / "cache").model_dump(mode="json")
        return make_config(values)

    return configure


def test_a_run_cannot_resume_with_different_recordings(
    digits: Path, tmp_path: Path, config: Callable[..., Config]
) -> None:
    create(config(digits), Progress("quiet"))
    shutil.rmtree(tmp_path / "cache")
    create(config(digits), Progress("quiet"))
    assert (tmp_path / "cache").exists()
    shutil.rmtree(tmp_path / "cache")
    shutil.copy(digits / "recordings" / "0_anna_0.wav", digits / "recordings" / "0_anna_1.wav")
    with pytest.raises(RunDirectoryError, match="the recordings have changed since the run began"):
        create(config(digits), Progress("quiet"))


def test_a_run_resumes_with_its_recordings_in_another_folder(
    digits: Path, tmp_path: Path, config: Callable[..., Config]
) -> None:
    run_dir = create(config(digits), Progress("quiet"))
    moved = shutil.move(digits, tmp_path / "moved")
    assert create(config(Path(moved)), Progress("quiet")) == run_dir
    with pytest.raises(RunDirectoryError, match="run.seed") as error:
        check_same(run_dir, config(Path(moved), "run.seed=2"))
    assert "data.root" not in str(error.value)
