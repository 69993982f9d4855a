"""Runs behind a URI: each commit is mirrored, survives failures at any moment, and is fetched with the same bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow.fs as fs
import pytest
from commands import Raydfl, write_config
from failing import Failing
from helpers import known, stop_after

from raydfl.cluster.client import ClientActor
from raydfl.cluster.resources import ActorKind
from raydfl.cluster.server import Server
from raydfl.cluster.sites import open_worker
from raydfl.core import remote as place
from raydfl.core.errors import ConfigError, InputError, ResourcesError, RunDirectoryError
from raydfl.core.remote import below, split_uri
from raydfl.engine.config import Config, make_config
from raydfl.engine.storage.mirror import RunMirror, local_run, local_runs
from raydfl.engine.storage.private import PrivateStore
from raydfl.engine.storage.record import read_rows
from raydfl.engine.storage.store import RunStore
from raydfl.runs import _run as runs
from raydfl.runs._run import resume, run
from raydfl.runs.folder import create
from raydfl.runs.inference.model import load_model
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, read_tensors

Tiny = Callable[..., Config]


@pytest.fixture(autouse=True)
def skip_reports_and_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip reports and delays between retries, to save time."""

    def write(run_dirs: list[Path], out: Path) -> Path:
        out.write_text("not drawn in this test")
        return out

    monkeypatch.setattr(runs, "write_page", write)
    monkeypatch.setattr(place, "_PAUSES", (0.0, 0.0, 0.0))


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return tmp_path / "remote"


@pytest.fixture
def make_remote(tiny: Tiny, tmp_path: Path, remote: Path) -> Tiny:
    """Make a tiny configuration with runs behind a URI. FedMLAC has private client state."""

    def configure(*overrides: str, method: str = "fedmlac") -> Config:
        cache = f"data.cache={tmp_path / 'cache'}"
        return tiny(cache, f"run.dir=file://{remote}", "run.name=far", *overrides, method=method)

    return configure


@pytest.fixture
def reference(tiny: Tiny) -> dict[str, bytes]:
    return known(tiny(method="fedmlac"))


def local(config: Config) -> Path:
    return local_runs(config.run.dir, config.data.cache) / "far"


