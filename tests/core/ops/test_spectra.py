"""Spectra of a batch against NumPy's float64 of each example's own frames."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from raydfl.core import ops
from raydfl.core.ops import spectra

pytestmark = pytest.mark.usefixtures("implementation")

FACTOR, LEAST = 10 / np.log(10), 1e-10  # decibels
COUNTS = torch.tensor([[20, 7, 0], [1, 13, 20]])
generator = np.random.default_rng(1)
NOISE = torch.from_numpy(generator.random((9, 11), np.float32))
FIRST, RATIO = torch.tensor([[8, 0, 3], [1, 5, 8]]), torch.tensor([[0.5, 0.0, 1.0], [2.0, 0.1, 0.3]])
MASKS = [
    torch.from_numpy(generator.integers(0, most, (2, 3, number))) for most, number in ((20, 2), (9, 2), (11, 1), (4, 1))
]


def literal_noise(x: np.ndarray, first: int, ratio: float) -> np.ndarray:
    rows = (first + np.arange(len(x))) % len(NOISE)
    return x + ratio * x.sum() / max(len(x), 1) * NOISE.numpy()[rows]


def literal_mask(x: np.ndarray, *masks: np.ndarray) -> np.ndarray:
    found, (firsts, lengths, lowest, widths) = x.copy(), masks
    for first, length in zip(firsts, lengths, strict=True):
        found[first : first + length] = x.mean()
    for low, width in zip(lowest, widths, strict=True):
        found[:, low : low + width] = x.mean()
    return found


OPERATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., np.ndarray], list[Tensor]]] = {
    "power": (lambda x, n: spectra.to_power(x, n, LEAST, FACTOR), lambda x: 10 ** (x / 10), []),
    "logarithm": (
        lambda x, n: spectra.to_logarithm(x, n, LEAST, FACTOR),
        lambda x: 10 * np.log10(np.maximum(x, LEAST)),
        [],
    ),
    "z-scores": (
        lambda x, n: spectra.to_z_scores(x, n, 1e-5),
        lambda x: (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-5),
        [],
    ),
    "noise": (lambda x, n, *own: spectra.add_noise(x, n, NOISE, *own), literal_noise, [FIRST, RATIO]),
    "masks": (spectra.mask, literal_mask, MASKS),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_example_is_its_own_frames(name: str) -> None:
    """Whatever stands in padding, and however much of it there is."""
    operation, literal, own = OPERATIONS[name]
    x = torch.randn(2, 3, 20, 11) * 15 if name == "power" else torch.rand(2, 3, 20, 11) - (name != "noise") * 0.2
    found = operation(x.clone(), COUNTS, *own)
    for place in np.ndindex(2, 3):
        count = int(COUNTS[place])
        if count == 0:
            continue
        expected = literal(x[place][:count].double().numpy(), *(each[place].numpy() for each in own))
        np.testing.assert_allclose(found[place][:count].numpy(), expected, rtol=2e-5, atol=2e-6)
        alone = operation(x[place][None, :count].clone(), COUNTS[place][None], *(each[place][None] for each in own))
        torch.testing.assert_close(alone[0], found[place][:count])


def test_power_and_logarithm_are_exact_to_a_few_bits() -> None:
    x = torch.linspace(-84, 84, 100_001).view(1, -1, 1)
    count = torch.tensor([x.numel()])
    power = spectra.to_power(x.clone(), count, 1e-36, 1.0)
    torch.testing.assert_close(power.double(), x.double().exp(), rtol=3e-7, atol=0)
    logarithm = spectra.to_logarithm(power.clone(), count, 1e-36, 1.0)
    torch.testing.assert_close(logarithm.double(), power.double().log().clamp_min(np.log(1e-36)), rtol=2e-7, atol=2e-7)
    strange = spectra.to_logarithm(
        torch.tensor([[[float("nan"), float("inf"), -1.0, 0.0]]]), torch.tensor([1]), 1.0, 1.0
    )
    assert str(strange.flatten().tolist()) == "[nan, inf, 0.0, 0.0]"


def test_the_input_may_lie_anyhow_in_memory() -> None:
    x, count = torch.randn(11, 20, 4), torch.full((4,), 20)
    torch.testing.assert_close(
        spectra.to_z_scores(x.permute(2, 1, 0), count, 1e-5),
        spectra.to_z_scores(x.permute(2, 1, 0).contiguous(), count, 1e-5),
        rtol=1e-5,
        atol=1e-4,  # sums in another order
    )


@pytest.mark.skipif(not ops.is_compiled(), reason="the operators in C++ were not built here")
def test_the_compiled_operators_check_what_they_are_given() -> None:
    x, count, compiled = torch.rand(3, 5, 4), torch.tensor([5, 5, 5]), torch.ops.raydfl
    one, ratio = torch.tensor([0, 0, 0]), torch.rand(3)
    for operator, arguments, message in [
        (compiled.to_power, (x.double(), count, 1.0), "x is not float32 and contiguous"),
        (compiled.to_power, (x.transpose(1, 2), count, 1.0), "x is not float32 and contiguous"),
        (compiled.to_z_scores, (x, count[:2], 1.0), "not one int64 for each example"),
        (
            compiled.add_noise,
            (x, count, torch.rand(7, 3), one, ratio),
            r"noise has shape \[7, 3\], not float32 \[1 or more, 4\]",
        ),
        (
            compiled.add_noise,
            (x, count, torch.rand(7, 4), one[:2], ratio),
            r"first has shape \[2\] of Long, which does not fit",
        ),
    ]:
        with pytest.raises(RuntimeError, match=message):
            operator(*arguments)
