"""A tensor that does not train is neither sent nor kept, is the same everywhere, and is there wherever a model is used."""

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
    """Frozen or not, all is sent, as if nothing were fixed."""

    fixed = None


@dataclass(frozen=True, kw_only=True)
class CutAndAllSent(FedDrop):
    """Parts of the network in which all travels, as if nothing were fixed."""

    fixed = None


@dataclass(frozen=True, kw_only=True)
class FixedHead(Method):
    """The head stays as it is from the seed, although it could train (FedBABU)."""

    fixed = ("model/output",)


@dataclass(frozen=True, kw_only=True)
class PrivateModel(Method):
    """The network stays with the client, which sends how much its head weighs."""

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
    """Trains what did not train when it was built."""

    def local(self, step: Step) -> Update:
        step.models["model"].requires_grad_(True)
        return super().local(step)


@dataclass(frozen=True, kw_only=True)
class Sending(Method):
    """Sends what is fixed."""

    def local(self, step: Step) -> Update:
        sent = {f"model/{key}": value for key, value in step.models["model"].state_dict().items() if "num" not in key}
        return step.update(fit(step, self.loss), tensors=sent)


def test_what_is_fixed() -> None:
    model = FrozenStem(4, 3)
    found = find_fixed_tensors({"m": model}, Method().fixed)
    layers = {"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"}
    assert found == {f"m/stem.{name}" for name in layers}  # the counter is no floating tensor
    assert find_fixed_tensors({"m": FrozenStem(4, 3, frozen=False)}, Method().fixed) == frozenset()
    model.stem[1].requires_grad_(True)  # its buffers move
    assert find_fixed_tensors({"m": model}, Method().fixed) == {"m/stem.0.weight", "m/stem.0.bias"}
    whole = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2)).requires_grad_(False)
    assert "w/1.running_mean" in find_fixed_tensors({"w": whole}, Method().fixed)
    whole[2].requires_grad_(True)  # of the smallest part around it that has parameters, one trains
    assert "w/1.running_mean" not in find_fixed_tensors({"w": whole}, Method().fixed)


def test_it_is_neither_sent_nor_kept_nor_committed(tiny: Tiny) -> None:
    config = tiny(STEM, "train.rounds=2", "train.cohort=3")
    run_dir = run(config).run_dir
    assert final_state(run_dir).tensors["global"].keys() == HEAD
    assert not any(name.startswith("client") for name in read_tensors(run_dir))
    size = sum(tensor.nbytes for tensor in final_state(run_dir).tensors["global"].values())
    rows = record.read_rows(run_dir).to_pandas()
    values = {what: rows.loc[(rows["metric"] == what) & (rows["round"] == 2), "value"].item() for what in _BYTES}
    assert values == {"bytes_down": 3 * size, "bytes_up": 3 * size}


def test_the_result_is_that_of_sending_everything(tiny: Tiny) -> None:
    """Of one layer, so that nothing but the way of the tensors differs; means of equal values are rounded."""
    network = f"models.model={NETWORKS}:FrozenLinear"
    fixed = final_state(run(tiny(network, "run.name=fixed")).run_dir).tensors["global"]
    sent = final_state(run(tiny(network, "run.name=sent", f"method.name={HERE}:AllSent")).run_dir).tensors["global"]
    assert sent.keys() - fixed.keys() == {"model/stem.weight", "model/stem.bias"}
    for name in HEAD:
        torch.testing.assert_close(fixed[name], sent[name], rtol=1e-5, atol=1e-6)


