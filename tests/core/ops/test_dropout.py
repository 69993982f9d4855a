"""ops.Dropout: masks depend only on the client's seed and are equal on all machines."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from raydfl.core import ops

pytestmark = pytest.mark.usefixtures("implementation")


def drop_ones(seed: int, *shape: int, p: float = 0.3, calls: int = 1) -> Tensor:
    module = ops.Dropout(p)
    with ops.random_state(torch.tensor(seed)):
        for _ in range(calls):
            y = module(torch.ones(shape))
    return y


def test_dropout_has_the_chosen_share_and_scale() -> None:
    for p in (0.1, 0.5, 0.9):
        y = drop_ones(7, 200, 25, 64, p=p)
        is_kept = (y != 0).double()
        assert abs(float(is_kept.mean()) - (1 - p)) < 5 * (p * (1 - p) / y.numel()) ** 0.5
        torch.testing.assert_close(y[y != 0], torch.full((int(is_kept.sum()),), 1 / (1 - p)))
        by_row, by_column = is_kept.mean(dim=(1, 2)), is_kept.mean(dim=0)
        assert float((by_row - (1 - p)).abs().max()) < 5 * (p * (1 - p) / 1600) ** 0.5
        assert float((by_column - (1 - p)).abs().max()) < 6 * (p * (1 - p) / 200) ** 0.5


def test_masks_of_seeds_calls_rows_and_columns_are_independent() -> None:
    base = drop_ones(1, 40, 500, p=0.5) != 0
    masks = [drop_ones(2, 40, 500, p=0.5), drop_ones(-5, 40, 500, p=0.5), drop_ones(2**62 + 1, 40, 500, p=0.5)]
    masks += [drop_ones(1, 40, 500, p=0.5, calls=2), base.roll(1, 0), base.roll(1, 1), base.roll(7, 1)]
    for mask in masks:
        assert abs(float((base == (mask != 0)).double().mean()) - 0.5) < 5 * 0.5 / 20_000**0.5


def test_masks_do_not_depend_on_padding() -> None:
    whole = drop_ones(3, 8, 10, 6)
    assert torch.equal(whole[:5], drop_ones(3, 5, 10, 6))
    assert torch.equal(whole[:, :7], drop_ones(3, 8, 7, 6))


def test_all_implementations_draw_the_same_bits() -> None:
    x, module = torch.randn(5, 7, 3), ops.Dropout(0.4)
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 123456789012345):
        with ops.random_state(torch.tensor(seed)):
            compiled = [module(x), module(x)]
        with ops.random_state(torch.tensor(seed)), ops.use("torch"):
            reference = [module(x), module(x)]
        assert all(
            torch.allclose(a, b, rtol=1e-6) and torch.equal(a == 0, b == 0)
            for a, b in zip(compiled, reference, strict=True)
        )


@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0)])
def test_vmap_matches_a_loop(dims: tuple[int | None, int | None]) -> None:
    x = torch.randn(3, 4, 5, 2).requires_grad_() if dims[0] == 0 else torch.randn(4, 5, 2).requires_grad_()
    seeds = torch.tensor([5, 6, 7]) if dims[1] == 0 else torch.tensor(5)
    module = ops.Dropout(0.5)

    def drop_twice(x: Tensor, seed: Tensor) -> Tensor:
        with ops.random_state(seed):
            return module(module(x))

    mapped = torch.func.vmap(drop_twice, in_dims=dims)(x, seeds)
    loop = torch.stack(
        [drop_twice(x if dims[0] is None else x[c], seeds if dims[1] is None else seeds[c]) for c in range(3)]
    )
    assert torch.equal(mapped, loop)
    left, right = (torch.autograd.grad(y.sum(), x)[0] for y in (mapped, loop))
    assert torch.equal(left, right)
    if dims[0] == 0:
        torch.testing.assert_close(left * x.detach(), mapped.detach())  # the gradient uses the mask of the forward pass


def test_dropout_without_a_seed_matches_torch() -> None:
    x, module = torch.randn(50, 3), ops.Dropout(0.5)
    torch.manual_seed(1)
    actual = module(x)
    torch.manual_seed(1)
    assert torch.equal(actual, torch.nn.Dropout(0.5)(x))
    with ops.random_state(torch.tensor(1)):
        assert torch.equal(module.eval()(x), x)
        assert torch.equal(ops.Dropout(0.0)(x), x)
        assert not ops.Dropout(1.0)(x).any()
    assert drop_ones(1, 0, 4).shape == (0, 4)


@pytest.mark.parametrize("seed", [torch.tensor(1.0), torch.tensor([1])])
def test_seeds_must_be_integer_scalars(seed: Tensor) -> None:
    with pytest.raises(TypeError, match="seed must be an int64 scalar, not torch"), ops.random_state(seed):
        pass
