"""Data at sites: preparation at each site, content of the run's folder, and resuming."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers import differ
from sklearn.metrics import average_precision_score

from raydfl.cluster.site_reports import SiteReport, join_sites
from raydfl.cluster.sites import place_folder
from raydfl.core.errors import ConfigError, DataError, ResourcesError, RunDirectoryError
from raydfl.core.settings import FIRST_VIEW
from raydfl.data.part import StoredView
from raydfl.data.population import Population
from raydfl.data.shards import Shard
from raydfl.engine.config import Config, make_config
from raydfl.engine.listeners import Compaction
from raydfl.engine.rounds import Checkpoint
from raydfl.engine.storage.folder import read_config
from raydfl.engine.storage.private import SharedPrivateStore
from raydfl.engine.storage.record import read_rows
from raydfl.experiments import prepare
from raydfl.runs import _run as runs
from raydfl.runs import folder as rundir
from raydfl.runs._replay import replay
from raydfl.runs.folder import create
from raydfl.runs.inference import load_model
from raydfl.runs.progress import Progress
from raydfl.runs.report.data import read_run
from raydfl.testing import assert_same_bits, read_tensors, start_server

Silos = Callable[..., Config]


def get_folder(config: Config) -> Path:
    return Path(config.run.dir) / str(config.run.name)


def load_site(config: Config, site: str) -> Path:
    return place_folder(config, get_folder(config), site)


def load_population(config: Config) -> dict[str, bytes]:
    return read_tensors(get_folder(config), *(load_site(config, site) / "private" for site in config.data.sites))


def list_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- public facts ----------------------------------------------------------------------------------------------------


def test_a_population_from_reports_has_only_their_clients() -> None:
    north = SiteReport("north", (3, 5), 16, 40, {"test": [(0, 7)], "triggered": []}, 2, ("a",))
    south = SiteReport("south", (4,), 16, 40, {"test": [], "triggered": []}, 0, ("b",))
    population = Population({"": join_sites([north, south], ["a", "b"])})
    assert list(population.ids) == ["north/0", "north/1", "south/0"]
    assert [population.num_examples(index) for index in range(3)] == [3, 5, 4]
    assert [population.place_of(index) for index in range(3)] == ["north", "north", "south"]
    assert population.shards == [Shard("test", 0, 7, "north")]
    assert population.views[FIRST_VIEW] == StoredView(40, (), 16)
    assert "2 clips cannot be read" in population.messages[0]
    assert "cannot" not in population.messages[1]


def test_sites_with_different_lengths_have_no_common_length() -> None:
    reports = [SiteReport(name, (3,), 16, length, {}, 0, ("a",)) for name, length in (("north", 40), ("south", 41))]
    assert join_sites(reports, ["a"]).views[FIRST_VIEW].length is None


def test_reports_of_sites_are_stored_verbatim(silos: Silos) -> None:
    config = silos()
    population = Population.load(create(config, Progress("quiet")) / "population")
    reported = json.loads((get_folder(config) / "sites.json").read_text())["parts"][""]
    assert reported["classes"] == ["tone0", "tone1", "tone2"]
    assert [site["site"] for site in reported["sites"]] == ["north", "south"]
    assert set(reported["sites"][0]) == {
        *("site", "examples", "bands", "length", "shards", "left_out", "trained", "views", "columns", "profile")
    }
    assert [site["trained"] for site in reported["sites"]] == [["tone0", "tone1", "tone2"], ["tone0", "tone1"]]
    examples = [count for site in reported["sites"] for count in site["examples"]]
    assert examples == [population.num_examples(index) for index in range(len(population))]


# -- site data -------------------------------------------------------------------------------------------------------


def test_label_indices_follow_the_classes_of_all_sites(silos: Silos) -> None:
    config = silos(south={"classes": 1})
    create(config, Progress("quiet"))
    own = Population.load(load_site(config, "south") / "population")
    assert own.classes == ("tone0", "tone1", "tone2")
    assert set(own.data(0).train.labels.tolist()) == {0}


def test_the_runs_folder_contains_no_site_data(silos: Silos) -> None:
    """Search every file of the run for features, private tensors and names of speakers and clips."""
    config = silos("train.rounds=2", "train.cohort=9")
    runs.run(config)
    secret: dict[str, bytes] = {}
    for site in config.data.sites:
        own = Population.load(load_site(config, site) / "population")
        for index in range(len(own)):
            examples = own.data(index).train
            frames = np.ascontiguousarray(own.stores[0].frames[int(examples.first_view.starts[0])])
            secret[f"{site} {index} features"] = frames.tobytes()
    names = [name for name in load_population(config) if name.startswith("client ") and "model:local" in name]
    assert len({name.split()[1] for name in names}) == 9  # all clients have private tensors
    secret.update({name: load_population(config)[name][:64] for name in names})
    speakers = {f"s{number}/c".encode() for number in (*range(5), *range(10, 14))}
    for path, content in list_files(get_folder(config)).items():
        assert not [name for name, value in secret.items() if value in content], path
        assert not [name for name in speakers if name in content], path
    at_sites = b"".join(
        content for site in config.data.sites for content in list_files(load_site(config, site)).values()
    )
    assert all(
        value in at_sites for name, value in secret.items() if "model:" in name
    )  # the search can find these bytes


# -- a run -----------------------------------------------------------------------------------------------------------


def test_training_and_evaluation_happen_at_all_sites(silos: Silos) -> None:
    config = silos("train.cohort=9", "evaluate.clients=all")
    outcome = runs.run(config)
    assert outcome.finished
    run = read_run(get_folder(config))
    tests = [len(Population.load(load_site(config, site) / "population").test) for site in config.data.sites]
    _, confusion = run.confusions["test", "plugin/confusion"]
    assert confusion.sum() == sum(tests)
    for site in config.data.sites:
        preserved = [load_site(config, site), *load_site(config, site).rglob("*")]
        assert {oct(path.stat().st_mode & 0o777) for path in preserved if path.is_dir()} == {"0o700"}
        assert {oct(path.stat().st_mode & 0o777) for path in preserved if path.is_file()} == {"0o600"}
        assert (config.data.sites[site].folder / "cache").stat().st_mode & 0o777 == 0o700


def test_private_state_is_private_with_any_umask(tiny: Silos) -> None:
    """Runs without sites, too. The umask 0 would give everybody access to new files."""
    before = os.umask(0)
    try:
        config = tiny("run.name=open", "train.cohort=4", method="fedper")
        runs.run(config)
    finally:
        os.umask(before)
    private = get_folder(config) / "private"
    files = [path for path in private.rglob("*") if path.is_file()]
    assert files
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert private.stat().st_mode & 0o777 == 0o700


def test_class_sets_are_indexed_alike_and_evaluated_at_their_sites(
    tiny: Silos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: scikit-learn's score per site, weighted by clips. Scores of clips stay at the site."""
    monkeypatch.setattr("raydfl.data.shards._SHARD", 3)  # several shards per site would change the score
    chords = {"north": ["low", "high|middle", "|"], "south": ["middle|low", "high", "low"]}
    sites = {name: {"folder": str(tmp_path / name), "chords": labels} for name, labels in chords.items()}
    config = tiny(
        f"data.sites={json.dumps(sites)}",
        f"data.name={Path(__file__).parents[2]}/objectives/machines.py:Chords",
        "data.label_sets={}",
        "objective=multi_label",
        "train.rounds=1",
        "train.cohort=8",
    )
    runs.run(config)
    model, weighted, clips = load_model(get_folder(config)), 0.0, 0
    assert model.classes == ("high", "low", "middle")
    for site, stored in chords.items():
        own = Population.load(load_site(config, site) / "population")
        assert own.classes == model.classes
        batch = own.test.batch(np.arange(len(own.test)))
        expected = {tuple(name in label.split("|") for name in model.classes) for label in stored}
        assert {tuple(row) for row in batch.y.bool().tolist()} == expected
        true_labels, output = batch.y.numpy(), model.logits(batch.x, batch.lengths).sigmoid().numpy()
        weighted += len(batch.y) * average_precision_score(true_labels, output, average="macro")
        clips += len(batch.y)
    rows = [
        row
        for row in read_rows(get_folder(config)).to_pylist()
        if row["metric"] == "model/map" and row["split"] == "test"
    ]
    assert (rows[-1]["count"], rows[-1]["value"]) == (clips, pytest.approx(weighted / clips, abs=1e-6))
    assert all(row["array"] is None for row in rows)


