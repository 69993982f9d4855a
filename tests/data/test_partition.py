from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats
from tiny_sets import list_synthetic

from raydfl.core.errors import DataError
from raydfl.data import Assignment, natural_order
from raydfl.data.steps import dealing
from raydfl.data.steps.dealing import PartitionSettings
from raydfl.data.steps.partition import partition_clips
from raydfl.data.steps.pools import assign_pools
from raydfl.data.steps.split import SplitSettings, split_clips


def deal(
    clips: int, labels: int, seed: int = 1, *, rows: list[int] | None = None, columns: Any = None, **options: Any
) -> Assignment:
    """Partition clips of the classes 0, 1, ... in turn, restricted to ``rows`` if given."""
    listed = list_synthetic(clips, labels, **(columns or {}))
    listed = listed if rows is None else listed.select(np.array(rows))
    tables = assign_pools(split_clips(listed, SplitSettings(test=None), 1), {}, None, 1)
    tables = partition_clips(tables, PartitionSettings(**options), {}, seed)
    if options.get("smaller") != "drop":
        assert sorted(tables.codes("clip")) == sorted(listed.codes("clip"))  # each clip once
    assert len(set(tables.ids)) == len(tables.ids)
    for clips_of_client in list_owned(tables):
        assert clips_of_client == sorted(clips_of_client)
    return tables


def list_owned(tables: Assignment) -> list[list[int]]:
    """List the clips of each client."""
    return [tables.codes("clip")[tables.codes("client") == number].tolist() for number in range(len(tables.ids))]


def count_labels(tables: Assignment) -> np.ndarray:
    """Count clips by client and label: int [clients, labels]."""
    table = np.zeros((len(tables.ids), len(tables.classes)), int)
    np.add.at(table, (tables.codes("client"), tables.codes("label")), 1)
    return table


def list_groups(tables: Assignment) -> list[str]:
    """List the group of each client."""
    values: list[str] = tables.clients.column("group").to_pylist()
    return values


EVERY_KIND: list[dict[str, Any]] = [
    {"by": "group"},
    {"by": "group", "shards": 3},
    {"by": "dirichlet", "clients": 9, "alpha": 0.5},
    {"by": "dirichlet", "clients": 9, "alpha": 0.5, "balance": False},
    {"by": "dirichlet", "clients": 9, "alpha": 0.5, "column": "recording"},
    {"by": "quantity", "clients": 9, "alpha": 2.0},
    {"by": "quantity", "clients": 9, "spread": 0.25},
    {"by": "classes", "clients": 9, "classes": 2},
    {"by": "classes", "clients": 9, "classes": 2, "variance": 0.5},
    {"by": "iid", "clients": 9},
]
COLUMNS = {"group": [f"s{i % 4}" for i in range(400)], "recording": [f"r{i % 80}" for i in range(400)]}


@pytest.mark.parametrize("options", EVERY_KIND)
def test_the_seed_determines_the_partition(options: dict[str, Any]) -> None:
    def draw_clips(seed: int) -> list[list[int]]:
        return list_owned(deal(400, 5, seed, columns=COLUMNS, **options))

    assert draw_clips(1) == draw_clips(1)
    assert (draw_clips(1) == draw_clips(2)) == (options == {"by": "group"})  # whole groups need no random draw


def test_each_group_becomes_a_client() -> None:
    tables = deal(6, 2, columns={"group": ["b", "a10", "a9", "b", "a9", "b"]}, by="group")
    assert list(tables.ids) == list_groups(tables) == ["a9", "a10", "b"]
    assert list_owned(tables) == [[2, 4], [1], [0, 3, 5]]


def test_shards_divide_each_group_evenly() -> None:
    tables = deal(76, 10, columns={"group": ["jackson"] * 45 + ["theo"] * 31}, by="group", shards=10)
    assert list(tables.ids) == [f"{name}/{number}" for name in ("jackson", "theo") for number in range(10)]
    sizes = tables.sizes()
    assert sorted(sizes[:10]) == [4] * 5 + [5] * 5
    assert sorted(sizes[10:]) == [3] * 9 + [4]
    assert list_groups(tables) == ["jackson"] * 10 + ["theo"] * 10


