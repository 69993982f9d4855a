"""Mixed precision: what computes in it, what stays float32, looped and vectorised alike, and float16's scaled gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import differ
from torch import Tensor, nn

from raydfl.core import ops, registry
from raydfl.core.errors import ConfigError
from raydfl.core.ops import GRU, Conv1d
from raydfl.engine.config import Config
from raydfl.engine.storage import record
from raydfl.engine.storage.private import PrivateStore
from raydfl.engine.storage.store import RunStore
from raydfl.testing import assert_same_bits, train_federation
from raydfl.training.optimiser import Optimiser
from raydfl.training.precision import GradientScale, autocast, check_device
from raydfl.training.settings import OptimiserSettings

Tiny = Callable[..., Config]
BFLOAT16 = {"rtol": 0.03, "atol": 0.03}
"""Eight bits of a number, and some operations one after another."""
METHODS = registry.names("raydfl.methods")


def bfloat16_on_cpu() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("implementation", ["auto", "torch"])
@pytest.mark.parametrize("kind", ["gru", "conv"])
def test_raydfls_operators_agree_with_torchs_under_autocast(implementation: Any, kind: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 20, 6)
    plain: nn.Module = (
        nn.GRU(6, 5, batch_first=True, bidirectional=True) if kind == "gru" else nn.Conv1d(6, 5, 3, padding=1)
    )
    own: Any = GRU(6, 5, batch_first=True, bidirectional=True) if kind == "gru" else Conv1d(6, 5, 3, padding=1)
    own.load_state_dict(plain.state_dict())
    ends = []
    for module in (plain, own):
        inputs = x.clone().requires_grad_()
        with ops.use(implementation), bfloat16_on_cpu():
            output = module(inputs)[0] if kind == "gru" else module(inputs.transpose(1, 2))
        output.float().square().sum().backward()
        ends.append([output.float(), inputs.grad, *(p.grad for p in module.parameters())])
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())
    for ours, theirs in zip(ends[1], ends[0], strict=True):
        torch.testing.assert_close(ours, theirs, **BFLOAT16)


@pytest.mark.parametrize("implementation", ["auto", "torch"])
def test_on_the_cpu_raydfls_operators_stay_float32_whatever_comes_in(implementation: Any) -> None:
    torch.manual_seed(1)
    gru, conv, x = GRU(6, 5, batch_first=True), Conv1d(6, 4, 3), torch.randn(2, 9, 6)
    with ops.use(implementation):
        expected = gru.outputs(x), conv.pooled(x, 2)
        with bfloat16_on_cpu():
            found = gru.outputs(x), conv.pooled(x, 2)
            short = gru.outputs(x.bfloat16()), conv.pooled(x.bfloat16(), 2)
    for ours, theirs, rounded in zip(found, expected, short, strict=True):
        assert torch.equal(ours, theirs)
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(rounded, theirs, **BFLOAT16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_operators_for_gpus_compute_in_short_types_too(dtype: torch.dtype) -> None:
    """What runs there under autocast, vectorised: PyTorch's operations on short tensors; their gradients for float32 weights."""
    torch.manual_seed(1)
    x = torch.randn(3, 4, 16, 6)
    gru, conv = GRU(6, 5, batch_first=True, bidirectional=True), Conv1d(6, 5, 3, padding=1)
    lengths = torch.tensor([[16, 9, 3, 1]] * 3)
    weights = {f"g{n}": p.detach() for n, p in enumerate(gru._weights())} | {
        "cw": conv.weight.detach(),
        "cb": conv.bias.detach(),
    }  # type: ignore[union-attr]

    def loss(inputs: Tensor, frames: Tensor, *given: Tensor) -> Tensor:
        own = [w.to(inputs.dtype) for w in given]
        y = ops.gru(inputs, own[:-2], frames)
        z = ops.conv1d(inputs, own[-2], own[-1], 1, pool=2, lengths=frames)
        return y.float().square().mean() + z.float().square().mean()

    ends = []
    for kind in (torch.float32, dtype):
        leaves = [torch.stack([value] * 3).requires_grad_() for value in weights.values()]
        with ops.use("torch"):
            values = torch.vmap(loss)(x.to(kind), lengths, *leaves)
        values.sum().backward()
        ends.append([values.detach(), *(leaf.grad for leaf in leaves)])
    for short, whole in zip(ends[1], ends[0], strict=True):
        assert short is not None
        assert short.dtype == torch.float32
        torch.testing.assert_close(short, whole, rtol=0.05, atol=0.02)


