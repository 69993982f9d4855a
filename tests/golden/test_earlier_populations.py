"""Populations of formats 1 and 2, written by earlier versions for golden cases, equal the tables built today."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from golden_cases import Case, cases
from golden_record import configure

from raydfl.core.errors import RunDirectoryError
from raydfl.data import Population, build_population, upgrade_population
from raydfl.testing import describe_population

RECORDED = Path(__file__).parent / "version1"
FOLDERS = [*RECORDED.iterdir(), *RECORDED.with_name("version2").iterdir()]


def copy_recorded(recorded: Path, folder: Path, cache: Path) -> None:
    """Copy a recorded population, with its features in the test's cache."""
    shutil.copytree(recorded, folder)
    for file in folder.rglob("population.safetensors"):
        with safetensors.safe_open(file, "np") as tensors:
            facts = tensors.metadata()["raydfl"].replace("CACHE", str(cache))
        safetensors.numpy.save_file(safetensors.numpy.load_file(file), file, {"raydfl": facts})
    for file in folder.rglob("population.json"):
        facts = file.read_text().replace("CACHE", str(cache))
        digest = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
        file.write_text(json.dumps({"facts": facts, "digest": digest}))


@pytest.mark.parametrize("recorded", sorted(FOLDERS), ids=lambda path: f"{path.parent.name} {path.name}")
def test_a_population_of_an_earlier_format_is_upgraded_to_tables(
    recorded: Path, tmp_path: Path, feature_cache: Path
) -> None:
    name = recorded.name.replace("-", " ")
    config = configure(name, cases()[name], tmp_path, feature_cache)
    attack = config.components.attack
    population = build_population(config.data, config.run.seed, attack=attack, labels_needed=config.labels_needed)
    expected, folder = describe_population(population, attack is not None), tmp_path / "population"
    copy_recorded(recorded, folder, feature_cache)
    for _ in range(3):
        assert population.is_saved_in(folder)
        loaded = Population.load(folder, verify=True, verify_features=True)
        assert describe_population(loaded, attack is not None) == expected
        stored_statistics, computed_statistics = loaded.statistics(1), population.statistics(1)
        assert (stored_statistics is None) == (computed_statistics is None)
        if (
            stored_statistics is not None
        ):  # Recorded with PyTorch 2.11: the last digits of features differ between kernels.
            np.testing.assert_allclose(stored_statistics, computed_statistics, rtol=1e-4)
        upgrade_population(folder)
        assert not list(folder.rglob("population.safetensors"))
        population.save(folder, again=True)  # as after rebuilding the features


@pytest.mark.parametrize("typed", [True, False])
def test_clients_with_shared_clips_keep_the_profiles_of_the_run(
    typed: bool, tmp_path: Path, feature_cache: Path
) -> None:
    """The first versions read all columns of a table as text."""
    table, folder = tmp_path / "clients.csv", tmp_path / "population"
    table.write_text("client,first,clips,power\nb,0,9,3\na,4,9,12\nc,20,10,-1\n")
    partition = f"data.partition={{by: table, file: {table}}}"
    settings = (partition, "data.profile={power: {column: power}}", "data.split.validation=0", "data.unseen=keep")
    config = configure("table", Case(overrides=settings), tmp_path, feature_cache)
    population = build_population(config.data, config.run.seed)
    copy_recorded(RECORDED.with_name("version1-table"), folder, feature_cache)
    if not typed:
        file = folder / "population.safetensors"
        with safetensors.safe_open(file, "np") as tensors:
            facts = json.loads(tensors.metadata()["raydfl"])
        assert facts.pop("profile_types") == {"power": "int"}
        safetensors.numpy.save_file(safetensors.numpy.load_file(file), file, {"raydfl": json.dumps(facts)})
    upgrade_population(folder)
    assert population.is_saved_in(folder)
    population.save(folder, again=True)
    loaded = Population.load(folder, verify=True)
    assert [loaded.profile(client)["power"] for client in range(3)] == ([3, 12, -1] if typed else ["3", "12", "-1"])
    if typed:
        assert describe_population(loaded, False) == describe_population(population, False)


def test_a_damaged_population_of_format_1_is_detected(tmp_path: Path) -> None:
    folder = tmp_path / "population"
    shutil.copytree(RECORDED / "data-unlabelled", folder)
    file = folder / "population.safetensors"
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunDirectoryError, match=r"the content of population.safetensors has changed.*start the run"):
        upgrade_population(folder)
    assert file.exists()
