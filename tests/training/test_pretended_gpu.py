"""Training on a GPU that is made up (pretend_gpu.py): nothing lies on the wrong device, and the numbers are the CPU's."""

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
def listed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clips.write(tmp_path_factory.mktemp("clips"), takes=2)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=[] if str(case) == FAST else [pytest.mark.slow]) for case in CASES],
)
def test_the_gpu_ends_as_the_cpu(
    case: federations.Case, listed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each method, objective, network, transform and attack, clients alone and together."""
    if case.name in federations.SHORT:
        pytest.skip("the made-up GPU has no autocast")
    if str(case) == FAST:
        case = federations.Case(case.kind, case.name, {**LINEAR, "train": {"local_epochs": 2, "rounds": 1}})
    expected, _ = federations.trained(federations.configuration(case, listed, tmp_path, "cpu"), "cpu")
    for together in (1, 3):
        with pretended():
            config = federations.configuration(case, listed, tmp_path, f"gpu-{together}", together)
            found, _ = federations.trained(config, "cuda")
        share, where = equality.difference(expected, found)
        assert share < 1, where


def refused(work: Callable[[], object], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        work()


def test_the_made_up_gpu_refuses_what_a_gpu_refuses() -> None:
    """Else the test above could not fail."""
    with pretended():
        here, there = torch.ones(2, 3), torch.ones(2, 3, device="cuda")
        assert isinstance(there, OnGpu)
        assert there.device == CUDA
        assert torch.equal((there + 1).cpu(), here + 1)
        refused(lambda: here + there, RuntimeError, "same device")
        refused(lambda: torch.cat([here, there]), RuntimeError, "same device")
        refused(lambda: there[torch.tensor([0])] @ here.T, RuntimeError, "same device")
        refused(there.numpy, TypeError, "can't convert cuda:0")
        refused(lambda: np.asarray(there), TypeError, "can't convert cuda:0")
        refused(lambda: torch.rand(2, device="cuda", generator=torch.Generator()), RuntimeError, "of the GPU")
        refused(lambda: torch.cuda.get_per_process_memory_fraction(torch.device("cuda")), ValueError, "index")
        refused(lambda: torch.ops.raydfl.mean_forward(there[None], None), NotImplementedError, "no kernel")
    assert not torch.cuda.is_available() or torch.cuda.get_device_name() != "pretended"


@pytest.mark.parametrize(("training", "gradients", "torchs"), [(True, True, 1), (False, False, 1), (False, True, 0)])
def test_cudnn_is_left_aside_where_it_has_no_gradients(
    training: bool, gradients: bool, torchs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a layer in evaluation mode whose input is trained."""
    calls: list[int] = []
    plain = nn.GRU.forward
    monkeypatch.setattr(sys.modules["raydfl.core.ops.gru"], "torch_is_better", lambda x: True)
    monkeypatch.setattr(nn.GRU, "forward", lambda *given: calls.append(0) or plain(*given))
    torch.manual_seed(0)
    layer, x = GRU(2, 3, batch_first=True).train(training), torch.randn(2, 4, 2)
    with torch.set_grad_enabled(gradients), use("torch"):
        found = layer.outputs(x)
    assert len(calls) == torchs
    torch.testing.assert_close(found, plain(layer, x)[0])
