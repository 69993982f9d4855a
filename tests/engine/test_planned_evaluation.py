"""Server evaluations planned by a method, and client metrics in its aggregation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import final_state
from pydantic.dataclasses import dataclass

from raydfl.core.errors import ConfigError, InputError
from raydfl.core.types import Client, Metrics, Ratio, State, Task, Update
from raydfl.data.population import Population
from raydfl.engine.config import Config
from raydfl.engine.storage import record
from raydfl.methods import Method
from raydfl.runs._run import run
from raydfl.runs.inference.model import load_model
from raydfl.testing import assert_same_bits, start_server, train_federation

Tiny = Callable[..., Config]
HERE = Path(__file__)


@dataclass(frozen=True, kw_only=True)
class Planned(Method):
    """Method with two equal state entries and a plan for their evaluation."""

    receive: tuple[tuple[str, ...], ...] = (("best",),)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def init(self, clients, models, rng):  # type: ignore[no-untyped-def]
        state = super().init(clients, models, rng)
        first = state.tensors["global"]
        head = {name: value for name, value in first.items() if name.startswith("model/output")}
        trunk = {name: value for name, value in first.items() if name not in head}
        return dataclasses.replace(state, tensors={"global": first, "best": first, "head": head, "trunk": trunk})

    def plan_evaluation(self, state: State, clients: Sequence[Client]) -> list[Task]:
        own = [Task("", phase="evaluate", receive=keys, options=self.options) for keys in self.receive]
        return own + super().plan_evaluation(state, clients)


@dataclass(frozen=True, kw_only=True)
class ByLoss(Method):
    """Method whose client weights fall with the reported loss."""

    by_loss: bool = True

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        seen: list[Ratio] = []

        def weight_updates() -> Iterable[Update]:
            for update in updates:
                loss = update.metrics["loss"]
                assert isinstance(loss, Ratio)
                seen.append(loss)
                yield dataclasses.replace(update, weight=1 / loss.value if self.by_loss else 1.0)

        new, report = super().aggregate(state, weight_updates(), rng)
        return new, {**report, "losses": Ratio(sum(loss.value for loss in seen), len(seen))}


@dataclass(frozen=True, kw_only=True)
class Momentum(Method):
    """The server's momentum has the names and shapes of the model, but no task receives it."""

    def init(self, clients, models, rng):  # type: ignore[no-untyped-def]
        state = super().init(clients, models, rng)
        return dataclasses.replace(state, tensors={"velocity": state.tensors["global"], **state.tensors})


def read_metrics(run_dir: Path, split: str = "test") -> set[str]:
    rows = record.read_rows(run_dir).to_pandas()
    names = set(rows.loc[(rows["split"] == split) & (rows["metric"].str.endswith("accuracy")), "metric"])
    return {name for name in names if "average" not in name}


def test_the_server_evaluates_the_planned_entries(tiny: Tiny) -> None:
    default = run(
        tiny("run.name=default", f"method.name={HERE}:Planned", "method.receive=[]", "train.rounds=1")
    ).run_dir
    assert read_metrics(default) == {"model/accuracy"}  # no client receives the other entries
    planned = run(tiny("run.name=planned", f"method.name={HERE}:Planned", "train.rounds=1")).run_dir
    assert read_metrics(planned) == {"best:model/accuracy"}
    assert read_metrics(planned, "validation") == {"model/accuracy"}  # client models are evaluated as usual
    load_model(planned, "best:model", client=None)
    joined = tiny("run.name=joined", f"method.name={HERE}:Planned", "method.receive=[[head, trunk]]", "train.rounds=1")
    joined_run = run(joined).run_dir
    assert read_metrics(joined_run) == {"head:model/accuracy"}
    values = [
        rows.loc[(rows["split"] == "test") & (rows["metric"] == metric) & (rows["round"] == 1), "value"].tolist()
        for rows, metric in (
            (record.read_rows(planned).to_pandas(), "best:model/loss"),
            (record.read_rows(joined_run).to_pandas(), "head:model/loss"),
        )
    ]
    assert values[0] == values[1]  # both are the initial model
    assert values[0]
    some = tiny("run.name=some", f"method.name={HERE}:Planned", "method.options={split: test, models: [model]}")
    assert read_metrics(run(some).run_dir) == {"best:model/accuracy"}


