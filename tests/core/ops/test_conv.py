"""ops.Conv1d and conv1d. Oracle: torch.nn.Conv1d, ReLU and max pooling."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydfl.core import ops

pytestmark = pytest.mark.usefixtures("implementation")


def make_noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def compute_reference(
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
    # At least 16 channels, in multiples of 8: computed by values at points.
    (2, 26, 24, 19, 3, 1, 2),
    (3, 31, 16, 16, 3, 0, None),
    (2, 17, 32, 40, 5, 4, 3),
    (1, 6, 16, 16, 3, 1, 4),
    (1, 8, 16, 16, 3, 1, 5),
    (11, 24, 24, 32, 5, 2, 2),
    (2, 40, 16, 17, 5, 0, 1),
    (2, 101, 64, 64, 5, 2, 2),
]


def compute_gradients(outputs: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(
        torch.autograd.grad(outputs, inputs, make_noise(*outputs.shape, seed=9, dtype=torch.float64).to(outputs.dtype))
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padded", [False, True])
def test_conv1d_matches_torch(shape: tuple[int, int, int, int, int, int, int | None], padded: bool) -> None:
    batch, frames, inputs, outputs, kernel, padding, pool = shape
    x, weight, bias = (
        make_noise(batch, frames, inputs),
        make_noise(outputs, inputs, kernel, seed=1),
        make_noise(outputs, seed=2),
    )
    weight /= (inputs * kernel) ** 0.5  # outputs have the scale of the inputs
    lengths = torch.arange(batch).mul(frames).div(max(batch, 1)).long() + 1 if padded else None
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    actual = ops.conv1d(x, weight, bias, padding, pool=pool, lengths=lengths)
    expected = compute_reference(x, weight, bias, padding, pool, lengths)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    for a, b in zip(compute_gradients(actual, leaves), compute_gradients(expected, leaves), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("channels", [12, 32, 128])
def test_float32_is_close_to_float64(kernel: int, channels: int) -> None:
    x, weight, bias = make_noise(4, 50, channels), make_noise(32, channels, kernel, seed=1), make_noise(32, seed=2)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    padding = kernel // 2
    actual, exact = ops.conv1d(*leaves, padding, pool=None), compute_reference(*wide, padding, None, None)
    for a, b in zip(
        [actual, *compute_gradients(actual, leaves)], [exact, *compute_gradients(exact, wide)], strict=True
    ):
        assert float(((a - b).norm() / b.norm()).detach()) < 1e-6


@pytest.mark.parametrize("kernel", [3, 5])
def test_results_do_not_depend_on_the_batch(implementation: str, kernel: int) -> None:
    if implementation == "torch":
        pytest.skip("PyTorch does not guarantee this")
    x, weight, bias = make_noise(11, 30, 24), make_noise(32, 24, kernel, seed=1), make_noise(32, seed=2)
    lengths, dy = torch.arange(11) * 3, make_noise(11, 15, 32, seed=3)

    def compute(items: slice) -> tuple[Tensor, Tensor]:
        frames = x[items].clone().requires_grad_()
        y = ops.conv1d(frames, weight, bias, kernel // 2, pool=2, lengths=lengths[items])
        return y, torch.autograd.grad(y, frames, dy[items])[0]

    batched = compute(slice(0, 11))
    for item in range(11):
        for a, b in zip(batched, compute(slice(item, item + 1)), strict=True):
            assert torch.equal(a[item : item + 1], b)


def test_gradients_pass_gradcheck() -> None:
    x, weight, bias = (make_noise(*s, dtype=torch.float64).requires_grad_() for s in ((2, 9, 3), (4, 3, 3), (4,)))
    lengths = torch.tensor([9, 5])
    assert torch.autograd.gradcheck(lambda *t: ops.conv1d(*t, 1, pool=2, lengths=lengths), (x, weight, bias))
    assert torch.autograd.gradcheck(lambda *t: ops.conv1d(*t, 2), (x, weight, bias))


def test_a_leading_client_dimension_matches_a_loop() -> None:
    x, weight, bias = make_noise(3, 4, 13, 6), make_noise(3, 5, 6, 3, seed=1), make_noise(3, 5, seed=2)
    lengths = torch.tensor([[13, 4, 1, 8]] * 3)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    batched = ops.conv1d(x, weight, bias, 1, pool=2, lengths=lengths)
    unbatched = torch.stack([ops.conv1d(x[c], weight[c], bias[c], 1, pool=2, lengths=lengths[c]) for c in range(3)])
    assert torch.equal(batched, unbatched) or torch.allclose(batched, unbatched, atol=1e-6)
    for a, b in zip(compute_gradients(batched, leaves), compute_gradients(unbatched, leaves), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shared", [None, "x", "weight", "lengths"])
def test_vmap_matches_a_loop(shared: str | None) -> None:
    values = {
        "x": make_noise(3, 2, 9, 4),
        "weight": make_noise(3, 5, 4, 3, seed=1),
        "bias": make_noise(3, 5, seed=2),
        "lengths": torch.tensor([[9, 3], [1, 9], [5, 6]]),
    }
    if shared is not None:
        values[shared] = values[shared][0]
    dims = {name: None if name == shared else 0 for name in values}
    leaves = [values[name].requires_grad_() for name in ("x", "weight", "bias")]

    def convolve(x: Tensor, weight: Tensor, bias: Tensor, lengths: Tensor) -> Tensor:
        return ops.conv1d(x, weight, bias, 1, pool=2, lengths=lengths)

    mapped = torch.func.vmap(convolve, in_dims=tuple(dims.values()))(*values.values())
    loop = torch.stack([convolve(*(v if dims[n] is None else v[c] for n, v in values.items())) for c in range(3)])
    torch.testing.assert_close(mapped, loop, atol=1e-6, rtol=1e-6)
    for a, b in zip(compute_gradients(mapped, leaves), compute_gradients(loop, leaves), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_vmap_of_grad_matches_a_loop() -> None:
    x, weight, bias = make_noise(3, 2, 9, 4), make_noise(5, 4, 3, seed=1), make_noise(5, seed=2)

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return ops.conv1d(x, weight, bias, 1, pool=2).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, x)
    for c in range(3):
        torch.testing.assert_close(gradients[c], torch.func.grad(loss)(weight, x[c]), atol=1e-5, rtol=1e-5)


def test_nan_is_propagated() -> None:
    x, weight = make_noise(1, 8, 2), make_noise(3, 2, 1, seed=1)
    x[0, 2, 0] = float("nan")
    assert ops.conv1d(x, weight, None, pool=2)[0].isnan().any(dim=1).tolist() == [False, True, False, False]


def test_inputs_may_be_strided() -> None:
    x, weight = make_noise(9, 2, 8).transpose(0, 1)[:, :, ::2], make_noise(3, 5, 4, seed=1).permute(1, 2, 0)
    torch.testing.assert_close(ops.conv1d(x, weight, None, 1), ops.conv1d(x.contiguous(), weight.contiguous(), None, 1))


def test_second_derivatives_are_rejected() -> None:
    weight = make_noise(3, 2, 1).requires_grad_()
    (first,) = torch.autograd.grad(ops.conv1d(make_noise(1, 4, 2), weight).square().sum(), weight, create_graph=True)
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
def test_the_module_matches_torch(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    reference = nn.Conv1d(4, 6, 5, **options)  # type: ignore[arg-type]
    torch.manual_seed(0)
    module = ops.Conv1d(4, 6, 5, **options)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), reference.parameters(), strict=True))
    module.load_state_dict(reference.state_dict())
    reference.load_state_dict(module.state_dict())
    x = make_noise(3, 4, 20)
    for copied_module in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(copied_module(x), reference(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(module(x[0]), reference(x[0]), atol=1e-5, rtol=1e-5)
    pooled = module.pooled(x.transpose(1, 2), 2)
    torch.testing.assert_close(pooled, F.max_pool1d(reference(x).relu(), 2).transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_functional_call_replaces_the_parameters() -> None:
    module, x = ops.Conv1d(4, 6, 3), make_noise(2, 4, 9)
    doubled = {name: 2 * value for name, value in module.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(module, doubled, (x,)), 2 * module(x))
