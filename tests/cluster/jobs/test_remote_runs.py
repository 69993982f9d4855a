"""Runs behind a URI: mirrored commit by commit, fetched back, whole after a failure at any moment, and the same bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow.fs as fs
import pytest
from commands import Raydfl, written
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
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing reports takes most of such small runs' time; and nobody wants to wait for another try."""

    def write(run_dirs: list[Path], out: Path) -> Path:
        out.write_text("not drawn in this test")
        return out

    monkeypatch.setattr(runs, "write_page", write)
    monkeypatch.setattr(place, "_PAUSES", (0.0, 0.0, 0.0))


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return tmp_path / "remote"


@pytest.fixture
def far(tiny: Tiny, tmp_path: Path, remote: Path) -> Tiny:
    """As ``tiny``, with its runs behind a URI. FedMLAC, because its clients have private state."""

    def configure(*overrides: str, method: str = "fedmlac") -> Config:
        cache = f"data.cache={tmp_path / 'cache'}"
        return tiny(cache, f"run.dir=file://{remote}", "run.name=far", *overrides, method=method)

    return configure


@pytest.fixture
def undisturbed(tiny: Tiny) -> dict[str, bytes]:
    return known(tiny(method="fedmlac"))


def local(config: Config) -> Path:
    return local_runs(config.run.dir, config.data.cache) / "far"