def test_only_the_clips_of_the_table_are_dealt() -> None:
    rows = [1, 4, 5, 8]
    deal(9, 2, rows=rows, columns={"group": list("aaabbbccc")}, by="group")
    deal(9, 2, rows=rows, by="iid", clients=2)


def test_small_groups_raise_or_are_dropped() -> None:
    columns = {"group": ["a"] * 5 + ["b"] * 2 + ["c"]}
    message = (
        r"2 of 3 clients \(by 'group', 1 shards each\) get fewer than minimum 3 training clips; "
        r"client 'c' gets 1.*smaller=drop"
    )
    with pytest.raises(DataError, match=message):
        deal(8, 2, columns=columns, by="group", minimum=3)
    tables = deal(8, 2, columns=columns, minimum=2, smaller="drop")
    assert list(tables.ids) == ["a", "b"]
    assert list_owned(tables) == [[0, 1, 2, 3, 4], [5, 6]]
    assert tables.messages == ("1 training clips belong to no client: their clients would have fewer than 2 clips",)
    with pytest.raises(DataError, match="leaves no client"):
        deal(8, 2, columns=columns, minimum=9, smaller="drop")
    with pytest.raises(DataError, match=r"2 shards each.*client 'c/1' gets 0"):
        deal(8, 2, columns=columns, by="group", shards=2)


def test_training_clips_need_a_group() -> None:
    columns = {"group": ["a", None, "b", None]}
    with pytest.raises(DataError, match="2 of 4 training clips have no 'group', so no client: c1, c3. Fill"):
        deal(4, 2, columns=columns, by="group")
    deal(4, 2, rows=[0, 2], columns=columns, by="group")  # clips of the test set may lack a group
    with pytest.raises(DataError, match="data.partition: the recordings have no column 'speaker'. Did you mean"):
        deal(4, 2, columns={"speakers": list("aabb")}, by="group", column="speaker")


@pytest.mark.slow
def test_unbalanced_dirichlet_follows_its_distribution() -> None:
    """A client's share of a label has the law Beta(alpha, alpha (clients - 1)). Labels are independent."""
    alpha, clients = 0.7, 5
    shares = []
    for seed in range(150):
        table = count_labels(deal(4000, 2, seed, by="dirichlet", clients=clients, alpha=alpha, balance=False))
        shares.append(table[0] / 2000)
    shares_of_client = np.array(shares)
    law = stats.beta(alpha, alpha * (clients - 1))
    for label in (0, 1):
        assert stats.kstest(shares_of_client[:, label], law.cdf).pvalue > 0.01
    assert abs(stats.pearsonr(*shares_of_client.T).statistic) < 0.2


def test_the_first_label_of_a_balanced_dirichlet_follows_its_distribution() -> None:
    alpha, clients = 0.7, 5
    first = [
        count_labels(deal(2000, 2, seed, by="dirichlet", clients=clients, alpha=alpha))[1, 0] / 1000
        for seed in range(150)
    ]
    assert stats.kstest(first, stats.beta(alpha, alpha * (clients - 1)).cdf).pvalue > 0.01


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
def test_full_clients_get_no_clips_of_later_labels(alpha: float) -> None:
    table = count_labels(deal(1200, 10, by="dirichlet", clients=50, alpha=alpha, minimum=5))
    assert table.sum(axis=1).min() >= 5
    clips_so_far = np.cumsum(table, axis=1)
    full = clips_so_far[:, :-1] >= 1200 / 50
    assert full.any()
    assert not table[:, 1:][full].any()


def test_alpha_controls_the_heterogeneity() -> None:
    def measure_entropy(alpha: float) -> float:
        table = count_labels(deal(3000, 10, by="dirichlet", clients=10, alpha=alpha, balance=False))
        return float(np.mean([stats.entropy(row + 1e-9) for row in table]))

    assert measure_entropy(0.05) < measure_entropy(0.5) < measure_entropy(5) < measure_entropy(500)
    assert measure_entropy(500) == pytest.approx(np.log(10), abs=0.02)
    single_labels = count_labels(deal(3000, 10, by="dirichlet", clients=10, alpha=1e-6))
    assert ((single_labels > 0).sum(axis=1) == 1).all()


