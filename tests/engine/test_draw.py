"""Client sampling: eligibility and draws. Oracles: frequencies by scipy, shares by hand, and the uniform draw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from scipy.stats import chisquare

from raydfl import Method, Task
from raydfl.core.errors import ConfigError, InputError
from raydfl.core.types import Client
from raydfl.data import Population
from raydfl.engine import Clients
from raydfl.engine.config import Config
from raydfl.engine.storage import read_rows, to_rows
from raydfl.methods import sample_clients
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, train_federation

Tiny = Callable[..., Config]
DEVICES = "data.profile={device: {values: [phone, tablet, watch]}, power: {values: [1, 2, 3]}}"


def make_clients(chances: list[float], strata: list[int] | None = None) -> list[Client]:
    groups = strata or [0] * len(chances)
    return [
        Client(f"c{place}", place, 1, chance=chance, stratum=group)
        for place, (chance, group) in enumerate(zip(chances, groups, strict=True))
    ]


class FirstTwo(Method):
    """A method with its own client sampling: it always plans the first two."""

    def plan(self, state: Any, clients: Any, rng: Any, cohort: int) -> list[Task]:
        return [Task(clients[place].id) for place in (0, 1)]


def test_weights_are_sampling_probabilities() -> None:
    weights = [1.0, 0.0, 2.0, 5.0]
    rng, counts = np.random.default_rng(1), np.zeros(4)
    for _ in range(4000):
        counts[sample_clients(make_clients(weights), rng, 1)[0].index] += 1
    assert counts[1] == 0
    assert chisquare(counts[[0, 2, 3]], [500, 1000, 2500]).pvalue > 0.01


def test_each_stratum_has_its_share_of_every_round() -> None:
    """Six of 7 + 5 + 3 clients: each stratum has 2.8, 2 and 1.2 on average, and differs by less than 1."""
    clients = make_clients([1.0] * 15, [0] * 7 + [1] * 5 + [2] * 3)
    rng = np.random.default_rng(1)
    shares = np.array(
        [np.bincount([c.stratum for c in sample_clients(clients, rng, 6)], minlength=3) for _ in range(2000)]
    )
    assert (shares.sum(axis=1) == 6).all()
    assert (np.abs(shares - [2.8, 2.0, 1.2]) < 1).all()
    assert shares.mean(axis=0) == pytest.approx([2.8, 2.0, 1.2], abs=0.05)


def test_a_cohort_has_at_most_the_eligible_clients() -> None:
    clients = make_clients([0.0, 1.0, 0.0, 2.0])
    assert [client.index for client in sample_clients(clients, np.random.default_rng(1), 3)] == [1, 3]
    assert sample_clients(make_clients([0.0, 0.0]), np.random.default_rng(1), 1) == []


def test_empty_settings_leave_the_draw_unchanged(tiny: Tiny) -> None:
    whole = train_federation(tiny("run.name=whole", "train.rounds=1"))
    for name, settings in {"empty": "{}", "all": "{min_examples: 1, weight: null}"}.items():
        assert_same_bits(
            whole, train_federation(tiny(f"run.name={name}", "train.rounds=1", f"train.clients={settings}"))
        )


@pytest.mark.parametrize(
    ("conditions", "is_eligible"),
    [
        ("{where: {device: [phone, watch]}}", lambda client: client.profile["device"] in ("phone", "watch")),
        ("{where: {device: phone, power: 3}}", lambda client: client.profile["power"] == 3),
        ("{ids: [s1, s4]}", lambda client: client.id in ("s1", "s4")),
        ("{min_examples: 8}", lambda client: client.num_examples >= 8),
        ("{weight: power, where: {power: [2, 3]}}", lambda client: client.profile["power"] > 1),
    ],
)
def test_only_eligible_clients_are_drawn(conditions: str, is_eligible: Callable[[Client], bool], tiny: Tiny) -> None:
    settings = [DEVICES, "run.name=some", "train.cohort=1.0", "train.rounds=2", f"train.clients={conditions}"]
    if "phone, power" in conditions:
        settings[0] = "data.profile={device: {values: [phone]}, power: {values: [1, 2, 3]}}"
    config = tiny(*settings, "evaluate.clients=none")
    train_federation(config)
    folder = Path(config.run.dir, "some")
    clients = Clients(Population.load(folder / "population"), config, planning=True)
    eligible = {client.id for client in clients if is_eligible(client)}
    assert {row.client for row in to_rows(read_rows(folder)) if row.client and row.metric == "loss"} == eligible
    assert 0 < len(eligible) < len(clients)
    assert f"{len(eligible)} of 6 clients may take part" in (folder / "run.json").read_text()  # shown in the report


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_column_of_the_client_table_is_a_sampling_weight(kind: str, tiny: Tiny, tmp_path: Path) -> None:
    columns = {
        "client": [*"abcdef"],
        "first": [0] * 6,
        "clips": [40] * 6,
        "power": [1, 0, 0, 2, 1, 0],
        "fast": [True] * 6,
    }
    write = pa.csv.write_csv if kind == "csv" else pa.parquet.write_table
    write(pa.table(columns), tmp_path / f"clients.{kind}")
    config = tiny(
        f"data.partition={{by: table, file: {tmp_path / f'clients.{kind}'}}}",
        "data.profile={power: {column: power}, fast: {column: fast}}",
        "data.split.validation=0",
        "train.clients={weight: power, where: {fast: true, power: [0, 1, 2]}}",
        "train.cohort=3",
        "train.rounds=1",
        "run.name=weighted",
    )
    train_federation(config)
    rows = to_rows(read_rows(Path(config.run.dir, "weighted")))
    assert {row.client for row in rows if row.client and row.metric == "loss"} == {"a", "d", "e"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "{where: {devise: [phone]}}",
            "data.profile: train.clients.where.devise needs the column 'devise', but the clients' profiles do not have it.",
        ),
        ("{where: {device: [fone]}}", "train.clients.where.device: no client has fone. Did you mean 'phone'"),
        ("{ids: [s9]}", "train.clients.ids: there is no client 's9'"),
        (
            "{ids: [s0, s1, s0]}",
            "train.clients.ids: 's0' is listed 2 times. A client is drawn at most once per round",
        ),
        (
            "{weight: power}",
            "power has '1e\\+308', but weights must be 0 or from 1e-100 to 1e\\+100. Divide all of them",
        ),
        ("{weight: device}", "train.clients.weight: device has 'phone', but weights must be numbers of at least 0"),
        ("{where: {power: []}}", r"train\.clients\.where\.power: .* should have at least 1 item"),
        ("{min_examples: 1000}", "train.clients excludes all 6 clients. Remove one of its conditions"),
        ("{strata: part}, train.cohort: 7", "7 clients a round, but train.clients leaves 6"),
        ("{where: {device: [phone]}}, method: OWN", "plans client 's1', which the setting excludes"),
    ],
)
def test_invalid_settings_are_rejected(setting: str, message: str, tiny: Tiny) -> None:
    clients, _, more = setting.partition("}, ")
    settings = [DEVICES, f"train.clients={clients}{'}' if more else ''}", "run.name=bad", "train.cohort=2"]
    if "cohort" in more:
        settings[-1] = "train.cohort=7"
    if "power" in clients:
        settings.append(DEVICES.replace("[1, 2, 3]", "[1.0e+308, 1.0e+308, 3]"))
    if "OWN" in more:
        settings.append(f"method={__file__}:FirstTwo")
    with pytest.raises(InputError, match=message):
        train_federation(tiny(*settings))


def test_sampling_from_a_subset_respects_the_conditions(tiny: Tiny) -> None:
    config = tiny(DEVICES, "run.name=some", "train.cohort=1.0", "train.clients={where: {device: watch}}")
    clients = Clients(Population.load(create(config, Progress("quiet")) / "population"), config, planning=True)
    sampled = sample_clients(list(clients)[1:], np.random.default_rng(1), 4)
    assert sampled
    assert {client.profile["device"] for client in sampled} == {"watch"}
    with pytest.raises(ConfigError, match=r"train\.clients\.min_examples"):
        tiny("train.clients={min_examples: -1}")
