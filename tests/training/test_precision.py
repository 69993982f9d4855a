"""Mixed precision: dtypes of operators, batched and unbatched training, and float16's scaled gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

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
from raydfl.training.precision import GradientScale, allow_tf32, autocast, check_device
from raydfl.training.settings import OptimiserSettings

Tiny = Callable[..., Config]
BFLOAT16 = {"rtol": 0.03, "atol": 0.03}
"""Tolerances for 8-bit significands after several operations."""
METHODS = registry.names("raydfl.methods")


def autocast_to_bfloat16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("implementation", ["auto", "torch"])
@pytest.mark.parametrize("kind", ["gru", "conv"])
def test_raydfls_operators_agree_with_torchs_under_autocast(implementation: Any, kind: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 20, 6)
    plain: nn.Module = (
        nn.GRU(6, 5, batch_first=True, bidirectional=True) if kind == "gru" else nn.Conv1d(6, 5, 3, padding=1)
    )
    module: Any = GRU(6, 5, batch_first=True, bidirectional=True) if kind == "gru" else Conv1d(6, 5, 3, padding=1)
    module.load_state_dict(plain.state_dict())
    results = []
    for layer in (plain, module):
        inputs = x.clone().requires_grad_()
        with ops.use(implementation), autocast_to_bfloat16():
            output = layer(inputs)[0] if kind == "gru" else layer(inputs.transpose(1, 2))
        output.float().square().sum().backward()
        results.append([output.float(), inputs.grad, *(p.grad for p in layer.parameters())])
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, **BFLOAT16)


@pytest.mark.parametrize("implementation", ["auto", "torch"])
def test_on_the_cpu_raydfls_operators_compute_in_float32_for_any_input(implementation: Any) -> None:
    torch.manual_seed(1)
    gru, conv, x = GRU(6, 5, batch_first=True), Conv1d(6, 4, 3), torch.randn(2, 9, 6)
    with ops.use(implementation):
        expected = gru.outputs(x), conv.pooled(x, 2)
        with autocast_to_bfloat16():
            outputs = gru.outputs(x), conv.pooled(x, 2)
            short = gru.outputs(x.bfloat16()), conv.pooled(x.bfloat16(), 2)
    for ours, theirs, rounded_input in zip(outputs, expected, short, strict=True):
        assert torch.equal(ours, theirs)
        assert rounded_input.dtype == torch.float32
        torch.testing.assert_close(rounded_input, theirs, **BFLOAT16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_operators_compute_in_short_dtypes(dtype: torch.dtype) -> None:
    """Run the batched operations of a GPU under autocast: short inputs, and gradients of float32 weights."""
    torch.manual_seed(1)
    x = torch.randn(3, 4, 16, 6)
    gru, conv = GRU(6, 5, batch_first=True, bidirectional=True), Conv1d(6, 5, 3, padding=1)
    lengths = torch.tensor([[16, 9, 3, 1]] * 3)
    weights = {f"g{n}": p.detach() for n, p in enumerate(gru._weights())} | {
        "cw": conv.weight.detach(),
        "cb": conv.bias.detach(),
    }  # type: ignore[union-attr]

    def loss(inputs: Tensor, frames: Tensor, *weights: Tensor) -> Tensor:
        cast_weights = [w.to(inputs.dtype) for w in weights]
        y = ops.gru(inputs, cast_weights[:-2], frames)
        z = ops.conv1d(inputs, cast_weights[-2], cast_weights[-1], 1, pool=2, lengths=frames)
        return y.float().square().mean() + z.float().square().mean()

    results = []
    for kind in (torch.float32, dtype):
        leaves = [torch.stack([value] * 3).requires_grad_() for value in weights.values()]
        with ops.use("torch"):
            values = torch.vmap(loss)(x.to(kind), lengths, *leaves)
        values.sum().backward()
        results.append([values.detach(), *(leaf.grad for leaf in leaves)])
    for short, whole in zip(results[1], results[0], strict=True):
        assert short is not None
        assert short.dtype == torch.float32
        torch.testing.assert_close(short, whole, rtol=0.05, atol=0.02)


def test_autocast_applies_to_gpu_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the casts of GPU operators on a CPU."""
    for module in ("gru", "conv"):
        monkeypatch.setattr(
            sys.modules[f"raydfl.core.ops.{module}"],  # the package's attribute is the function with the module's name
            "autocast_type",
            lambda x: None if not torch.is_autocast_enabled("cpu") else torch.bfloat16,
        )
    torch.manual_seed(1)
    gru, conv, x = GRU(6, 5, batch_first=True), Conv1d(6, 4, 3), torch.randn(2, 9, 6)
    with autocast_to_bfloat16():
        outputs = gru.outputs(x), conv.pooled(x, 2)
    for ours, theirs in zip(outputs, (gru.outputs(x), conv.pooled(x, 2)), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), theirs, **BFLOAT16)
    (outputs[0].float().sum() + outputs[1].float().sum()).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in (*gru.parameters(), *conv.parameters()))