def test_the_location_of_folders_does_not_change_results(silos: Silos) -> None:
    here, there = silos("run.name=here"), silos("run.name=there", folders="elsewhere")
    runs.run(here)
    runs.run(there)
    assert here.digest() == there.digest()
    assert_same_bits(load_population(here), load_population(there))


@pytest.mark.slow
def test_sites_may_use_the_same_folder(silos: Silos, tmp_path: Path) -> None:
    """Separate machines often use equal paths. Two sites on one machine keep their clients apart."""
    one = {"folder": str(tmp_path / "one")}
    apart, shared = (
        silos("run.name=apart", "train.cohort=9"),
        silos("run.name=shared", "train.cohort=9", north=one, south=one),
    )
    runs.run(apart)
    runs.run(shared)
    assert apart.digest() == shared.digest()
    assert_same_bits(load_population(apart), load_population(shared))


@pytest.mark.slow
def test_a_killed_start_leaves_nothing_at_the_sites(silos: Silos, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start succeeds, even with a changed configuration."""

    def raise_kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rundir, "write_new_run", raise_kill)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                create(silos(), Progress("quiet"))
    for config in (silos("train.batch_size=4"), silos()):
        create(config, Progress("quiet"))
        for site in config.data.sites.values():
            assert len(list((site.folder / "runs").iterdir())) == 1
    found = []
    for config in (silos(), silos("run.name=undisturbed")):
        runs.run(config)
        found.append(load_population(config))
    assert_same_bits(*found)


def test_the_order_of_sites_changes_results(silos: Silos) -> None:
    """The order of the sites determines the numbers of clients."""

    values = silos().model_dump(mode="json")
    values["data"]["sites"] = dict(reversed(values["data"]["sites"].items()))
    assert make_config(values).digest() != silos().digest()


def test_site_state_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file is durable only after its folder is synced."""
    synced: list[Path] = []
    monkeypatch.setattr("raydfl.engine.storage.private.sync", synced.append)
    store = SharedPrivateStore(tmp_path / "private")
    for round_index in (1, 1, 2):
        store.append(round_index, {"a": torch.zeros(1)})
    store.close()
    assert synced == [tmp_path / "private"] * 2  # once per segment


def test_a_sweep_leaves_the_recordings_to_the_sites(silos: Silos, tmp_path: Path) -> None:
    values = silos().model_dump(mode="json")
    preserved = {key: values["data"][key] for key in ("cache", "features")}
    site = {"root": str(tmp_path / "not here"), "folder": str(tmp_path / "north")}
    values["data"] = {"name": "folder", "sites": {"north": site}, **preserved}
    cell = SimpleNamespace(config=make_config(values), run_dir=tmp_path / "run", name="cell")
    prepare([cast(Any, cell)], Progress("quiet"))


def test_the_content_of_a_site_changes_results(silos: Silos) -> None:
    here, other = silos("run.name=here"), silos("run.name=other", south={"first": 11})
    runs.run(here)
    runs.run(other)
    assert here.digest() != other.digest()
    assert differ(load_population(here), load_population(other))


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_same_bits(silos: Silos) -> None:
    reference, stopped = silos("train.rounds=4", "run.name=whole"), silos("train.rounds=4", "run.name=stopped")
    runs.run(reference)
    server = start_server(stopped)
    server.round()
    server.round()
    server.close()
    orphan = load_site(stopped, "north") / "private" / "000003-north@00000000.seg"
    orphan.write_bytes(b"of a call whose result was lost")
    runs.resume(get_folder(stopped))
    assert_same_bits(load_population(reference), load_population(stopped))
    assert not orphan.exists()


@pytest.mark.slow
def test_superseded_private_state_is_removed_at_the_sites(silos: Silos) -> None:
    config = silos("train.rounds=8", "train.cohort=9", "run.keep=2")
    runs.run(config)
    for site in config.data.sites:
        segments = sorted(path.name for path in (load_site(config, site) / "private").glob("*.seg"))
        assert {int(name[:6]) for name in segments} <= {6, 7, 8}
    assert not list(get_folder(config).rglob("*.seg"))


@pytest.mark.slow  # tests/engine tests compaction without sites
def test_sparse_segments_are_compacted_at_their_sites(silos: Silos, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydfl.engine.storage.committer._SLACK", -(10**9))  # compacts all segments
    plain, moved = (
        silos("train.rounds=8", "train.cohort=6", "evaluate.every=99", f"run.name={name}")
        for name in ("plain", "moved")
    )
    compacted: list[int] = []
    compact = Compaction.before_commit

    def record_compaction(self: Compaction, before: Checkpoint) -> Checkpoint:
        after = compact(self, before)
        compacted.append(before is not after)
        return after

    monkeypatch.setattr(Compaction, "before_commit", record_compaction)
    runs.run(moved)
    assert any(compacted)
    monkeypatch.setattr(Compaction, "before_commit", lambda self, before: before)
    runs.run(plain)
    assert_same_bits(load_population(plain), load_population(moved))


def test_a_sites_client_is_replayed_at_its_site(silos: Silos) -> None:
    config = silos("train.rounds=3", "train.cohort=9")
    runs.run(config)
    before = list_files(load_site(config, "south"))
    replayed = replay(get_folder(config), 2, "south/1")
    assert replayed.update is not None
    assert replayed.client.id == "south/1"
    assert list_files(load_site(config, "south")) == before


# -- errors ---------------------------------------------------------------------------------------------------------


def test_a_site_with_a_missing_folder_is_reported(silos: Silos) -> None:
    config = silos()
    create(config, Progress("quiet"))
    key = get_folder(config) / "sites.key"
    preserved = key.read_text()
    key.write_text("../../x")
    with pytest.raises(
        RunDirectoryError, match=r"sites.key is missing or damaged \('../../x' is not the name of a file"
    ):
        runs.resume(get_folder(config))
    key.write_text(preserved)
    shutil.rmtree(config.data.sites["south"].folder)
    with pytest.raises(RunDirectoryError, match="site 'south'"):
        runs.resume(get_folder(config))


def test_unusable_recordings_are_reported(silos: Silos) -> None:
    with pytest.raises(DataError):
        create(silos(south={"speakers": 0}), Progress("quiet"))


def test_a_class_without_training_clips_is_reported(silos: Silos) -> None:
    """One site has nine takes of the last class, all in the test set."""
    only_tests = {"classes": 3, "test_takes": 8, "takes": 0, "speakers": 1}
    with pytest.raises(DataError, match="no client of any site has a training clip of label 'tone2'"):
        create(silos(north={"classes": 2}, south=only_tests), Progress("quiet"))
    preserved = create(
        silos("data.unseen=keep", "run.name=kept", north={"classes": 2}, south=only_tests), Progress("quiet")
    )
    assert "tone2" in Population.load(preserved / "population").classes


def test_paths_of_a_site_must_be_absolute(tiny: Silos) -> None:
    with pytest.raises(ConfigError, match=r"data\.sites\.north\.root: 'recordings' .*absolute path"):
        tiny("data={name: fsdd, sites: {north: {folder: /x, root: recordings}}}")


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        ("{north: {folder: relative}}", "absolute path"),
        ("{north: {speakers: 3}}", "folder"),
        ("{no@rth: {folder: /x}}", "letters, digits"),
        ("{..: {folder: /x}}", "do not start with"),
        ("{north: {folder: /x, speekers: 3}}", "Did you mean 'speakers'|speakers"),
        ("{north: {folder: /x, speakers: many}}", "speakers"),
    ],
)
def test_settings_of_sites_are_checked(tiny: Silos, sites: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(f"data.sites={sites}")


def test_configurations_without_sites_keep_their_digest(tiny: Silos) -> None:
    config = tiny()
    assert config.digest() == tiny("data.sites={}").digest()
    assert read_config(create(config, Progress("quiet"))).data.sites == {}


def test_a_site_without_a_node_is_reported(silos: Silos, ray_session: None) -> None:
    with pytest.raises(ResourcesError, match=r"no node of the cluster is site 'north'.*--resources"):
        runs.run(silos("ray.actors=1", "ray.cpus=0.5"))
