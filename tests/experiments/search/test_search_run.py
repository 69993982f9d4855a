"""Whole searches with Ray Tune: interrupted and not, with failures, without room, in MLflow, with client actors and populations."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from studies import StudyFile

from raydfl.cli.experiments import do_search
from raydfl.core.errors import ResourcesError, RunDirectoryError
from raydfl.engine.config import Config
from raydfl.engine.storage.folder import stored_config
from raydfl.experiments.search.journal import Journal
from raydfl.experiments.search.plan import Search, load_search, trial_name
from raydfl.experiments.search.run import opened, run_search
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, read_tensors, train_federation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("ray_session")]


def _events(search: Search) -> list[dict[str, Any]]:
    return Journal(search.output("journal.jsonl")).events


@pytest.fixture
def interrupting() -> Iterator[Any]:
    """Ctrl-C once the journal has so many lines."""
    over = threading.Event()

    def begin(search: Search, lines: int) -> None:
        def watch() -> None:
            path = search.output("journal.jsonl")
            while not over.is_set():
                if path.exists() and path.read_text().count("\n") >= lines:
                    os.kill(os.getpid(), signal.SIGINT)
                    return
                time.sleep(0.005)

        threading.Thread(target=watch, daemon=True).start()

    yield begin
    over.set()


def test_an_interrupted_search_ends_as_an_undisturbed_one(
    search_file: StudyFile, tmp_path: Path, interrupting: Any
) -> None:
    """The same trials, scores and decisions, line by line, and the same bits in every trial."""
    asha = {"scheduler": {"name": "asha", "grace": 1, "factor": 2}, "samples": 4, "rounds": 6}
    undisturbed = load_search(search_file("a", **asha, dir=str(tmp_path / "a")))
    assert run_search(undisturbed).complete
    search = load_search(search_file("b", **asha, dir=str(tmp_path / "b")))
    interrupting(search, 3)
    outcome = run_search(search)
    assert not outcome.complete
    assert outcome.open >= 3
    stand = len(_events(search))
    assert run_search(search).complete
    assert stand < len(_events(search))
    assert _events(search) == _events(undisturbed)
    assert any(event.get("decision") == "STOP" for event in _events(search))
    for number in range(4):
        name = f"trial-{number:03d}"
        assert_same_bits(read_tensors(tmp_path / "b" / name), read_tensors(tmp_path / "a" / name))
    assert not list((tmp_path / "b").glob(".tune*"))
    # nothing is left to do: nothing is started
    assert run_search(search).complete
    assert _events(search) == _events(undisturbed)


def test_failures_do_not_stop_the_others_and_are_tried_again(
    search_file: StudyFile, capsys: pytest.CaptureFixture[str]
) -> None:
    space = {"method.mu": {"grid": [0.1, 0.2]}}
    search = load_search(search_file(searcher="grid", samples=None, space=space, parallel=2))
    folder = search.folder / "trial-000"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{")  # no run directory any more
    results = run_search(search)
    assert [record.number for record in results.records if record.status == "finished"] == [1]
    assert "run.json is missing or damaged" in results.failed["trial-000"]
    assert (search.folder / "logs" / "trial-000.log").exists()
    (folder / "run.json").unlink()
    with Progress("quiet") as progress:
        assert do_search(search, progress) == 0
    assert Journal(search.output("journal.jsonl")).trials[0].status == "finished"


def test_a_trial_that_cannot_fit_is_refused(search_file: StudyFile) -> None:
    search = load_search(search_file(), ["ray.actors=5", "ray.cpus=1"])
    with pytest.raises(
        ResourcesError, match=r"a trial needs 6 CPU \(its own process and 5 client actors\), .* has 4 CPU"
    ):
        run_search(search)
    assert _events(search) == []


def test_what_others_hold_is_waited_for_and_then_said(search_file: StudyFile) -> None:
    import ray

    held = ray.util.placement_group([{"CPU": 4}])
    try:
        ray.get(held.ready(), timeout=60)
        search = load_search(search_file(samples=1), ["ray.ready_timeout=3"])
        with pytest.raises(
            ResourcesError, match=r"no trial could begin within 3 s .* free are 0 CPU and 1 GPU; wait until"
        ):
            run_search(search)
    finally:
        ray.util.remove_placement_group(held)
    assert run_search(search).complete  # the same command goes on


def test_client_actors_live_in_the_trials_placement_group(search_file: StudyFile, tiny: Any) -> None:
    """Two trials at a time fill the cluster, to the bits of trials without actors."""
    search = load_search(search_file(samples=2, parallel=2, rounds=2), ["ray.actors=1", "ray.cpus=1"])
    assert run_search(search).complete
    for number in range(2):
        config: Config = search.trial(number, search.drawn(number)).config
        alone = config.model_copy(
            update={
                "ray": config.ray.model_copy(update={"actors": 0}),
                "run": config.run.model_copy(update={"name": f"alone-{number}"}),
            }
        )
        assert_same_bits(read_tensors(search.folder / f"trial-{number:03d}"), train_federation(alone))


def test_a_search_and_its_trials_are_nested_in_mlflow(search_file: StudyFile, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    asha = {"scheduler": {"name": "asha", "grace": 1, "factor": 2}}
    search = load_search(search_file(**asha, samples=3, parallel=3), ["track.mlflow=true"])
    with Progress("quiet") as progress:
        assert do_search(search, progress) == 0
        assert do_search(load_search(search_file(**asha, samples=4), ["track.mlflow=true"]), progress) == 0
    ids = json.loads(search.output("mlflow.json").read_text())
    client = MlflowClient(f"sqlite:///{search.folder}/mlflow.db")
    found = client.search_runs([client.get_experiment_by_name("raydfl").experiment_id])
    assert len(found) == 5
    below = {run.info.run_name: run for run in found if run.data.tags.get("mlflow.parentRunId") == ids["search"]}
    assert sorted(below) == [f"trial-{number:03d}" for number in range(4)]
    for name, record in ((f"trial-{n:03d}", r) for n, r in Journal(search.output("journal.jsonl")).trials.items()):
        run = below[name]
        assert run.info.status == {"finished": "FINISHED", "stopped": "KILLED"}[record.status]
        assert float(run.data.params["method.mu"]) == record.values["method.mu"]
        history = client.get_metric_history(run.info.run_id, "validation/model/loss_client_mean")
        history = history or client.get_metric_history(run.info.run_id, "validation/model/loss")
        assert [(item.step, item.value) for item in history] == list(zip(record.rounds, record.scores, strict=True))
    assert {item.path for item in client.list_artifacts(ids["search"])} >= {"search.html", "trials.csv", "best.yaml"}


def test_a_population_is_its_schedule(search_file: StudyFile, tmp_path: Path, interrupting: Any) -> None:
    """Interrupted or not, whatever the number of trials at a time; and a copy is what goes on by hand from its parent's commit."""
    pbt = {"scheduler": {"name": "pbt", "interval": 2}, "samples": 3, "rounds": 4}
    undisturbed = load_search(search_file("a", **pbt, dir=str(tmp_path / "a"), parallel=3))
    assert run_search(undisturbed).complete
    search = load_search(search_file("b", **pbt, dir=str(tmp_path / "b")))
    interrupting(search, 7)
    assert not run_search(search).complete
    assert run_search(search).complete
    a, b = (Journal(each.output("journal.jsonl")).trials for each in (undisturbed, search))
    assert {n: (r.values, r.parent, r.rounds, r.scores) for n, r in a.items()} == {
        n: (r.values, r.parent, r.rounds, r.scores) for n, r in b.items()
    }
    assert sorted(a) == list(range(6))
    for number in range(6):
        name = f"trial-{number:03d}"
        assert_same_bits(read_tensors(tmp_path / "b" / name), read_tensors(tmp_path / "a" / name))
    changed = [r for n, r in a.items() if r.parent is not None and r.values != a[r.parent].values]
    assert len(changed) == 1
    before = json.loads((tmp_path / "a" / f"trial-{changed[0].number:03d}" / "run.json").read_text())["branches"]
    assert [each["round"] for each in before] == [2]


def test_two_processes_cannot_do_one_search(search_file: StudyFile) -> None:
    search = load_search(search_file())
    with opened(search), pytest.raises(RunDirectoryError, match="is in use by process"), opened(search):
        pass


def test_trials_with_data_at_sites_end_as_they_do_alone(search_file: StudyFile, tmp_path: Path) -> None:
    sites = [f"data.sites={{north: {{speakers: 3, folder: {tmp_path}/n}}, south: {{first: 9, folder: {tmp_path}/s}}}}"]
    search = load_search(search_file(samples=2, rounds=2), sites)
    results = run_search(search, Progress("quiet"))
    assert results.complete
    for number in range(2):
        folder = search.folder / trial_name(number)
        config = stored_config(folder)
        alone = train_federation(config.model_copy(update={"run": config.run.model_copy(update={"name": "alone"})}))
        assert_same_bits(alone, read_tensors(folder))
        shutil.rmtree(search.folder / "alone")
