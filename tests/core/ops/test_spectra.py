"""Spectra of a batch. Oracle: NumPy in float64 on the unpadded frames of each example."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from raydfl.core import ops
from raydfl.core.ops import spectra

pytestmark = pytest.mark.usefixtures("implementation")

FACTOR, FLOOR = 10 / np.log(10), 1e-10  # decibels
COUNTS = torch.tensor([[20, 7, 0], [1, 13, 20]])
generator = np.random.default_rng(1)
NOISE = torch.from_numpy(generator.random((9, 11), np.float32))
FIRST, RATIO = torch.tensor([[8, 0, 3], [1, 5, 8]]), torch.tensor([[0.5, 0.0, 1.0], [2.0, 0.1, 0.3]])
MASKS = [
    torch.from_numpy(generator.integers(0, most, (2, 3, number))) for most, number in ((20, 2), (9, 2), (11, 1), (4, 1))
]


def add_expected_noise(x: np.ndarray, first: int, ratio: float) -> np.ndarray:
    rows = (first + np.arange(len(x))) % len(NOISE)
    return x + ratio * x.sum() / max(len(x), 1) * NOISE.numpy()[rows]


def apply_expected_mask(x: np.ndarray, *masks: np.ndarray) -> np.ndarray:
    result, (firsts, lengths, lowest, widths) = x.copy(), masks
    for first, length in zip(firsts, lengths, strict=True):
        result[first : first + length] = x.mean()
    for low, width in zip(lowest, widths, strict=True):
        result[:, low : low + width] = x.mean()
    return result


OPERATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., np.ndarray], list[Tensor]]] = {
    "power": (lambda x, n: spectra.to_power(x, n, FLOOR, FACTOR), lambda x: 10 ** (x / 10), []),
    "logarithm": (
        lambda x, n: spectra.to_logarithm(x, n, FLOOR, FACTOR),
        lambda x: 10 * np.log10(np.maximum(x, FLOOR)),
        [],
    ),
    "z-scores": (
        lambda x, n: spectra.to_z_scores(x, n, 1e-5),
        lambda x: (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-5),
        [],
    ),
    "noise": (lambda x, n, *draws: spectra.add_noise(x, n, NOISE, *draws), add_expected_noise, [FIRST, RATIO]),
    "masks": (spectra.mask, apply_expected_mask, MASKS),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_use_only_the_unpadded_frames(name: str) -> None:
    """The result depends neither on the content nor on the amount of padding."""
    operation, reference, draws = OPERATIONS[name]
    x = torch.randn(2, 3, 20, 11) * 15 if name == "power" else torch.rand(2, 3, 20, 11) - (name != "noise") * 0.2
    actual = operation(x.clone(), COUNTS, *draws)
    for place in np.ndindex(2, 3):
        count = int(COUNTS[place])
        if count == 0:
            continue
        expected = reference(x[place][:count].double().numpy(), *(draw[place].numpy() for draw in draws))
        np.testing.assert_allclose(actual[place][:count].numpy(), expected, rtol=2e-5, atol=2e-6)
        unbatched = operation(
            x[place][None, :count].clone(), COUNTS[place][None], *(draw[place][None] for draw in draws)
        )
        torch.testing.assert_close(unbatched[0], actual[place][:count])


def test_power_and_logarithm_are_exact_to_a_few_bits() -> None:
    x = torch.linspace(-84, 84, 100_001).view(1, -1, 1)
    count = torch.tensor([x.numel()])
    power = spectra.to_power(x.clone(), count, 1e-36, 1.0)
    torch.testing.assert_close(power.double(), x.double().exp(), rtol=3e-7, atol=0)
    logarithm = spectra.to_logarithm(power.clone(), count, 1e-36, 1.0)
    torch.testing.assert_close(logarithm.double(), power.double().log().clamp_min(np.log(1e-36)), rtol=2e-7, atol=2e-7)
    special = spectra.to_logarithm(
        torch.tensor([[[float("nan"), float("inf"), -1.0, 0.0]]]), torch.tensor([1]), 1.0, 1.0
    )
    assert str(special.flatten().tolist()) == "[nan, inf, 0.0, 0.0]"


def test_inputs_may_be_strided() -> None:
    x, count = torch.randn(11, 20, 4), torch.full((4,), 20)
    torch.testing.assert_close(
        spectra.to_z_scores(x.permute(2, 1, 0), count, 1e-5),
        spectra.to_z_scores(x.permute(2, 1, 0).contiguous(), count, 1e-5),
        rtol=1e-5,
        atol=1e-4,  # the order of the sums differs
    )


@pytest.mark.skipif(not ops.is_compiled(), reason="the operators in C++ were not built here")
def test_compiled_operators_check_their_arguments() -> None:
    x, count, compiled = torch.rand(3, 5, 4), torch.tensor([5, 5, 5]), torch.ops.raydfl
    starts, ratio = torch.tensor([0, 0, 0]), torch.rand(3)
    for operator, arguments, message in [
        (compiled.to_power, (x.double(), count, 1.0), "x is not float32 and contiguous"),
        (compiled.to_power, (x.transpose(1, 2), count, 1.0), "x is not float32 and contiguous"),
        (compiled.to_z_scores, (x, count[:2], 1.0), "not one int64 for each example"),
        (
            compiled.add_noise,
            (x, count, torch.rand(7, 3), starts, ratio),
            r"noise has shape \[7, 3\], not float32 \[1 or more, 4\]",
        ),
        (
            compiled.add_noise,
            (x, count, torch.rand(7, 4), starts[:2], ratio),
            r"first has shape \[2\] of Long, which does not fit",
        ),
    ]:
        with pytest.raises(RuntimeError, match=message):
            operator(*arguments)
