"""Clients that end or block their actor are dropped. Other clients keep their bits.

The server runs in this process, and its client actors run in Ray.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from raydfl.core.errors import ResourcesError
from raydfl.data import Population
from raydfl.engine.config import Config
from raydfl.engine.storage import record
from raydfl.engine.storage.folder import final_state
from raydfl.testing import assert_same_bits, train_federation

Tiny = Callable[..., Config]
FAULTY = Path(__file__).parent / "faulty_methods.py"
pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.slow, pytest.mark.timeout(600)]
WHOLE = ["train.cohort=1.0", "ray.cpus=0.5"]


@pytest.fixture(autouse=True)
def free_cpus() -> Iterator[None]:
    """Wait until the actors of the previous test have ended."""
    yield
    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU", 0) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)


def select_method(name: str) -> str:
    return f"method.name={FAULTY}:{name}"


def get_run_dir(config: Config) -> Path:
    return Path(config.run.dir) / str(config.run.name)


def read_failures(config: Config) -> list[tuple[int, str, str]]:
    rows = record.to_rows(record.read_rows(get_run_dir(config)))
    return [(row.round, row.client, row.note or "") for row in rows if row.metric == "failed" and row.client]


@pytest.mark.parametrize("retries", [0, 1])
def test_a_client_that_ends_every_actor_is_dropped(tiny: Tiny, retries: int) -> None:
    """Only this client is dropped, even without retries. Clients lost with it are retried individually."""
    settings = [
        select_method("Fails"),
        "method.what=exit",
        "ray.actors=2",
        f"ray.retries={retries}",
        "run.on_error=drop",
    ]
    config = tiny(*WHOLE, *settings, "run.name=lost")
    dropped = train_federation(config)
    ((round_, client, note),) = read_failures(config)
    assert (round_, client) == (2, "s2")
    assert note.startswith("lost: its actor was lost 2 times: ActorDiedError")
    assert_same_bits(train_federation(tiny(*WHOLE, select_method("Absent"), "run.name=absent")), dropped)


def test_a_client_of_a_group_that_ends_every_actor_is_dropped(tiny: Tiny) -> None:
    common = [*WHOLE, "train.together=3", "train.rounds=2"]
    settings = [select_method("Fails"), "method.what=exit", "ray.actors=2", "ray.retries=0", "run.on_error=drop"]
    config = tiny(*common, *settings, "run.name=lost")
    train_federation(config)
    assert [entry[:2] for entry in read_failures(config)] == [(2, "s2")]
    absent = tiny(*WHOLE, "train.rounds=2", select_method("Absent"), "run.name=absent")
    train_federation(absent)
    expected = final_state(Path(absent.run.dir) / "absent").tensors["global"]
    for name, tensor in final_state(get_run_dir(config)).tensors["global"].items():
        assert (tensor - expected[name]).abs().max() < 1e-5, name


def test_a_dropped_client_gives_the_same_bits_from_any_pool(tiny: Tiny) -> None:
    common = [*WHOLE, select_method("Fails"), "run.on_error=drop"]
    serial = tiny(*common, "run.name=serial")
    reference = train_federation(serial)
    for actors in (1, 2):
        config = tiny(*common, f"ray.actors={actors}", f"run.name=actors{actors}")
        assert_same_bits(reference, train_federation(config))
        assert read_failures(config) == read_failures(serial)


@pytest.mark.parametrize(("actors", "together"), [("2", 1), ("2", 3), ("per_client", 1)])
def test_a_blocked_client_is_not_awaited(tiny: Tiny, actors: str, together: int) -> None:
    """The client sleeps for an hour. The other clients train as without it."""
    settings = [select_method("Fails"), "method.what=hang", "train.deadline=20", "ray.grace=3", f"ray.actors={actors}"]
    settings.append("data.speakers=3")  # all three clients in every round; per_client gives each its own actor
    config = tiny(*WHOLE, *settings, f"train.together={together}", "run.name=hung")
    ended = train_federation(config)
    ((round_, client, note),) = read_failures(config)
    assert (round_, client) == (2, "s2")
    assert note == "late: no answer after 23 s (train.deadline and ray.grace)"
    if together == 1:
        assert_same_bits(
            train_federation(tiny(*WHOLE, "data.speakers=3", select_method("Absent"), "run.name=absent")), ended
        )


def test_late_clients_do_not_hurry_the_others(tiny: Tiny) -> None:
    """One client takes 3 s per batch. Its work until the deadline counts, and the other clients finish their work."""
    settings = [
        select_method("SlowBatches"),
        "method.seconds=3",
        "train.local_epochs=4",
        "train.deadline=10",
        "ray.actors=2",
    ]
    config = tiny(*WHOLE, *settings, "train.rounds=1", "run.name=slow")
    train_federation(config)
    rows = record.to_rows(record.read_rows(get_run_dir(config)))
    late = [(row.round, row.client) for row in rows if row.metric == "late" and row.client]
    assert late == [(1, "s2")]
    steps = {row.client: row.value for row in rows if row.metric == "steps" and row.client}
    assert 1 <= steps.pop("s2") <= 4
    population = Population.load(get_run_dir(config) / "population")
    batches = {client: math.ceil(population.num_examples(index) / 8) for index, client in enumerate(population.ids)}
    assert steps == {client: 4 * batches[client] for client in steps}
    assert len(steps) == len(batches) - 1


def test_the_servers_evaluation_is_never_dropped(tiny: Tiny, tmp_path: Path) -> None:
    killer = tmp_path / "killer.py"
    killer.write_text(
        "import os\nfrom raydfl import Method\n\nclass Killer(Method):\n"
        "    def evaluate(self, step, examples, batch_size):\n"
        "        os._exit(1) if not step.client.id else None\n"
        "        return super().evaluate(step, examples, batch_size)\n"
    )
    settings = [f"method.name={killer}:Killer", "ray.actors=1", "ray.retries=0", "run.on_error=drop"]
    with pytest.raises(ResourcesError, match=r"the actor of client '' was lost 2 times in round 2"):
        train_federation(tiny(*settings, "run.name=server"))
