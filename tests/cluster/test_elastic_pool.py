"""An elastic actor pool on a simulated cluster: assignment of work, requests for actors, and timeouts."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from fake_cluster import START, FakeCluster, make_orders, open_pool

from raydfl.cluster.faults import StragglerPolicy
from raydfl.cluster.nodes import SuitableNodes
from raydfl.cluster.pool import RayPool
from raydfl.cluster.run_files import BlindNodeError, RunFiles
from raydfl.core.errors import ResourcesError
from raydfl.core.tensors import FlatTensors
from raydfl.core.types import Task
from raydfl.data.shards import Shard
from raydfl.engine.orders import SERVER, Measurement, Order, name_version
from raydfl.engine.pool import EarlyOrders
from raydfl.engine.settings import RaySettings


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    return FakeCluster(monkeypatch)


SITES = ("north", "south")
EMPTY = FlatTensors.from_tensors({})


def carry_out(pool, costs):  # type: ignore[no-untyped-def]
    """Return all results, and check that each order has exactly one."""
    results = list(pool.run(make_orders(costs), {"global": EMPTY}))
    assert sorted(result.position for result in results) == list(range(len(costs)))
    return results


def test_all_actors_are_requested_at_once_and_awaited(cluster: FakeCluster) -> None:
    cluster.at(30.0, lambda: cluster.join("a", 2))
    cluster.at(50.0, lambda: cluster.join("b", 2))
    pool = open_pool(cluster, actors=4, autoscale=True)
    assert max(number for time, number in cluster.demand if time == 0.0) == 4  # makes a cluster grow
    assert cluster.now == 50.0 + START
    carry_out(pool, [1.0] * 8)
    assert [len(actor.done) for actor in cluster.actors] == [2, 2, 2, 2]
    pool.close()
    assert all(not node.actors for node in cluster.nodes)  # lets idle nodes stop


def test_replies_come_in_batches_nearly_in_client_order(cluster: FakeCluster) -> None:
    """The server uses replies in client order and holds early replies."""
    cluster.join("a", 100)
    pool = open_pool(cluster, actors=100)
    rng, most_held, early, used = random.Random(1), 0, set(), 0
    carry_out(pool, [1.0] * 200)  # the pool measures the time per client
    waits = cluster.waits
    for reply in pool.run(make_orders([rng.choice([0.5, 1.0, 1.5]) for _ in range(1000)]), {"global": EMPTY}):
        early.add(reply.position)
        while used in early:
            early.remove(used)
            used += 1
        most_held = max(most_held, len(early))
    assert used == 1000
    assert most_held <= 300  # 654 with longest-first order
    assert cluster.waits - waits <= 100


def test_a_large_pool_takes_many_replies_at_once(cluster: FakeCluster) -> None:
    """A reply arrives every 0.1 ms. A pass over 400 to 500 pending calls gathers replies for 2 ms, and over 200 to 400 for 1 ms."""
    cluster.join("a", 500)
    pool = open_pool(cluster, actors=500)
    waits = cluster.waits
    replies = pool.run(make_orders([1.0 + number / 10_000 for number in range(500)]), {"global": EMPTY})
    assert len({reply.position for reply in itertools.islice(replies, 300)}) == 300
    assert cluster.waits - waits <= 2 * (100 / 20 + 200 / 10) + 10  # 600 with a pass for each reply


def test_rounds_start_with_min_actors_and_late_actors_join(cluster: FakeCluster) -> None:
    cluster.join("a", 1)
    pool = open_pool(cluster, actors=2, min_actors=1)
    assert cluster.now == START
    carry_out(pool, [1.0])  # the time per client is known now
    began = cluster.now
    cluster.at(began + 6.0 - START, lambda: cluster.join("b", 1))
    carry_out(pool, [1.0] * 24)
    # The first actor trains six alone, then both share the rest. Two may be queued when the second joins.
    assert 7 <= len(cluster.actors[1].done) <= 9
    assert cluster.now - began <= 6.0 + 9.0 + 2.0


def test_a_lost_node_counts_for_no_client_and_its_actors_are_requested_again(
    cluster: FakeCluster,
) -> None:
    cluster.join("a", 1)
    cluster.join("b", 2)
    pool = open_pool(cluster, actors=3, min_actors=1, retries=0, ready_timeout=20.0)
    carry_out(pool, [1.0] * 9)
    cluster.at(cluster.now + 1.0, lambda: cluster.leave("b"))
    results = carry_out(pool, [1.0] * 9)  # retries=0: a counted loss would stop the run
    assert {result.retried for result in results} == {0, 1}  # but it is reported
    assert cluster.waiting  # still requested
    carry_out(pool, [1.0] * 60)  # longer than ready_timeout
    assert len(cluster.waiting) == 2
    cluster.join("c", 2)
    carry_out(pool, [1.0] * 30)
    assert [len(actor.done) > 0 for actor in cluster.nodes[2].actors] == [True, True]


def test_a_preempted_node_counts_for_no_client(cluster: FakeCluster) -> None:
    """Ray reports the preemption with a lost actor, possibly before it lists the node as lost."""
    cluster.join("a", 1)
    cluster.join("b", 2)
    pool = open_pool(cluster, actors=3, min_actors=1, retries=0)
    carry_out(pool, [1.0] * 9)
    cluster.at(cluster.now + 1.0, lambda: cluster.preempt("b"))
    results = carry_out(pool, [1.0] * 9)  # retries=0: a counted loss would stop the run
    assert {result.retried for result in results} == {0, 1}
    assert len(cluster.waiting) == 2  # The idle actors of the node are requested again too.
    cluster.join("c", 2)
    carry_out(pool, [1.0] * 30)
    assert all(actor.done for actor in cluster.nodes[2].actors)


def test_preempted_actors_do_not_count_as_failed_starts(cluster: FakeCluster) -> None:
    cluster.at(5.0, lambda: cluster.join("spot", 1))
    cluster.at(5.0 + START / 2, lambda: cluster.preempt("spot"))
    cluster.at(20.0, lambda: cluster.join("stays", 1))
    carry_out(open_pool(cluster, actors=1, autoscale=True, retries=0), [1.0])


def test_idle_actors_of_lost_nodes_are_replaced(cluster: FakeCluster) -> None:
    """Otherwise each actor would lose an order, and more than ray.retries losses would stop the run."""
    cluster.join("a", 1)
    cluster.join("b", 5)
    pool = open_pool(cluster, actors=6, min_actors=1, retries=1)
    cluster.leave("b")
    carry_out(pool, [1.0])
    carry_out(pool, [1.0] * 8)
    assert len(cluster.waiting) == 5


def test_a_cpu_actor_counts_until_it_is_replaced(cluster: FakeCluster) -> None:
    cluster.join("a", 1, fallback="no driver on a")
    cluster.join("b", 1, fallback="no driver on b")
    pool = open_pool(cluster, actors=2, min_actors=1)
    carry_out(pool, [1.0] * 4)
    assert sorted(pool.fallbacks()) == ["no driver on a", "no driver on b"]
    cluster.leave("b")
    carry_out(pool, [1.0] * 8)
    assert len(pool.fallbacks()) == 2
    cluster.join("c", 1)
    carry_out(pool, [1.0] * 8)
    assert pool.fallbacks() == ["no driver on a"]


def test_the_wait_for_min_actors_has_a_limit(cluster: FakeCluster) -> None:
    cluster.join("a", 1)
    cluster.join("b", 1)
    pool = open_pool(cluster, actors=2, min_actors=2, ready_timeout=30.0)
    cluster.at(5.0, lambda: cluster.leave("b"))
    cluster.at(25.0, lambda: cluster.join("c", 1))
    carry_out(pool, [1.0] * 50)  # below min_actors for only 20 s
    cluster.leave("c")
    left = cluster.now
    with pytest.raises(
        ResourcesError, match=r"1 of 2 client actors started within 30 s\. Requested: 2 with 1 CPU each\. Free"
    ):
        carry_out(pool, [1.0] * 200)
    assert left + 30.0 <= cluster.now <= left + 40.0


def test_a_fixed_cluster_gives_up_slots(cluster: FakeCluster) -> None:
    cluster.join("a", 1)
    cluster.join("b", 1)
    pool = open_pool(cluster, actors=2, ready_timeout=30.0)
    cluster.at(5.0, lambda: cluster.leave("b"))
    carry_out(pool, [1.0] * 100)
    assert pool.count_workers() == 1
    assert not cluster.waiting
    cluster.leave("a")
    with pytest.raises(ResourcesError, match="0 of 1 client actors started within 30 s"):
        carry_out(pool, [1.0])


def test_a_slot_given_up_reopens_after_a_node_has_joined(cluster: FakeCluster) -> None:
    cluster.join("a", 1)
    cluster.join("b", 1)
    pool = open_pool(cluster, actors=2, ready_timeout=30.0)
    cluster.at(5.0, lambda: cluster.leave("b"))
    carry_out(pool, [1.0] * 100)
    cluster.at(cluster.now + 20.0, lambda: cluster.join("c", 1))
    carry_out(pool, [1.0] * 100)
    assert pool.count_workers() == 2
    assert cluster.actors[-1].node is not None
    assert cluster.actors[-1].node.name == "c"
    assert len(cluster.actors[-1].done) > 20


def make_nodes(*names: str, store: str = "") -> SuitableNodes:
    return SuitableNodes(RunFiles("token", "", store, frozenset(names)), Path("run"))


def test_a_node_that_joins_and_cannot_open_the_run_is_not_used(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.join("a", 1)
    cluster.join("b", 1)
    cluster.nodes_for = make_nodes("a", "b")
    pool = open_pool(cluster, actors=2, ready_timeout=100.0)
    cluster.at(5.0, lambda: cluster.leave("b"))
    cluster.at(6.0, lambda: cluster.join("old", 1, broken=ResourcesError("node old: raydfl 0.0 instead of 0.1")))
    cluster.at(20.0, lambda: cluster.join("c", 1))
    carry_out(pool, [1.0] * 100)
    assert caplog.messages == ["A new node is not used: node old: raydfl 0.0 instead of 0.1"]
    assert [actor.node.name for actor in cluster.actors if actor.node] == ["a", "b", "old", "c"]
    cluster.leave("a")
    cluster.leave("c")
    with pytest.raises(
        ResourcesError, match=r"0 of 1 client actors started .* Not used: node old: raydfl 0\.0 instead"
    ):
        carry_out(pool, [1.0])


def test_a_node_that_joins_without_raydfl_is_not_used(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.join("a", 1)
    cluster.nodes_for = make_nodes("a")
    pool = open_pool(cluster, actors=2, min_actors=1, ready_timeout=100.0)
    for name in ("10.0.0.2", "10.0.0.22"):
        cluster.at(6.0, lambda name=name: cluster.join(name, 1, broken=ImportError("No module named 'raydfl'")))
    cluster.at(20.0, lambda: cluster.join("c", 1))
    carry_out(pool, [1.0] * 100)
    reason = "a client actor failed to start: ImportError: No module named 'raydfl'"
    assert caplog.messages == [f"A new node is not used: {reason}"] * 2
    assert [actor.node.name for actor in cluster.actors if actor.node] == ["a", "10.0.0.2", "10.0.0.22", "c"]
    assert pool.count_workers() == 2


def test_a_node_of_the_start_without_raydfl_ends_the_run(cluster: FakeCluster) -> None:
    cluster.join("a", 1)
    cluster.join("new", 1, broken=ImportError("No module named 'raydfl'"))
    cluster.nodes_for = make_nodes("a", "new")
    with pytest.raises(ResourcesError, match="a client actor failed to start"):
        open_pool(cluster, actors=2)


def test_a_node_of_the_start_that_cannot_open_the_run_ends_it(cluster: FakeCluster) -> None:
    cluster.join("a", 1)
    cluster.join("old", 1, broken=ResourcesError("node old: raydfl 0.0 instead of 0.1"))
    cluster.nodes_for = make_nodes("a", "old")
    with pytest.raises(ResourcesError, match="node old"):
        open_pool(cluster, actors=2)


@pytest.mark.parametrize("settings", [{"actors": 3, "min_actors": 1}, {"actors": "per_client"}])
def test_the_runs_files_are_uploaded_once_for_nodes_that_join_without_them(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, settings: dict[str, int | str]
) -> None:
    uploads = []

    def upload(folder: Path, uri: str) -> str:
        uploads.append((str(folder), uri))
        for node in cluster.nodes:
            node.broken = None
        return f"{uri}/copy"

    monkeypatch.setattr("raydfl.cluster.run_files.upload_population", upload)
    cluster.join("a", 1)
    cluster.nodes_for = make_nodes("a", store="s3://bucket/.data")
    pool = open_pool(cluster, **settings)
    for at in (5.0, 5.5):
        cluster.at(at, lambda at=at: cluster.join(f"blind{at}", 1, broken=BlindNodeError("it does not see the folder")))
    carry_out(pool, [1.0] * (100 if settings["actors"] == 3 else 3))
    assert uploads == [("run/population", "s3://bucket/.data")]
    assert cluster.nodes_for.files.uri == "s3://bucket/.data/copy"
    assert not cluster.nodes_for.excluded
    assert sum(bool(actor.done) for actor in cluster.actors) == 3


def test_missing_nodes_are_reported_with_their_resources(cluster: FakeCluster) -> None:
    cluster.join("a", 1)
    with pytest.raises(
        ResourcesError,
        match=r"1 of 3 client actors started within 60 s\. Requested: 2 with 1 CPU and 0.5 GPU each, 1 with 1 CPU each\. "
        r"Free in the cluster: 0 CPU, 0 GPU",
    ):
        open_pool(cluster, actors=2, gpus=0.5, cpu_actors=1, autoscale=True, ready_timeout=60.0)
    assert cluster.now == 60.0


def test_actors_that_fail_at_startup_are_retried_a_limited_number_of_times(cluster: FakeCluster) -> None:
    def come_and_go(name: str, at: float) -> None:
        cluster.at(at, lambda: cluster.join(name, 1))
        cluster.at(at + START / 2, lambda: cluster.leave(name))

    for number in range(3):
        come_and_go(f"spot{number}", 5.0 * number)
    cluster.at(20.0, lambda: cluster.join("stays", 1))
    carry_out(open_pool(cluster, actors=1, autoscale=True, retries=3), [1.0])
    for number in range(3):
        come_and_go(f"again{number}", cluster.now + 1.0 + 5.0 * number)
    with pytest.raises(ResourcesError, match="a client actor failed to start"):
        open_pool(cluster, actors=1, autoscale=True, retries=2)


def test_gpu_and_cpu_actors_share_a_round_by_pace(cluster: FakeCluster) -> None:
    cluster.join("gpus", 2, 1)
    cluster.join("cpus", 2)
    pool = open_pool(cluster, actors=2, gpus=0.5, cpu_actors=2)
    assert [actor.node.name for actor in cluster.actors if actor.node] == ["gpus", "gpus", "cpus", "cpus"]
    carry_out(pool, [1.0] * 44)  # the pool measures 0.1 s per unit on a GPU and 1 s on a CPU
    before, began = [len(actor.done) for actor in cluster.actors], cluster.now
    carry_out(pool, [1.0] * 220)
    done = [len(actor.done) - earlier for actor, earlier in zip(cluster.actors, before, strict=True)]
    assert 190 <= done[0] + done[1] <= 210  # the GPU does ten elevenths of the work
    assert cluster.now - began <= 220 / (2 / 0.1 + 2 / 1.0) + 1.0  # plus the longest piece


def test_actors_too_slow_to_help_get_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(monkeypatch, seconds_per_cost=10.0, gpu_seconds=0.1)
    cluster.join("a", 2, 1)
    pool = open_pool(cluster, actors=1, gpus=1, cpu_actors=1)
    carry_out(pool, [1.0] * 20)
    began = cluster.now
    carry_out(pool, [1.0] * 20)
    assert cluster.now - began <= 2.1
    carry_out(pool, [1.0] * 2000)  # a slow actor helps in longer rounds
    assert len(cluster.actors[1].done) > 10


def test_with_per_client_actors_server_data_are_evaluated_at_their_site(
    cluster: FakeCluster,
) -> None:
    cluster.join("a", 4)
    pool = RayPool(cluster.start_actor, RaySettings(actors="per_client"), places=SITES)
    sent = [
        Order(position, Task(SERVER), 0, 1.0, measure=(Measurement("test", (), Shard("test", 0, 1, site)),), place=site)
        for position, site in enumerate(["north", "south", "north"])
    ]
    assert len(list(pool.run(sent, {"global": EMPTY}))) == 3
    assert {(actor.site, tuple(sorted(actor.done))) for actor in cluster.actors} == {
        ("north", (0, 2)),
        ("south", (1,)),
    }


def test_a_client_runs_only_at_its_site(cluster: FakeCluster) -> None:
    cluster.join("a", 4)
    pool = RayPool(cluster.start_actor, RaySettings(actors=2), places=SITES)
    clients = ["north/0", "south/0", "north/1", "south/1", "south/2"]
    sent = [Order(position, Task(client), 0, 1.0, place=client[:5]) for position, client in enumerate(clients)]
    results = list(pool.run(sent, {"global": EMPTY}))
    assert sorted(result.position for result in results) == [0, 1, 2, 3, 4]
    for site in ("north", "south"):
        done = {clients[position] for actor in cluster.actors if actor.site == site for position in actor.done}
        assert done == {client for client in clients if client.startswith(site)}
    assert {result.span.actor for result in results if result.span} == {
        0,
        1,
        2,
        3,
    }  # slots are numbered across all sites


def test_a_missing_site_is_reported(cluster: FakeCluster) -> None:
    cluster.join("a", 1)
    settings = RaySettings(actors=1, ready_timeout=30.0)
    with pytest.raises(ResourcesError, match="1 of 2 client actors started within 30 s, none at site south, but each"):
        RayPool(cluster.start_actor, settings, places=SITES)


def test_retries_of_a_dropped_client_are_reported(cluster: FakeCluster) -> None:
    cluster.join("a", 1)
    settings = RaySettings(actors=1, retries=1)
    pool = RayPool(cluster.start_actor, settings, StragglerPolicy(drop_lost=True))
    for time in (1.0, 2.0 + START):  # the first actor and its replacement end
        cluster.at(cluster.now + time, lambda: cluster.actors[-1].end(cluster.now))
    (result,) = carry_out(pool, [10.0])
    assert result.rejected.startswith("lost: its actor was lost 2 times")
    assert result.retried == 1


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_actors_without_other_work_begin_orders_of_later_steps(cluster: FakeCluster, lost: int | None) -> None:
    """40 server steps need one client each, and 4 further clients are in flight. 2 actors halve the time of 40 s."""
    cluster.join("a", 2)
    pool = open_pool(cluster, actors=2)
    began = cluster.now
    if lost is not None:  # while the actor carries out an early order: the current step needs that of one of the actors
        cluster.at(began + 4.5, lambda: cluster.actors[lost].end(cluster.now))
    states = {"global": EMPTY} | {name_version("global", version): EMPTY for version in range(40)}

    def order(start: int, step: int, early: bool) -> Order:
        """Make the order of the client that starts four steps before its arrival."""
        age = step - max(0, start - 4)
        return Order(3 * early, Task(f"c{start}"), step, 1.0, staleness=age, start=start, early=early)

    for step in range(40):
        following = [order(start, step + 1, early=True) for start in range(step + 1, min(step + 5, 40))]
        early = EarlyOrders(following, frozenset(range(step + 1, 40)))
        (reply,) = pool.run([order(step, step, early=False)], states, early)
        assert (reply.position, reply.client_id) == (0, f"c{step}")
    assert cluster.now - began <= (20 if lost is None else 25)
    assert sum(len(actor.done) for actor in cluster.actors) == 40 + 2 * (lost is not None)
    assert len(carry_out(pool, [1.0] * 4)) == 4
    pool.close()
