"""One task with updates to several entries of the server's state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import known

from raydfl.core.errors import ClientError, ConfigError
from raydfl.engine.config import Config
from raydfl.testing import assert_same_bits, start_server, train_federation

Tiny = Callable[..., Config]
METHOD = '''
import dataclasses

from pydantic.dataclasses import dataclass
from raydfl import Method, Task, fit


@dataclass(frozen=True, kw_only=True)
class Parted(Method):
    """FedAvg with the last layer in a separate entry."""

    key: str = "head"
    has: str = "head"

    def init(self, clients, models, rng):
        state = super().init(clients, models, rng)
        head = {n: t for n, t in state.tensors["global"].items() if "/output." in n}
        rest = {n: t for n, t in state.tensors["global"].items() if n not in head}
        return dataclasses.replace(state, tensors={"global": rest, "head": head})

    def plan(self, state, clients, rng, cohort):
        tasks = super().plan(state, clients, rng, cohort)
        has = (self.has,) if state.round_index else ()
        return [dataclasses.replace(task, receive=("global", "head"), has=has) for task in tasks]

    def plan_evaluation(self, state, clients):
        return [Task(client.id, phase="evaluate", receive=("global", "head")) for client in clients]

    def local(self, step):
        metrics = fit(step, self.loss)
        head = {n: t for n, t in step.floating_state().items() if "/output." in n}
        rest = {n: t for n, t in step.floating_state().items() if n not in head}
        return step.update(metrics, tensors=rest, further=[step.update(tensors=head, key=self.key)])
'''


@pytest.fixture
def split_method(tmp_path: Path) -> str:
    (tmp_path / "parted.py").write_text(METHOD)
    return f"{tmp_path / 'parted.py'}:Parted"


@pytest.mark.parametrize("attack", ["null", "{name: sign_flip, clients: 0.34}"])
def test_splitting_a_model_into_two_entries_keeps_the_bits(tiny: Tiny, split_method: str, attack: str) -> None:
    """Only the entry's name differs, with and without attackers."""
    settings = ["train.rounds=2", f"attack={attack}", "evaluate.server=false"]
    reference = known(tiny(*settings))
    split = train_federation(tiny(*settings, "run.name=parted", method=split_method))
    assert_same_bits(
        {name.replace("server head ", "server global "): value for name, value in split.items()}, reference
    )


def test_entries_that_a_client_already_has_are_not_counted(tiny: Tiny, split_method: str) -> None:
    server = start_server(tiny("evaluate.every=9", method=split_method))
    state = server._federation.state
    rest, head = (4 * sum(t.numel() for t in state.tensors[key].values()) for key in ("global", "head"))
    reports = [server._federation.round() for _ in range(2)]
    assert [report.bytes_down for report in reports] == [3 * (rest + head), 3 * rest]
    assert all(report.bytes_up == 3 * (rest + head) for report in reports)
    server.close()


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ("key=global", ClientError, "two updates to the key 'global'. Join their tensors in one update"),
        ("key=tail", ClientError, "the update has the key 'tail'"),
        ("has=tail", ConfigError, "with 'tail' in has but not in receive"),
    ],
)
def test_invalid_keys_are_rejected(
    tiny: Tiny, split_method: str, option: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train_federation(tiny("train.rounds=2", f"method.{option}", method=split_method))
