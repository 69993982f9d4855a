"""Fine-tuning at evaluation: copies of a client's models train, their metrics are recorded, and the copies are discarded."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import finish_in, known
from several_clients import BANDS, CLASSES, make_examples, make_steps
from torch import nn

from raydfl import Config, read_rows
from raydfl.core import registry
from raydfl.core.errors import ConfigError
from raydfl.core.types import Ratio
from raydfl.engine.fine_tuning import fine_tune
from raydfl.methods.fedbabu import FedBABU
from raydfl.models.dense import MeanMLP
from raydfl.objectives import Classify
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, start_server
from raydfl.training import Replica, find_fixed_tensors

Tiny = Callable[..., Config]


def build_models() -> dict[str, nn.Module]:
    return {"model": MeanMLP(BANDS, CLASSES, hidden=7)}


@pytest.mark.parametrize("part", [[], ["model/output"], ["model/hidden"]])
def test_a_copy_is_trained_on_the_clients_data(part: list[str]) -> None:
    """Plain SGD in float64 is the oracle. The method's fixed head trains too, unless the part excludes it."""
    method = FedBABU()
    step, reference = (make_steps(method, build_models)[1] for _ in range(2))
    for client_step in (step, reference):
        client_step.fixed = find_fixed_tensors(client_step.models, method.fixed)
        Replica(client_step.models, client_step.fixed)  # as in the engine
    network = copy.deepcopy(reference.models["model"]).double().requires_grad_(True)
    trained = [p for name, p in network.named_parameters() if not part or f"model/{name}".startswith(part[0])]
    for _ in range(3):
        for batch in reference.data.train.batches(4, reference.rng):
            loss = F.cross_entropy(network(batch.x.double()), batch.y)
            with torch.no_grad():
                for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                    parameter -= 0.1 * gradient
    before = {name: value.clone() for name, value in step.models["model"].state_dict().items()}
    tuned = fine_tune(step, Classify(), 3, part, method.fixed)
    examples = make_examples(8, 5)
    batch = examples.batch(np.arange(8))
    for measured, model in ((step, reference.models["model"].double()), (tuned, network)):
        result = method.evaluate(measured, examples, 4)["model/loss"]
        assert isinstance(result, Ratio)
        assert result.value == pytest.approx(F.cross_entropy(model(batch.x.double()), batch.y).item(), rel=1e-4)
    assert step.rng.bit_generator.state == reference.rng.bit_generator.state
    assert all(torch.equal(before[name], value) for name, value in step.models["model"].state_dict().items())


FAST = ("fedavg", "ditto")


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in registry.names("raydfl.methods")],
)
def test_fine_tuning_adds_metrics_and_leaves_the_run_unchanged(tiny: Tiny, method: str) -> None:
    settings = ["train.rounds=2", "evaluate.clients=all"]
    config = tiny(*settings, "evaluate.fine_tune={epochs: 1}", "run.name=tuned", method=method)
    run_dir = create(config, Progress("quiet"))
    assert_same_bits(
        known(tiny(*settings, "evaluate.fine_tune={epochs: 0}", method=method)), finish_in(run_dir, config)
    )
    names = {row["metric"] for row in read_rows(run_dir).to_pylist() if row["split"] == "validation"}
    plain = {
        name for name in names if not name.startswith("personal-") and (method == "ditto" or "personal/" not in name)
    }
    models = config.components.models
    assert plain
    for name in plain:
        model, _, metric = name.partition("/")
        assert (f"personal/{metric}" if len(models) == 1 else f"personal-{model}/{metric}") in names


def test_former_options_of_fedbabu_keep_their_meaning(tiny: Tiny) -> None:
    former = tiny("method.fine_tune_epochs=2", "method.fine_tune_part=head", method="fedbabu")
    assert former.components.fine_tune.model_dump() == {"epochs": 2, "part": ["model/output"]}
    assert tiny(method="fedbabu").components.fine_tune.epochs == 5
    assert tiny().components.fine_tune.epochs == 0
    explicit = tiny("evaluate.fine_tune={epochs: 3}", method="fedbabu")
    assert explicit.components.fine_tune.epochs == 3
    # evaluate.fine_tune is not in the digest, because it affects no training.
    assert explicit.digest() == tiny(method="fedbabu").digest() != former.digest()


@pytest.mark.parametrize(
    ("settings", "method", "message"),
    [
        (
            ["evaluate.fine_tune={epochs: 1, part: [model/top]}"],
            "fedavg",
            "evaluate.fine_tune.part: no tensor's name begins with 'model/top'. Choose among these layers: model/convolutions.0",
        ),
        (["evaluate.fine_tune={part: [model/output]}"], "fedavg", "evaluate.fine_tune.epochs"),
        (["evaluate.fine_tune={epochs: -1}"], "fedavg", "evaluate.fine_tune.epochs"),
        (["method.fine_tune_epochs=1"], "fedavg", "unknown key 'fine_tune_epochs'"),
        (["method.fine_tune_epochs=true"], "fedbabu", "method.fine_tune_epochs: True"),
        (["method.fine_tune_part=body"], "fedbabu", "method.fine_tune_part: 'body' is neither all nor head"),
        (["method.fine_tune_part=head", "method.head=[]"], "fedbabu", "names of tensors in method.head"),
    ],
)
def test_invalid_fine_tuning_is_rejected_before_the_first_round(
    tiny: Tiny, settings: list[str], method: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        start_server(tiny(*settings, method=method))
