"""Split CNN, compared with the published number of weights and with formulas in NumPy, and its dropout of maps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raydfl.core.errors import ConfigError
from raydfl.core.ops import random_state
from raydfl.models.split_cnn import SplitCNN


def test_the_number_of_weights_is_the_published_number() -> None:
    network = SplitCNN(64, 12)
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    assert sum(size for name, size in sizes.items() if not name.startswith("output.")) == 134_648
    assert sum(sizes.values()) == 136_196
    with torch.no_grad():
        x = torch.randn(1, 96, 64, 1)
        shapes = [tuple((x := block(x, None)).shape[1:]) for block in network.blocks]
    assert shapes == [(48, 32, 24), (24, 16, 32), (12, 8, 64), (6, 4, 128)]


def test_every_step_equals_its_formula() -> None:
    """The formulas are loops in float64. Kernels of 4 read a position before and two after."""
    torch.manual_seed(0)
    network = SplitCNN(5, 3, filters=(4, 8), groups=2).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    weights = {name: value.double().numpy() for name, value in network.state_dict().items()}

    def convolve(x: np.ndarray, name: str) -> np.ndarray:
        kernel, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        rows, columns = kernel.shape[2:]
        padded = np.pad(x, ((0, 0), (int(rows == 4), 2 * int(rows == 4)), (int(columns == 4), 2 * int(columns == 4))))
        y = np.zeros((len(kernel), *x.shape[1:]))
        for row in range(rows):
            for column in range(columns):
                part = padded[:, row : row + x.shape[1], column : column + x.shape[2]]
                y += np.einsum("oi,itf->otf", kernel[:, :, row, column], part)
        y += bias[:, None, None]
        for group in np.split(np.arange(len(y)), 2):
            y[group] = (y[group] - y[group].mean()) / np.sqrt(y[group].var() + 1e-3)
        y = y * weights[f"{name}_norm.weight"][:, None, None] + weights[f"{name}_norm.bias"][:, None, None]
        return np.maximum(y, 0)

    x = torch.randn(2, 7, 5)
    for item, logits in zip(x.double().numpy(), network(x).detach().numpy(), strict=True):
        maps = item[None]
        for block in ("blocks.0", "blocks.1"):
            maps = np.concatenate([convolve(maps, f"{block}.time"), convolve(maps, f"{block}.frequency")])
            maps = convolve(maps, f"{block}.mix")
            maps = np.stack([maps[:, t : t + 2].max(axis=1) for t in range(0, maps.shape[1], 2)], axis=1)
            maps = np.stack([maps[:, :, f : f + 2].max(axis=2) for f in range(0, maps.shape[2], 2)], axis=2)
        expected = weights["output.weight"] @ maps.max(axis=(1, 2)) + weights["output.bias"]
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_dropout_zeroes_maps_drawn_with_the_seed() -> None:
    block, x = SplitCNN(6, 3, filters=(8,), dropout=0.5).blocks[0], torch.randn(9, 8, 6, 1)

    def train_block(seed: int) -> torch.Tensor:
        with random_state(torch.tensor(seed)), torch.no_grad():
            return block.train()(x, None)  # type: ignore[no-any-return]

    with torch.no_grad():
        whole = block.eval()(x, None)
    is_kept = train_block(1).abs().sum(dim=(1, 2)) > 0
    assert 0.3 < is_kept.float().mean() < 0.7
    torch.testing.assert_close(train_block(1), 2 * whole * is_kept[:, None, None])
    assert torch.equal(train_block(1), train_block(1))
    assert not torch.equal(train_block(1), train_block(2))


def test_initial_weights_follow_glorot_and_bengio() -> None:
    """Weights are uniform with the variance 2 / (fan in + fan out), and biases are 0."""
    torch.manual_seed(0)
    layer = SplitCNN(64, 12).blocks[2].time
    assert float(layer.weight.detach().abs().max()) <= (6 / (4 * (32 + 64))) ** 0.5
    assert float(layer.weight.detach().var()) == pytest.approx(2 / (4 * (32 + 64)), rel=0.05)
    assert not layer.bias.any()


def test_channels_must_be_a_multiple_of_groups() -> None:
    with pytest.raises(ConfigError, match="6 channels cannot be divided into 4 groups. Use multiples of 4"):
        SplitCNN(8, 3, filters=(4, 6))
