"""Seconds of nodes and bytes between nodes, with three numbers that a reader can check by hand."""

from __future__ import annotations

from raydfl.cluster.use import UseMeter, add_use


class Clock:
    """A clock under the test's control."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_node_is_held_from_its_first_actor_to_its_last() -> None:
    """Two actors share a GPU node for 10 s, and work for 4 s and 8 s. The server's node sends and receives nothing."""
    clock = Clock()
    meter = UseMeter("head", clock)
    for node in ("head", "gpu", "gpu"):
        meter.join(node)
    meter.begin_round({"global": 100, "control": 7})
    meter.send("gpu", ["global"])
    meter.send("gpu", ["control", "global"])  # The node already has the model of this round.
    meter.send("head", ["global"])
    meter.receive("gpu", 4.0, 30)
    meter.receive("gpu", 8.0, 30)
    meter.receive("head", 5.0, 30)
    meter.begin_round({"global": 100})
    meter.send("gpu", ["global"])
    clock.now = 6.0
    meter.leave("gpu")
    clock.now = 10.0
    meter.leave("gpu")
    clock.now = 20.0
    use = meter.summarise({"head": "CPU node", "gpu": "workers (spot)"})
    assert use == {
        "CPU node": {"held": 20, "busy": 5, "bytes_down": 0, "bytes_up": 0},
        "workers (spot)": {"held": 10, "busy": 6, "bytes_down": 207, "bytes_up": 60},
    }


def test_a_resumed_run_adds_its_use() -> None:
    total = {"CPU node": {"held": 20.0}}
    add_use(total, {"CPU node": {"held": 5.0}, "GPU node": {"held": 3.0}})
    assert total == {"CPU node": {"held": 25.0}, "GPU node": {"held": 3.0}}
