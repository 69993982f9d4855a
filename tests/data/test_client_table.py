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


def write_clients(path: Path, **columns: Any) -> Path:
    """Write a client table in the format of the file's suffix."""
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


def use_table(file: Path, **options: Any) -> dict[str, Any]:
    return {"partition": {"by": "table", "file": file, **options}}


GROUPS: dict[str, Any] = {
    "client": [f"g{group}" for group in range(6)],
    "first": [20 * group for group in range(6)],
    "clips": [20] * 6,
    "room": ["hall", "kitchen"] * 3,
    "power": [3, 1, 2, 2**62, 0, -1],
    "share": [0.1, 1.0, 1e-300, 2.5, -0.0, 7.0],
    "fast": [True, False, False, True, True, False],
}
"""The groups of the synthetic tones. Clips of a group are consecutive in the list."""


@pytest.mark.parametrize("kind", ["parquet", "arrow", "feather", "csv"])
def test_a_table_of_the_groups_matches_the_partition_by_group(make_data: Make, tmp_path: Path, kind: str) -> None:
    expected = build_population(make_data(), 1)
    columns = ("room", "power", "share", "fast")
    profile = {name: {"column": name} for name in columns}
    settings = make_data(**use_table(write_clients(tmp_path / f"clients.{kind}", **GROUPS)), profile=profile)
    build_population(settings, 1).save(tmp_path)
    population = Population.load(tmp_path, verify=True)
    assert list(population.ids) == list(expected.ids)
    assert population.sizes().tolist() == expected.sizes().tolist()
    np.testing.assert_array_equal(population.label_counts(), expected.label_counts())
    np.testing.assert_array_equal(population.class_counts(), expected.class_counts())
    for client in range(6):
        actual, reference = (source.data(client, attacking=False) for source in (population, expected))
        np.testing.assert_array_equal(actual.train.clips, reference.train.clips)
        np.testing.assert_array_equal(actual.train.labels, reference.train.labels)
        for batch, reference_batch in zip(actual.train.batches(4, None), reference.train.batches(4, None), strict=True):
            np.testing.assert_array_equal(batch.x, reference_batch.x)
        assert len(actual.validation) == len(actual.test) == 0
        profile_of_client = {"noisy": False, "label_errors": False, **{name: GROUPS[name][client] for name in columns}}
        assert population.profile(client) == profile_of_client
        assert {name: type(value) for name, value in population.profile(client).items()} == {
            name: type(value) for name, value in profile_of_client.items()
        }


def test_csv_ids_are_strings_and_empty_cells_are_missing(make_data: Make, tmp_path: Path) -> None:
    file = tmp_path / "clients.csv"
    file.write_text("client;first;clips;room\n007;1;1;hall\n08;2;1;\n")
    assert list(build_population(make_data(**use_table(file), unseen="keep"), 1).ids) == ["007", "08"]
    with pytest.raises(DataError, match="row 2 of .* has no 'room'"):
        build_population(make_data(**use_table(file), unseen="keep", profile={"room": {"column": "room"}}), 1)