def test_autocast_reaches_the_operators_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their casts, on a CPU that is taken for one."""
    for module in ("gru", "conv"):
        monkeypatch.setattr(
            sys.modules[f"raydfl.core.ops.{module}"],  # the package's attribute is the function of that name
            "autocast_type",
            lambda x: None if not torch.is_autocast_enabled("cpu") else torch.bfloat16,
        )
    torch.manual_seed(1)
    gru, conv, x = GRU(6, 5, batch_first=True), Conv1d(6, 4, 3), torch.randn(2, 9, 6)
    with bfloat16_on_cpu():
        found = gru.outputs(x), conv.pooled(x, 2)
    for ours, theirs in zip(found, (gru.outputs(x), conv.pooled(x, 2)), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), theirs, **BFLOAT16)
    (found[0].float().sum() + found[1].float().sum()).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in (*gru.parameters(), *conv.parameters()))


def kept(config: Config) -> dict[str, Tensor]:
    """Everything that a finished run knows."""
    train_federation(config)
    folder = Path(config.run.dir) / str(config.run.name)
    commit = RunStore(folder).load(RunStore(folder).latest() or "")
    private = PrivateStore(folder / "private")
    found = {f"{key} {name}": t for key, group in commit.state.tensors.items() for name, t in group.items()}
    return found | {f"{i} {name}": t for i, ref in commit.private.items() for name, t in private.read(ref).items()}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_law_8_holds_in_bfloat16(tiny: Tiny, method: str) -> None:
    common = ["train.precision=bfloat16", "train.cohort=4", "train.rounds=2"]
    if method == "fedopt":  # its usual eps turns the rounding of a change near 0 into a whole step
        common.append("method.eps=0.001")
    if method.startswith("profila"):  # clients of different learning rates are not trained together, and an AUC jumps
        common.append("method.steer=off")
    alone = kept(tiny("run.name=alone", *common, method=method))
    together = kept(tiny("run.name=together", "train.together=3", *common, method=method))
    whole = kept(tiny("run.name=whole", *common[1:], method=method))
    shares = [
        row["value"]
        for row in record.read_rows(Path(tiny().run.dir) / "together").to_pylist()
        if row["metric"] == "vectorised"
    ]
    assert shares == [1.0, 1.0]
    assert alone.keys() == together.keys() == whole.keys()
    assert all(tensor.dtype == torch.float32 for tensor in alone.values())
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=0.02, atol=0.01, msg=name)
        torch.testing.assert_close(whole[name], tensor, rtol=0.1, atol=0.05, msg=name)
    assert any(not torch.equal(whole[name], tensor) for name, tensor in alone.items())


def test_the_setting_decides_the_numbers_and_belongs_to_the_run(tiny: Tiny) -> None:
    whole, short = tiny("run.name=whole"), tiny("run.name=short", "train.precision=bfloat16")
    assert whole.digest() != short.digest()
    assert tiny("train.precision=float32").digest() == whole.digest()
    first = train_federation(short)
    assert differ(train_federation(whole), first)
    assert_same_bits(train_federation(tiny("run.name=again", "train.precision=bfloat16")), first)


def test_what_a_loss_gets_is_float32(tiny: Tiny, tmp_path: Path) -> None:
    source = tmp_path / "watching.py"
    source.write_text(
        "import torch\nfrom raydfl import Method\n\nclass Watching(Method):\n    def loss(self, step, batch):\n"
        "        logits = step.forward('model', batch)\n        assert logits.dtype == torch.float32, logits.dtype\n"
        "        inner = step.models['model'].output(torch.ones(1, 8))\n        assert inner.dtype == torch.bfloat16, inner.dtype\n"
        "        assert all(p.dtype == torch.float32 for p in step.models['model'].parameters())\n"
        "        return super().loss(step, batch)\n"
    )
    train_federation(tiny(f"method.name={source}:Watching", "train.precision=bfloat16", "train.rounds=1"))


def test_float16_is_refused_on_the_cpu(tiny: Tiny) -> None:
    refused = (
        r"train.precision: float16 needs a GPU, but clients train on the CPU. Give every client actor a share of a GPU"
    )
    for settings in ([], ["ray.actors=2"], ["ray.actors=2", "ray.gpus=0.5", "ray.cpu_actors=1"], ["ray.gpus=0.5"]):
        with pytest.raises(ConfigError, match=refused):
            tiny("train.precision=float16", *settings)
    # Whether the GPU is there is seen where the work is done.
    config = tiny("train.precision=float16", "ray.actors=2", "ray.gpus=0.5")
    here = config.model_copy(update={"ray": config.ray.model_copy(update={"actors": 0})})
    with pytest.raises(ConfigError, match=refused):
        train_federation(here)
    check_device("float16", torch.device("cuda"))
    check_device("bfloat16", torch.device("cpu"))


def test_float32_computes_as_without_the_setting() -> None:
    with autocast("float32", torch.device("cpu")):
        assert not torch.is_autocast_enabled("cpu")
    with autocast("float16", torch.device("cpu")):
        assert torch.get_autocast_dtype("cpu") == torch.float16


SETTINGS = [
    OptimiserSettings(lr=0.1),
    OptimiserSettings(lr=0.1, momentum=0.9, weight_decay=0.01),
    OptimiserSettings(name="adam", lr=0.1),
]


def trained(settings: OptimiserSettings, scaled: bool, overflows: set[int], clip: float | None = None) -> list[Tensor]:
    """Parameters after some steps of a small problem in which a gradient is infinite at some of them."""
    torch.manual_seed(3)
    layer = nn.Linear(4, 3)
    optimiser = Optimiser({"model": list(layer.parameters())}, settings, 0)
    scale = GradientScale((), torch.device("cpu"))
    for number in range(5):
        optimiser.clear_gradients()
        value = F.cross_entropy(layer(torch.randn(6, 4)), torch.arange(6) % 3)
        if number in overflows:
            if not scaled:
                continue
            value = value * torch.tensor(float("inf"))

        def limit() -> None:
            if clip is not None:
                nn.utils.clip_grad_norm_(layer.parameters(), clip)

        if scaled:
            (value * scale.scale).backward()
            scale.advance(optimiser, limit)
        else:
            value.backward()
            limit()
            optimiser.advance()
    assert not scaled or scale.scale.item() == 1024.0 / 2 ** len(overflows)
    return [parameter.detach() for parameter in layer.parameters()]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_scaled_gradients_change_nothing(settings: OptimiserSettings, clip: float | None) -> None:
    for ours, plain in zip(trained(settings, True, set(), clip), trained(settings, False, set(), clip), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("settings", SETTINGS[:2])
@pytest.mark.parametrize("overflows", [{0}, {2}, {0, 1, 3}])
def test_a_step_that_overflows_is_left_out(settings: OptimiserSettings, overflows: set[int]) -> None:
    for ours, plain in zip(trained(settings, True, overflows), trained(settings, False, overflows), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("settings", SETTINGS)
def test_of_stacked_clients_only_the_one_that_overflows_waits(settings: OptimiserSettings) -> None:
    torch.manual_seed(3)
    start, data = torch.randn(3, 4), torch.randn(4, 5, 4)

    def alone(client: int) -> Tensor:
        leaf = start[client].clone().requires_grad_()
        optimiser, scale = Optimiser({"model": [leaf]}, settings, 0), GradientScale((), torch.device("cpu"))
        for number in range(4):
            leaf.grad = None
            value = (data[number] @ leaf).square().mean() * (float("inf") if (client, number) == (1, 1) else 1.0)
            (value * scale.scale).backward()
            scale.advance(optimiser, lambda: None)
        return leaf.detach()

    leaves = start.clone().requires_grad_()
    optimiser, scale = Optimiser({"model": [leaves]}, settings, 0), GradientScale((3,), torch.device("cpu"))
    for number in range(4):
        leaves.grad = None
        factors = torch.tensor([1.0, float("inf") if number == 1 else 1.0, 1.0])
        values = (data[number] @ leaves.T).square().mean(dim=0) * factors
        (values * scale.scale).sum().backward()
        scale.advance(optimiser, lambda: None)
    assert scale.scale.tolist() == [1024.0, 512.0, 1024.0]
    for client in range(3):
        torch.testing.assert_close(leaves.detach()[client], alone(client))
    scale.truncate(2)
    assert scale.scale.tolist() == [1024.0, 512.0]


def test_float16_trains_looped_and_together(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which is allowed to for this test: with the scale a run ends near the one in float32."""
    for module in ("raydfl.engine.config", "raydfl.engine.worker"):
        monkeypatch.setattr(f"{module}.check_device", lambda precision, device: None)
    ends = {
        width: kept(tiny(f"run.name=w{width}", f"train.together={width}", "train.precision=float16", "train.rounds=2"))
        for width in (1, 3)
    }
    whole = kept(tiny("run.name=whole", "train.rounds=2"))
    for name, tensor in ends[1].items():
        assert torch.isfinite(tensor).all()
        torch.testing.assert_close(ends[3][name], tensor, rtol=0.01, atol=0.005, msg=name)
        torch.testing.assert_close(whole[name], tensor, rtol=0.02, atol=0.01, msg=name)
