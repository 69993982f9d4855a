"""Damaged, incomplete, mismatched and missing run directories."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from commands import Raydfl, write_config
from helpers import known

from raydfl.core.errors import RunDirectoryError
from raydfl.core.files import file_digest
from raydfl.core.lock import FileLock
from raydfl.core.yaml import parse_yaml, to_yaml
from raydfl.data.population_folder import map_table, write_table
from raydfl.engine import RoundReport
from raydfl.engine.config import Config
from raydfl.engine.overrides import apply_overrides
from raydfl.engine.storage import record
from raydfl.engine.storage.private import PrivateStore
from raydfl.engine.storage.store import RunStore
from raydfl.runs import folder as rundir
from raydfl.runs._run import run
from raydfl.testing import assert_same_bits, read_tensors

Tiny = Callable[..., Config]
Undisturbed = Callable[..., dict[str, bytes]]


@pytest.fixture(scope="module")
def template_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("finished")


@pytest.fixture
def run_dir(template_run: Path, tiny: Tiny, tmp_path: Path) -> Path:
    """Return a copy of a FedMLAC run after two rounds."""
    if not (template_run / "tiny").exists():
        run(tiny("train.rounds=2", f"run.dir={template_run}", method="fedmlac"))
    return Path(shutil.copytree(template_run / "tiny", tmp_path / "run"))


def flip(path: Path, at: float = 0.5) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
def test_a_run_survives_the_deletion_of_its_working_directory(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster may delete the working directory of a job. The report's path is only printed."""
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")

    def delete(report: RoundReport) -> bool:
        (tmp_path / "job").rmdir()
        return False

    result = run(tiny("train.rounds=1", "track.mlflow=true"), on_round=delete)
    assert result.finished
    assert (result.run_dir / "report.html").exists()


