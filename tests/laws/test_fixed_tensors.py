"""Fixed tensors (never trained) are not sent or committed, are equal everywhere, and are part of every exported model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers import differ, stop_after
from networks import FrozenStem
from pydantic.dataclasses import dataclass
from torch import nn

from raydfl.core.errors import ClientError, ConfigError
from raydfl.core.types import Update
from raydfl.engine.config import Config
from raydfl.engine.storage import record
from raydfl.engine.storage.folder import final_state
from raydfl.engine.storage.private import PrivateStore
from raydfl.engine.storage.store import RunStore
from raydfl.methods import Method
from raydfl.methods.feddrop import FedDrop
from raydfl.runs._run import resume, run
from raydfl.runs.inference.model import load_model
from raydfl.testing import assert_same_bits, read_tensors, start_server, to_bytes, train_federation
from raydfl.training._fit import fit
from raydfl.training.ownership import find_fixed_tensors
from raydfl.training.step import Step

Tiny = Callable[..., Config]
NETWORKS = Path(__file__).parent.parent / "networks.py"
HERE = Path(__file__)
STEM = f"models.model={NETWORKS}:FrozenStem"
_BYTES = ("bytes_down", "bytes_up")
HEAD = {"model/output.weight", "model/output.bias"}


@dataclass(frozen=True, kw_only=True)
class AllSent(Method):
    """FedAvg without fixed tensors: frozen tensors are sent too."""

    fixed = None


@dataclass(frozen=True, kw_only=True)
class CutAndAllSent(FedDrop):
    """FedDrop without fixed tensors: frozen tensors are sent too."""

    fixed = None


@dataclass(frozen=True, kw_only=True)
class FixedHead(Method):
    """Keep the initial head although it could train (FedBABU)."""

    fixed = ("model/output",)


@dataclass(frozen=True, kw_only=True)
class PrivateModel(Method):
    """Keep the network with the client, and send only the sum of the head's weights."""

    def shared(self, name: str) -> bool:
        return name.startswith("sum/")

    def init(self, clients, models, rng):  # type: ignore[no-untyped-def]
        state = super().init(clients, models, rng)
        state.tensors["global"]["sum/head"] = torch.zeros(1)  # type: ignore[index]
        return state

    def local(self, step: Step) -> Update:
        metrics = fit(step, self.loss)
        return step.update(metrics, tensors={"sum/head": step.parameters()["model/output.weight"].detach().sum()[None]})


@dataclass(frozen=True, kw_only=True)
class Thawing(Method):
    """Train a tensor of a frozen layer."""

    def local(self, step: Step) -> Update:
        step.models["model"].requires_grad_(True)
        return super().local(step)


@dataclass(frozen=True, kw_only=True)
class Sending(Method):
    """Send a fixed tensor."""

    def local(self, step: Step) -> Update:
        tensors = {
            f"model/{key}": value for key, value in step.models["model"].state_dict().items() if "num" not in key
        }
        return step.update(fit(step, self.loss), tensors=tensors)


def test_fixed_tensors_are_found() -> None:
    model = FrozenStem(4, 3)
    fixed = find_fixed_tensors({"m": model}, Method().fixed)
    layers = {"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"}
    assert fixed == {f"m/stem.{name}" for name in layers}  # The counter has an integer dtype.
    assert find_fixed_tensors({"m": FrozenStem(4, 3, frozen=False)}, Method().fixed) == frozenset()
    model.stem[1].requires_grad_(True)  # Buffers beside a trained parameter change.
    assert find_fixed_tensors({"m": model}, Method().fixed) == {"m/stem.0.weight", "m/stem.0.bias"}
    whole = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2)).requires_grad_(False)
    assert "w/1.running_mean" in find_fixed_tensors({"w": whole}, Method().fixed)
    whole[2].requires_grad_(True)  # The smallest enclosing module with parameters trains.
    assert "w/1.running_mean" not in find_fixed_tensors({"w": whole}, Method().fixed)


def test_fixed_tensors_are_neither_sent_nor_committed(tiny: Tiny) -> None:
    config = tiny(STEM, "train.rounds=2", "train.cohort=3")
    run_dir = run(config).run_dir
    assert final_state(run_dir).tensors["global"].keys() == HEAD
    assert not any(name.startswith("client") for name in read_tensors(run_dir))
    size = sum(tensor.nbytes for tensor in final_state(run_dir).tensors["global"].values())
    rows = record.read_rows(run_dir).to_pandas()
    values = {metric: rows.loc[(rows["metric"] == metric) & (rows["round"] == 2), "value"].item() for metric in _BYTES}
    assert values == {"bytes_down": 3 * size, "bytes_up": 3 * size}


def test_sending_fixed_tensors_gives_the_same_model(tiny: Tiny) -> None:
    """Use a single layer, so that only the transport differs. Means of equal values are rounded."""
    network = f"models.model={NETWORKS}:FrozenLinear"
    without_fixed = final_state(run(tiny(network, "run.name=fixed")).run_dir).tensors["global"]
    all_sent = final_state(run(tiny(network, "run.name=sent", f"method.name={HERE}:AllSent")).run_dir).tensors["global"]
    assert all_sent.keys() - without_fixed.keys() == {"model/stem.weight", "model/stem.bias"}
    for name in HEAD:
        torch.testing.assert_close(without_fixed[name], all_sent[name], rtol=1e-5, atol=1e-6)


