"""Sites combined with parts, columns, profiles, client tables, attacks and searches."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raydfl import Config, make_config, read_rows, resume, run
from raydfl.cluster.sites import place_folder
from raydfl.core.errors import ConfigError
from raydfl.data import Population, build_population
from raydfl.runs import Progress, create
from raydfl.testing import assert_same_bits, read_tensors

Silos = Callable[..., Config]
PARTS = "data.parts={low: {}, high: {classes: 3, first: 20}}"
SOUTH_ALONE = {"north": {"parts": {"low": {}}}}


def get_folder(config: Config) -> Path:
    return Path(config.run.dir) / str(config.run.name)


def open_sites(config: Config) -> tuple[Population, dict[str, Population]]:
    """Return a run's population at the server and at each site."""
    run_dir = get_folder(config)
    known = pickle.loads(pickle.dumps(Population.load(run_dir / "population")))  # the population of an actor at a site
    return known, {
        site: known.load_place(site, place_folder(config, run_dir, site) / "population") for site in config.data.sites
    }


def assert_has_clips(known: Population, at_site: Population, site: str, alone: Population, part: str = "") -> None:
    """Check a site's clients against a federation of the site's recordings alone."""
    ids = [f"{part}/{site}/{i}".lstrip("/") for i in range(len(alone))]
    assert [each for each in known.ids if site in each and each.startswith(part)] == ids
    for number, client in enumerate(ids):
        mine, theirs = at_site.data(known.index(client)), alone.data(number)
        assert known.num_examples(known.index(client)) == len(theirs.train)
        for one, other in ((mine.train, theirs.train), (mine.validation, theirs.validation)):
            assert (one.clips.tolist(), one.labels.tolist()) == (other.clips.tolist(), other.labels.tolist())


def test_columns_have_equal_indices_at_all_sites_and_profiles_are_known(silos: Silos) -> None:
    config = silos("data.columns=[group]", "data.profile={speaker: {column: group}}", "train.rounds=1", method="fedavg")
    run(config)
    known, at_sites = open_sites(config)
    speakers = [f"s{number}" for number in (*range(5), *range(10, 14))]
    assert known.columns["group"] == tuple(speakers)
    assert [known.profile(i)["speaker"] for i in range(9)] == speakers
    for i, speaker in enumerate(speakers):
        batch = at_sites[known.place_of(i)].data(i).train.batch(np.arange(3))
        assert {speakers[code] for code in batch.columns["group"].tolist()} == {speaker}


def test_a_site_may_have_a_client_table(silos: Silos, tmp_path: Path) -> None:
    table = tmp_path / "clients.csv"
    table.write_text("client,first,clips\nb,0,20\na,10,15\n")  # the tables share clips
    partition = {"partition": {"by": "table", "file": str(table)}}
    config = silos("data.split.validation=0", "train.rounds=2", "train.cohort=7", method="fedavg", south=partition)
    assert run(config).finished
    assert config.digest() != silos("data.split.validation=0", method="fedavg").digest()
    known, at_sites = open_sites(config)
    for site, at_site in at_sites.items():
        alone = build_population(config.data.select_site(site), config.run.seed, classes=known.classes)
        assert_has_clips(known, at_site, site, alone)
    assert len(known) == 7


def test_attackers_are_sampled_from_all_clients_and_poison_data_at_their_site(silos: Silos) -> None:
    attack = "attack={name: label_flip, clients: 0.5}"
    config = silos(attack, "train.rounds=1", "train.cohort=9", method="fedavg")
    run(config)
    rows = read_rows(get_folder(config)).to_pylist()
    recorded = {row["client"] for row in rows if row["metric"] == "attacker"}
    known, at_sites = open_sites(config)
    assert config.components.attack is not None
    attackers = config.components.attack.candidates(known.ids, config.run.seed)
    assert recorded == {known.ids[i] for i in np.flatnonzero(attackers)}
    assert {name[:5] for name in recorded} == {"north", "south"}
    for i in range(9):
        population = at_sites[known.place_of(i)]
        honest, used = (population.data(i, attacking).train.labels for attacking in (False, True))
        assert used.tolist() == ((honest + attackers[i]) % 3).tolist()