def test_a_deleted_working_directory_is_rejected_at_the_start(
    raydfl: Raydfl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the import of PyTorch ends the process with an obscure message of MKL."""
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    (tmp_path / "job").rmdir()
    raydfl("run", tmp_path / "job.yaml").refuses(
        "The working directory cannot be used: No such file or directory. Change to"
    )


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nonsense", ["what?", "", "000002-zzzzzzzz.safetensors", "../../etc/passwd"])
def test_invalid_content_of_latest_is_reported(raydfl: Raydfl, run_dir: Path, nonsense: str) -> None:
    (run_dir / "LATEST").write_text(nonsense)
    message = "LATEST does not name a commit but holds .*. Write the newest name in commits/ into it"
    raydfl("resume", run_dir).refuses(message)
    raydfl("report", run_dir).refuses(message)
    raydfl("replay", run_dir, "--round", 1, "--client", "s0").refuses(message)
    (run_dir / "LATEST").write_text(RunStore(run_dir).commits()[-1])  # the remedy works
    assert raydfl("resume", run_dir).code == 0


def test_a_missing_latest_does_not_restart_the_run(raydfl: Raydfl, run_dir: Path) -> None:
    (run_dir / "LATEST").unlink()
    before = sorted((run_dir / "commits").iterdir())
    raydfl("resume", run_dir).refuses(
        "LATEST is missing, but commits/ holds rounds. Write the newest name in commits/ into it"
    )
    assert sorted((run_dir / "commits").iterdir()) == before


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_commit_falls_back_with_a_warning(
    raydfl: Raydfl, tiny: Tiny, check_reference: Undisturbed, run_dir: Path, damage: str
) -> None:
    newest = run_dir / "commits" / RunStore(run_dir).commits()[-1]
    if damage == "flip":
        flip(newest)
    elif damage == "cut":
        newest.write_bytes(newest.read_bytes()[:-100])
    else:
        newest.unlink()
    output = raydfl("resume", run_dir)
    assert output.code == 0
    assert f"warning: commit {newest} " in output.out
    assert "; resuming from round 1" in output.out
    assert_same_bits(check_reference(2), read_tensors(run_dir))
    resumed = raydfl("resume", run_dir)
    assert "warning" not in resumed.out


def test_a_run_without_an_intact_commit_is_rejected(raydfl: Raydfl, run_dir: Path) -> None:
    for path in (run_dir / "commits").iterdir():
        flip(path)
    raydfl("resume", run_dir).refuses(
        "is damaged: its checksum does not match", "no earlier commit is intact. Restart the run"
    )


def test_private_state_behind_a_link_is_rejected_and_kept(raydfl: Raydfl, run_dir: Path, tmp_path: Path) -> None:
    foreign_folder = Path(shutil.copytree(run_dir / "private", tmp_path / "theirs"))
    for path in list(foreign_folder.iterdir()):
        path.rename(path.with_name(f"{path.name[:7]}0badcafe.seg"))
    before = sorted(foreign_folder.iterdir())
    shutil.rmtree(run_dir / "private")
    (run_dir / "private").symlink_to(foreign_folder)
    raydfl("resume", run_dir, "train.rounds=3").refuses(
        f"private is a link to {foreign_folder}, outside the run's folder"
    )
    assert sorted(foreign_folder.iterdir()) == before


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_private_state_is_not_used_for_training(raydfl: Raydfl, run_dir: Path, damage: str) -> None:
    for path in (run_dir / "private").iterdir():
        if damage == "flip":
            flip(path, 0.1)
            flip(path, 0.9)
        elif damage == "cut":
            path.write_bytes(path.read_bytes()[:100])
        else:
            path.unlink()
    output = raydfl("resume", run_dir, "train.rounds=6")
    output.refuses("private/.*seg is (damaged at byte|missing).*a client's private state")


def test_damage_anywhere_in_private_state_is_detected(run_dir: Path) -> None:
    """Each record has a checksum, so any changed bit is detected."""
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
def test_a_damaged_population_is_detected(raydfl: Raydfl, run_dir: Path, damage: str) -> None:
    path = run_dir / "population" / "clips.arrow"
    if damage == "flip":
        flip(path, 0.99)  # in the labels and offsets, not in the header
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    output = raydfl("resume", run_dir, "train.rounds=3")
    output.refuses("is missing or damaged", "restart the run in a new folder")


@pytest.mark.parametrize("where", ["there", "elsewhere"])
def test_missing_features_are_rebuilt(
    raydfl: Raydfl, tiny: Tiny, check_reference: Undisturbed, tmp_path: Path, where: str
) -> None:
    cache = tmp_path / "there"
    outcome = run(tiny(f"data.cache={cache}", "train.rounds=1"))
    shutil.rmtree(cache)
    output = raydfl("resume", outcome.run_dir, "train.rounds=2", f"data.cache={tmp_path / where}")
    assert output.code == 0
    assert re.search(r"cached features in .* cannot be used .*[.] Rebuilding the features[.]", output.out)
    assert_same_bits(check_reference(2, "fedavg"), read_tensors(outcome.run_dir))
    assert cache.exists() == (where == "there")


def test_a_run_with_group_normalisation_resumes_unless_started_by_an_earlier_version(
    raydfl: Raydfl, tiny: Tiny, tmp_path: Path
) -> None:
    """Earlier statistics included held-out clips, invisible in the results."""
    by_group = ("data.features.normalise=group", f"data.cache={tmp_path / 'cache'}")
    whole = known(tiny(*by_group, "train.rounds=2", method="fedavg"))
    run_dir = run(tiny(*by_group, "train.rounds=1", method="fedavg")).run_dir
    about = json.loads((run_dir / "run.json").read_bytes())
    for key in ("statistics", "config", "files", "code"):
        del about[key]
    former = Path(shutil.copytree(run_dir, run_dir.with_name("former")))
    (former / "run.json").write_text(json.dumps(about | {"digest": "0123456789abcdef"}))
    message = "was started by an earlier version of raydfl. With .*normalise: group, it computed statistics from held-out clips too"
    raydfl("resume", former, "train.rounds=2").refuses(message)
    shutil.rmtree(tmp_path / "cache")
    assert raydfl("resume", run_dir, "train.rounds=2").code == 0
    assert_same_bits(whole, read_tensors(run_dir))


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("frames.npy", 0.2),
        pytest.param("offsets.npy", 0.6, marks=pytest.mark.slow),  # like frames.npy: the same code reads all files
        pytest.param("lengths.npy", 1.0, marks=pytest.mark.slow),
    ],
)
def test_a_flipped_bit_in_the_features_is_detected(
    raydfl: Raydfl, tiny: Tiny, check_reference: Undisturbed, tmp_path: Path, name: str, at: float
) -> None:
    """Detection does not depend on modification times. New runs reject damaged features too."""
    outcome = run(tiny(f"data.cache={tmp_path}/there", "train.rounds=1"))
    (path,) = (tmp_path / "there").glob(f"*/{name}")
    times = path.stat()

    def damage() -> None:
        flip(path, at)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    damage()
    output = raydfl("resume", outcome.run_dir, "train.rounds=2")
    assert output.code == 0
    assert f"cannot be used (the content of {name} has changed). Rebuilding the features." in output.out
    assert_same_bits(check_reference(2, "fedavg"), read_tensors(outcome.run_dir))
    damage()
    other = run(tiny(f"data.cache={tmp_path}/there", "train.rounds=2", "run.name=other"))
    assert_same_bits(check_reference(2, "fedavg"), read_tensors(other.run_dir))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "config.yaml is damaged, or refers to missing files: .* is empty"),
        (
            b"method: {name: fedavg",
            "config.yaml is damaged, or refers to missing files: .* is not valid YAML in line 2",
        ),
        (b"method: \xff", "config.yaml cannot be read: it is not UTF-8 text. Restore it from a copy"),
        (
            b"method: gone.py:Gone\ndata: spoken_words",
            "what it names is gone: 'gone.py:Gone'|there is no file .*gone.py",
        ),
    ],
)
def test_a_damaged_configuration_of_a_run_is_reported(
    raydfl: Raydfl, run_dir: Path, content: bytes, message: str
) -> None:
    (run_dir / "config.yaml").write_bytes(content)
    raydfl("resume", run_dir).refuses(message)
    raydfl("replay", run_dir, "--round", 1, "--client", "s0").refuses(message)


def test_a_site_key_outside_the_run_is_rejected(raydfl: Raydfl, run_dir: Path) -> None:
    about = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**about, "site_key": "../../x"}))
    raydfl("resume", run_dir).refuses(r"run.json is missing or damaged \('../../x' is not the name of a file")


@pytest.mark.parametrize("content", ["", "{", "[1]", "5", "{}", '{"id": "x"}'])
def test_a_damaged_run_json_is_reported(raydfl: Raydfl, run_dir: Path, content: str) -> None:
    (run_dir / "run.json").write_text(content)
    raydfl("resume", run_dir).refuses(
        "run.json is missing or damaged", "Restore it from a copy, or restart the run in a new folder"
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("raydfl", ..., "it lacks raydfl"),
        ("raydfl", None, "raydfl is 'None' but must be text"),
        ("classes", "tone0", "classes is 'tone0' but must be a list"),
        ("models", [], "models is .* but must be a group"),
        ("clients", "6", "clients is '6' but must be a whole number"),
        ("clients", True, "clients is 'True' but must be a whole number"),
        ("id", 5, "id is '5' but must be text"),
        ("config", "x", "config is 'x' but must be a group"),
        ("resumes", [{"kernels": 1}], "resumes has .* but must hold groups with kernels"),
    ],
)
def test_missing_and_wrong_entries_of_run_json_are_reported(
    raydfl: Raydfl, run_dir: Path, key: str, value: object, message: str
) -> None:
    about = json.loads((run_dir / "run.json").read_text())
    about[key] = value
    if value is ...:
        del about[key]
    (run_dir / "run.json").write_text(json.dumps(about))
    raydfl("resume", run_dir).refuses(f"run.json is missing or damaged .{message}")
    raydfl("predict", run_dir, run_dir).refuses(f"run.json is missing or damaged .{message}")
    if value is not ...:
        raydfl("report", run_dir).refuses(message)


def test_a_damaged_file_of_rows_is_reported(raydfl: Raydfl, run_dir: Path) -> None:
    for path in (run_dir / "rows").iterdir():
        flip(path, 1.0)
    message = "rows/.*parquet is not a readable Parquet file.*Restore it from a copy or move it away"
    raydfl("report", run_dir).refuses(message)
    raydfl("resume", run_dir, "train.rounds=3").refuses(message)
    shutil.rmtree(run_dir / "rows")
    assert raydfl("report", run_dir).code == 0


def test_a_missing_file_of_rows_is_reported(raydfl: Raydfl, tiny: Tiny) -> None:
    run_dir = run(tiny("train.rounds=4")).run_dir
    sentence = "The files in rows/ of rounds 3 to 4 are missing"
    assert sentence not in (run_dir / "report.html").read_text()
    record.discard_rows(run_dir, 2)
    output = raydfl("resume", run_dir, "train.rounds=5")
    assert output.code == 0
    assert re.search("warning: the files in .*rows of rounds 3 to 4 are missing[.] Restore them", output.out)
    assert sentence in (run_dir / "report.html").read_text()


# -- incomplete and foreign runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["run.json", "config.yaml"])
def test_an_incomplete_run_is_not_resumed(raydfl: Raydfl, run_dir: Path, missing: str) -> None:
    (run_dir / missing).unlink()
    output = raydfl("resume", run_dir)
    output.refuses("is not a run directory, or the run was interrupted before it began", "Start it with: raydfl run")


def test_a_run_that_crashed_before_its_first_round_restarts(
    raydfl: Raydfl, tiny: Tiny, check_reference: Undisturbed, tmp_path: Path
) -> None:
    """A crash before the first round leaves a population, perhaps a configuration, and no run.json."""
    config = tiny("train.rounds=1")
    folder = Path(config.run.dir) / "tiny"
    (folder / "population").mkdir(parents=True)
    (folder / "population" / "clips.arrow").write_bytes(b"half")
    (folder / "config.yaml").write_text("method: fed")
    assert raydfl("run", write_config(config, tmp_path)).code == 0
    assert_same_bits(check_reference(1, "fedavg"), read_tensors(folder))


def test_rounds_without_a_run_json_are_not_mixed_with_a_new_run(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    outcome = run(tiny("train.rounds=1"))
    (outcome.run_dir / "run.json").unlink()
    output = raydfl("run", write_config(tiny("train.rounds=2", "run.seed=7"), tmp_path))
    output.refuses(
        "contains rounds of a run, but its run.json is missing",
        "give the new run another `run.name`, or remove the folder",
    )


def test_a_run_rejects_a_different_configuration(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    outcome = run(tiny("train.rounds=1"))
    before = {path: path.read_bytes() for path in outcome.run_dir.rglob("*") if path.is_file()}
    file = write_config(tiny("train.rounds=1"), tmp_path)
    output = raydfl("run", file, "train.optimiser.lr=0.2", "train.rounds=5", "data.takes=5")
    output.refuses(
        "runs/tiny belongs to another configuration",
        "train.optimiser.lr: 0.1 there, 0.2 here",
        "another run.name, or remove",
    )
    assert "data.takes" in output.err
    assert "train.rounds" not in output.err  # these settings may differ
    raydfl("resume", outcome.run_dir, "run.seed=2").refuses("run.seed: 1 there, 2 here")
    raydfl("resume", outcome.run_dir, "train.ronds=2").refuses("train: unknown key 'ronds'. Did you mean 'rounds'")
    assert before == {path: path.read_bytes() for path in outcome.run_dir.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", [".lock", ".driver.lock"])
def test_a_run_in_use_is_unchanged(raydfl: Raydfl, run_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The committing process or its driver holds the lock. Then even config.yaml is unchanged."""
    lock = RunStore.lock
    monkeypatch.setattr(RunStore, "lock", lambda self: lock(self, wait=0.1))
    monkeypatch.setattr(rundir, "_PATIENCE", 0.1)
    before = (run_dir / "config.yaml").read_bytes()
    other = FileLock(run_dir / name)
    other.acquire(0.0)
    overrides = ["train.rounds=3"] if name == ".driver.lock" else []
    message = r"run is in use by process [0-9]+ on \S+[.] Wait for it or end it, then try again"
    raydfl("resume", run_dir, *overrides).refuses(message)
    assert (run_dir / "config.yaml").read_bytes() == before
    other.release()
    assert raydfl("resume", run_dir, *overrides).code == 0


def test_the_second_of_two_simultaneous_runs_is_rejected(
    tiny: Tiny, check_reference: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run is rejected while the first prepares its data, whatever its configuration."""
    monkeypatch.setattr(rundir, "_PATIENCE", 0.1)
    prepare, refused = rundir.build_population, []

    def start_second_run(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(rundir, "build_population", prepare)
        for overrides in ([], ["train.optimiser.lr=0.2"]):
            with pytest.raises(RunDirectoryError) as error:
                run(tiny("train.rounds=1", *overrides))
            refused.append(str(error.value))
        return prepare(*arguments, **options)

    monkeypatch.setattr(rundir, "build_population", start_second_run)
    outcome = run(tiny("train.rounds=1"))
    assert len(refused) == 2
    for message in refused:
        assert f"runs/tiny is in use by process {os.getpid()} on " in message
    assert_same_bits(check_reference(1, "fedavg"), read_tensors(outcome.run_dir))


EDITS = {
    "train.optimiser.lr": 0.2,
    "run.seed": 7,
    "train.cohort": 0.9,
    "train.batch_size": 4,
    "method.alpha": 0.25,
    "data.takes": 5,
    "method.name": "fedavg",
}


def edit(run_dir: Path, key: str, value: object) -> None:
    """Edit a setting in config.yaml."""
    path = run_dir / "config.yaml"
    values = parse_yaml(path.read_text(), "")
    if key == "method.name":
        values["method"] = {"name": value}
        values["models"] = {"model": values["models"]["plugin"]}
    path.write_text(to_yaml(apply_overrides(values, [f"{key}={value}"]), flow=False))


@pytest.mark.parametrize("key", EDITS)
def test_settings_with_effect_on_results_cannot_be_edited_in_a_run(raydfl: Raydfl, run_dir: Path, key: str) -> None:
    edit(run_dir, "train.rounds", 3)
    edit(run_dir, key, EDITS[key])
    edited = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    messages = [
        "config.yaml was changed since the run began",
        f"{key}: .* there, {EDITS[key]!r} here",
        "Restore them",
    ]
    raydfl("resume", run_dir).refuses(*messages)
    assert edited == {path: path.read_bytes() for path in edited}
    if key == "train.optimiser.lr":
        raydfl("replay", run_dir, "--round", 1, "--client", "s0").refuses(*messages)
        raydfl("predict", run_dir, run_dir).refuses(*messages)
        raydfl("export", run_dir).refuses(*messages)
        output = raydfl("report", run_dir)
        assert output.code == 0
        assert "warning" in output.err
        assert "config.yaml was changed since the run began" in output.err
        assert "config.yaml was changed since the run began" in (run_dir / "report.html").read_text()


def test_the_report_distinguishes_added_settings_from_explicit_defaults(
    raydfl: Raydfl, tiny: Callable[..., Config], tmp_path: Path
) -> None:
    run_dir = run(tiny("train.rounds=1", method="fedprox")).run_dir
    assert raydfl("run", write_config(tiny("train.rounds=1", "method.mu=0.01", method="fedprox"), tmp_path)).code == 0
    assert raydfl("report", run_dir).err == "", "it is the default"
    edit(run_dir, "method.mu", 5.0)
    raydfl("resume", run_dir).refuses("method.mu: None there, 5.0 here")
    assert "method.mu: None there, 5.0 here" in raydfl("report", run_dir).err
    assert "method.mu: None there, 5.0 here" in (run_dir / "report.html").read_text()


def test_other_settings_may_be_edited_in_a_run(raydfl: Raydfl, check_reference: Undisturbed, run_dir: Path) -> None:
    for key, value in {"train.rounds": 3, "evaluate.every": 3, "run.keep": 1}.items():
        edit(run_dir, key, value)
    assert raydfl("resume", run_dir).code == 0
    assert_same_bits(check_reference(3), read_tensors(run_dir))
    assert "was changed since the run began" not in (run_dir / "report.html").read_text()


def test_a_run_of_an_earlier_version_resumes(raydfl: Raydfl, check_reference: Undisturbed, run_dir: Path) -> None:
    """Such a run lacks a copy of its settings, has an older digest, and has an unquoted 08 in config.yaml."""
    config = (run_dir / "config.yaml").read_text()
    assert "experiment: raydfl" in config
    (run_dir / "config.yaml").write_text(config.replace("experiment: raydfl", "experiment: 08"))
    about = json.loads((run_dir / "run.json").read_text())
    del about["config"]
    (run_dir / "run.json").write_text(json.dumps(about))
    output = raydfl("resume", run_dir, "train.rounds=3")
    assert (output.code, "warning" in output.out) == (0, False)
    (run_dir / "run.json").write_text(json.dumps({**about, "raydfl": "0.0.1", "digest": "0" * 16}))
    raydfl("resume", run_dir, "train.optimiser.lr=0.2").refuses("train.optimiser.lr: 0.1 there, 0.2 here")
    output = raydfl("resume", run_dir, "train.rounds=4")
    assert output.code == 0
    assert (
        "started by an earlier version of raydfl, 0.0.1, so changes of its config.yaml cannot be detected" in output.out
    )
    assert_same_bits(check_reference(4), read_tensors(run_dir))
    assert parse_yaml((run_dir / "config.yaml").read_text(), "")["track"]["experiment"] == "08"


def test_a_rejected_run_leaves_no_files(raydfl: Raydfl, tiny: Tiny, tmp_path: Path, no_ray_session: None) -> None:
    file, folder = write_config(tiny("ray.actors=1"), tmp_path), tmp_path / "runs"
    for override in ("ray.address=127.0.0.1:1", "train.cohort=7"):
        raydfl("run", file, override).refuses("cannot reach the Ray cluster|cohort")
        assert not folder.exists()
    (folder / "tiny").mkdir(parents=True)
    (folder / "tiny" / "notes").write_text("mine")
    raydfl("run", file, "ray.address=127.0.0.1:1").refuses("cannot reach the Ray cluster")
    assert (folder / "tiny" / "notes").read_text() == "mine"
    assert [path.name for path in folder.iterdir()] == ["tiny"]
    assert raydfl("run", file, "ray.actors=0", "train.rounds=1").code == 0


@pytest.mark.parametrize("command", ["resume", "report", "replay"])
def test_a_folder_without_a_run_is_reported(raydfl: Raydfl, tmp_path: Path, command: str) -> None:
    more = ["--round", "1", "--client", "a"] if command == "replay" else []
    raydfl(command, tmp_path / "gone", *more).refuses(r"there is no run directory .*gone")
    (tmp_path / "empty").mkdir()
    raydfl(command, tmp_path / "empty", *more).refuses(r"empty is not a run directory")
    (tmp_path / "file").touch()
    raydfl(command, tmp_path / "file", *more).refuses(r"there is no run directory .*file")
    assert not list((tmp_path / "empty").iterdir())


def test_a_comparison_with_a_folder_without_a_run_is_rejected(raydfl: Raydfl, run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    raydfl("report", run_dir, tmp_path / "empty", "--out", tmp_path / "x.html").refuses("empty is not a run directory")
    raydfl("report", run_dir, "--out", "/dev/null/x.html").refuses(
        "the report cannot be written to /dev/null", "choose another file"
    )


# -- replay ----------------------------------------------------------------------------------------------------------


def test_impossible_replays_are_rejected(raydfl: Raydfl, tiny: Tiny) -> None:
    run_dir = run(tiny("train.rounds=4", "run.keep=2", "train.cohort=1")).run_dir
    early = raydfl("replay", run_dir, "--round", 1, "--client", "s0")
    early.refuses(
        "round 1 .* cannot be replayed: the commit before it is no longer kept[.] Choose round 4 or later",
        "set `run.keep`",
    )
    late = raydfl("replay", run_dir, "--round", 6, "--client", "s0")
    late.refuses("round 6 of .* cannot be replayed: the last commit is of round 4")
    nobody = raydfl("replay", run_dir, "--round", 4, "--client", "nobody")
    nobody.refuses("client 'nobody' is not in the cohort of round 4[.] Choose one of 's[0-5]'")


def test_an_unwritable_run_folder_is_reported(raydfl: Raydfl, tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = write_config(tiny(), tmp_path)
    raydfl("run", file, f"run.dir={tmp_path}/file").refuses(
        "cannot create the run directory .*file/tiny: Not a directory"
    )
    raydfl("run", file, f"data.cache={tmp_path}/file/cache").refuses(
        "the features .*cannot be written to .*file/cache: Not a directory; .*choose another folder with data.cache"
    )
    raydfl("run", file, f"run.name={'n' * 300}").refuses(r"run.name.*at most 240 bytes \(this has 300\)")
    raydfl("run", file, 'run.name="a\\nb"').refuses("run.name.*no control characters")
    raydfl("run", file, "run.dir=/proc/x").refuses("cannot create the run directory /proc/x/tiny")


def test_json_of_a_run_may_contain_entries_of_later_versions(raydfl: Raydfl, run_dir: Path) -> None:
    about = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**about, "more": 1}))
    assert raydfl("resume", run_dir).code == 0


@pytest.mark.parametrize("command", ["resume", "predict", "explain", "report"])
def test_a_population_with_offsets_outside_the_file_is_rejected(raydfl: Raydfl, run_dir: Path, command: str) -> None:
    """Its digests match, so only a check of all values finds them. Without it, Arrow reads outside the file."""
    path = run_dir / "population" / "clients.arrow"
    table = map_table(path)
    offsets = np.full(table.num_rows + 1, 1 << 40, np.int64)
    offsets[[0, -1]] = 0, 1  # the writer checks these
    bad = pa.LargeStringArray.from_buffers(table.num_rows, pa.py_buffer(offsets), pa.py_buffer(b"x"))
    write_table(table.set_column(table.schema.get_field_index("client"), "client", bad), path)
    facts = run_dir / "population" / "population.json"
    stored = json.loads(facts.read_text())
    described = json.loads(stored["facts"])
    described["files"]["clients.arrow"] = [path.stat().st_size, file_digest(path)]
    text = json.dumps(described)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    facts.write_text(json.dumps({"facts": text, "digest": digest}))
    arguments = [run_dir / "population"] if command == "predict" else []
    raydfl(command, run_dir, *arguments).refuses(
        r"clients\.arrow: is missing or damaged: .*offset", "Restore it from a copy"
    )