def test_fixed_tensors_of_a_cut_network_are_not_sent(tiny: Tiny) -> None:
    """Clients cut their channels from a full network built by themselves."""
    network = [f"models.model={NETWORKS}:NarrowStem", "train.cohort=1.0", "method.share=0.5"]
    train_federation(tiny(*network, "run.name=fixed", method="feddrop"))
    run_dir = Path(tiny().run.dir) / "fixed"
    head = final_state(run_dir).tensors["global"]
    assert head.keys() == HEAD
    train_federation(tiny(*network, "run.name=sent", f"method.name={HERE}:CutAndAllSent"))
    all_sent = final_state(Path(tiny().run.dir) / "sent").tensors["global"]
    assert all_sent.keys() - HEAD == {"model/stem.weight", "model/stem.bias"}
    train_federation(tiny(*network, "run.name=joint", "train.together=4", method="feddrop"))
    batched = final_state(Path(tiny().run.dir) / "joint").tensors["global"]
    for name in HEAD:
        torch.testing.assert_close(head[name], all_sent[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(head[name], batched[name], rtol=1e-4, atol=1e-5)
    part = load_model(run_dir, client="s1").network.state_dict()["stem.weight"]
    whole = load_model(run_dir).network.state_dict()["stem.weight"]
    assert len(whole) == 2 * len(part)
    assert {*map(to_bytes, part)} < {*map(to_bytes, whole)}


def test_a_fixed_part_computes_the_same_in_training_and_evaluation(tiny: Tiny) -> None:
    """Compare dropout 0.5 in the fixed part with dropout 0. Its statistics keep their initial values."""
    with_dropout = train_federation(tiny("run.name=one", f"models.model={{name: {NETWORKS}:FrozenStem, dropout: 0.5}}"))
    without_dropout = train_federation(
        tiny("run.name=other", f"models.model={{name: {NETWORKS}:FrozenStem, dropout: 0.0}}")
    )
    assert_same_bits(with_dropout, without_dropout)
    networks = [f"models.model={{name: {NETWORKS}:FrozenStem, frozen: false, dropout: {p}}}" for p in (0.5, 0.0)]
    models = [
        train_federation(tiny(f"run.name=trained{i}", network, "train.batch_size=5"))
        for i, network in enumerate(networks)
    ]
    assert differ(*models)


@pytest.mark.parametrize(
    "method",
    [
        "fedavg",
        "scaffold",
        "fedadam",
        "fedper",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("fedprox", "fedavgm")),
    ],
)
def test_methods_with_fixed_tensors_resume_to_the_same_bits(tiny: Tiny, method: str) -> None:
    config = tiny(STEM, "run.name=whole", "train.rounds=3", method=method)
    reference = train_federation(config)
    assert not any("stem" in name for name in reference)
    half = tiny(STEM, "run.name=half", "train.rounds=3", method=method)
    stop_after(half, 2)
    assert_same_bits(reference, read_tensors(resume(Path(half.run.dir) / "half").run_dir))


def test_exported_models_contain_fixed_tensors(tiny: Tiny) -> None:
    run_dir = run(tiny(STEM, "run.name=used")).run_dir
    tensors = safetensors.torch.load_file(run_dir / "model.safetensors")
    assert tensors.keys() == HEAD | find_fixed_tensors({"model": FrozenStem(4, 3)}, Method().fixed)
    network = load_model(run_dir).network
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point():
            assert torch.equal(tensor, tensors[f"model/{name}"])
    rows = record.read_rows(run_dir).to_pandas()
    last = rows[(rows["split"] == "test") & (rows["metric"] == "model/accuracy")]
    assert len(last)  # the server evaluates the model


def test_fixed_tensors_of_a_private_network_are_not_stored(tiny: Tiny) -> None:
    run_dir = run(tiny(STEM, f"method.name={HERE}:PrivateModel", "train.cohort=1.0", "train.rounds=1")).run_dir
    commit = RunStore(run_dir).load(RunStore(run_dir).latest() or "")
    private_names = [PrivateStore(run_dir / "private").read(ref).keys() for _, ref in commit.private.items()]
    assert private_names
    assert all(names == {f"model:{name}" for name in HEAD} for names in private_names)


def test_a_method_may_fix_trainable_tensors(tiny: Tiny) -> None:
    run_dir = run(tiny(f"method.name={HERE}:FixedHead", "run.name=babu")).run_dir
    assert not HEAD & final_state(run_dir).tensors["global"].keys()
    network = load_model(run_dir).network
    tensors = safetensors.torch.load_file(run_dir / "model.safetensors")
    assert torch.equal(tensors["model/output.weight"], network.state_dict()["output.weight"])
    longer_dir = run(tiny(f"method.name={HERE}:FixedHead", "run.name=longer", "train.rounds=4")).run_dir
    assert to_bytes(tensors["model/output.weight"]) == to_bytes(
        safetensors.torch.load_file(longer_dir / "model.safetensors")["model/output.weight"]
    )


def test_training_or_sending_a_fixed_tensor_is_rejected(tiny: Tiny) -> None:
    for name, message in (
        ("Thawing", r"'stem.0.weight' of model 'model' requires gradients, but is fixed"),
        ("Sending", r"the update holds tensors that are fixed, because they do not train: model/stem.0.weight"),
    ):
        server = start_server(tiny(STEM, f"method.name={HERE}:{name}", f"run.name={name}"))
        with pytest.raises((ClientError, ConfigError), match=message):
            server.round()
        server.close()


def test_batched_clients_equal_unbatched_clients(tiny: Tiny) -> None:
    train_federation(tiny(STEM, "run.name=looped", "train.together=1"))
    config = tiny(STEM, "run.name=stacked", "train.together=3")
    train_federation(config)
    tensors = final_state(Path(config.run.dir) / "stacked").tensors["global"]
    expected = final_state(Path(config.run.dir) / "looped").tensors["global"]
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
    rows = record.read_rows(Path(config.run.dir) / "stacked").to_pandas()
    assert (rows.loc[rows["metric"] == "vectorised", "value"] == 1).all()
