"""Clients without a view: their choice, their networks, their payloads and their reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seen_and_heard import CLIENTS, federation, write
from tiny_sets import list_synthetic

from raydfl.core.errors import ConfigError
from raydfl.data.examples import Frames
from raydfl.data.population import Population
from raydfl.data.steps.corrupt import remove_views
from raydfl.data.steps.dealing import PartitionSettings
from raydfl.data.steps.partition import partition_clips
from raydfl.data.steps.pools import assign_pools
from raydfl.data.steps.split import SplitSettings, split_clips
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.storage.record import read_rows, to_rows
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress
from raydfl.testing import start_server

Tiny = Callable[..., Config]
VIEWS = ("video", "depth")
BARE = 6
"""Index of the clip without the first image. The six clips before it are tests."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("views"), takes=3, bare=(BARE - 6,))


def test_a_share_of_clients_is_exact_and_nested() -> None:
    """Shares round half up in decimal arithmetic, not in floating point (0.29 * 50)."""
    groups = list_synthetic(50, group=[f"g{number}" for number in range(50)])
    clients = partition_clips(
        assign_pools(split_clips(groups, SplitSettings(test=None), 1), {}, None, 1), PartitionSettings(), {}, 1
    )

    def draw_lacking(seed: int, **missing: float) -> dict[str, np.ndarray]:
        tables = remove_views(clients, missing, seed)
        return {view: tables.codes(f"lacks:{view}") for view in missing}

    before = np.zeros(50, bool)
    for share, count in ((0.0, 0), (0.09, 5), (0.1, 5), (0.29, 15), (0.3, 15), (0.9, 45), (1.0, 50)):
        lacking = draw_lacking(3, video=share)["video"]
        assert lacking.sum() == count
        assert not (before & ~lacking).any()
        before = lacking
    half = [draw_lacking(seed, video=0.5, depth=0.5) for seed in (3, 4)]
    assert (half[0]["video"] != half[0]["depth"]).any()
    assert (half[0]["video"] != half[1]["video"]).any()


def test_clients_train_the_networks_of_their_views(tiny: Tiny, folder: Path) -> None:
    """Batches, profile and networks of a client agree on its views. The server's test set has all views."""
    config = federation(
        tiny, folder, "harmony", "data.missing={video: 0.5, depth: 0.3}", "data.split.validation=0.3", views=VIEWS
    )
    population = Population.load(create(config, Progress("quiet")) / "population").use(config.data)
    lacking = {name: ~population.owners(name) for name in VIEWS}
    clients = Clients(population, config)
    assert [int(lacking[name].sum()) for name in VIEWS] == [3, 2]
    for client in range(CLIENTS):
        data = population.data(client)
        has = tuple(name for name in VIEWS if not lacking[name][client])
        assert clients[client].profile["views"] == has
        for part in (data.train, data.validation):
            batch = part.batch(np.arange(len(part)))
            for name in VIEWS:
                bare = [name == "video" and clip == BARE for clip in part.clips.tolist()]
                assert batch.present[name].tolist() == [name in has and not lacks for lacks in bare]
                assert (batch.views[name].flatten(1).abs().sum(1) > 0).tolist() == batch.present[name].tolist()
        whole = ("fusion",) if len(has) == 2 else ()
        assert tuple(spec.name for spec in clients[client].models) == ("audio", *has, *whole)
    assert all(population.test.batch(np.arange(6)).present[name].all() for name in VIEWS)


def test_clients_receive_only_their_networks(tiny: Tiny, folder: Path) -> None:
    """Oracle: the bytes of the networks' tensors."""
    config = federation(tiny, folder, "harmony", "data.missing={video: 0.5}", "evaluate.every=9")
    server = start_server(config)
    sizes = {"audio": 0, "video": 0, "fusion": 0}
    for name, tensor in server._federation.state.tensors["global"].items():
        sizes[name.partition("/")[0]] += tensor.numel() * 4
    report = server._federation.round()
    assert report.bytes_down == 6 * sizes["audio"] + 3 * (sizes["video"] + sizes["fusion"])
    assert report.bytes_up == 6 * sizes["audio"] + 3 * sizes["video"]
    server.close()
    rows = to_rows(read_rows(Path(config.run.dir) / config.run.name))
    traffic = {row.metric: row.value for row in rows if row.metric.startswith("views/")}
    both_networks = sizes["audio"] + sizes["video"]
    assert traffic == {
        "views/none/clients": 3,
        "views/none/bytes_down": 3 * sizes["audio"],
        "views/none/bytes_up": 3 * sizes["audio"],
        "views/video/clients": 3,
        "views/video/bytes_down": 3 * (both_networks + sizes["fusion"]),
        "views/video/bytes_up": 3 * both_networks,
    }


def test_evaluating_a_network_reads_only_its_view(tiny: Tiny, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = federation(tiny, folder, "unifl", "data.missing={video: 1.0}", "evaluate.every=1")
    server = start_server(config)
    read: list[int] = []
    original = Frames._read

    def record_read(self: Frames, *arguments: Any) -> np.ndarray:
        read.append(self.stream)
        return original(self, *arguments)

    federation_ = server._federation
    monkeypatch.setattr(Frames, "_read", record_read)
    orders = [o for o in federation_._evaluation.make_server_orders(federation_.state) if o.task.receive == ("global",)]
    list(federation_.pool.run(orders, federation_.broadcast({"global"})))
    assert set(read) == {0}
    server.close()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("{video: 1.5}", "data.missing.video"),
        ("{video: -0.1}", "data.missing.video"),
        ("{film: 0.5}", "data.missing: unknown view 'film', not in data.views"),
    ],
)
def test_impossible_shares_and_views_are_rejected(tiny: Tiny, folder: Path, missing: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        federation(tiny, folder, "multifl", f"data.missing={missing}")


def test_missing_views_change_the_digest(tiny: Tiny, folder: Path) -> None:
    digests = [
        federation(tiny, folder, "multifl", *overrides).digest()
        for overrides in ([], ["data.missing={}"], ["data.missing={video: 0.5}"])
    ]
    assert digests[0] == digests[1] != digests[2]
