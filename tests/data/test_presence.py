"""Views that clients lack: who, in what, and what is then built, sent and read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seen_and_heard import CLIENTS, federation, write
from tiny_sets import list_made_up

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
"""Of the clips (six are tests) the one without the first picture."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("views"), takes=3, bare=(BARE - 6,))


def test_a_share_is_exact_and_nested() -> None:
    """Half up in decimals, whatever 0.29 * 50 is in floating point."""
    groups = list_made_up(50, group=[f"g{number}" for number in range(50)])
    owned = partition_clips(
        assign_pools(split_clips(groups, SplitSettings(test=None), 1), {}, None, 1), PartitionSettings(), {}, 1
    )

    def take(seed: int, **missing: float) -> dict[str, np.ndarray]:
        tables = remove_views(owned, missing, seed)
        return {view: tables.codes(f"lacks:{view}") for view in missing}

    before = np.zeros(50, bool)
    for share, count in ((0.0, 0), (0.09, 5), (0.1, 5), (0.29, 15), (0.3, 15), (0.9, 45), (1.0, 50)):
        taken = take(3, video=share)["video"]
        assert taken.sum() == count
        assert not (before & ~taken).any()
        before = taken
    half = [take(seed, video=0.5, depth=0.5) for seed in (3, 4)]
    assert (half[0]["video"] != half[0]["depth"]).any()
    assert (half[0]["video"] != half[1]["video"]).any()


def test_three_views_of_which_clients_lack_some(tiny: Tiny, folder: Path) -> None:
    """What a client has is what its batches, its profile and its networks say; the server's test keeps all."""
    config = federation(
        tiny, folder, "harmony", "data.missing={video: 0.5, depth: 0.3}", "data.split.validation=0.3", views=VIEWS
    )
    population = Population.load(create(config, Progress("quiet")) / "population").use(config.data)
    taken = {name: ~population.owners(name) for name in VIEWS}
    clients = Clients(population, config)
    assert [int(taken[name].sum()) for name in VIEWS] == [3, 2]
    for client in range(CLIENTS):
        data = population.data(client)
        has = tuple(name for name in VIEWS if not taken[name][client])
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


def test_a_client_is_sent_only_networks_that_it_has(tiny: Tiny, folder: Path) -> None:
    """Oracle: the bytes of the networks' tensors, counted by hand."""
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
    found = {row.metric: row.value for row in rows if row.metric.startswith("views/")}
    both = sizes["audio"] + sizes["video"]
    assert found == {
        "views/none/clients": 3,
        "views/none/bytes_down": 3 * sizes["audio"],
        "views/none/bytes_up": 3 * sizes["audio"],
        "views/video/clients": 3,
        "views/video/bytes_down": 3 * (both + sizes["fusion"]),
        "views/video/bytes_up": 3 * both,
    }


def test_measuring_a_network_reads_no_other_view(tiny: Tiny, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = federation(tiny, folder, "unifl", "data.missing={video: 1.0}", "evaluate.every=1")
    server = start_server(config)
    read: list[int] = []
    stored = Frames._read

    def watched(self: Frames, *arguments: Any) -> np.ndarray:
        read.append(self.stream)
        return stored(self, *arguments)

    federation_ = server._federation
    monkeypatch.setattr(Frames, "_read", watched)
    orders = [o for o in federation_._evaluation.make_server_orders(federation_.state) if o.task.receive == ("global",)]
    list(federation_.pool.run(orders, federation_.broadcast({"global"})))
    assert set(read) == {0}
    server.close()


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("{video: 1.5}", "data.missing.video"),
        ("{video: -0.1}", "data.missing.video"),
        ("{film: 0.5}", "data.missing: unknown view 'film', not in data.views"),
    ],
)
def test_a_share_or_view_that_cannot_be_is_refused(tiny: Tiny, folder: Path, missing: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        federation(tiny, folder, "multifl", f"data.missing={missing}")


def test_the_digest_knows_who_lacks_a_view(tiny: Tiny, folder: Path) -> None:
    digests = [
        federation(tiny, folder, "multifl", *more).digest()
        for more in ([], ["data.missing={}"], ["data.missing={video: 0.5}"])
    ]
    assert digests[0] == digests[1] != digests[2]
