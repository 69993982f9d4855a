"""S3 and Google Cloud Storage through Arrow's clients, with servers in this process."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gcp_storage_emulator.server import create_server
from head import BUCKET, free_port
from helpers import known, stop_after

from raydfl.core import remote as place
from raydfl.core.errors import ConfigError, DataError, ResourcesError
from raydfl.core.remote import RemoteFolder, check_uri
from raydfl.data.remote import fetch_recordings
from raydfl.engine.config import Config
from raydfl.engine.storage.mirror import local_runs
from raydfl.runs import _run as runs
from raydfl.runs._run import run
from raydfl.testing import assert_same_bits, read_tensors

Tiny = Callable[..., Config]


@pytest.fixture(scope="module")
def gs() -> Iterator[str]:
    port = free_port()
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    server.start()
    try:
        yield f"gs://anonymous@{BUCKET}/folder/runs?endpoint_override=127.0.0.1:{port}&scheme=http&retry_limit_seconds=5"
    finally:
        server.stop()


@pytest.fixture(params=["s3", "gs"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URI of a new folder."""
    monkeypatch.setattr(runs, "write_page", lambda run_dirs, out: out.write_text("not drawn in this test") and out)
    monkeypatch.setattr(place, "_PAUSES", (0.0,))
    uri: str = request.getfixturevalue(request.param)
    RemoteFolder(uri, "").remove(RemoteFolder(uri, "").files())
    return uri


def test_a_store_returns_the_uploaded_files(store: str, tmp_path: Path) -> None:
    remote = RemoteFolder(store, "look")
    assert remote.files() == {}
    assert remote.read("a/b") is None
    big = tmp_path / "big"
    big.write_bytes(bytes(range(256)) * 4096 * 20)  # 20 MiB: in several parts
    remote.upload(big, "a/big")
    remote.write("a/b", b"first")
    remote.write("a/b", b"second")
    assert remote.files() == {"a/big": 20 << 20, "a/b": 6}
    assert remote.read("a/b") == b"second"
    remote.download("a/big", tmp_path / "back", "")
    assert (tmp_path / "back").read_bytes() == big.read_bytes()
    remote.remove(["a/b", "never/there", "a/big"])
    assert remote.files() == {}


@pytest.mark.slow
def test_a_run_resumes_from_the_bucket_on_another_machine(store: str, tiny: Tiny, tmp_path: Path) -> None:
    reference = known(tiny(method="fedmlac"))

    def here(name: str) -> Config:
        return tiny(f"data.cache={tmp_path / name}", f"run.dir={store}", "run.name=far", method="fedmlac")

    stop_after(here("one"), 2)
    shutil.rmtree(tmp_path / "one")
    assert run(here("two")).finished
    folder = local_runs(store, tmp_path / "two") / "far"
    assert_same_bits(read_tensors(folder), reference)
    remote = RemoteFolder(place.below(store, "far"), "").files()
    preserved = {
        path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()
    }
    assert remote == {name: size for name, size in preserved.items() if not name.startswith(".")}


def test_recordings_are_copied_from_a_bucket(store: str, tmp_path: Path) -> None:
    remote = RemoteFolder(store, "")
    for name in ("x/1.wav", "x/2.wav", "labels.csv"):
        remote.write(name, name.encode())
    folder = fetch_recordings(store, tmp_path)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == set(remote.files())
    assert (folder / "x" / "2.wav").read_bytes() == b"x/2.wav"
    alone = fetch_recordings(place.below(store, "labels.csv"), tmp_path)
    assert alone.read_bytes() == b"labels.csv"
    with pytest.raises(DataError, match="there is nothing at|there are no files at"):
        fetch_recordings(place.below(store, "nothing"), tmp_path)


def test_a_missing_bucket_is_reported(store: str, tiny: Tiny, tmp_path: Path) -> None:
    missing = store.replace(BUCKET, "no-such-bucket")
    with pytest.raises(ResourcesError, match="no-such-bucket"):
        run(tiny(f"data.cache={tmp_path}", f"run.dir={missing}", "run.name=far"))
    with pytest.raises((DataError, ResourcesError), match="no-such-bucket"):
        fetch_recordings(missing, tmp_path)


def test_anonymous_access_is_not_a_credential() -> None:
    check_uri("gs://anonymous@bucket/runs", "run.dir")
    for uri in ("gs://me@bucket/runs", "s3://key:secret@bucket/runs", "gs://anonymous:word@bucket/runs"):
        with pytest.raises(ConfigError, match="credentials"):
            check_uri(uri, "run.dir")
