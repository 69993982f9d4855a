"""Steps from the list of clips to the clients, and user tables that replace them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import Raydfl
from tiny_sets import list_synthetic

from raydfl.core.errors import ConfigError, DataError
from raydfl.data import Assignment, DataSettings, assign_clips, build_population, list_clips
from raydfl.data.steps.corrupt import CorruptSettings, NoiseSettings, corrupt
from raydfl.data.steps.dealing import PartitionSettings
from raydfl.data.steps.partition import partition_clips
from raydfl.data.steps.pools import PoolSettings, assign_pools
from raydfl.data.steps.profile import ProfileSettings, add_profiles
from raydfl.data.steps.split import HoldOutSettings, SplitSettings, hold_out, split_clips
from raydfl.testing import describe_population

Make = Callable[..., DataSettings]


def list_column(tables: Assignment, name: str) -> list[Any]:
    values: list[Any] = tables.clips.column(name).to_pylist()
    return values


@pytest.fixture
def clips() -> Assignment:
    """List six clips of two groups with three takes each."""
    return list_synthetic(6, group=list("aaabbb"), take=[0, 1, 2] * 2, room=["hall"] * 3 + ["yard"] * 3)


@pytest.fixture
def assignment(clips: Assignment) -> Assignment:
    """Assign take 0 to the test set and further takes to their group's client."""
    settings = SplitSettings(test=HoldOutSettings(by="take", values=(0,)))
    return partition_clips(assign_pools(split_clips(clips, settings, 1), {}, None, 1), PartitionSettings(), {}, 1)


def test_split_assigns_a_role_to_each_clip(clips: Assignment) -> None:
    settings = {"test": {"by": "take", "values": [0]}, "validation": {"by": "take", "values": [2]}}
    assert list_column(split_clips(clips, SplitSettings(**settings), 1), "role") == ["test", "train", "validation"] * 2


def test_pools_assigns_training_clips_and_drops_the_rest(clips: Assignment) -> None:
    split = split_clips(clips, SplitSettings(test=HoldOutSettings(by="take", values=(0,))), 1)
    tables = assign_pools(split, {"late": PoolSettings(column="take", values=(2,))}, None, 1)
    assert list_column(tables, "pool") == [None, "late", None, "late"]
    assert tables.messages == ("2 training clips are in no pool, so no client trains on them",)


def test_partition_assigns_owners_and_sorts_by_owner(assignment: Assignment) -> None:
    assert list_column(assignment, "client") == ["a", "a", "b", "b", None, None]
    assert list_column(assignment, "clip") == ["c1", "c2", "c4", "c5", "c0", "c3"]
    assert assignment.clients.to_pydict() == {"client": ["a", "b"], "group": ["a", "b"]}


def test_hold_out_reserves_a_share_of_each_client(assignment: Assignment) -> None:
    tables = hold_out(assignment, SplitSettings(validation=0.5), 1)
    assert tables.sizes("train").tolist() == tables.sizes("validation").tolist() == [1, 1]


def test_profile_copies_the_value_of_the_clips_to_their_client(assignment: Assignment) -> None:
    tables = add_profiles(assignment, {"where": ProfileSettings(column="room")})
    assert tables.clients.column("profile:where").to_pylist() == ["hall", "yard"]


def test_corrupt_flags_clients_and_their_training_clips(assignment: Assignment) -> None:
    tables = corrupt(assignment, CorruptSettings(noise=NoiseSettings(snr_db=5, clients=("b",))), 1)
    assert tables.clients.column("noisy").to_pylist() == [False, True]
    assert list_column(tables, "store") == ["clean", "clean", "noisy", "noisy", "clean", "clean"]


OWN: dict[str, Any] = {
    "split": {"validation": {"fraction": 0.3}, "client_test": {"by": "take", "values": [4]}},
    "pools": {"low": {"column": "label", "values": ["w0", "w1"]}, "high": {"column": "label", "values": ["w2", "w3"]}},
    "partition": {"by": "dirichlet", "clients": 4, "alpha": 1.0},
}


