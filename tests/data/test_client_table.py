from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest

from raydfl.core.errors import ConfigError, DataError, RunDirectoryError
from raydfl.data.build import build_population
from raydfl.data.population import Population
from raydfl.data.settings import DataSettings
from raydfl.engine.clients import _find_first

Make = Callable[..., DataSettings]


def written(path: Path, **columns: Any) -> Path:
    """A table of clients in a file of the kind that its name says."""
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path)
    elif path.suffix == ".csv":
        pa.csv.write_csv(table, path)
    elif path.suffix == ".feather":
        pa.feather.write_feather(table, path, chunksize=2)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    return path


def by_table(file: Path, **more: Any) -> dict[str, Any]:
    return {"partition": {"by": "table", "file": file, **more}}


GROUPS: dict[str, Any] = {
    "client": [f"g{group}" for group in range(6)],
    "first": [20 * group for group in range(6)],
    "clips": [20] * 6,
    "room": ["hall", "kitchen"] * 3,
    "power": [3, 1, 2, 2**62, 0, -1],
    "share": [0.1, 1.0, 1e-300, 2.5, -0.0, 7.0],
    "fast": [True, False, False, True, True, False],
}
"""The groups of the made-up tones, which are neighbours in their list."""


@pytest.mark.parametrize("kind", ["parquet", "arrow", "feather", "csv"])
def test_a_table_of_the_groups_gives_what_the_partition_by_group_gives(made: Make, tmp_path: Path, kind: str) -> None:
    expected = build_population(made(), 1)
    columns = ("room", "power", "share", "fast")
    profile = {name: {"column": name} for name in columns}
    settings = made(**by_table(written(tmp_path / f"clients.{kind}", **GROUPS)), profile=profile)
    build_population(settings, 1).save(tmp_path)
    population = Population.load(tmp_path, verify=True)
    assert list(population.ids) == list(expected.ids)
    assert population.sizes().tolist() == expected.sizes().tolist()
    np.testing.assert_array_equal(population.label_counts(), expected.label_counts())
    np.testing.assert_array_equal(population.class_counts(), expected.class_counts())
    for client in range(6):
        own, other = (each.data(client, attacking=False) for each in (population, expected))
        np.testing.assert_array_equal(own.train.clips, other.train.clips)
        np.testing.assert_array_equal(own.train.labels, other.train.labels)
        for batch, same in zip(own.train.batches(4, None), other.train.batches(4, None), strict=True):
            np.testing.assert_array_equal(batch.x, same.x)
        assert len(own.validation) == len(own.test) == 0
        known = {"noisy": False, "label_errors": False, **{name: GROUPS[name][client] for name in columns}}
        assert population.profile(client) == known
        assert {name: type(value) for name, value in population.profile(client).items()} == {
            name: type(value) for name, value in known.items()
        }


def test_ids_and_gaps_of_a_csv(made: Make, tmp_path: Path) -> None:
    file = tmp_path / "clients.csv"
    file.write_text("client;first;clips;room\n007;1;1;hall\n08;2;1;\n")
    assert list(build_population(made(**by_table(file), unseen="keep"), 1).ids) == ["007", "08"]
    with pytest.raises(DataError, match="row 2 of .* has no 'room'"):
        build_population(made(**by_table(file), unseen="keep", profile={"room": {"column": "room"}}), 1)


