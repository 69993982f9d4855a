"""ops.Conv2d, conv2d, group_norm and relu_pool. Oracle: torch.nn in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydfl.core import ops

pytestmark = pytest.mark.usefixtures("implementation")


def make_noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close_to_float64(
    compute: Callable[..., Tensor], reference: Callable[..., Tensor], leaves: Sequence[Tensor]
) -> None:
    """Assert that float32 values and gradients match a float64 reference up to rounding."""
    leaves = [leaf.requires_grad_() for leaf in leaves]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    actual, exact = compute(*leaves), reference(*wide)
    assert actual.shape == exact.shape
    output_gradient = make_noise(*actual.shape, seed=9)
    pairs = [
        (actual, exact),
        *zip(
            torch.autograd.grad(actual, leaves, output_gradient),
            torch.autograd.grad(exact, wide, output_gradient.double()),
            strict=True,
        ),
    ]
    for a, b in pairs:
        assert float((a - b).norm().detach()) <= 2e-6 * float(b.norm().detach()) + 1e-30


# Inputs, rows, columns, outputs, kernel, padding and stride.
SHAPES = [
    (1, 11, 9, 24, (4, 1), (1, 0, 2, 0), (1, 1)),
    (24, 11, 8, 33, (1, 4), (0, 1, 0, 2), (1, 1)),
    (48, 7, 9, 24, (1, 1), (0, 0, 0, 0), (1, 1)),
    (3, 13, 11, 19, (7, 7), (3, 3, 3, 3), (2, 2)),
    (6, 5, 6, 9, (1, 1), (0, 0, 0, 0), (2, 2)),
    (4, 9, 5, 8, (2, 3), (0, 0, 0, 0), (3, 2)),
    (1, 8, 8, 8, (5, 5), (2, 2, 2, 2), (1, 1)),
    (8, 1, 1, 8, (3, 3), (1, 1, 1, 1), (1, 1)),
    (4, 2, 2, 8, (3, 5), (1, 2, 1, 2), (2, 2)),
    (40, 2, 3, 70, (3, 3), (1, 1, 1, 1), (2, 1)),
    (8, 5, 15, 16, (3, 3), (1, 1, 1, 1), (1, 1)),
    (36, 9, 7, 145, (3, 3), (1, 1, 1, 1), (2, 2)),  # this and later shapes pack windows for the weight's gradient
    (67, 9, 31, 137, (3, 2), (1, 0, 1, 1), (1, 1)),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [0, 3])
def test_conv2d_matches_torch(shape: tuple, batch: int) -> None:  # type: ignore[type-arg]
    inputs, rows, columns, outputs, kernel, (above, left, below, right), stride = shape

    def compute_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        padded = F.pad(x.permute(0, 3, 1, 2), (left, right, above, below))
        return F.conv2d(padded, weight, bias, stride).permute(0, 2, 3, 1)

    def compute(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ops.conv2d(x, weight, bias, stride=stride, padding=(above, left, below, right))

    weight = make_noise(outputs, inputs, *kernel, seed=1)
    assert_close_to_float64(
        compute, compute_reference, [make_noise(batch, rows, columns, inputs), weight, make_noise(outputs, seed=2)]
    )


@pytest.mark.parametrize(
    ("relu", "pool", "ceil"), [(False, 0, False), (True, 0, False), (True, 2, True), (True, 3, False)]
)
@pytest.mark.parametrize("lengths", [None, [7, 3, 1]])
@pytest.mark.parametrize("channels", [(24,), (6, 10)])
def test_group_norm_matches_torch_without_padding(
    relu: bool, pool: int, ceil: bool, lengths: list[int] | None, channels: tuple[int, ...]
) -> None:
    count = len(channels)

    def compute(*tensors: Tensor) -> Tensor:
        lengths_tensor = None if lengths is None else torch.tensor(lengths)
        parts = (tensors[:count], tensors[count : 2 * count], tensors[2 * count :])
        return ops.group_norm(*parts, 2, 1e-3, relu=relu, pool=pool, ceil=ceil, lengths=lengths_tensor)

    def compute_reference(*tensors: Tensor) -> Tensor:
        items = []
        for item, length in enumerate(lengths or [7] * 3):  # each item separately, without padding
            normed = [
                F.group_norm(x[item : item + 1, :length].permute(0, 3, 1, 2), 2, weight, bias, 1e-3)
                for x, weight, bias in zip(
                    tensors[:count], tensors[count : 2 * count], tensors[2 * count :], strict=True
                )
            ]
            y = torch.cat(normed, dim=1)
            y = F.pad(y.relu() if relu else y, (0, 0, 0, 7 - length))
            items.append(F.max_pool2d(y, pool, ceil_mode=ceil) if pool else y)
        return torch.cat(items).permute(0, 2, 3, 1)

    images = [make_noise(3, 7, 5, size, seed=size) + 1 for size in channels]
    assert_close_to_float64(
        compute,
        compute_reference,
        [*images, *(make_noise(size, seed=3) for size in channels), *(make_noise(size, seed=4) for size in channels)],
    )


def test_relu_pool_matches_torch() -> None:
    assert_close_to_float64(
        lambda x: ops.relu_pool(x, 2),
        lambda x: F.max_pool2d(x.relu().permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1),
        [make_noise(2, 5, 7, 9)],
    )


def test_gradients_pass_gradcheck() -> None:
    x, weight, bias = (make_noise(*s).double().requires_grad_() for s in ((2, 5, 4, 4), (6, 4, 3, 2), (6,)))
    assert torch.autograd.gradcheck(lambda *t: ops.conv2d(*t, stride=(2, 1), padding=(1, 1, 0, 0)), (x, weight, bias))
    scale, shift = (make_noise(4, seed=s).double().requires_grad_() for s in (1, 2))
    lengths = torch.tensor([5, 2])
    assert torch.autograd.gradcheck(
        lambda *t: ops.group_norm(*t, 2, 1e-3, relu=True, pool=2, lengths=lengths), (x, scale, shift)
    )


@pytest.mark.parametrize("shared", [None, "x", "weight"])
def test_vmap_of_grad_matches_a_loop(shared: str | None) -> None:
    values = {
        "x": make_noise(3, 2, 6, 5, 4),
        "weight": make_noise(3, 8, 4, 3, 2, seed=1),
        "scale": make_noise(3, 8, seed=2),
    }
    if shared is not None:
        values[shared] = values[shared][0]
    dims = tuple(None if name == shared else 0 for name in values)
    lengths = torch.tensor([[6, 2], [1, 5], [4, 4]])

    def loss(x: Tensor, weight: Tensor, scale: Tensor, lengths: Tensor) -> Tensor:
        y = ops.conv2d(x, weight, padding=(1, 0, 1, 0))
        return (
            ops.group_norm(
                (y, y[..., :4]), (scale, scale[:4]), (scale, scale[4:]), 2, 1e-3, relu=True, pool=2, lengths=lengths
            )
            .square()
            .sum()
        )

    arguments = (*values.values(), lengths)
    batched = torch.func.vmap(torch.func.grad_and_value(loss, (0, 1, 2)), in_dims=(*dims, 0))(*arguments)
    for client in range(3):
        client_arguments = [
            value if dim is None else value[client] for value, dim in zip(arguments, (*dims, 0), strict=True)
        ]
        unbatched = torch.func.grad_and_value(loss, (0, 1, 2))(*client_arguments)
        torch.testing.assert_close(batched[1][client], unbatched[1], atol=1e-4, rtol=1e-5)
        for a, b in zip(batched[0], unbatched[0], strict=True):
            torch.testing.assert_close(a[client], b, atol=1e-4, rtol=1e-4)


def test_nan_is_propagated() -> None:
    x = make_noise(1, 4, 4, 2)
    x[0, 0, 0, 0] = float("nan")
    assert ops.relu_pool(x, 2).isnan().sum() == 1
    assert ops.conv2d(x, make_noise(3, 2, 1, 1)).isnan().sum() == 3
    assert ops.group_norm(x, torch.ones(2), torch.zeros(2), 2, 1e-5, relu=True).isnan().sum() == 16


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": 2, "bias": False},
        {"stride": 2},
        {"padding": "same"},
        {"groups": 2},
        {"dilation": 2},
        {"padding": 7},
    ],
)
def test_the_module_matches_torch(options: dict[str, object]) -> None:
    reference = nn.Conv2d(4, 6, 3, **options)  # type: ignore[arg-type]
    compute = ops.Conv2d(4, 6, 3, **options)  # type: ignore[arg-type]
    compute.load_state_dict(reference.state_dict())
    x = make_noise(3, 4, 11, 9)
    torch.testing.assert_close(compute(x), reference(x), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not ops.is_compiled(), reason="the operators in C++ were not built here")
def test_second_derivatives_are_rejected() -> None:
    weight = make_noise(3, 2, 1, 1).requires_grad_()
    with ops.use("auto"):
        (first,) = torch.autograd.grad(
            ops.conv2d(make_noise(1, 4, 4, 2), weight).square().sum(), weight, create_graph=True
        )
    with pytest.raises(RuntimeError, match=r"Conv2d of raydfl.ops cannot be differentiated twice"):
        first.sum().backward()