def test_of_a_cut_network_fixed_tensors_stay_where_they_are(tiny: Tiny) -> None:
    """Clients take their channels from the whole network, which they build themselves."""
    network = [f"models.model={NETWORKS}:NarrowStem", "train.cohort=1.0", "method.share=0.5"]
    train_federation(tiny(*network, "run.name=fixed", method="feddrop"))
    run_dir = Path(tiny().run.dir) / "fixed"
    head = final_state(run_dir).tensors["global"]
    assert head.keys() == HEAD
    train_federation(tiny(*network, "run.name=sent", f"method.name={HERE}:CutAndAllSent"))
    sent = final_state(Path(tiny().run.dir) / "sent").tensors["global"]
    assert sent.keys() - HEAD == {"model/stem.weight", "model/stem.bias"}
    train_federation(tiny(*network, "run.name=joint", "train.together=4", method="feddrop"))
    joint = final_state(Path(tiny().run.dir) / "joint").tensors["global"]
    for name in HEAD:
        torch.testing.assert_close(head[name], sent[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(head[name], joint[name], rtol=1e-4, atol=1e-5)
    part = load_model(run_dir, client="s1").network.state_dict()["stem.weight"]
    whole = load_model(run_dir).network.state_dict()["stem.weight"]
    assert len(whole) == 2 * len(part)
    assert {*map(to_bytes, part)} < {*map(to_bytes, whole)}


def test_a_fixed_part_is_one_function_in_training_and_evaluation(tiny: Tiny) -> None:
    """With dropout 0.5 in it and without: the same bits, and its statistics are those that it was built with."""
    one = train_federation(tiny("run.name=one", f"models.model={{name: {NETWORKS}:FrozenStem, dropout: 0.5}}"))
    other = train_federation(tiny("run.name=other", f"models.model={{name: {NETWORKS}:FrozenStem, dropout: 0.0}}"))
    assert_same_bits(one, other)
    trained = [f"models.model={{name: {NETWORKS}:FrozenStem, frozen: false, dropout: {p}}}" for p in (0.5, 0.0)]
    finished = [
        train_federation(tiny(f"run.name=trained{i}", which, "train.batch_size=5")) for i, which in enumerate(trained)
    ]
    assert differ(*finished)


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
def test_methods_work_with_it_and_resume_to_the_same_bits(tiny: Tiny, method: str) -> None:
    config = tiny(STEM, "run.name=whole", "train.rounds=3", method=method)
    reference = train_federation(config)
    assert not any("stem" in name for name in reference)
    half = tiny(STEM, "run.name=half", "train.rounds=3", method=method)
    stop_after(half, 2)
    assert_same_bits(reference, read_tensors(resume(Path(half.run.dir) / "half").run_dir))


def test_it_is_there_when_the_model_is_exported_and_used(tiny: Tiny) -> None:
    run_dir = run(tiny(STEM, "run.name=used")).run_dir
    exported = safetensors.torch.load_file(run_dir / "model.safetensors")
    assert exported.keys() == HEAD | find_fixed_tensors({"model": FrozenStem(4, 3)}, Method().fixed)
    network = load_model(run_dir).network
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point():
            assert torch.equal(tensor, exported[f"model/{name}"])
    rows = record.read_rows(run_dir).to_pandas()
    last = rows[(rows["split"] == "test") & (rows["metric"] == "model/accuracy")]
    assert len(last)  # the server measures it


def test_a_private_network_keeps_its_fixed_part_nowhere(tiny: Tiny) -> None:
    run_dir = run(tiny(STEM, f"method.name={HERE}:PrivateModel", "train.cohort=1.0", "train.rounds=1")).run_dir
    commit = RunStore(run_dir).load(RunStore(run_dir).latest() or "")
    kept = [PrivateStore(run_dir / "private").read(ref).keys() for _, ref in commit.private.items()]
    assert kept
    assert all(names == {f"model:{name}" for name in HEAD} for names in kept)


def test_a_method_may_fix_what_could_train(tiny: Tiny) -> None:
    run_dir = run(tiny(f"method.name={HERE}:FixedHead", "run.name=babu")).run_dir
    assert not HEAD & final_state(run_dir).tensors["global"].keys()
    built = load_model(run_dir).network
    exported = safetensors.torch.load_file(run_dir / "model.safetensors")
    assert torch.equal(exported["model/output.weight"], built.state_dict()["output.weight"])
    other = run(tiny(f"method.name={HERE}:FixedHead", "run.name=longer", "train.rounds=4")).run_dir
    assert to_bytes(exported["model/output.weight"]) == to_bytes(
        safetensors.torch.load_file(other / "model.safetensors")["model/output.weight"]
    )


def test_training_or_sending_it_is_refused(tiny: Tiny) -> None:
    for name, message in (
        ("Thawing", r"'stem.0.weight' of model 'model' requires gradients, but is fixed"),
        ("Sending", r"the update holds tensors that are fixed, because they do not train: model/stem.0.weight"),
    ):
        server = start_server(tiny(STEM, f"method.name={HERE}:{name}", f"run.name={name}"))
        with pytest.raises((ClientError, ConfigError), match=message):
            server.round()
        server.close()


def test_batched_clients_end_as_unbatched_ones(tiny: Tiny) -> None:
    train_federation(tiny(STEM, "run.name=looped", "train.together=1"))
    stacked = tiny(STEM, "run.name=stacked", "train.together=3")
    train_federation(stacked)
    tensors = final_state(Path(stacked.run.dir) / "stacked").tensors["global"]
    expected = final_state(Path(stacked.run.dir) / "looped").tensors["global"]
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
    rows = record.read_rows(Path(stacked.run.dir) / "stacked").to_pandas()
    assert (rows.loc[rows["metric"] == "vectorised", "value"] == 1).all()
