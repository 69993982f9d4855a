"""Run directories that are damaged, half-written, of another configuration, or none at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Raydfl, written
from helpers import finish, same, truth

from raydfl.config import Config
from raydfl.private import PrivateStore
from raydfl.runs import run
from raydfl.store import RunStore

Tiny = Callable[..., Config]
Undisturbed = Callable[..., dict[str, bytes]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("finished")


@pytest.fixture
def run_dir(finished: Path, tiny: Tiny, tmp_path: Path) -> Path:
    """A copy of a run of FedMLAC after two rounds."""
    if not (finished / "tiny").exists():
        run(tiny("train.rounds=2", f"run.dir={finished}", method="fedmlac"))
    return Path(shutil.copytree(finished / "tiny", tmp_path / "run"))


def flip(path: Path, at: float = 0.5) -> None:
    """Changes one bit of a file."""
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(data)


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nonsense", ["what?", "", "000002-zzzzzzzz.safetensors", "../../etc/passwd"])
def test_nonsense_in_latest(raydfl: Raydfl, run_dir: Path, nonsense: str) -> None:
    (run_dir / "LATEST").write_text(nonsense)
    message = "LATEST does not name a commit but holds .*; write the newest name in commits/ into it"
    raydfl("resume", run_dir).refuses(message)
    raydfl("report", run_dir).refuses(message)
    raydfl("replay", run_dir, "--round", 1, "--client", "s0").refuses(message)
    (run_dir / "LATEST").write_text(RunStore(run_dir).commits()[-1])  # the advice helps
    assert raydfl("resume", run_dir).code == 0


def test_a_lost_latest_does_not_begin_the_run_again(raydfl: Raydfl, run_dir: Path) -> None:
    (run_dir / "LATEST").unlink()
    before = sorted((run_dir / "commits").iterdir())
    raydfl("resume", run_dir).refuses(
        "LATEST is missing, but commits/ holds rounds; write the newest name in commits/ into it"
    )
    assert sorted((run_dir / "commits").iterdir()) == before


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_commit_falls_back_and_says_so(
    raydfl: Raydfl, tiny: Tiny, undisturbed: Undisturbed, run_dir: Path, damage: str
) -> None:
    newest = run_dir / "commits" / RunStore(run_dir).commits()[-1]
    if damage == "flip":
        flip(newest)
    elif damage == "cut":
        newest.write_bytes(newest.read_bytes()[:-100])
    else:
        newest.unlink()
    said = raydfl("resume", run_dir)
    assert said.code == 0
    assert f"warning: commit {newest} " in said.out
    assert "; going on from round 1" in said.out
    same(undisturbed(2), truth(run_dir))
    again = raydfl("resume", run_dir)
    assert "warning" not in again.out


def test_nothing_whole_to_fall_back_to(raydfl: Raydfl, run_dir: Path) -> None:
    for path in (run_dir / "commits").iterdir():
        flip(path)
    raydfl("resume", run_dir).refuses(
        "is damaged: its checksum does not fit", "no earlier commit is whole: start the run afresh"
    )


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_private_state_is_not_trained_on(raydfl: Raydfl, run_dir: Path, damage: str) -> None:
    for path in (run_dir / "private").iterdir():
        if damage == "flip":
            flip(path, 0.1)
            flip(path, 0.9)
        elif damage == "cut":
            path.write_bytes(path.read_bytes()[:100])
        else:
            path.unlink()
    said = raydfl("resume", run_dir, "train.rounds=6")
    said.refuses("private/.*seg is (damaged at byte|missing).*a client's private state")


def test_damaged_private_state_is_found_wherever_it_is(run_dir: Path) -> None:
    """Each record has its own checksum: no bit of any can change unseen."""
    store = RunStore(run_dir)
    refs = store.load(store.commits()[-1]).private
    assert len(refs) > 2
    for ref in refs.values():
        path = run_dir / "private" / ref.segment
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[ref.offset + ref.length - 1] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(Exception, match="is damaged at byte"):
            PrivateStore(run_dir / "private").read(ref)
        path.write_bytes(whole)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "remove"])
def test_a_damaged_population_is_noticed(raydfl: Raydfl, run_dir: Path, damage: str) -> None:
    path = run_dir / "population" / "population.safetensors"
    if damage == "flip":
        flip(path, 0.99)  # of the labels and offsets, not of the header
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    said = raydfl("resume", run_dir, "train.rounds=3")
    said.refuses("population.safetensors is missing or damaged", "start the run again in a new folder")


@pytest.mark.parametrize("where", ["there", "elsewhere"])
def test_lost_features_are_made_again(
    raydfl: Raydfl, tiny: Tiny, undisturbed: Undisturbed, tmp_path: Path, where: str
) -> None:
    cache = tmp_path / "there"
    outcome = run(tiny(f"data.cache={cache}", "train.rounds=1"))
    shutil.rmtree(cache)
    said = raydfl("resume", outcome.run_dir, "train.rounds=2", f"data.cache={tmp_path / where}")
    assert said.code == 0
    assert "they are made again" in said.out
    same(undisturbed(2, "fedavg"), truth(outcome.run_dir))
    assert cache.exists() == (where == "there")


def test_a_run_normalised_by_group_goes_on_unless_an_earlier_version_began_it(
    raydfl: Raydfl, tiny: Tiny, tmp_path: Path
) -> None:
    """Its statistics were of held-out clips too, and nobody would see it in the numbers."""
    by_group = ("data.features.normalise=group", f"data.cache={tmp_path / 'cache'}")
    whole = finish(tiny(*by_group, "train.rounds=2", "run.name=whole", method="fedavg"))
    run_dir = run(tiny(*by_group, "train.rounds=1", method="fedavg")).run_dir
    about = json.loads((run_dir / "run.json").read_bytes())
    del about["statistics"]
    former = Path(shutil.copytree(run_dir, run_dir.with_name("former")))
    (former / "run.json").write_text(json.dumps(about | {"digest": "0123456789abcdef"}))
    message = (
        "was begun by an earlier version of raydfl, whose .*normalise: group took statistics from held-out clips too"
    )
    raydfl("resume", former, "train.rounds=2").refuses(message)
    shutil.rmtree(tmp_path / "cache")
    assert raydfl("resume", run_dir, "train.rounds=2").code == 0
    same(whole, truth(run_dir))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "config.yaml is damaged, or what it names is gone: .* is empty"),
        (b"method: {name: fedavg", "config.yaml is damaged, or what it names is gone: .* is not valid YAML in line 1"),
        (b"method: \xff", "config.yaml cannot be read: it is not UTF-8 text; restore it from a copy"),
        (
            b"method: gone.py:Gone\ndata: spoken_words",
            "what it names is gone: 'gone.py:Gone'|there is no file .*gone.py",
        ),
    ],
)
def test_a_damaged_configuration_of_a_run(raydfl: Raydfl, run_dir: Path, content: bytes, message: str) -> None:
    (run_dir / "config.yaml").write_bytes(content)
    raydfl("resume", run_dir).refuses(message)
    raydfl("replay", run_dir, "--round", 1, "--client", "s0").refuses(message)


def test_a_site_key_that_leads_elsewhere(raydfl: Raydfl, run_dir: Path) -> None:
    about = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**about, "site_key": "../../x"}))
    raydfl("resume", run_dir).refuses(r"run.json is missing or damaged \('../../x' is not the name of a file")


@pytest.mark.parametrize("content", ["", "{", "[1]", "5", "{}", '{"id": "x"}'])
def test_a_damaged_run_json(raydfl: Raydfl, run_dir: Path, content: str) -> None:
    (run_dir / "run.json").write_text(content)
    raydfl("resume", run_dir).refuses(
        "run.json is missing or damaged", "restore it from a copy, or start the run again in a new folder"
    )


def test_a_damaged_file_of_rows(raydfl: Raydfl, run_dir: Path) -> None:
    for path in (run_dir / "rows").iterdir():
        flip(path, 1.0)
    message = "rows/.*parquet is not a readable Parquet file.*restore it from a copy, or move it away"
    raydfl("report", run_dir).refuses(message)
    shutil.rmtree(run_dir / "rows")
    assert raydfl("report", run_dir).code == 0


# -- half-written, and of others -------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["run.json", "config.yaml"])
def test_a_half_written_run_is_not_gone_on_with(raydfl: Raydfl, run_dir: Path, missing: str) -> None:
    (run_dir / missing).unlink()
    said = raydfl("resume", run_dir)
    said.refuses("is not a run directory, or the run was interrupted before it began", "start it with raydfl run")


def test_a_run_that_never_began_begins_when_it_is_started_again(
    raydfl: Raydfl, tiny: Tiny, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """What a crash before the first round leaves: a population, perhaps a configuration, no run.json."""
    config = tiny("train.rounds=1")
    folder = Path(config.run.dir) / "tiny"
    (folder / "population").mkdir(parents=True)
    (folder / "population" / "population.safetensors").write_bytes(b"half")
    (folder / "config.yaml").write_text("method: fed")
    assert raydfl("run", written(config, tmp_path)).code == 0
    same(undisturbed(1, "fedavg"), truth(folder))


def test_rounds_without_a_run_json_are_not_mixed_with_a_new_run(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    outcome = run(tiny("train.rounds=1"))
    (outcome.run_dir / "run.json").unlink()
    said = raydfl("run", written(tiny("train.rounds=2", "run.seed=7"), tmp_path))
    said.refuses(
        "holds rounds of a run, but its run.json is missing", "give the new run another run.name, or remove the folder"
    )


def test_another_configuration_is_not_mixed_into_a_run(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    outcome = run(tiny("train.rounds=1"))
    before = {path: path.read_bytes() for path in outcome.run_dir.rglob("*") if path.is_file()}
    file = written(tiny("train.rounds=1"), tmp_path)
    said = raydfl("run", file, "train.optimiser.lr=0.2", "train.rounds=5", "data.takes=5")
    said.refuses(
        "runs/tiny belongs to another configuration",
        "train.optimiser.lr: 0.1 there, 0.2 here",
        "another run.name, or remove",
    )
    assert "data.takes" in said.err
    assert "train.rounds" not in said.err  # may differ
    raydfl("resume", outcome.run_dir, "run.seed=2").refuses("run.seed: 1 there, 2 here")
    raydfl("resume", outcome.run_dir, "train.ronds=2").refuses("train: unknown key 'ronds'; did you mean 'rounds'")
    assert before == {path: path.read_bytes() for path in outcome.run_dir.rglob("*") if path.is_file()}


def test_a_run_in_use_is_left_alone(raydfl: Raydfl, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = RunStore.lock
    monkeypatch.setattr(RunStore, "lock", lambda self: lock(self, wait=0.1))
    other = RunStore(run_dir)
    other.lock()
    raydfl("resume", run_dir).refuses("is in use by process [0-9]+; wait for it or end it, then try again")
    other.unlock()
    assert raydfl("resume", run_dir).code == 0


@pytest.mark.parametrize("command", ["resume", "report", "replay"])
def test_a_folder_that_is_no_run(raydfl: Raydfl, tmp_path: Path, command: str) -> None:
    more = ["--round", "1", "--client", "a"] if command == "replay" else []
    raydfl(command, tmp_path / "gone", *more).refuses(r"there is no run directory .*gone")
    (tmp_path / "empty").mkdir()
    raydfl(command, tmp_path / "empty", *more).refuses(r"empty is not a run directory")
    (tmp_path / "file").touch()
    raydfl(command, tmp_path / "file", *more).refuses(r"there is no run directory .*file")
    assert not list((tmp_path / "empty").iterdir())


def test_several_reports_of_which_one_is_no_run(raydfl: Raydfl, run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    raydfl("report", run_dir, tmp_path / "empty", "--out", tmp_path / "x.html").refuses("empty is not a run directory")
    raydfl("report", run_dir, "--out", "/dev/null/x.html").refuses(
        "the report /dev/null/x.html cannot be written", "name another file"
    )


# -- replay ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_replayed(raydfl: Raydfl, tiny: Tiny) -> None:
    run_dir = run(tiny("train.rounds=4", "run.keep=2", "train.cohort=1")).run_dir
    early = raydfl("replay", run_dir, "--round", 1, "--client", "s0")
    early.refuses(
        "round 1 .* cannot be replayed: the commit before it is no longer kept .rounds 4 and later can be",
        "set run.keep",
    )
    late = raydfl("replay", run_dir, "--round", 6, "--client", "s0")
    late.refuses("round 6 of .* cannot be replayed: the last commit is of round 4")
    nobody = raydfl("replay", run_dir, "--round", 4, "--client", "nobody")
    nobody.refuses("client 'nobody' took no part in round 4; the cohort was 's[0-5]'")


def test_where_a_run_cannot_be_written(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = written(tiny(), tmp_path)
    raydfl("run", file, f"run.dir={tmp_path}/file").refuses(
        "cannot make the run directory .*file/tiny: Not a directory"
    )
    raydfl("run", file, f"data.cache={tmp_path}/file/cache").refuses(
        "the features .*cannot be written to .*file/cache: Not a directory; .*choose another folder with data.cache"
    )
    raydfl("run", file, "run.dir=/proc/x").refuses("cannot make the run directory /proc/x/tiny")


def test_json_of_a_run_may_hold_what_later_versions_add(raydfl: Raydfl, run_dir: Path) -> None:
    about = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**about, "more": 1}))
    assert raydfl("resume", run_dir).code == 0
