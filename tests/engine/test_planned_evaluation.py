"""Planned evaluation: entries measured by the server, and client metrics in the aggregation."""

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
    """A method with several entries in its state and a configurable evaluation plan."""

    receive: tuple[tuple[str, ...], ...] = (("best",),)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def init(self, clients, models, rng):  # type: ignore[no-untyped-def]
        state = super().init(clients, models, rng)
        first = state.tensors["global"]
        head = {name: value for name, value in first.items() if name.startswith("model/output")}
        trunk = {name: value for name, value in first.items() if name not in head}
        return dataclasses.replace(state, tensors={"global": first, "best": first, "head": head, "trunk": trunk})

    def plan_evaluation(self, state: State, clients: Sequence[Client]) -> list[Task]:
        planned = [Task("", phase="evaluate", receive=keys, options=self.options) for keys in self.receive]
        return planned + super().plan_evaluation(state, clients)


@dataclass(frozen=True, kw_only=True)
class ByLoss(Method):
    """A method whose server weights each update by the inverse of its reported loss."""

    by_loss: bool = True

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        losses: list[Ratio] = []

        def weight_updates() -> Iterable[Update]:
            for update in updates:
                loss = update.metrics["loss"]
                assert isinstance(loss, Ratio)
                losses.append(loss)
                yield dataclasses.replace(update, weight=1 / loss.value if self.by_loss else 1.0)

        new, report = super().aggregate(state, weight_updates(), rng)
        return new, {**report, "losses": Ratio(sum(loss.value for loss in losses), len(losses))}


@dataclass(frozen=True, kw_only=True)
class Momentum(Method):
    """A method whose server keeps a velocity with the model's names and shapes, for no task."""

    def init(self, clients, models, rng):  # type: ignore[no-untyped-def]
        state = super().init(clients, models, rng)
        return dataclasses.replace(state, tensors={"velocity": state.tensors["global"], **state.tensors})


def list_accuracies(run_dir: Path, split: str = "test") -> set[str]:
    rows = record.read_rows(run_dir).to_pandas()
    names = set(rows.loc[(rows["split"] == split) & (rows["metric"].str.endswith("accuracy")), "metric"])
    return {name for name in names if "average" not in name}


def test_the_server_measures_planned_entries(tiny: Tiny) -> None:
    default = run(
        tiny("run.name=default", f"method.name={HERE}:Planned", "method.receive=[]", "train.rounds=1")
    ).run_dir
    assert list_accuracies(default) == {"model/accuracy"}  # no task receives the additional entries
    planned = run(tiny("run.name=planned", f"method.name={HERE}:Planned", "train.rounds=1")).run_dir
    assert list_accuracies(planned) == {"best:model/accuracy"}
    assert list_accuracies(planned, "validation") == {"model/accuracy"}  # clients still measure their own models
    load_model(planned, "best:model", client=None)
    joined = tiny("run.name=joined", f"method.name={HERE}:Planned", "method.receive=[[head, trunk]]", "train.rounds=1")
    joined_dir = run(joined).run_dir
    assert list_accuracies(joined_dir) == {"head:model/accuracy"}
    values = [
        rows.loc[(rows["split"] == "test") & (rows["metric"] == metric) & (rows["round"] == 1), "value"].tolist()
        for rows, metric in (
            (record.read_rows(planned).to_pandas(), "best:model/loss"),
            (record.read_rows(joined_dir).to_pandas(), "head:model/loss"),
        )
    ]
    assert values[0] == values[1]  # both are the initial model
    assert values[0]
    some = tiny("run.name=some", f"method.name={HERE}:Planned", "method.options={split: test, models: [model]}")
    assert list_accuracies(run(some).run_dir) == {"best:model/accuracy"}


def test_entries_without_a_task_are_not_models(tiny: Tiny) -> None:
    run_dir = run(tiny(f"method.name={HERE}:Momentum", "train.rounds=1", "run.best={}")).run_dir
    assert list_accuracies(run_dir) == {"model/accuracy"}
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
def test_invalid_evaluation_plans_are_rejected_before_the_first_round(
    tiny: Tiny, settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        start_server(tiny(f"method.name={HERE}:Planned", *settings))


def test_aggregation_receives_the_metrics_of_updates(tiny: Tiny) -> None:
    reference = train_federation(tiny("run.name=uniform", "method.rule=uniform_mean"))
    assert_same_bits(
        reference, train_federation(tiny("run.name=one", f"method.name={HERE}:ByLoss", "method.by_loss=false"))
    )
    config = tiny("run.name=loss", f"method.name={HERE}:ByLoss", "train.rounds=2")
    run_dir = run(config).run_dir
    rows = record.read_rows(run_dir).to_pandas()
    client_rows = rows[(rows["metric"] == "loss") & (rows["client"] != "") & (rows["phase"] == "train")]
    for round_index in (1, 2):
        losses = client_rows.loc[client_rows["round"] == round_index, "value"]
        reported = rows.loc[(rows["metric"] == "losses") & (rows["round"] == round_index), "value"].item()
        np.testing.assert_allclose(reported, losses.mean())
    resumed = tiny("run.name=uneven", f"method.name={HERE}:ByLoss")
    assert reference != train_federation(resumed)


def test_shared_models_are_measured_on_the_servers_validation_clips(tiny: Tiny) -> None:
    """Oracle: predictions of the exported model for the held-out clips."""
    held_out = "data.split.server_validation={fraction: 0.3, stratify: true}"
    folder = run(tiny(held_out, "train.rounds=1")).run_dir
    examples = Population.load(folder / "population").validation
    batch = examples.batch(np.arange(len(examples)))
    right = (load_model(folder).logits(batch.x, None).argmax(dim=1) == batch.y).float().mean()
    rows = [row for row in record.read_rows(folder).to_pylist() if row["split"] == "server_validation"]
    (accuracy,) = [row for row in rows if row["metric"] == "model/accuracy" and row["round"] == 1]
    assert (accuracy["count"], accuracy["value"]) == (len(examples), pytest.approx(float(right)))
    assert len(examples) == 21  # 30 % of 24 clips of each of 3 labels, rounded
    assert tiny("data.split.server_validation=null").digest() == tiny().digest() != tiny(held_out).digest()