def write_table(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_tables_written_after_the_steps_give_the_same_examples(make_data: Make, tmp_path: Path) -> None:
    """Oracle: the steps replaced by the tables."""
    noise = {"noise": {"snr_db": 5, "clients": 0.5}}
    settings = make_data(**OWN, corrupt=noise)
    tables = assign_clips(*list_clips(settings, 1), settings, 1)
    clips = write_table(
        tmp_path / "clips.parquet", **{name: list_column(tables, name) for name in ("client", "pool", "role", "clip")}
    )
    ids, noisy = list(tables.ids), tables.clients.column("noisy").to_pylist()
    clients = write_table(tmp_path / "clients.parquet", client=ids, noisy=noisy, room=["x", "y", "x", "y"])
    with_tables = make_data(
        tables={"clips": clips, "clients": clients}, corrupt=noise, profile={"room": {"column": "room"}}
    )
    expected, actual = (describe_population(build_population(source, 1), False) for source in (settings, with_tables))
    assert [client["profile"].pop("room") for client in actual["clients"]] == ["x", "y", "x", "y"]
    for client in (*actual["clients"], *expected["clients"]):
        client["validation"].sort()  # the steps sort it by the former pools of the clips
    assert actual == expected


def test_the_client_table_determines_the_order(make_data: Make, tmp_path: Path) -> None:
    ids = ["g3", "g0", "g5", "g1", "g2", "g4"]
    ranks = {"rank": {"column": "rank"}, "take": {"column": "group"}}
    file = write_table(tmp_path / "clients.parquet", client=ids, rank=[1, 2, 3, 4, 5, 6])
    population = build_population(make_data(tables={"clients": file}, profile=ranks), 1)
    assert list(population.ids) == ids
    assert [population.profile(i) for i in (0, 5)] == [
        {"group": name, "noisy": False, "label_errors": False, "rank": rank, "take": name}
        for name, rank in (("g3", 1), ("g4", 6))
    ]
    groups = {i: {f"g{clip // 20}" for clip in population.data(i).train.clips.tolist()} for i in range(6)}
    assert groups == {i: {name} for i, name in enumerate(ids)}


def test_the_client_table_may_have_clients_that_share_clips(make_data: Make, tmp_path: Path) -> None:
    file = write_table(tmp_path / "clients.parquet", client=["a", "b"], first=[0, 10], clips=[40, 110])
    by_partition = make_data(partition={"by": "table", "file": file})
    by_table = make_data(partition={"by": "table"}, tables={"clients": file})
    assert describe_population(build_population(by_table, 1), False) == describe_population(
        build_population(by_partition, 1), False
    )
    with pytest.raises(
        ConfigError, match="needs exactly one table of clients. Set data.partition.file or data.tables.clients"
    ):
        make_data(partition={"by": "table"})


IDS = [f"g{i}" for i in range(6)]
ALL = [f"w{label}/g{group}/{take}" for label in range(4) for group in range(6) for take in range(6)]
CLIPS = ["w0/g0/1", "w1/g0/1", "w2/g1/1", "w3/g1/1"]
ROLES = ["train"] * 4


@pytest.mark.parametrize(
    ("clips", "message"),
    [
        ({"role": ROLES}, "data.tables.clips: the table of clips .* has no single column 'clip'"),
        ({"clip": [1, 2, 3, 4]}, "column 'clip' of .* has the type int64; write strings"),
        ({"clip": CLIPS, "role": [1, 2, 3, 4]}, "column 'role' of .* has the type int64; write strings"),
        ({"clip": CLIPS, "client": [0.5] * 4}, "column 'client' of .* has the type double; .* strings or integers"),
        ({"clip": ["w0/g0/1", None]}, "row 2 of .* has no 'clip'"),
        ({"clip": ["w0/g0/9"]}, "row 1 of .*, clip 'w0/g0/9', is not on the list of clips; rows to correct: 1"),
        (
            {"clip": [*CLIPS, CLIPS[0]], "client": list("aabbb"), "role": ["train"] * 5},
            "row 5 of .*, clip 'w0/g0/1', has a row already: a clip has one role and one client",
        ),
        (
            {"clip": CLIPS, "role": ["train", "trian", "test", "test"]},
            "row 2 of .*, clip 'w1/g0/1', has an unknown role, not one of train, validation",
        ),
        ({"clip": CLIPS, "role": ["train", None] * 2}, "row 2 of .* has an unknown role"),
        (
            {"clip": CLIPS, "role": ROLES, "client": [*"aab", None]},
            "row 4 of .* has no client, but its role needs it",
        ),
        (
            {"clip": CLIPS, "role": ["train"] * 3 + ["test"], "client": list("aabb")},
            "has a client, but its role excl",
        ),
        (
            {"clip": CLIPS, "client": ["a", "b", "", "b"]},
            "row 3 of .*, clip 'w2/g1/1', has an empty client; fill it in, or write null",
        ),
        ({"clip": CLIPS, "role": ["test"] * 4}, "no clip has the role train, so clients cannot learn"),
        (
            {"clip": CLIPS, "role": ROLES, "pool": ["unlabelled"] * 4},
            "all training clips are in the pool 'unlabelled'",
        ),
        (
            {"clip": ALL[:129], "role": ["train"] * 129, "pool": [f"p{number}" for number in range(129)]},
            "129 pools are more than the maximum of 128",
        ),
    ],
)
def test_unusable_clip_tables_are_rejected(
    make_data: Make, tmp_path: Path, clips: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        build_population(make_data(takes=6, tables={"clips": write_table(tmp_path / "clips.parquet", **clips)}), 1)


@pytest.mark.parametrize(
    ("clips", "clients", "message"),
    [
        ({"client": list("aabb")}, {}, "data.tables.clips: its column 'client' and data.partition.by: table both"),
        ({"pool": list("xyxy")}, {}, "data.tables.clips: its column 'pool' needs a single owner of each clip"),
        (
            {"role": [*ROLES[:3], "client_test"]},
            {},
            "data.tables.clips: its role 'client_test' needs a single owner",
        ),
        (
            {"role": [*ROLES[:3], "validation"]},
            {},
            "data.tables.clips: its role 'validation' needs a single owner",
        ),
        ({}, {"noisy": [True, False]}, "data.tables.clients: its column 'noisy' needs a single owner of each clip"),
        ({}, {"label_errors": [True, False]}, "data.tables.clients: its column 'label_errors' needs a single owner"),
    ],
)
def test_columns_that_need_a_single_owner_are_rejected_for_shared_clips(
    make_data: Make, tmp_path: Path, clips: dict[str, Any], clients: dict[str, Any], message: str
) -> None:
    columns: dict[str, Any] = {"clip": CLIPS, "role": ROLES} | clips
    tables = {
        "clips": write_table(tmp_path / "clips.parquet", **columns),
        "clients": write_table(tmp_path / "clients.parquet", first=[0, 1], clips=[3, 3], **clients),
    }
    with pytest.raises(DataError, match=message):
        build_population(make_data(partition={"by": "table"}, tables=tables), 1)


def test_the_pool_unlabelled_of_a_table_is_last(make_data: Make, tmp_path: Path) -> None:
    file = write_table(tmp_path / "clips.parquet", clip=CLIPS, role=ROLES, pool=["unlabelled", "y", "x", "y"])
    tables = build_population(make_data(tables={"clips": file}), 1)
    assert list(tables.pools) == ["y", "x", "unlabelled"]


@pytest.mark.parametrize(
    ("settings", "pool", "message"),
    [
        ({}, "near by", "data.tables.clips: column 'pool': the name 'near by' is invalid"),
        (
            {"views": {"near": {"column": "path", "features": {"kind": "image", "size": 8}}}},
            "near",
            "data.views: a pool has the name 'near' already. Give the view another name",
        ),
        (
            {"pools": {"low": {"column": "label", "values": ["w0"]}}},
            "near",
            "data.pools: the column 'pool' of data.tables.clips names the pool of every training clip. Remove data.pools or",
        ),
        (
            {"unlabelled": {"keep": 0.5}},
            "near",
            "data.unlabelled: the column 'pool' of data.tables.clips names the pool",
        ),
    ],
)
def test_unusable_pools_of_a_table_are_rejected(
    make_data: Make, tmp_path: Path, settings: dict[str, Any], pool: str, message: str
) -> None:
    file = write_table(tmp_path / "clips.parquet", clip=CLIPS, role=ROLES, pool=[pool] * 4)
    with pytest.raises(ConfigError, match=message):
        build_population(make_data(tables={"clips": file}, **settings), 1)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ({"room": ["x"]}, "data.tables.clients: the table of clients .* has no single column 'client'"),
        ({"client": ["g0", "g1", "g2", "g3", "g4"]}, "has no row for client 'g5'. Did you mean 'g[0-4]'"),
        ({"client": [f"g{i}" for i in range(7)]}, "has the client 'g6', who has no clips. Did you mean"),
        ({"client": ["g0", "g0"]}, "several rows of .* have the client 'g0'"),
        (
            {"client": IDS, "noisy": [1] * 6},
            "column 'noisy' of .* int64; write booleans",
        ),
        (
            {"client": IDS, "noisy": [True] * 6},
            "column 'noisy' marks clients. Set data.corrupt.noise",
        ),
        (
            {"client": IDS, "mic": [[1]] * 6},
            "column 'mic' of the table of clients has the type list<.*>. Write",
        ),
        (
            {"client": IDS, "mic": pa.array([2**63] * 6, pa.uint64())},
            "is 9223372036854775808 for client 'g0'. .* 0 .the first. to 1000",
        ),
        ({"client": IDS, "mic": [1001] * 6}, "is 1001 for client 'g0'. .* 0 .the first. to 1000"),
    ],
)
def test_unusable_client_tables_are_rejected(
    make_data: Make, tmp_path: Path, clients: dict[str, Any], message: str
) -> None:
    file = write_table(tmp_path / "clients.parquet", **clients)
    device = {"profile": {"mic": {"column": "mic"}}, "device": "mic"} if "mic" in clients else {}
    with pytest.raises(DataError, match=message):
        build_population(make_data(tables={"clients": file}, **device), 1)