def files(folder: Path) -> dict[str, bytes]:
    """The content of what a mirror shall hold, by name."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def fail(monkeypatch: pytest.MonkeyPatch, fails: Callable[[str, str], bool], kind: str = "far") -> Failing:
    """From now on every URI leads to a file system that fails when it is told to."""
    handler = Failing(fails, kind)
    monkeypatch.setattr(
        place, "open_file_system", lambda uri: (fs.PyFileSystem(handler), uri.partition("://")[2].partition("?")[0])
    )
    return handler


# -- the copy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["far", "s3"])
def test_everything_of_a_run_is_there_when_it_ends(
    far: Tiny, remote: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    handler = fail(monkeypatch, lambda call, path: False, kind)
    config = far()
    outcome = run(config)
    assert outcome.finished
    assert outcome.run_dir == local(config)
    there = files(remote / "far")
    assert there == files(local(config))
    assert {"LATEST", "config.yaml", "run.json", "report.html", "model.safetensors"} <= set(there)
    assert_same_bits(read_tensors(remote / "far"), undisturbed)
    moved = [path for call, path in handler.calls if call == "move"]
    assert bool(moved) == (kind == "far"), "an object store has whole objects or none; elsewhere a rename makes it so"


def test_a_commit_is_copied_before_the_next_is_begun_and_old_ones_are_removed(far: Tiny, remote: Path) -> None:
    config = far("train.rounds=8", "run.keep=2")
    run_dir = create(config, Progress("quiet"))
    server = Server(run_dir, config)
    try:
        for completed in range(1, 9):
            server.round()
            if completed >= 2:  # the commit of the round before was written beside this one
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


def test_what_clients_write_for_the_next_commit_is_not_copied_by_half(far: Tiny, remote: Path) -> None:
    config = far("train.rounds=2", "run.commit_every=2")
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
def test_a_store_that_fails_now_and_then_changes_nothing(
    far: Tiny, remote: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    count = 0

    def now_and_then(call: str, path: str) -> bool:
        nonlocal count
        count += 1
        return count % every == 0

    fail(monkeypatch, now_and_then)
    config = far()
    assert run(config).finished
    assert count > 40
    assert files(remote / "far") == files(local(config))
    assert_same_bits(read_tensors(remote / "far"), undisturbed)


@pytest.mark.parametrize(
    "moment", [pytest.param(m, marks=[] if m % 9 == 4 else [pytest.mark.slow]) for m in range(1, 35, 3)]
)
def test_when_copying_ends_at_any_moment_a_whole_commit_is_there_and_the_run_goes_on(
    far: Tiny, remote: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    config = far()
    run_dir = create(config, Progress("quiet"))
    writes = 0

    def from_then_on(call: str, path: str) -> bool:
        nonlocal writes
        writes += call in ("write", "move", "delete")
        return writes >= moment

    with monkeypatch.context() as patched:
        fail(patched, from_then_on)
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
    # Whatever is there is a whole run up to some commit, or none.
    if (remote / "far" / "LATEST").exists():
        assert read_tensors(remote / "far")["round"] in (b"0", b"1", b"2", b"3")
    # The machine is gone: all that is left is what was copied.
    shutil.rmtree(run_dir)
    assert run(config).finished
    assert_same_bits(read_tensors(remote / "far"), undisturbed)
    rows = read_rows(local(config)).to_pylist()
    losses = [row["round"] for row in rows if row["metric"] == "clients" and not row["client"]]
    assert losses == [1, 2, 3]


class Lying(Failing):
    """A listing that names a file which is not below the folder that was asked about."""

    name = "../outside.txt"

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        true = super().get_file_info_selector(selector)
        return [*true, fs.FileInfo(f"{selector.base_dir}/{self.name}", fs.FileType.File, size=6)]


@pytest.mark.parametrize("name", ["../outside.txt", "rows/../../outside.txt", "rows/..", "./outside.txt", "a//b"])
def test_a_faked_listing_writes_and_removes_nothing_outside(
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
    liar = Lying(lambda call, path: False)
    liar.name = name
    monkeypatch.setattr(
        place, "open_file_system", lambda uri: (fs.PyFileSystem(liar), uri.partition("://")[2].partition("?")[0])
    )
    mirror = RunMirror(tmp_path / "here" / "run", f"file://{tmp_path}/there/run")
    with pytest.raises(ResourcesError, match=f"lists '{name}', which is not below it"):
        mirror.fetch()
    assert not list(tmp_path.glob("here/**/*.txt"))
    (tmp_path / "here" / "run" / "run.json").write_text("another")
    with pytest.raises(ResourcesError, match="which is not below it"):
        mirror.sync()
    assert (tmp_path / "there" / "outside.txt").read_text() == "theirs"


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


def test_a_store_that_is_lost_stops_the_run_and_loses_nothing_here(
    far: Tiny, remote: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = far()
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
    assert_same_bits(read_tensors(remote / "far"), undisturbed)


# -- the way back ------------------------------------------------------------------------------------------------------


def test_on_another_machine_the_run_is_fetched_and_ends_the_same(
    far: Tiny, remote: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    stop_after(far(), 1)
    for folder in (tmp_path / "cache").iterdir():  # features and all
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    messages: list[str] = []
    told = Progress("quiet")
    told.message = messages.append  # type: ignore[method-assign]
    assert run(far(), told).finished
    assert any(text.startswith(f"the run was fetched from file://{remote}/far to {tmp_path}") for text in messages)
    assert any("Rebuilding the features" in text for text in messages)
    assert_same_bits(read_tensors(remote / "far"), undisturbed)
    assert files(remote / "far") == files(local(far()))


def test_a_new_cache_under_a_path_of_equal_length_reaches_the_mirror(far: Tiny, remote: Path, tmp_path: Path) -> None:
    stop_after(far(), 1)
    shutil.rmtree(tmp_path / "cache")
    config = far(f"data.cache={tmp_path / 'hoard'}")
    assert run(config).finished
    there, here = (files(folder)["population/population.json"] for folder in (remote / "far", local(config)))
    assert str(tmp_path / "hoard").encode() in here
    assert there == here


def test_resume_by_uri_with_more_rounds(far: Tiny, remote: Path, tiny: Tiny) -> None:
    run(far("train.rounds=1"))
    shutil.rmtree(local(far()))
    uri = f"file://{remote}/far"
    outcome = resume(uri, ["train.rounds=3", f"data.cache={far().data.cache}"])
    assert outcome.finished
    assert outcome.run_dir == local(far())
    assert_same_bits(read_tensors(remote / "far"), known(tiny(method="fedmlac")))


def test_a_copy_that_is_behind_is_brought_up_and_one_that_is_ahead_is_kept(
    far: Tiny, remote: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    stop_after(far(), 1)
    shutil.copytree(local(far()), tmp_path / "behind")
    stop_after(far(), 1)
    assert_same_bits(read_tensors(remote / "far"), read_tensors(local(far())))
    shutil.rmtree(local(far()))
    shutil.move(tmp_path / "behind", local(far()))
    mirror = RunMirror(local(far()), f"file://{remote}/far")
    assert mirror.fetch()
    assert_same_bits(read_tensors(remote / "far"), read_tensors(local(far())))
    assert not mirror.fetch()
    # Ahead: the copy is of round 1, here it is round 2.
    shutil.copytree(local(far()), tmp_path / "ahead")
    shutil.rmtree(remote)
    shutil.rmtree(local(far()))
    stop_after(far(), 1)
    facts = json.loads((tmp_path / "ahead" / "run.json").read_text())
    (remote / "far" / "run.json").write_text(json.dumps(facts))
    shutil.rmtree(local(far()))
    shutil.move(tmp_path / "ahead", local(far()))
    assert not mirror.fetch()
    assert run(far()).finished
    assert_same_bits(read_tensors(remote / "far"), undisturbed)


def test_two_that_write_to_one_place_are_told(far: Tiny, remote: Path, tmp_path: Path) -> None:
    config = far()
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


def test_another_run_of_the_same_name_is_not_overwritten(far: Tiny, remote: Path) -> None:
    stop_after(far(), 1)
    shutil.rmtree(local(far()))
    before = files(remote / "far")
    with pytest.raises(RunDirectoryError, match=r"run.seed|belongs to another configuration"):
        run(far("run.seed=2"))
    assert files(remote / "far") == before
    about = json.loads((local(far()) / "run.json").read_text())
    (local(far()) / "run.json").write_text(json.dumps({**about, "created": "another day"}))
    with pytest.raises(RunDirectoryError, match="hold different runs of the same name. Remove one of them"):
        run(far())
    assert files(remote / "far") == before


def test_a_run_that_never_began_gives_way(far: Tiny, remote: Path, tiny: Tiny) -> None:
    stop_after(far(), 0)
    assert (remote / "far" / "LATEST").read_text().startswith("000000")
    run(far("run.seed=2"))
    assert_same_bits(read_tensors(remote / "far"), known(tiny("run.seed=2", method="fedmlac")))
    assert files(remote / "far") == files(local(far()))


# -- commands ----------------------------------------------------------------------------------------------------------


def test_commands_take_a_uri(
    far: Tiny, remote: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAYDFL_CACHE", str(tmp_path / "usual"))
    raydfl = Raydfl(capsys)
    config = far("train.rounds=2", method="fedavg")
    assert raydfl("run", written(config, tmp_path)).code == 0
    uri = f"file://{remote}/far"
    shutil.rmtree(tmp_path / "cache" / "runs")
    said = raydfl("report", uri)
    assert said.code == 0, said.err
    assert Path(said.out.strip()) == local(config) / "report.html"
    model = load_model(uri)
    assert model.round == 2
    said = raydfl("predict", uri, tmp_path / "none.wav")
    assert said.code == 2
    assert "none.wav" in said.err
    shutil.rmtree(tmp_path / "cache")  # as on a machine that does not have this cache: the usual one is taken
    assert local_run(uri) == local_runs(config.run.dir, tmp_path / "usual") / "far"
    said = raydfl("replay", uri, "--round", "2", "--client", "s0")
    assert said.code == 2  # it needs the features
    assert "raydfl data prepare" in said.err
    said = raydfl("resume", uri, "train.rounds=3", f"data.cache={tmp_path / 'cache'}")
    assert said.code == 0, said.err
    assert (remote / "far" / "LATEST").read_text().startswith("000003")
    raydfl("resume", f"file://{remote}/other").refuses(r"there is no run at file://\S+/other: it holds no config.yaml")
    raydfl("report", "s3:///x").refuses("the bucket is missing in s3:///x")


def test_a_stopped_run_says_how_to_go_on(far: Tiny, remote: Path) -> None:
    config = far()
    said = []
    progress = Progress("quiet")
    progress.finish = lambda *told: said.append(told)  # type: ignore[method-assign]
    run(config, progress, on_round=lambda report: report.round == 1)
    assert said[0][2] == f"raydfl resume file://{remote}/far"


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
def test_uris_that_cannot_be_meant(tiny: Tiny, uri: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        tiny(f"run.dir={uri}")
    assert "secret@" not in str(error.value)
    assert str(error.value).count("run.dir") >= 1


def test_uris_are_kept_as_they_are_and_decide_nothing(tiny: Tiny) -> None:
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


def test_a_place_that_cannot_be_reached_is_told_at_the_start(far: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, lambda call, path: True)
    with pytest.raises(ResourcesError, match=r"far/run.json cannot be read, after 4 tries: no answer to read"):
        run(far())


def test_access_that_is_denied_is_not_tried_again(far: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def denied(call: str, path: str) -> bool:
        nonlocal calls
        calls += 1
        raise PermissionError("access denied")

    fail(monkeypatch, denied)
    with pytest.raises(InputError, match="cannot be read: access denied"):
        run(far())
    assert calls == 1


def test_a_folder_that_only_some_nodes_see_is_refused(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "CUDA_VISIBLE_DEVICES", "0"
    )  # an actor hides them from its process, which here is the tests' own
    config = tiny()
    run_dir = create(config, Progress("quiet"))
    with pytest.raises(ResourcesError, match=r"does not see the run's folder .*all nodes must see run.dir"):
        Server(tmp_path / "elsewhere", config)
    elsewhere = tmp_path / "elsewhere"
    actor = ClientActor(config, ActorKind(1, 0), partial(open_worker, config, elsewhere, "", elsewhere, None))
    with pytest.raises(ResourcesError, match="does not see the run's folder"):
        actor.ready()
    with pytest.raises(
        ResourcesError, match=r"000000-1234.seg: a client actor wrote this file, but the server cannot see it"
    ):
        PrivateStore(run_dir / "private").sync(["000000-1234.seg"])
    assert RunStore(run_dir).latest() is None


@pytest.mark.parametrize("name", ["..", ".", "a/b", "/a"])
def test_a_run_has_one_folder(tiny: Tiny, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name: .*valid folder name"):
        tiny(f"run.name='{name}'")


def test_a_uri_with_one_slash_is_no_path(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="If you mean a URI, write s3://bucket/runs"):
        tiny("run.dir=s3:/bucket/runs")


def test_an_option_that_no_file_system_has_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydfl.core.remote.time.sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(ResourcesError, match="s3://bucket/runs.*cannot be listed: "):
        place.RemoteFolder("s3://bucket/runs?regoin=eu", "mend it").files()


def test_actors_that_have_to_be_there_need_ray(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"Remove ray\.min_actors"):
        tiny("ray.min_actors=1", "ray.actors=0")