def test_recordings_are_not_divided() -> None:
    columns = {"recording": [f"r{i // 5}" for i in range(1000)]}
    tables = deal(1000, 10, columns=columns, by="dirichlet", column="recording", clients=10, alpha=0.5, minimum=5)
    recordings = [{clip // 5 for clip in client} for client in list_owned(tables)]
    assert sum(map(len, recordings)) == 200  # each at a single client
    assert min(map(len, recordings)) >= 5


def test_the_label_of_a_recording_is_its_most_frequent_label() -> None:
    result = dealing._find_main_labels(np.array([0, 0, 0, 1, 1]), np.array([2, 1, 2, 3, 0]), 2)
    assert result.tolist() == [2, 0]


def test_a_proportion_of_zero_gets_no_clips() -> None:
    thirds = np.array([1 / 3, 1 / 3, 1 / 3, 0.0])
    for count in (1, 3, 9, 3000):
        dealt = np.bincount(dealing._split_by_proportions(count, thirds), minlength=4)
        assert dealt[3] == 0
        assert dealt.sum() == count
        assert np.ptp(dealt[:3]) <= 1


@pytest.mark.parametrize(
    ("clips", "clients", "spread"), [(85511, 30, 0.25), (100, 7, 0.5), (103, 100, 0.0), (50, 50, 1.0)]
)
def test_quantity_follows_the_rule_of_fedstar(clips: int, clients: int, spread: float) -> None:
    """Clients start with int(m - v) clips. The rest is dealt one by one to clients below the limit int(m + v)."""
    mean = clips / clients
    variation = int(spread * mean + 1e-9)
    for seed in range(5):
        sizes = dealing._draw_sizes(clips, clients, spread, np.random.default_rng(seed))
        assert sizes.sum() == clips
        assert sizes.min() >= int(mean - variation)
        assert sizes.max() <= max(int(mean + variation), int(np.ceil(mean)))


def test_remaining_clips_of_a_quantity_partition_are_dealt_uniformly() -> None:
    sizes = dealing._draw_sizes(200_000, 100, 1.0, np.random.default_rng(0))  # from 0, the limit is not reached
    assert stats.chisquare(sizes).pvalue > 0.01
    with pytest.raises(DataError, match="the smallest client has 0 clips .2.0 on average., fewer than minimum 1"):
        deal(200, 4, by="quantity", clients=100, spread=1.0)


def test_quantity_by_dirichlet_preserves_the_label_distribution() -> None:
    shares = []
    for seed in range(150):
        table = count_labels(deal(2000, 4, seed, by="quantity", clients=5, alpha=1.5))
        shares.append(table[0].sum() / 2000)
    assert stats.kstest(shares, stats.beta(1.5, 1.5 * 4).cdf).pvalue > 0.01
    assert stats.chi2_contingency(table).pvalue > 0.001


@pytest.mark.parametrize(
    ("clients", "per_client", "classes"), [(60, 2, 10), (5, 2, 10), (3, 10, 10), (100, 1, 35), (7, 3, 20)]
)
def test_each_client_has_the_chosen_number_of_classes(clients: int, per_client: int, classes: int) -> None:
    table = count_labels(deal(classes * 300, classes, by="classes", clients=clients, classes=per_client))
    assert ((table > 0).sum(axis=1) == per_client).all()
    for label in range(classes):  # its clients share it evenly
        shares = table[:, label][table[:, label] > 0]
        assert np.ptp(shares) <= 1
        assert shares.sum() == 300


def test_the_number_of_classes_can_be_random() -> None:
    """FedSTAR draws int(Normal(3, sqrt(0.5))), mostly 2 or 3. Every label belongs to some client."""
    table = count_labels(deal(400 * 12, 12, by="classes", clients=400, classes=3, variance=0.5))
    numbers = (table > 0).sum(axis=1)
    assert set(numbers.tolist()) <= {1, 2, 3, 4, 5}
    normal = stats.norm(3, 0.5**0.5)
    for number in (2, 3):
        share = normal.cdf(number + 1) - normal.cdf(number)
        assert (numbers == number).mean() == pytest.approx(share, abs=4 * (share * (1 - share) / 400) ** 0.5)
    assert (table.sum(axis=0) == 400).all()


def test_iid_clients_have_even_sizes_and_the_overall_label_distribution() -> None:
    table = count_labels(deal(2703, 10, by="iid", clients=60))
    assert set(table.sum(axis=1)) == {45, 46}
    assert stats.chi2_contingency(table).pvalue > 0.001


@pytest.mark.parametrize(
    ("clips", "options", "message"),
    [
        (
            100,
            {"by": "iid", "clients": 101},
            r"100 clips cannot give 101 clients 1 each \(101 needed\). Set at most 100",
        ),
        (
            100,
            {"by": "iid", "clients": 30, "minimum": 4},
            r"cannot give 30 clients 4 each \(120 needed\). Set at most 25",
        ),
        (100, {"by": "dirichlet", "clients": 51, "alpha": 1, "minimum": 2}, r"100 clips cannot give 51 clients 2 each"),
        (
            400,
            {"by": "dirichlet", "clients": 81, "alpha": 1, "column": "recording"},
            r"80 values of column 'recording' cannot give 81 clients 1 each",
        ),
        (
            100,
            {"by": "dirichlet", "clients": 50, "alpha": 0.01, "minimum": 2},
            r"none of \d+ draws with alpha 0.01 gave all 50 clients the minimum of 2; the best draw gave "
            r"every client 0 \(2.0 on average\). Raise alpha",
        ),
        (100, {"by": "quantity", "clients": 50, "alpha": 0.1}, r"none of \d+ draws with alpha 0.1 .*lower minimum"),
        (
            100,
            {"by": "quantity", "clients": 4, "spread": 0.9, "minimum": 25},
            "with spread 0.9 the smallest client has",
        ),
        (100, {"by": "classes", "clients": 4, "classes": 6}, "classes 6 is more than the 5 labels"),
        (
            100,
            {"by": "classes", "clients": 2, "classes": 2},
            "2 clients with 2 classes each cannot hold all 5 labels.*3 clients",
        ),
        (
            100,
            {"by": "classes", "clients": 14, "classes": 1, "minimum": 7},
            r"none of \d+ draws with 1 classes each .* minimum of 7; the best draw gave every client [1-6] \(7.1",
        ),
    ],
)
def test_impossible_partitions_are_rejected(
    clips: int, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealing, "_WORK", 300_000)
    columns = {"recording": [f"r{i % 80}" for i in range(clips)]}
    with pytest.raises(DataError, match=message):
        deal(clips, 5, columns=columns, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "dirichlet"}, "by: dirichlet needs alpha and clients"),
        ({"by": "group", "clients": 5}, "clients has no effect with by: group"),
        ({"by": "iid", "clients": 5, "shards": 2}, "shards has no effect with by: iid"),
        ({"by": "quantity", "clients": 5}, "by: quantity needs either alpha or spread"),
        ({"by": "quantity", "clients": 5, "alpha": 1, "spread": 0.1}, "either alpha or spread"),
        ({"by": "classes", "clients": 5}, "by: classes needs classes"),
        ({"by": "iid", "clients": 0}, "greater than or equal to 1"),
        ({"by": "dirichlet", "clients": 3, "alpha": 0}, "greater than 0"),
        ({"by": "speaker"}, "'group', 'dirichlet'"),
    ],
)
def test_contradictory_settings_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PartitionSettings(**options)


def test_resolved_settings_survive_a_round_trip() -> None:
    for options in EVERY_KIND:
        settings = PartitionSettings(**options)
        assert PartitionSettings(**settings.model_dump(mode="json")) == settings


def test_natural_order_sorts_digits_by_value() -> None:
    assert natural_order(["b", "a10", "a9", "10", "9", "a", "a9b"]) == ["9", "10", "a", "a9", "a9b", "a10", "b"]
    assert natural_order(["²", "2", "02"]) == ["02", "2", "²"], "a digit that int() cannot read is text"