def test_an_entry_without_receiving_tasks_is_not_a_model(tiny: Tiny) -> None:
    run_dir = run(tiny(f"method.name={HERE}:Momentum", "train.rounds=1", "run.best={}")).run_dir
    assert read_metrics(run_dir) == {"model/accuracy"}
    weights = load_model(run_dir).network.state_dict()
    assert torch.equal(weights["output.weight"], final_state(run_dir).tensors["global"]["model/output.weight"])
    assert {path.name for path in run_dir.glob("*.safetensors")} == {"model.safetensors", "model-best.safetensors"}
    with pytest.raises(InputError, match="no model 'velocity:model'"):
        load_model(run_dir, "velocity:model")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["method.receive=[[bset]]"], r"the server's state has no 'bset'. Did you mean 'best'"),
        (["method.receive=[[]]"], r"it receives no entry of the server's state"),
        (["method.options={splt: test}"], r"it has the option 'splt'. Did you mean 'split'"),
        (["method.options={split: tset}"], r"there is no split 'tset'. Did you mean 'test'"),
        (["method.options={models: [modle]}"], r"no whole model 'modle'. Did you mean 'model'"),
        (["method.options={models: model}"], r"models is 'model'. Set it to a list"),
        (["method.receive=[[best], [best]]"], r"'model' of 'best' is measured twice on the split 'test'"),
        (
            ["method.receive=[[head]]", "method.options={models: [model]}"],
            r"the model 'model' of 'head', because some of its tensors are missing there",
        ),
    ],
)
def test_an_impossible_plan_is_rejected_before_the_first_round(tiny: Tiny, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start_server(tiny(f"method.name={HERE}:Planned", *settings))


def test_updates_keep_their_metrics_at_the_server(tiny: Tiny) -> None:
    reference = train_federation(tiny("run.name=uniform", "method.rule=uniform_mean"))
    assert_same_bits(
        reference, train_federation(tiny("run.name=one", f"method.name={HERE}:ByLoss", "method.by_loss=false"))
    )
    config = tiny("run.name=loss", f"method.name={HERE}:ByLoss", "train.rounds=2")
    run_dir = run(config).run_dir
    rows = record.read_rows(run_dir).to_pandas()
    of_clients = rows[(rows["metric"] == "loss") & (rows["client"] != "") & (rows["phase"] == "train")]
    for round_index in (1, 2):
        losses = of_clients.loc[of_clients["round"] == round_index, "value"]
        output = rows.loc[(rows["metric"] == "losses") & (rows["round"] == round_index), "value"].item()
        np.testing.assert_allclose(output, losses.mean())
    resumed = tiny("run.name=uneven", f"method.name={HERE}:ByLoss")
    assert reference != train_federation(resumed)


def test_shared_models_are_evaluated_on_the_servers_validation_clips(tiny: Tiny) -> None:
    """Oracle: predictions of the published model."""
    held_out = "data.split.server_validation={fraction: 0.3, stratify: true}"
    folder = run(tiny(held_out, "train.rounds=1")).run_dir
    examples = Population.load(folder / "population").validation
    batch = examples.batch(np.arange(len(examples)))
    right = (load_model(folder).logits(batch.x, None).argmax(dim=1) == batch.y).float().mean()
    rows = [row for row in record.read_rows(folder).to_pylist() if row["split"] == "server_validation"]
    (accuracy,) = [row for row in rows if row["metric"] == "model/accuracy" and row["round"] == 1]
    assert (accuracy["count"], accuracy["value"]) == (len(examples), pytest.approx(float(right)))
    assert len(examples) == 21  # 30 % of 24 clips per label, rounded, for 3 labels
    assert tiny("data.split.server_validation=null").digest() == tiny().digest() != tiny(held_out).digest()