def train_and_read_tensors(config: Config) -> dict[str, Tensor]:
    """Train a federation and return all tensors of its server and clients."""
    train_federation(config)
    folder = Path(config.run.dir) / str(config.run.name)
    commit = RunStore(folder).load(RunStore(folder).latest() or "")
    private = PrivateStore(folder / "private")
    tensors = {f"{key} {name}": t for key, group in commit.state.tensors.items() for name, t in group.items()}
    return tensors | {f"{i} {name}": t for i, ref in commit.private.items() for name, t in private.read(ref).items()}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_law_8_holds_in_bfloat16(tiny: Tiny, method: str) -> None:
    common = ["train.precision=bfloat16", "train.cohort=4", "train.rounds=2"]
    if method == "fedopt":  # The usual eps turns the rounding of a change near 0 into a whole step.
        common.append("method.eps=0.001")
    if method.startswith(
        "profila"
    ):  # Clients with different learning rates are not batched, and an AUC changes in steps.
        common.append("method.steer=off")
    alone = train_and_read_tensors(tiny("run.name=alone", *common, method=method))
    together = train_and_read_tensors(tiny("run.name=together", "train.together=3", *common, method=method))
    whole = train_and_read_tensors(tiny("run.name=whole", *common[1:], method=method))
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


def test_the_precision_changes_the_result_and_the_digest(tiny: Tiny) -> None:
    whole, short = tiny("run.name=whole"), tiny("run.name=short", "train.precision=bfloat16")
    assert whole.digest() != short.digest()
    assert tiny("train.precision=float32").digest() == whole.digest()
    first = train_federation(short)
    assert differ(train_federation(whole), first)
    assert_same_bits(train_federation(tiny("run.name=again", "train.precision=bfloat16")), first)


def test_a_loss_receives_float32_logits(tiny: Tiny, tmp_path: Path) -> None:
    source = tmp_path / "watching.py"
    source.write_text(
        "import torch\nfrom raydfl import Method\n\nclass Watching(Method):\n    def loss(self, step, batch):\n"
        "        logits = step.forward('model', batch)\n        assert logits.dtype == torch.float32, logits.dtype\n"
        "        inner = step.models['model'].output(torch.ones(1, 8))\n        assert inner.dtype == torch.bfloat16, inner.dtype\n"
        "        assert all(p.dtype == torch.float32 for p in step.models['model'].parameters())\n"
        "        return super().loss(step, batch)\n"
    )
    train_federation(tiny(f"method.name={source}:Watching", "train.precision=bfloat16", "train.rounds=1"))