def test_clients_may_share_and_omit_clips(make_data: Make, tmp_path: Path) -> None:
    firsts, counts = [31, 0, 5, 31, 70], [9, 50, 10, 9, 3]
    file = write_clients(tmp_path / "clients.arrow", first=firsts, clips=counts)
    segment = {"frames": 8, "stride": 4}
    settings = make_data(
        **use_table(file), segment=segment, features={"sample_rate": 8000, "bands": 16, "seconds": None}
    )
    population = build_population(settings, 1)
    assert list(population.ids) == [f"client-{number}" for number in range(5)]
    rows = [
        [row for row in range(first, first + clips) if row % 5] for first, clips in zip(firsts, counts, strict=True)
    ]
    labels = np.zeros((5, 4), int)
    for client, clips in enumerate(rows):
        data = population.data(client)
        assert sorted(set(data.train.clips.tolist())) == clips  # take 0 of every five clips is in the test set
        assert len(data.train) > len(clips) * 2  # segments
        assert population.num_examples(client) == len(data.train)
        np.add.at(labels[client], np.array(clips) // 5 % 4, 1)
    np.testing.assert_array_equal(population.label_counts(), labels)
    np.testing.assert_array_equal(population.label_counts(clients=np.array([4, 1])), labels[[4, 1]])
    np.testing.assert_array_equal(population.class_counts(), labels.sum(axis=0))
    assert population.messages[0].startswith(f"{96 - len(set().union(*rows))} training clips belong to no client")


def test_clients_with_a_single_group_use_its_statistics(make_data: Make, tmp_path: Path) -> None:
    file = write_clients(tmp_path / "clients.parquet", first=[0, 15, 20], clips=[20, 10, 20])
    features = {"sample_rate": 8000, "bands": 16, "normalise": "group"}
    population = build_population(make_data(**use_table(file), features=features), 1)
    first, both, second, overall = (population.statistics(client) for client in (0, 1, 2, None))
    assert first is not None
    assert second is not None
    np.testing.assert_array_equal(both, overall)
    assert not np.array_equal(first, second)


def test_ids_in_any_order_are_found(make_data: Make, tmp_path: Path) -> None:
    ids = ["theo", "änne", "日本", "a", "theo2", "b"]
    file = write_clients(tmp_path / "clients.arrow", client=ids, first=GROUPS["first"], clips=GROUPS["clips"])
    build_population(make_data(**use_table(file)), 1).save(tmp_path)
    loaded = Population.load(tmp_path).ids
    assert list(loaded) == ids
    assert [loaded.index(name) for name in ids] == list(range(6))
    assert [name in loaded for name in ("theo", "theo/11", "z", "")] == [True, False, False, False]
    with pytest.raises(ValueError, match="is not among 6 ids"):
        loaded.index("theo3")


def test_a_flipped_byte_in_an_id_is_reported_as_damage(make_data: Make, tmp_path: Path) -> None:
    """Loading without ``verify`` does not read the file."""
    build_population(make_data(), 1).save(tmp_path)
    file = tmp_path / "clients.arrow"
    file.write_bytes(file.read_bytes().replace(b"g0g1g2", b"g0\xff1g2"))
    population = Population.load(tmp_path)
    assert population.ids[0] == "g0"
    with pytest.raises(RunDirectoryError, match="the population is damaged: the id of client 1 is not text"):
        list(population.ids)


def test_ids_may_be_integers_or_absent(make_data: Make, tmp_path: Path) -> None:
    columns = {"first": [0] * 11, "clips": [5] * 11}
    for id_column, ids in (
        ({"client": [*range(30, 19, -1)]}, [str(number) for number in range(30, 19, -1)]),
        ({}, [f"client-{number:02d}" for number in range(11)]),
    ):
        loaded = build_population(
            make_data(**use_table(write_clients(tmp_path / "x.parquet", **columns, **id_column)), unseen="keep"), 1
        ).ids
        assert list(loaded) == ids
        assert [loaded.index(name) for name in ids] == list(range(11))


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
def test_unusable_tables_are_rejected(make_data: Make, tmp_path: Path, columns: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_population(make_data(**use_table(write_clients(tmp_path / "clients.arrow", **columns))), 1)


def test_unreadable_table_files_are_rejected(make_data: Make, tmp_path: Path) -> None:
    for name, message in (
        ("x.txt", "ends in .parquet"),
        ("x.arrow", "cannot be read"),
        ("x.parquet", "cannot be read"),
    ):
        (tmp_path / name).write_text("first,clips\n0,1\n")
        with pytest.raises(DataError, match=message):
            build_population(make_data(**use_table(tmp_path / name)), 1)
    settings = make_data(
        **use_table(write_clients(tmp_path / "y.arrow", **GROUPS)), profile={"room": {"column": "rooms"}}
    )
    with pytest.raises(DataError, match=r"no single column 'rooms'.*room"):
        build_population(settings, 1)


@pytest.mark.parametrize(
    "options",
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
def test_settings_that_need_a_single_owner_are_rejected(make_data: Make, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs a single owner of each clip"):
        make_data(partition={"by": "table", "file": "x.arrow"}, **options)


def test_first_occurrences_match_numpy() -> None:
    rng = np.random.default_rng(1)
    columns = [
        rng.integers(-1, 3, 500).astype(np.int8),
        rng.integers(0, 2, 500),
        rng.integers(5, 9, 500).astype(np.int32),
    ]
    _, first = np.unique(np.stack(columns, axis=1), axis=0, return_index=True)
    assert _find_first(columns) == sorted(first.tolist())


@pytest.mark.parametrize("kind", ["arrow", "feather"])
def test_damaged_offsets_of_texts_are_an_error(make_data: Make, tmp_path: Path, kind: str) -> None:
    """Without the check, the process would read beyond the file and end with a segmentation fault."""
    table = pa.table({"client": ["a", "b"], "first": [0, 60], "clips": [60, 60]})
    path = tmp_path / f"clients.{kind}"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    offsets = b"".join(number.to_bytes(4, "little") for number in (0, 1, 2))
    content = path.read_bytes()
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, offsets[:4] + b"\xff\xff\xff\x7f" + offsets[8:]))
    with pytest.raises(DataError, match=rf"clients\.{kind}: cannot be read: .*[Oo]ffset"):
        build_population(make_data(**use_table(path)), 1)
