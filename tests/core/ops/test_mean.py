"""The mean over time. Oracle: the mean over the frames of each item, item by item."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from raydfl.core import ops
from raydfl.core.ops import mean_over_time

pytestmark = pytest.mark.usefixtures("implementation")


def compute_mean(x: Tensor, lengths: Tensor | None) -> Tensor:
    counts = [x.shape[1]] * len(x) if lengths is None else lengths.tolist()
    return torch.stack([item[:count].sum(dim=0) / max(count, 1) for item, count in zip(x, counts, strict=True)])


SHAPES = [(16, 25, 64), (1, 1, 1), (3, 7, 33), (0, 5, 4), (2, 4, 0)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padded", [False, True])
def test_the_mean_excludes_padded_frames(shape: tuple[int, int, int], padded: bool) -> None:
    x = torch.randn(shape, requires_grad=True)
    lengths = torch.randint(0, shape[1] + 1, shape[:1]) if padded else None
    y, reference = mean_over_time(x, lengths), compute_mean(x, lengths) if len(x) else x.sum(dim=1)
    torch.testing.assert_close(y, reference)
    weight = torch.randn_like(y)
    for a, b in zip(
        torch.autograd.grad((y * weight).sum(), x), torch.autograd.grad((reference * weight).sum(), x), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_gradients_pass_gradcheck() -> None:
    x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: mean_over_time(x, torch.tensor([5, 2, 1])), x)


def test_padding_is_not_read() -> None:
    x = torch.randn(2, 4, 3)
    x[0, 2:] = float("nan")
    assert torch.isfinite(mean_over_time(x, torch.tensor([2, 4]))).all()
    assert torch.isnan(mean_over_time(x, torch.tensor([3, 4]))[0]).all()


@pytest.mark.parametrize("padded", [False, True])
def test_vmap_matches_a_loop(padded: bool) -> None:
    x = torch.randn(4, 3, 6, 5, requires_grad=True)
    lengths = torch.randint(0, 7, (4, 3))
    if padded:
        y = torch.func.vmap(mean_over_time)(x, lengths)
        loop = torch.stack([mean_over_time(item, n) for item, n in zip(x, lengths, strict=True)])
    else:
        y = torch.func.vmap(mean_over_time)(x)
        loop = torch.stack([mean_over_time(item) for item in x])
    torch.testing.assert_close(y, loop)
    weight = torch.randn_like(y)
    (a,), (b,) = (torch.autograd.grad((z * weight).sum(), x) for z in (y, loop))
    torch.testing.assert_close(a, b)


def test_inputs_may_be_strided() -> None:
    x = torch.randn(5, 3, 6)
    torch.testing.assert_close(mean_over_time(x.transpose(0, 2)), compute_mean(x.transpose(0, 2), None))


def test_forward_mode_is_rejected_by_compiled_operators(implementation: str) -> None:
    """Otherwise, they would silently return a derivative of zero."""
    x, tangent = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    gru, convolution, drop = ops.GRU(3, 4, batch_first=True), ops.Conv1d(3, 4, 3, padding=1), ops.Dropout(0.5)

    def apply_dropout(x: Tensor) -> Tensor:
        with ops.random_state(torch.tensor(1)):
            return drop(x)

    for function in (mean_over_time, gru.outputs, lambda x: convolution.pooled(x, 2), apply_dropout):
        if implementation == "compiled":
            with pytest.raises(NotImplementedError, match="no forward-mode differentiation"):
                torch.func.jvp(function, (x,), (tangent,))
    if implementation == "torch":
        _, derivative = torch.func.jvp(mean_over_time, (x,), (tangent,))
        torch.testing.assert_close(derivative, tangent.mean(dim=1))