def test_the_success_of_a_backdoor_is_measured_at_all_sites(silos: Silos) -> None:
    config = silos("attack={name: backdoor, target: tone0, clients: 0.4}", "train.rounds=1", method="fedavg")
    outcome = run(config)
    rows = read_rows(outcome.run_dir).to_pylist()
    (success,) = [row for row in rows if row["split"] == "triggered" and row["metric"].endswith("attack_success")]
    _, at_sites = open_sites(config)
    assert success["count"] == sum(len(population.triggered) for population in at_sites.values()) > 0


@pytest.mark.slow
def test_parts_of_some_sites_resume_to_the_same_bits(silos: Silos) -> None:
    settings = (PARTS, "train.cohort=1.0", "train.rounds=2")
    whole = silos(*settings, "run.name=whole", **SOUTH_ALONE)
    outcome = run(whole)
    assert {"test low:plugin/accuracy", "test high:plugin/accuracy"} <= set(outcome.scores)
    known, at_sites = open_sites(whole)
    assert known.places == ("north", "south")
    for part, data in whole.data.each.items():
        classes = known.parts[part].classes
        for site in data.sites:
            alone = build_population(data.select_site(site), whole.run.seed, classes=classes)
            assert_has_clips(known, at_sites[site], site, alone, part)
    assert [*whole.data.each["high"].sites] == ["south"]
    stopped = silos(*settings, "run.name=stopped", "train.rounds=1", **SOUTH_ALONE)
    resume(run(stopped).run_dir, ["train.rounds=2"])
    found = [
        read_tensors(get_folder(config), *(place_folder(config, get_folder(config), s) / "private" for s in at_sites))
        for config in (whole, stopped)
    ]
    assert_same_bits(*found)


def test_the_digest_covers_only_options_of_sites_and_parts(silos: Silos) -> None:
    digests = {
        name: silos(PARTS, **options).digest()
        for name, options in {
            "all": {},
            "moved": {"folders": "elsewhere"},
            "named": {"north": {"parts": {"low": {}, "high": {}}}},
            "fewer": SOUTH_ALONE,
            "other": {"north": {"parts": {"low": {"takes": 2}, "high": {}}}},
        }.items()
    }
    assert digests["all"] == digests["moved"] == digests["named"]
    assert len(set(digests.values())) == 3
    config = silos(PARTS)
    assert make_config(config.model_dump(mode="json")).digest() == config.digest()


@pytest.mark.parametrize(
    ("overrides", "north", "message"),
    [
        ([PARTS], {"parts": {"hihg": {}}}, r"data\.sites\.north\.parts: unknown part 'hihg'.* Did you mean 'high'"),
        ([], {"parts": {"low": {}}}, r"data\.sites\.north\.parts: unknown part 'low', not in data.parts. Remove it"),
        ([PARTS], {"parts": {"high": {"speekers": 1}}}, r"data\.parts\.high: .*unknown key 'speekers'"),
        (
            ["data.parts={low: {}, high: {}}", "data.sites.south.parts={low: {}}"],
            {"parts": {"low": {}}},
            r"data\.parts\.high: no site has this part. Add it to data\.sites\.SITE\.parts",
        ),
        ([], {"partition": {"by": "table", "file": "t.csv"}}, r"data\.sites\.north\.partition\.file: .*absolute path"),
    ],
)
def test_inconsistent_sites_and_parts_are_rejected(
    silos: Silos, overrides: list[str], north: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        silos(*overrides, north=north)


def test_a_class_without_training_clips_names_its_part(silos: Silos) -> None:
    tests_only = {"takes": 0, "test_takes": 9, "speakers": 1}
    both = {site: {"parts": {"low": {}, "high": tests_only}} for site in ("north", "south")}
    with pytest.raises(Exception, match=r"data\.parts\.high"):
        create(silos(PARTS, **both), Progress("quiet"))


def test_the_report_of_a_site_contains_no_client_names(silos: Silos) -> None:
    config = silos(PARTS, **SOUTH_ALONE)
    create(config, Progress("quiet"))
    reported = json.loads((get_folder(config) / "sites.json").read_text())["parts"]
    assert [site["site"] for site in reported["low"]["sites"]] == ["north", "south"]
    assert [site["site"] for site in reported["high"]["sites"]] == ["south"]
    assert "s20" not in json.dumps(reported)
