"""ops.Conv1d and conv1d against torch.nn.Conv1d, ReLU and max pooling."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydfl.core import ops

pytestmark = pytest.mark.usefixtures("implementation")


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, pool: int | None, lengths: Tensor | None
) -> Tensor:
    if lengths is not None:
        x = torch.where((torch.arange(x.shape[1]) < lengths[:, None])[:, :, None], x, 0.0)
    y = F.conv1d(x.transpose(1, 2), weight, bias, padding=padding)
    return (y if pool is None else F.max_pool1d(F.relu(y), pool)).transpose(1, 2)


# Batch, frames, inputs, outputs, kernel, padding and pool.
SHAPES = [
    (3, 21, 5, 7, 3, 1, 2),
    (2, 25, 16, 32, 5, 2, 2),
    (2, 23, 20, 33, 5, 2, 3),
    (2, 9, 3, 40, 1, 0, None),
    (1, 1, 1, 1, 1, 0, 1),
    (2, 11, 4, 5, 4, 0, None),
    (2, 11, 4, 5, 4, 3, 4),
    (0, 11, 4, 5, 3, 1, 2),
    # 16 channels and more, a multiple of 8 of them: by values at points.
    (2, 26, 24, 19, 3, 1, 2),
    (3, 31, 16, 16, 3, 0, None),
    (2, 17, 32, 40, 5, 4, 3),
    (1, 6, 16, 16, 3, 1, 4),
    (1, 8, 16, 16, 3, 1, 5),
    (11, 24, 24, 32, 5, 2, 2),
    (2, 40, 16, 17, 5, 0, 1),
    (2, 101, 64, 64, 5, 2, 2),
]


def gradients(outputs: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(
        torch.autograd.grad(outputs, inputs, noise(*outputs.shape, seed=9, dtype=torch.float64).to(outputs.dtype))
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padded", [False, True])
def test_it_is_torchs_convolution(shape: tuple[int, int, int, int, int, int, int | None], padded: bool) -> None:
    batch, frames, inputs, outputs, kernel, padding, pool = shape
    x, weight, bias = noise(batch, frames, inputs), noise(outputs, inputs, kernel, seed=1), noise(outputs, seed=2)
    weight /= (inputs * kernel) ** 0.5  # outputs of the size of inputs
    lengths = torch.arange(batch).mul(frames).div(max(batch, 1)).long() + 1 if padded else None
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    mine = ops.conv1d(x, weight, bias, padding, pool=pool, lengths=lengths)
    theirs = reference(x, weight, bias, padding, pool, lengths)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    for one, other in zip(gradients(mine, leaves), gradients(theirs, leaves), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("channels", [12, 32, 128])
def test_float32_is_near_float64(kernel: int, channels: int) -> None:
    x, weight, bias = noise(4, 50, channels), noise(32, channels, kernel, seed=1), noise(32, seed=2)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    padding = kernel // 2
    found, exact = ops.conv1d(*leaves, padding, pool=None), reference(*wide, padding, None, None)
    for one, other in zip([found, *gradients(found, leaves)], [exact, *gradients(exact, wide)], strict=True):
        assert float(((one - other).norm() / other.norm()).detach()) < 1e-6


@pytest.mark.parametrize("kernel", [3, 5])
def test_the_same_bits_in_any_company(implementation: str, kernel: int) -> None:
    if implementation == "torch":
        pytest.skip("PyTorch does not promise it")
    x, weight, bias = noise(11, 30, 24), noise(32, 24, kernel, seed=1), noise(32, seed=2)
    lengths, dy = torch.arange(11) * 3, noise(11, 15, 32, seed=3)

    def both(items: slice) -> tuple[Tensor, Tensor]:
        frames = x[items].clone().requires_grad_()
        y = ops.conv1d(frames, weight, bias, kernel // 2, pool=2, lengths=lengths[items])
        return y, torch.autograd.grad(y, frames, dy[items])[0]

    together = both(slice(0, 11))
    for item in range(11):
        for one, other in zip(together, both(slice(item, item + 1)), strict=True):
            assert torch.equal(one[item : item + 1], other)


def test_gradcheck() -> None:
    x, weight, bias = (noise(*s, dtype=torch.float64).requires_grad_() for s in ((2, 9, 3), (4, 3, 3), (4,)))
    lengths = torch.tensor([9, 5])
    assert torch.autograd.gradcheck(lambda *t: ops.conv1d(*t, 1, pool=2, lengths=lengths), (x, weight, bias))
    assert torch.autograd.gradcheck(lambda *t: ops.conv1d(*t, 2), (x, weight, bias))


def test_clients_in_front_are_clients_alone() -> None:
    x, weight, bias = noise(3, 4, 13, 6), noise(3, 5, 6, 3, seed=1), noise(3, 5, seed=2)
    lengths = torch.tensor([[13, 4, 1, 8]] * 3)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    together = ops.conv1d(x, weight, bias, 1, pool=2, lengths=lengths)
    alone = torch.stack([ops.conv1d(x[c], weight[c], bias[c], 1, pool=2, lengths=lengths[c]) for c in range(3)])
    assert torch.equal(together, alone) or torch.allclose(together, alone, atol=1e-6)
    for one, other in zip(gradients(together, leaves), gradients(alone, leaves), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shared", [None, "x", "weight", "lengths"])
def test_vmap_is_a_loop(shared: str | None) -> None:
    values = {
        "x": noise(3, 2, 9, 4),
        "weight": noise(3, 5, 4, 3, seed=1),
        "bias": noise(3, 5, seed=2),
        "lengths": torch.tensor([[9, 3], [1, 9], [5, 6]]),
    }
    if shared is not None:
        values[shared] = values[shared][0]
    dims = {name: None if name == shared else 0 for name in values}
    leaves = [values[name].requires_grad_() for name in ("x", "weight", "bias")]

    def one(x: Tensor, weight: Tensor, bias: Tensor, lengths: Tensor) -> Tensor:
        return ops.conv1d(x, weight, bias, 1, pool=2, lengths=lengths)

    mapped = torch.func.vmap(one, in_dims=tuple(dims.values()))(*values.values())
    loop = torch.stack([one(*(v if dims[n] is None else v[c] for n, v in values.items())) for c in range(3)])
    torch.testing.assert_close(mapped, loop, atol=1e-6, rtol=1e-6)
    for left, right in zip(gradients(mapped, leaves), gradients(loop, leaves), strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)


def test_vmap_of_grad() -> None:
    x, weight, bias = noise(3, 2, 9, 4), noise(5, 4, 3, seed=1), noise(5, seed=2)

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return ops.conv1d(x, weight, bias, 1, pool=2).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, x)
    for c in range(3):
        torch.testing.assert_close(found[c], torch.func.grad(loss)(weight, x[c]), atol=1e-5, rtol=1e-5)


def test_nothing_not_a_number_is_hidden() -> None:
    x, weight = noise(1, 8, 2), noise(3, 2, 1, seed=1)
    x[0, 2, 0] = float("nan")
    assert ops.conv1d(x, weight, None, pool=2)[0].isnan().any(dim=1).tolist() == [False, True, False, False]


def test_the_input_may_lie_anyhow_in_memory() -> None:
    x, weight = noise(9, 2, 8).transpose(0, 1)[:, :, ::2], noise(3, 5, 4, seed=1).permute(1, 2, 0)
    torch.testing.assert_close(ops.conv1d(x, weight, None, 1), ops.conv1d(x.contiguous(), weight.contiguous(), None, 1))


def test_a_gradient_of_a_gradient_is_refused() -> None:
    weight = noise(3, 2, 1).requires_grad_()
    (first,) = torch.autograd.grad(ops.conv1d(noise(1, 4, 2), weight).square().sum(), weight, create_graph=True)
    with pytest.raises(
        RuntimeError, match=r"Conv1d of raydfl.ops cannot be differentiated twice; use Conv1d of torch\.nn"
    ):
        first.sum().backward()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": 2},
        {"bias": False},
        {"stride": 2},
        {"padding": "same"},
        {"dilation": 2},
        {"groups": 2},
        {"padding": 7},
    ],
)
def test_the_module_is_torchs(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    theirs = nn.Conv1d(4, 6, 5, **options)  # type: ignore[arg-type]
    torch.manual_seed(0)
    mine = ops.Conv1d(4, 6, 5, **options)  # type: ignore[arg-type]
    assert all(torch.equal(one, other) for one, other in zip(mine.parameters(), theirs.parameters(), strict=True))
    mine.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(mine.state_dict())
    x = noise(3, 4, 20)
    for copied in (mine, copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        torch.testing.assert_close(copied(x), theirs(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine(x[0]), theirs(x[0]), atol=1e-5, rtol=1e-5)
    pooled = mine.pooled(x.transpose(1, 2), 2)
    torch.testing.assert_close(pooled, F.max_pool1d(theirs(x).relu(), 2).transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_functional_call_replaces_the_parameters() -> None:
    module, x = ops.Conv1d(4, 6, 3), noise(2, 4, 9)
    twice = {name: 2 * value for name, value in module.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(module, twice, (x,)), 2 * module(x))
