"""ops.GRU and gru. Oracle: torch.nn.GRU."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from raydfl.core import ops

pytestmark = pytest.mark.usefixtures("implementation")


def make_noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def draw_weights(
    inputs: int, hidden: int, directions: int, clients: int | None = None, **options: torch.dtype
) -> list[Tensor]:
    shapes = [(3 * hidden, inputs), (3 * hidden, hidden), (3 * hidden,), (3 * hidden,)] * directions
    front = () if clients is None else (clients,)
    return [make_noise(*front, *s, seed=k, **options).mul(0.5).requires_grad_() for k, s in enumerate(shapes)]


def compute_gradients(outputs: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(
        torch.autograd.grad(outputs, inputs, make_noise(*outputs.shape, seed=9, dtype=torch.float64).to(outputs.dtype))
    )


def build_modules(inputs: int, hidden: int, **options: object) -> tuple[ops.GRU, nn.GRU]:
    torch.manual_seed(0)
    reference = nn.GRU(inputs, hidden, batch_first=True, **options)  # type: ignore[arg-type]
    torch.manual_seed(0)
    return ops.GRU(inputs, hidden, batch_first=True, **options), reference  # type: ignore[arg-type]


# Batch, frames, inputs and hidden units.
SHAPES = [(3, 7, 5, 9), (2, 12, 32, 64), (1, 1, 1, 1), (2, 5, 40, 33), (4, 3, 4, 16), (7, 6, 3, 8), (0, 4, 3, 5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_gru_matches_torch(shape: tuple[int, int, int, int], bidirectional: bool) -> None:
    batch, frames, inputs, hidden = shape
    module, reference = build_modules(inputs, hidden, bidirectional=bidirectional)
    x = make_noise(batch, frames, inputs).requires_grad_()
    actual, last = module(x)
    if batch == 0:  # torch.nn.GRU rejects empty batches
        assert actual.shape == (0, frames, hidden * (1 + bidirectional))
        assert all(not gradient.any() for gradient in compute_gradients(actual, [x, *module.parameters()]))
        return
    expected, expected_last = reference(x)
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(last, expected_last, atol=2e-6, rtol=1e-5)
    gradients = compute_gradients(actual, [x, *module.parameters()])
    for a, b in zip(gradients, compute_gradients(expected, [x, *reference.parameters()]), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    through_last = torch.autograd.grad(module(x)[1].square().sum(), x)[0]
    torch.testing.assert_close(
        through_last, torch.autograd.grad(reference(x)[1].square().sum(), x)[0], atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("bidirectional", [False, True])
def test_lengths_match_a_packed_sequence(bidirectional: bool) -> None:
    module, reference = build_modules(5, 9, bidirectional=bidirectional)
    x, lengths = make_noise(4, 8, 5).requires_grad_(), torch.tensor([8, 3, 1, 6])
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    actual, expected = module.outputs(x, lengths), pad_packed_sequence(reference(packed)[0], batch_first=True)[0]
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)
    gradients = compute_gradients(actual, [x, *module.parameters()])
    for a, b in zip(gradients, compute_gradients(expected, [x, *reference.parameters()]), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_float32_is_close_to_float64() -> None:
    narrow, x = draw_weights(32, 64, 2), make_noise(8, 25, 32).requires_grad_()
    wide, exact_x = draw_weights(32, 64, 2, dtype=torch.float64), x.detach().double().requires_grad_()
    with torch.no_grad():
        for a, b in zip(wide, narrow, strict=True):
            a.copy_(b.mul_(0.2))  # large weights make a GRU chaotic, so that it amplifies rounding errors
    actual, exact = ops.gru(x, narrow), ops.gru(exact_x, wide)
    pairs = zip(
        [actual, *compute_gradients(actual, [x, *narrow])],
        [exact, *compute_gradients(exact, [exact_x, *wide])],
        strict=True,
    )
    for a, b in pairs:
        assert float(((a - b).norm() / b.norm()).detach()) < 3e-6


@pytest.mark.parametrize("gate", ["n", "z"])
def test_gate_functions_are_exact_to_a_few_bits(gate: str) -> None:
    """After a single frame, h = (1 - z) n. A bias fixes z at 0 to test tanh, or n at 1 to test the sigmoid."""
    size = torch.cat([torch.linspace(0, 12, 4000), torch.logspace(-30, 1, 4000)])
    x = torch.cat([size, -size]).view(-1, 1, 1)
    w_ih, b_ih = torch.zeros(3, 1), torch.tensor([0.0, -60.0, 60.0])  # of r, z, n
    w_ih[2 if gate == "n" else 1], b_ih[2 if gate == "n" else 1] = 1.0, 0.0
    actual = ops.gru(x, [w_ih, torch.zeros(3, 1), b_ih, torch.zeros(3)]).flatten()
    exact = x.double().flatten().tanh() if gate == "n" else 1 - x.double().flatten().sigmoid()
    torch.testing.assert_close(actual.double(), exact, rtol=2e-7, atol=1.3e-7 if gate == "z" else 0.0)


def test_extreme_values_saturate_and_nan_is_propagated() -> None:
    module, reference = build_modules(1, 3)
    x = torch.tensor([0.0, 1e-6, -1e-3, 0.3, 1.0, -30.0, 1e4, -1e4, 1e30, -1e30]).view(-1, 1, 1)
    torch.testing.assert_close(module(x)[0], reference(x)[0], atol=1e-7, rtol=1e-6)
    assert bool(module(torch.full((1, 2, 1), float("nan")))[0].isnan().all())


def test_gradients_pass_gradcheck() -> None:
    x, all_weights = (
        make_noise(2, 4, 3, dtype=torch.float64).requires_grad_(),
        draw_weights(3, 2, 2, dtype=torch.float64),
    )
    for lengths in (None, torch.tensor([4, 2])):
        assert torch.autograd.gradcheck(lambda x, *w, n=lengths: ops.gru(x, w, n), (x, *all_weights))


def test_a_leading_client_dimension_matches_a_loop() -> None:
    x, all_weights = make_noise(3, 4, 6, 5).requires_grad_(), draw_weights(5, 7, 2, clients=3)
    lengths = torch.tensor([[6, 4, 1, 3], [1, 2, 3, 4], [6, 6, 6, 6]])
    batched = ops.gru(x, all_weights, lengths)
    unbatched = torch.stack([ops.gru(x[c], [w[c] for w in all_weights], lengths[c]) for c in range(3)])
    torch.testing.assert_close(batched, unbatched, atol=1e-6, rtol=1e-6)
    leaves = [x, *all_weights]
    for a, b in zip(compute_gradients(batched, leaves), compute_gradients(unbatched, leaves), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shared", ["", "x", "weights", "lengths"])
def test_vmap_matches_a_loop(shared: str) -> None:
    x, all_weights, lengths = (
        make_noise(3, 2, 6, 5),
        draw_weights(5, 7, 2, clients=3),
        torch.tensor([[6, 3], [1, 6], [5, 5]]),
    )
    if shared == "x":
        x = x[0]
    if shared == "weights":
        all_weights = [w[0].detach().requires_grad_() for w in all_weights]
    if shared == "lengths":
        lengths = lengths[0]
    leaves = [x.requires_grad_(), *all_weights]
    dims = tuple(None if shared == name else 0 for name in ("x", "lengths", "weights"))

    def run(x: Tensor, lengths: Tensor, weights: list[Tensor]) -> Tensor:
        return ops.gru(x, weights, lengths)

    def select(value: Tensor, dim: int | None, client: int) -> Tensor:
        return value if dim is None else value[client]

    mapped = torch.func.vmap(run, in_dims=dims)(x, lengths, all_weights)
    loop = torch.stack(
        [
            run(select(x, dims[0], c), select(lengths, dims[1], c), [select(w, dims[2], c) for w in all_weights])
            for c in range(3)
        ]
    )
    torch.testing.assert_close(mapped, loop, atol=1e-6, rtol=1e-6)
    for a, b in zip(compute_gradients(mapped, leaves), compute_gradients(loop, leaves), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_vmap_of_grad_matches_a_loop_for_shared_and_per_client_weights() -> None:
    x, client_weights = make_noise(3, 2, 6, 5), [w.detach() for w in draw_weights(5, 7, 1, clients=3)]

    def loss(weights: list[Tensor], x: Tensor) -> Tensor:
        return ops.gru(x, weights).square().sum()

    gradient_of = torch.func.grad(loss)
    for dims, chosen in ((0, client_weights), (None, [w[0] for w in client_weights])):
        actual = torch.func.vmap(gradient_of, in_dims=(dims, 0))(chosen, x)
        for c in range(3):
            expected = gradient_of([w[c] if dims == 0 else w for w in chosen], x[c])
            for a, b in zip(actual, expected, strict=True):
                torch.testing.assert_close(a[c], b, atol=1e-5, rtol=1e-5)


def test_results_are_reproducible_and_do_not_depend_on_the_batch(implementation: str) -> None:
    x, all_weights = make_noise(4, 16, 25, 32), [w.detach() for w in draw_weights(32, 64, 1, clients=4)]
    first, second = ops.gru(x, all_weights), ops.gru(x, all_weights)
    assert torch.equal(first, second)
    pair = ops.gru(x[2:], [w[2:] for w in all_weights])
    torch.testing.assert_close(pair, first[2:], atol=1e-6, rtol=0)
    if implementation == "compiled":
        torch.set_num_threads(2)
        assert torch.equal(ops.gru(x, all_weights), first)


def test_the_graph_is_retained_only_on_request() -> None:
    leaves = draw_weights(3, 4, 1)
    value = ops.gru(make_noise(2, 3, 3), leaves).sum()
    first = torch.autograd.grad(value, leaves, retain_graph=True)
    second = torch.autograd.grad(value, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(value, leaves)


def test_second_derivatives_are_rejected() -> None:
    leaves = draw_weights(3, 4, 1)
    first = torch.autograd.grad(ops.gru(make_noise(2, 3, 3), leaves).square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match=r"GRU of raydfl.ops cannot be differentiated twice; use GRU of torch\.nn"):
        first[0].sum().backward()


def test_gradients_are_computed_only_where_required() -> None:
    x, leaves = make_noise(2, 3, 3).requires_grad_(), draw_weights(3, 4, 1)
    (input_gradient,) = torch.autograd.grad(ops.gru(x, [w.detach() for w in leaves]).sum(), x)
    gradients = torch.autograd.grad(ops.gru(x, leaves).sum(), [x, leaves[0]])
    assert torch.equal(input_gradient, gradients[0])
    assert ops.gru(x.detach(), [w.detach() for w in leaves]).grad_fn is None


@pytest.mark.parametrize(
    "options", [{}, {"bidirectional": True}, {"bias": False}, {"num_layers": 2}, {"batch_first": False}]
)
def test_the_module_matches_torch(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    reference = nn.GRU(4, 6, **{"batch_first": True, **options})  # type: ignore[arg-type]
    module = ops.GRU(4, 6, **{"batch_first": True, **options})  # type: ignore[arg-type]
    module.load_state_dict(reference.state_dict())
    assert list(module.state_dict()) == list(reference.state_dict())
    x, start = make_noise(3, 5, 4), make_noise(*reference(make_noise(3, 5, 4))[1].shape, seed=3)
    for copied_module in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        for arguments in ((x,), (x, start), (x[0],)):
            if len(arguments) == 1 or arguments[0].dim() == 3:
                for a, b in zip(copied_module(*arguments), reference(*arguments), strict=True):
                    torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


def test_functional_call_replaces_the_parameters() -> None:
    module, x = ops.GRU(4, 6, batch_first=True), make_noise(2, 9, 4)
    zero = {name: torch.zeros_like(value) for name, value in module.named_parameters()}
    assert not torch.func.functional_call(module, zero, (x,))[0].any()
    assert module(x)[0].any()


def test_inputs_may_be_strided() -> None:
    x, all_weights = make_noise(9, 2, 8).transpose(0, 1)[:, :, ::2], draw_weights(4, 5, 1)
    torch.testing.assert_close(ops.gru(x, all_weights), ops.gru(x.contiguous(), all_weights))


def test_outputs_rejects_unsupported_modules() -> None:
    with pytest.raises(ValueError, match=r"a single layer, batch_first=True .* not GRU\(4, 6, num_layers=2"):
        ops.GRU(4, 6, num_layers=2, batch_first=True).outputs(make_noise(2, 3, 4))


def test_nan_with_any_payload_is_propagated() -> None:
    """An exponential in float32 arithmetic may misread the lowest bits of NaN as an exponent."""
    for bits in (0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000 - 2**32, 0x7F800180):
        x = torch.zeros(1, 2, 8)
        x.view(torch.int32)[0, 0, 3] = bits
        assert torch.isnan(ops.GRU(8, 8, batch_first=True).outputs(x)).any(), hex(bits)