def test_a_duplicate_column_is_rejected(make_data: Make, tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(CLIPS), pa.array(ROLES), pa.array(ROLES)], names=["clip", "role", "role"])
    pq.write_table(table, tmp_path / "clips.parquet")
    with pytest.raises(DataError, match="has no single column 'role'. Several columns have this name"):
        build_population(make_data(tables={"clips": tmp_path / "clips.parquet"}), 1)


def test_data_info_prints_the_tables_after_a_step(raydfl: Raydfl, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"method: fedavg\ndata: {{name: '{Path(__file__).parent}/tiny_sets.py:Made', columns: [take]}}\n")
    text = raydfl("data", "info", job, "--step", "split", "data.leave_out=[w1]").out
    assert "clips after step split, 90 rows" in text
    assert "... and 70 more" in text
    assert [line.split() for line in text.splitlines() if line.startswith("w0/g0/1 ")] == [
        ["w0/g0/1", "w0", "g0", "validation", "1", "r0-0", "1", "train"]
    ]
    raydfl("data", "info", job, "--step", "spilt").refuses("--step spilt: unknown step. Did you mean 'split'?")


def test_tables_of_sites_are_configured_per_site(make_data: Make, tmp_path: Path) -> None:
    site = {"folder": tmp_path, "tables": {"clients": tmp_path / "clients.parquet"}}
    assert make_data(sites={"here": site}).select_site("here").tables.clients == tmp_path / "clients.parquet"
    for sites, message in (
        (
            {"here": {"folder": tmp_path}},
            "data.tables is not supported with data.sites",
        ),
        (
            {"here": {"folder": tmp_path, "tables": {"clips": "x.csv"}}},
            "data.sites.here.tables.clips: 'x.csv' .* absolute",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            make_data(sites=sites, **({} if "tables" in sites["here"] else {"tables": {"clips": "x.csv"}}))