@pytest.mark.parametrize("precision", ["float16", "tf32"])
def test_formats_of_gpus_are_rejected_on_the_cpu(tiny: Tiny, precision: Literal["float16", "tf32"]) -> None:
    message = rf"train.precision: {precision} needs a GPU, but clients train on the CPU. Give every client actor a share of a GPU"
    for settings in ([], ["ray.actors=2"], ["ray.actors=2", "ray.gpus=0.5", "ray.cpu_actors=1"], ["ray.gpus=0.5"]):
        with pytest.raises(ConfigError, match=message):
            tiny(f"train.precision={precision}", *settings)
    # Only the training process can check the GPU.
    config = tiny(f"train.precision={precision}", "ray.actors=2", "ray.gpus=0.5")
    on_cpu = config.model_copy(update={"ray": config.ray.model_copy(update={"actors": 0})})
    with pytest.raises(ConfigError, match=message):
        train_federation(on_cpu)
    check_device(precision, torch.device("cuda"))
    check_device("bfloat16", torch.device("cpu"))


def test_only_tf32_rounds_float32_products_on_a_gpu() -> None:
    flags = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [flag.allow_tf32 for flag in flags]
    try:
        for precision, allowed in (("tf32", True), ("float32", False), ("tf32", True), ("bfloat16", False)):
            allow_tf32(precision, torch.device("cuda"))  # type: ignore[arg-type]
            assert [flag.allow_tf32 for flag in flags] == [allowed, allowed]
        allow_tf32("tf32", torch.device("cpu"))
        assert not torch.backends.cudnn.allow_tf32
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.allow_tf32 = value


def test_float32_disables_autocast() -> None:
    with autocast("float32", torch.device("cpu")):
        assert not torch.is_autocast_enabled("cpu")
    with autocast("float16", torch.device("cpu")):
        assert torch.get_autocast_dtype("cpu") == torch.float16


SETTINGS = [
    OptimiserSettings(lr=0.1),
    OptimiserSettings(lr=0.1, momentum=0.9, weight_decay=0.01),
    OptimiserSettings(name="adam", lr=0.1),
]


def train_with_overflows(
    settings: OptimiserSettings, scaled: bool, overflows: set[int], clip: float | None = None
) -> list[Tensor]:
    """Return the parameters after five steps of a small problem, with infinite gradients in the steps ``overflows``."""
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
def test_scaled_gradients_leave_the_result_unchanged(settings: OptimiserSettings, clip: float | None) -> None:
    for ours, plain in zip(
        train_with_overflows(settings, True, set(), clip),
        train_with_overflows(settings, False, set(), clip),
        strict=True,
    ):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("settings", SETTINGS[:2])
@pytest.mark.parametrize("overflows", [{0}, {2}, {0, 1, 3}])
def test_an_overflowing_step_is_skipped(settings: OptimiserSettings, overflows: set[int]) -> None:
    for ours, plain in zip(
        train_with_overflows(settings, True, overflows), train_with_overflows(settings, False, overflows), strict=True
    ):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("settings", SETTINGS)
def test_only_the_overflowing_client_of_a_batch_skips_a_step(settings: OptimiserSettings) -> None:
    torch.manual_seed(3)
    start, data = torch.randn(3, 4), torch.randn(4, 5, 4)

    def train_alone(client: int) -> Tensor:
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
        torch.testing.assert_close(leaves.detach()[client], train_alone(client))
    scale.truncate(2)
    assert scale.scale.tolist() == [1024.0, 512.0]


def test_float16_trains_unbatched_and_batched(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train on a CPU, allowed only in this test. With the scale, the result is close to float32's."""
    for module in ("raydfl.engine.config", "raydfl.engine.worker"):
        monkeypatch.setattr(f"{module}.check_device", lambda precision, device: None)
    tensors = {
        width: train_and_read_tensors(
            tiny(f"run.name=w{width}", f"train.together={width}", "train.precision=float16", "train.rounds=2")
        )
        for width in (1, 3)
    }
    reference = train_and_read_tensors(tiny("run.name=whole", "train.rounds=2"))
    for name, tensor in tensors[1].items():
        assert torch.isfinite(tensor).all()
        torch.testing.assert_close(tensors[3][name], tensor, rtol=0.01, atol=0.005, msg=name)
        torch.testing.assert_close(reference[name], tensor, rtol=0.02, atol=0.01, msg=name)