def files(folder: Path) -> dict[str, bytes]:
    """Return the mirrored content by file name."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def fail(monkeypatch: pytest.MonkeyPatch, fails: Callable[[str, str], bool], kind: str = "far") -> Failing:
    """Replace the file systems of all URIs by a failing one."""
    handler = Failing(fails, kind)
    monkeypatch.setattr(
        place, "open_file_system", lambda uri: (fs.PyFileSystem(handler), uri.partition("://")[2].partition("?")[0])
    )
    return handler


# -- the copy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["far", "s3"])
def test_a_finished_run_is_mirrored_completely(
    make_remote: Tiny, remote: Path, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    handler = fail(monkeypatch, lambda call, path: False, kind)
    config = make_remote()
    outcome = run(config)
    assert outcome.finished
    assert outcome.run_dir == local(config)
    mirror_files = files(remote / "far")
    assert mirror_files == files(local(config))
    assert {"LATEST", "config.yaml", "run.json", "report.html", "model.safetensors"} <= set(mirror_files)
    assert_same_bits(read_tensors(remote / "far"), reference)
    moved = [path for call, path in handler.calls if call == "move"]
    assert bool(moved) == (kind == "far"), "an object store has whole objects or none; elsewhere a rename makes it so"


def test_each_commit_is_mirrored_before_the_next_and_old_commits_are_removed(make_remote: Tiny, remote: Path) -> None:
    config = make_remote("train.rounds=8", "run.keep=2")
    run_dir = create(config, Progress("quiet"))
    server = Server(run_dir, config)
    try:
        for completed in range(1, 9):
            server.round()
            if completed >= 2:  # the previous commit was written at the same time
                assert int((remote / "far" / "LATEST").read_text()[:6]) >= completed - 2
        server.finish()
        assert (remote / "far" / "LATEST").read_bytes() == (run_dir / "LATEST").read_bytes()
        assert len(list((remote / "far" / "commits").iterdir())) == 2
        for folder in ("commits", "private", "rows"):
            assert {p.name for p in (remote / "far" / folder).iterdir()} == {
                p.name for p in (run_dir / folder).iterdir()
            }
    finally:
        server.close()


def test_unfinished_commits_are_not_mirrored(make_remote: Tiny, remote: Path) -> None:
    config = make_remote("train.rounds=2", "run.commit_every=2")
    run_dir = create(config, Progress("quiet"))
    server = Server(run_dir, config)
    try:
        server.round()
        assert list((run_dir / "private").glob("000001-*.seg"))
        assert RunMirror(run_dir, "file:///nowhere")._files(False, 0).keys() == {
            path.relative_to(run_dir).as_posix() for path in (run_dir / "commits").iterdir()
        }
        assert not list((remote / "far").glob("private/*.seg"))
    finally:
        server.close()


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [3, 5])
def test_occasional_failures_of_the_store_change_nothing(
    make_remote: Tiny, remote: Path, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    count = 0

    def fail_sometimes(call: str, path: str) -> bool:
        nonlocal count
        count += 1
        return count % every == 0

    fail(monkeypatch, fail_sometimes)
    config = make_remote()
    assert run(config).finished
    assert count > 40
    assert files(remote / "far") == files(local(config))
    assert_same_bits(read_tensors(remote / "far"), reference)


@pytest.mark.parametrize(
    "moment", [pytest.param(m, marks=[] if m % 9 == 4 else [pytest.mark.slow]) for m in range(1, 35, 3)]
)
def test_a_copy_interrupted_at_any_moment_leaves_a_commit_to_resume(
    make_remote: Tiny, remote: Path, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    config = make_remote()
    run_dir = create(config, Progress("quiet"))
    writes = 0

    def fail_permanently(call: str, path: str) -> bool:
        nonlocal writes
        writes += call in ("write", "move", "delete")
        return writes >= moment

    with monkeypatch.context() as patched:
        fail(patched, fail_permanently)
        try:
            server = Server(run_dir, config)
            try:
                for _ in range(3):
                    server.round()
                server.finish()
            finally:
                server.close()
        except ResourcesError as error:
            stopped = str(error)
        else:
            stopped = ""
    assert writes >= moment
    assert "nothing is lost" in stopped
    assert f"raydfl resume {config.run.dir}/far" in stopped
    # The mirror holds a complete run up to some commit, or no run.
    if (remote / "far" / "LATEST").exists():
        assert read_tensors(remote / "far")["round"] in (b"0", b"1", b"2", b"3")
    # The machine is lost: only the mirror remains.
    shutil.rmtree(run_dir)
    assert run(config).finished
    assert_same_bits(read_tensors(remote / "far"), reference)
    rows = read_rows(local(config)).to_pylist()
    losses = [row["round"] for row in rows if row["metric"] == "clients" and not row["client"]]
    assert losses == [1, 2, 3]


class ForgedListing(Failing):
    """A file system whose listings contain a file outside the requested folder."""

    name = "../outside.txt"

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        true = super().get_file_info_selector(selector)
        return [*true, fs.FileInfo(f"{selector.base_dir}/{self.name}", fs.FileType.File, size=6)]


@pytest.mark.parametrize("name", ["../outside.txt", "rows/../../outside.txt", "rows/..", "./outside.txt", "a//b"])
def test_a_forged_listing_cannot_change_files_outside_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "there" / "run").mkdir(parents=True)
    for file, content in {
        "run.json": "{}",
        "LATEST": "000001-0",
        "config.yaml": "{}",
        "../outside.txt": "theirs",
    }.items():
        (tmp_path / "there" / "run" / file).write_text(content)
    forger = ForgedListing(lambda call, path: False)
    forger.name = name
    monkeypatch.setattr(
        place, "open_file_system", lambda uri: (fs.PyFileSystem(forger), uri.partition("://")[2].partition("?")[0])
    )
    mirror = RunMirror(tmp_path / "here" / "run", f"file://{tmp_path}/there/run")
    with pytest.raises(ResourcesError, match=f"lists '{name}', which is not below it"):
        mirror.fetch()
    assert not list(tmp_path.glob("here/**/*.txt"))
    (tmp_path / "here" / "run" / "run.json").write_text("another")
    with pytest.raises(ResourcesError, match="which is not below it"):
        mirror.sync()
    assert (tmp_path / "there" / "outside.txt").read_text() == "theirs"


def test_an_unreachable_place_of_a_new_run_promises_nothing(make_remote: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, lambda call, path: True)
    with pytest.raises(ResourcesError, match=r"cannot be read, .*; check the URI and the access to it"):
        run(make_remote())


def test_a_lock_is_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "there" / "run").mkdir(parents=True)
    for name in ("run.json", "LATEST", ".lock"):
        (tmp_path / "there" / "run" / name).write_text("000001-0")
    (tmp_path / "here" / "run").mkdir(parents=True)
    lock = tmp_path / "here" / "run" / ".lock"
    lock.touch()
    before = lock.stat().st_ino
    assert RunMirror(tmp_path / "here" / "run", f"file://{tmp_path}/there/run").fetch()
    assert lock.stat().st_ino == before


@pytest.mark.slow
def test_a_lost_store_stops_the_run_without_local_losses(
    make_remote: Tiny, remote: Path, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = make_remote()
    run_dir = local(config)
    with monkeypatch.context() as patched:
        fail(patched, lambda call, path: call == "write" and "commits/.000002" in path)
        with pytest.raises(
            ResourcesError,
            match=r"cannot be written, after 4 tries: no answer to write; nothing is lost: the run is in",
        ):
            run(config)
    assert int((run_dir / "LATEST").read_text()[:6]) >= 2
    assert (remote / "far" / "LATEST").read_text().startswith("000001")
    assert resume(run_dir).finished
    assert files(remote / "far") == files(run_dir)
    assert_same_bits(read_tensors(remote / "far"), reference)


# -- the way back ------------------------------------------------------------------------------------------------------


def test_a_run_resumes_on_another_machine_with_the_same_bits(
    make_remote: Tiny, remote: Path, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    stop_after(make_remote(), 1)
    for folder in (tmp_path / "cache").iterdir():  # with the features
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    messages: list[str] = []
    messages_received = Progress("quiet")
    messages_received.message = messages.append  # type: ignore[method-assign]
    assert run(make_remote(), messages_received).finished
    assert any(text.startswith(f"the run was fetched from file://{remote}/far to {tmp_path}") for text in messages)
    assert any("Rebuilding the features" in text for text in messages)
    assert_same_bits(read_tensors(remote / "far"), reference)
    assert files(remote / "far") == files(local(make_remote()))


def test_a_new_cache_under_a_path_of_equal_length_reaches_the_mirror(
    make_remote: Tiny, remote: Path, tmp_path: Path
) -> None:
    stop_after(make_remote(), 1)
    shutil.rmtree(tmp_path / "cache")
    config = make_remote(f"data.cache={tmp_path / 'hoard'}")
    assert run(config).finished
    mirror_files, local_population = (
        files(folder)["population/population.json"] for folder in (remote / "far", local(config))
    )
    assert str(tmp_path / "hoard").encode() in local_population
    assert mirror_files == local_population


def test_resume_by_uri_with_more_rounds(make_remote: Tiny, remote: Path, tiny: Tiny) -> None:
    run(make_remote("train.rounds=1"))
    shutil.rmtree(local(make_remote()))
    uri = f"file://{remote}/far"
    outcome = resume(uri, ["train.rounds=3", f"data.cache={make_remote().data.cache}"])
    assert outcome.finished
    assert outcome.run_dir == local(make_remote())
    assert_same_bits(read_tensors(remote / "far"), known(tiny(method="fedmlac")))


def test_an_older_copy_is_updated_and_a_newer_copy_is_kept(
    make_remote: Tiny, remote: Path, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    stop_after(make_remote(), 1)
    shutil.copytree(local(make_remote()), tmp_path / "behind")
    stop_after(make_remote(), 1)
    assert_same_bits(read_tensors(remote / "far"), read_tensors(local(make_remote())))
    shutil.rmtree(local(make_remote()))
    shutil.move(tmp_path / "behind", local(make_remote()))
    mirror = RunMirror(local(make_remote()), f"file://{remote}/far")
    assert mirror.fetch()
    assert_same_bits(read_tensors(remote / "far"), read_tensors(local(make_remote())))
    assert not mirror.fetch()
    # Ahead: the copy is of round 1, the local run of round 2.
    shutil.copytree(local(make_remote()), tmp_path / "ahead")
    shutil.rmtree(remote)
    shutil.rmtree(local(make_remote()))
    stop_after(make_remote(), 1)
    facts = json.loads((tmp_path / "ahead" / "run.json").read_text())
    (remote / "far" / "run.json").write_text(json.dumps(facts))
    shutil.rmtree(local(make_remote()))
    shutil.move(tmp_path / "ahead", local(make_remote()))
    assert not mirror.fetch()
    assert run(make_remote()).finished
    assert_same_bits(read_tensors(remote / "far"), reference)


def test_two_writers_to_one_uri_are_rejected(make_remote: Tiny, remote: Path, tmp_path: Path) -> None:
    config = make_remote()
    server = Server(create(config, Progress("quiet")), config)
    try:
        server.round()
        server.finish()
        (remote / "far" / "LATEST").write_text("000007-00000000.safetensors")
        server.round()
        with pytest.raises(
            RunDirectoryError, match=r"another process has committed to file://.*far since the start of this process"
        ):
            server.finish()
    finally:
        server.close()
    with pytest.raises(RunDirectoryError, match="is ahead of"):
        RunMirror(local(config), f"file://{remote}/far").sync()


def test_a_different_run_with_the_same_name_is_not_overwritten(make_remote: Tiny, remote: Path) -> None:
    stop_after(make_remote(), 1)
    shutil.rmtree(local(make_remote()))
    before = files(remote / "far")
    with pytest.raises(RunDirectoryError, match=r"run.seed|belongs to another configuration"):
        run(make_remote("run.seed=2"))
    assert files(remote / "far") == before
    about = json.loads((local(make_remote()) / "run.json").read_text())
    (local(make_remote()) / "run.json").write_text(json.dumps({**about, "created": "another day"}))
    with pytest.raises(RunDirectoryError, match="hold different runs of the same name. Remove one of them"):
        run(make_remote())
    assert files(remote / "far") == before


def test_a_run_without_commits_is_replaced(make_remote: Tiny, remote: Path, tiny: Tiny) -> None:
    stop_after(make_remote(), 0)
    assert (remote / "far" / "LATEST").read_text().startswith("000000")
    run(make_remote("run.seed=2"))
    assert_same_bits(read_tensors(remote / "far"), known(tiny("run.seed=2", method="fedmlac")))
    assert files(remote / "far") == files(local(make_remote()))


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_commands_accept_a_uri(
    make_remote: Tiny, remote: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAYDFL_CACHE", str(tmp_path / "usual"))
    raydfl = Raydfl(capsys)
    config = make_remote("train.rounds=2", method="fedavg")
    assert raydfl("run", write_config(config, tmp_path)).code == 0
    uri = f"file://{remote}/far"
    shutil.rmtree(tmp_path / "cache" / "runs")
    output = raydfl("report", uri)
    assert output.code == 0, output.err
    assert Path(output.out.strip()) == local(config) / "report.html"
    model = load_model(uri)
    assert model.round == 2
    output = raydfl("predict", uri, tmp_path / "none.wav")
    assert output.code == 2
    assert "none.wav" in output.err
    shutil.rmtree(tmp_path / "cache")  # simulates a machine without this cache: the default is used
    assert local_run(uri) == local_runs(config.run.dir, tmp_path / "usual") / "far"
    output = raydfl("replay", uri, "--round", "2", "--client", "s0")
    assert output.code == 2  # the command needs the features
    assert "raydfl data prepare" in output.err
    output = raydfl("resume", uri, "train.rounds=3", f"data.cache={tmp_path / 'cache'}")
    assert output.code == 0, output.err
    assert (remote / "far" / "LATEST").read_text().startswith("000003")
    raydfl("resume", f"file://{remote}/other").refuses(r"there is no run at file://\S+/other: it holds no config.yaml")
    raydfl("report", "s3:///x").refuses("the bucket is missing in s3:///x")


def test_a_stopped_run_prints_how_to_resume(make_remote: Tiny, remote: Path) -> None:
    config = make_remote()
    output = []
    progress = Progress("quiet")
    progress.finish = lambda *messages_received: output.append(messages_received)  # type: ignore[method-assign]
    run(config, progress, on_round=lambda report: report.round == 1)
    assert output[0][2] == f"raydfl resume file://{remote}/far"


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("ftp://host/runs", "not a supported kind of URI. Use one of file://, s3://, gs://"),
        ("file://runs", "three slashes"),
        ("s3:///runs", "the bucket is missing"),
        ("s3://key:secret@bucket/runs", "credentials"),
        ("s3://bucket/runs?access_key=x&secret_key=y", "credentials"),
    ],
)
def test_invalid_uris_are_rejected(tiny: Tiny, uri: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        tiny(f"run.dir={uri}")
    assert "secret@" not in str(error.value)
    assert str(error.value).count("run.dir") >= 1


def test_uris_are_kept_verbatim_and_do_not_change_the_digest(tiny: Tiny) -> None:
    config = tiny("run.dir=s3://bucket/runs?region=eu-central-1")
    assert config.run.dir == "s3://bucket/runs?region=eu-central-1"
    assert config.digest() == tiny().digest()
    assert make_config(config.model_dump(mode="json")) == config
    assert below(config.run.dir, "far") == "s3://bucket/runs/far?region=eu-central-1"
    assert split_uri(below(config.run.dir, "far")) == (config.run.dir, "far")
    folder = local_runs(config.run.dir, config.data.cache)
    assert folder.parent == config.data.cache / "runs"
    assert folder != local_runs("s3://bucket/runs?region=eu-west-1", config.data.cache)
    assert local_runs("/shared/runs", None) == Path("/shared/runs")


def test_an_unreachable_uri_is_reported_at_the_start(make_remote: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, lambda call, path: True)
    with pytest.raises(ResourcesError, match=r"far/run.json cannot be read, after 4 tries: no answer to read"):
        run(make_remote())


def test_denied_access_is_not_retried(make_remote: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def deny(call: str, path: str) -> bool:
        nonlocal calls
        calls += 1
        raise PermissionError("access denied")

    fail(monkeypatch, deny)
    with pytest.raises(InputError, match="cannot be read: access denied"):
        run(make_remote())
    assert calls == 1


def test_a_folder_without_shared_access_is_rejected(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "CUDA_VISIBLE_DEVICES", "0"
    )  # an actor hides GPUs from its process, here the process of the tests
    config = tiny()
    run_dir = create(config, Progress("quiet"))
    with pytest.raises(ResourcesError, match=r"does not see the run's folder .*all nodes must see run.dir"):
        Server(tmp_path / "elsewhere", config)
    other_folder = tmp_path / "elsewhere"
    actor = ClientActor(config, ActorKind(1, 0), partial(open_worker, config, other_folder, "", other_folder, None))
    with pytest.raises(ResourcesError, match="does not see the run's folder"):
        actor.ready()
    with pytest.raises(
        ResourcesError, match=r"000000-1234.seg: a client actor wrote this file, but the server cannot see it"
    ):
        PrivateStore(run_dir / "private").sync(["000000-1234.seg"])
    assert RunStore(run_dir).latest() is None


@pytest.mark.parametrize("name", ["..", ".", "a/b", "/a"])
def test_a_run_accepts_only_one_folder(tiny: Tiny, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name: .*valid folder name"):
        tiny(f"run.name='{name}'")


def test_a_uri_with_one_slash_is_rejected(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="If you mean a URI, write s3://bucket/runs"):
        tiny("run.dir=s3:/bucket/runs")


def test_an_unknown_file_system_option_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydfl.core.remote.time.sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(ResourcesError, match="s3://bucket/runs.*cannot be listed: "):
        place.RemoteFolder("s3://bucket/runs?regoin=eu", "mend it").files()


def test_min_actors_requires_ray(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"Remove ray\.min_actors"):
        tiny("ray.min_actors=1", "ray.actors=0")