def test_clients_may_share_clips_and_leave_some_out(made: Make, tmp_path: Path) -> None:
    firsts, counts = [31, 0, 5, 31, 70], [9, 50, 10, 9, 3]
    file = written(tmp_path / "clients.arrow", first=firsts, clips=counts)
    segment = {"frames": 8, "stride": 4}
    settings = made(**by_table(file), segment=segment, features={"sample_rate": 8000, "bands": 16, "seconds": None})
    population = build_population(settings, 1)
    assert list(population.ids) == [f"client-{number}" for number in range(5)]
    rows = [
        [row for row in range(first, first + clips) if row % 5] for first, clips in zip(firsts, counts, strict=True)
    ]
    labels = np.zeros((5, 4), int)
    for client, own in enumerate(rows):
        data = population.data(client)
        assert sorted(set(data.train.clips.tolist())) == own  # take 0 of every five clips is in the test set
        assert len(data.train) > len(own) * 2  # segments
        assert population.num_examples(client) == len(data.train)
        np.add.at(labels[client], np.array(own) // 5 % 4, 1)
    np.testing.assert_array_equal(population.label_counts(), labels)
    np.testing.assert_array_equal(population.label_counts(clients=np.array([4, 1])), labels[[4, 1]])
    np.testing.assert_array_equal(population.class_counts(), labels.sum(axis=0))
    assert population.messages[0].startswith(f"{96 - len(set().union(*rows))} training clips belong to no client")


def test_statistics_are_the_groups_of_clients_with_one_group(made: Make, tmp_path: Path) -> None:
    file = written(tmp_path / "clients.parquet", first=[0, 15, 20], clips=[20, 10, 20])
    features = {"sample_rate": 8000, "bands": 16, "normalise": "group"}
    population = build_population(made(**by_table(file), features=features), 1)
    first, both, second, everybody = (population.statistics(client) for client in (0, 1, 2, None))
    assert first is not None
    assert second is not None
    np.testing.assert_array_equal(both, everybody)
    assert not np.array_equal(first, second)


def test_ids_in_any_order_are_found(made: Make, tmp_path: Path) -> None:
    ids = ["theo", "änne", "日本", "a", "theo2", "b"]
    file = written(tmp_path / "clients.arrow", client=ids, first=GROUPS["first"], clips=GROUPS["clips"])
    build_population(made(**by_table(file)), 1).save(tmp_path)
    found = Population.load(tmp_path).ids
    assert list(found) == ids
    assert [found.index(name) for name in ids] == list(range(6))
    assert [name in found for name in ("theo", "theo/11", "z", "")] == [True, False, False, False]
    with pytest.raises(ValueError, match="is not among 6 ids"):
        found.index("theo3")


def test_a_flipped_byte_in_an_id_is_damage(made: Make, tmp_path: Path) -> None:
    """Without ``verify`` the file is not read when the population is loaded."""
    build_population(made(), 1).save(tmp_path)
    file = tmp_path / "clients.arrow"
    file.write_bytes(file.read_bytes().replace(b"g0g1g2", b"g0\xff1g2"))
    population = Population.load(tmp_path)
    assert population.ids[0] == "g0"
    with pytest.raises(RunDirectoryError, match="the population is damaged: the id of client 1 is not text"):
        list(population.ids)


def test_ids_may_be_numbers_or_absent(made: Make, tmp_path: Path) -> None:
    columns = {"first": [0] * 11, "clips": [5] * 11}
    for more, ids in (
        ({"client": [*range(30, 19, -1)]}, [str(number) for number in range(30, 19, -1)]),
        ({}, [f"client-{number:02d}" for number in range(11)]),
    ):
        found = build_population(
            made(**by_table(written(tmp_path / "x.parquet", **columns, **more)), unseen="keep"), 1
        ).ids
        assert list(found) == ids
        assert [found.index(name) for name in ids] == list(range(11))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"first": [0]}, "no single column 'clips'"),
        (
            {"first": [0, 115], "clips": [5, 6]},
            "row 2 of .* has first 115 and clips 6, .* the rows 0 to 119; rows to correct: 1",
        ),
        ({"first": [-1], "clips": [5]}, "row 1 of .* has first -1"),
        ({"first": [0], "clips": [0]}, "clips must be at least 1"),
        ({"first": [1], "clips": [2**63 - 1]}, "clips must be at least 1"),
        ({"first": [0, None], "clips": [1, 1]}, "row 2 of .* has no 'first'"),
        ({"first": [0.0], "clips": [1]}, "'first' of .* has the type double; write integers"),
        ({"first": [0], "clips": [1]}, "1 of 1 clients have fewer than data.partition.minimum 1 clips to train on"),
        ({"first": [1, 2], "clips": [1, 1], "client": ["a", "a"]}, "several rows of .* have the client 'a'"),
        ({"first": [1, 2], "clips": [1, 1], "client": ["a", ""]}, "the id in row 2 of .* is empty"),
        ({"first": [1], "clips": [1], "client": [0.5]}, "write strings or integers"),
        ({"first": pa.array([], pa.int64()), "clips": pa.array([], pa.int64())}, "has no rows"),
    ],
)
def test_a_table_that_cannot_be_used_is_named(made: Make, tmp_path: Path, columns: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_population(made(**by_table(written(tmp_path / "clients.arrow", **columns))), 1)


def test_a_file_that_is_no_table_is_named(made: Make, tmp_path: Path) -> None:
    for name, message in (
        ("x.txt", "ends in .parquet"),
        ("x.arrow", "cannot be read"),
        ("x.parquet", "cannot be read"),
    ):
        (tmp_path / name).write_text("first,clips\n0,1\n")
        with pytest.raises(DataError, match=message):
            build_population(made(**by_table(tmp_path / name)), 1)
    settings = made(**by_table(written(tmp_path / "y.arrow", **GROUPS)), profile={"room": {"column": "rooms"}})
    with pytest.raises(DataError, match=r"no single column 'rooms'.*room"):
        build_population(settings, 1)


@pytest.mark.parametrize(
    "more",
    [
        {"split": {"validation": 0.1}},
        {"corrupt": {"labels": {"rate": 0.1}}},
        {"features": {"sample_rate": 8000, "bands": 16, "normalise": "client"}},
        {"unlabelled": {"keep": 0.5}},
        {
            "views": {"seen": {"column": "recording", "features": {"kind": "image", "size": 4}}},
            "missing": {"seen": 0.5},
        },
    ],
)
def test_what_needs_clips_of_ones_own_is_refused(made: Make, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs a single owner of each clip"):
        made(partition={"by": "table", "file": "x.arrow"}, **more)


def test_first_of_each_kind_as_numpy_finds_them() -> None:
    rng = np.random.default_rng(1)
    columns = [
        rng.integers(-1, 3, 500).astype(np.int8),
        rng.integers(0, 2, 500),
        rng.integers(5, 9, 500).astype(np.int32),
    ]
    _, first = np.unique(np.stack(columns, axis=1), axis=0, return_index=True)
    assert _find_first(columns) == sorted(first.tolist())
