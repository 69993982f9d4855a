"""Training on a simulated GPU (pretend_gpu.py): every tensor is on the right device, and the values equal the CPU's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu import clips, equality, federations
from pretend_gpu import CUDA, OnGpu, pretended
from torch import nn

from raydfl.core.ops import GRU, use

CASES = federations.cases(dry=True)
LINEAR = {"models": {"model": {"name": "mlp", "hidden": 4}}}
FAST = "method fedavg"


@pytest.fixture(scope="module")
def manifest_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clips.write(tmp_path_factory.mktemp("clips"), takes=2)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=[] if str(case) == FAST else [pytest.mark.slow]) for case in CASES],
)
def test_training_on_the_gpu_equals_the_cpu(
    case: federations.Case, manifest_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train with each method, objective, network, transform and attack, batched and unbatched."""
    if case.name in federations.SHORT:
        pytest.skip("the simulated GPU has no autocast")
    if str(case) == FAST:
        case = federations.Case(case.kind, case.name, {**LINEAR, "train": {"local_epochs": 2, "rounds": 1}})
    expected, _ = federations.train(federations.configuration(case, manifest_file, tmp_path, "cpu"), "cpu")
    for together in (1, 3):
        with pretended():
            config = federations.configuration(case, manifest_file, tmp_path, f"gpu-{together}", together)
            result, _ = federations.train(config, "cuda")
        share, place = equality.difference(expected, result)
        assert share < 1, place


def assert_rejected(work: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        work()


def test_the_simulated_gpu_raises_the_errors_of_a_gpu() -> None:
    """Without these errors, the test above could not fail."""
    with pretended():
        on_cpu, on_gpu = torch.ones(2, 3), torch.ones(2, 3, device="cuda")
        assert isinstance(on_gpu, OnGpu)
        assert on_gpu.device == CUDA
        assert torch.equal((on_gpu + 1).cpu(), on_cpu + 1)
        assert_rejected(lambda: on_cpu + on_gpu, RuntimeError, "same device")
        assert_rejected(lambda: torch.cat([on_cpu, on_gpu]), RuntimeError, "same device")
        assert_rejected(lambda: on_gpu[torch.tensor([0])] @ on_cpu.T, RuntimeError, "same device")
        assert_rejected(on_gpu.numpy, TypeError, "can't convert cuda:0")
        assert_rejected(lambda: np.asarray(on_gpu), TypeError, "can't convert cuda:0")
        assert_rejected(lambda: torch.rand(2, device="cuda", generator=torch.Generator()), RuntimeError, "of the GPU")
        assert_rejected(lambda: torch.cuda.get_per_process_memory_fraction(torch.device("cuda")), ValueError, "index")
        assert_rejected(lambda: torch.ops.raydfl.mean_forward(on_gpu[None], None), NotImplementedError, "no kernel")
    assert not torch.cuda.is_available() or torch.cuda.get_device_name() != "pretended"


@pytest.mark.parametrize(
    ("training", "gradients", "cudnn_calls"), [(True, True, 1), (False, False, 1), (False, True, 0)]
)
def test_cudnn_is_not_used_where_it_cannot_compute_gradients(
    training: bool, gradients: bool, cudnn_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Include a layer in evaluation mode with a trained input."""
    calls: list[int] = []
    plain = nn.GRU.forward
    monkeypatch.setattr(sys.modules["raydfl.core.ops.gru"], "torch_is_better", lambda x: True)
    monkeypatch.setattr(nn.GRU, "forward", lambda *arguments: calls.append(0) or plain(*arguments))
    torch.manual_seed(0)
    layer, x = GRU(2, 3, batch_first=True).train(training), torch.randn(2, 4, 2)
    with torch.set_grad_enabled(gradients), use("torch"):
        outputs = layer.outputs(x)
    assert len(calls) == cudnn_calls
    torch.testing.assert_close(outputs, plain(layer, x)[0])
