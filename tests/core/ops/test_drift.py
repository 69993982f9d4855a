"""The loss term of methods against client drift. Oracles: its formula, and gradients by autograd."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from raydfl.ops import drift_term

pytestmark = pytest.mark.usefixtures("implementation")

SHAPES: list[tuple[int, ...]] = [(3, 5, 7), (), (0, 4), (17,), (4099, 3), (16,)]


def draw_tensors(*clients: int) -> list[Tensor]:
    return [torch.randn((*clients, *shape)) for shape in SHAPES]


def compute_term(weights: Sequence[Tensor], pull: float, anchors: Sequence[Tensor], slopes: Sequence[Tensor]) -> Tensor:
    weights = [weight.double() for weight in weights]
    differences = [weight - anchor for weight, anchor in zip(weights, anchors, strict=True)] if anchors else weights
    term = pull / 2 * sum(difference.square().sum() for difference in differences)
    return (
        term + sum((difference * slope).sum() for difference, slope in zip(differences, slopes, strict=True))
        if slopes
        else term
    )


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("sloped", [False, True])
@pytest.mark.parametrize("pull", [0.0, 0.3])
def test_the_term_and_its_gradients_match_the_formula(anchored: bool, sloped: bool, pull: float) -> None:
    weights = [weight.requires_grad_() for weight in draw_tensors()]
    anchors, slopes = draw_tensors() if anchored else [], draw_tensors() if sloped else []
    term, expected = drift_term(weights, pull, anchors, slopes), compute_term(weights, pull, anchors, slopes)
    torch.testing.assert_close(term, expected.float(), rtol=1e-5, atol=1e-4)
    for a, b in zip(
        torch.autograd.grad(2.5 * term, weights), torch.autograd.grad(2.5 * expected, weights), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_only_trained_weights_have_a_gradient() -> None:
    weights = draw_tensors()
    weights[0].requires_grad_()
    drift_term(weights, 1.0, draw_tensors()).backward()
    assert [weight.grad is not None for weight in weights] == [True] + [False] * (len(weights) - 1)
    assert not drift_term(draw_tensors(), 1.0).requires_grad


def test_gradients_pass_gradcheck() -> None:
    weights = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in [(2, 3), (4,)]]
    anchors, slopes = ([torch.randn_like(weight) for weight in weights] for _ in range(2))
    assert torch.autograd.gradcheck(lambda *weights: drift_term(weights, 0.7, anchors, slopes), weights)


@pytest.mark.parametrize("per_client", [False, True], ids=["one pull", "a pull for each client"])
def test_vmap_matches_a_loop(per_client: bool) -> None:
    weights, anchors, slopes = [weight.requires_grad_() for weight in draw_tensors(3)], draw_tensors(3), draw_tensors()
    pulls = torch.rand(3) if per_client else torch.tensor(0.4)
    mapped = torch.func.vmap(drift_term, (0, 0 if per_client else None, 0, None))(weights, pulls, anchors, slopes)
    terms = [
        drift_term(
            [w[client] for w in weights], pulls[client] if per_client else pulls, [a[client] for a in anchors], slopes
        )
        for client in range(3)
    ]
    torch.testing.assert_close(mapped, torch.stack(terms))
    scales = torch.randn(3)
    for a, b in zip(
        torch.autograd.grad((mapped * scales).sum(), weights),
        torch.autograd.grad((torch.stack(terms) * scales).sum(), weights),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_tensors_may_be_strided() -> None:
    weight = torch.randn(6, 5).t().requires_grad_()
    anchor = torch.randn(5, 12)[:, ::2]
    term = drift_term([weight], 0.5, [anchor])
    torch.testing.assert_close(term, (weight - anchor).square().sum() / 4)
    (gradient,) = torch.autograd.grad(term, weight)
    torch.testing.assert_close(gradient, ((weight - anchor) / 2).detach())


def test_integer_strengths_and_mixed_types_are_accepted() -> None:
    weights = [torch.full((2,), 3.0), torch.full((2,), 2.0, dtype=torch.float64)]
    assert float(drift_term(weights, 2)) == 2 * 9 + 2 * 4
    assert float(drift_term(weights[:1], 2, slopes=[torch.ones(2)])) == 2 * 9 + 2 * 3


def test_small_differences_of_large_weights_are_not_lost() -> None:
    """The sum of a million squares is exact to a few units in the last place."""
    weight = torch.full((1000, 1000), 3.0)
    term = drift_term([weight], 2.0, [weight - 2**-10])
    torch.testing.assert_close(term, torch.tensor(1e6 * 2.0**-20), rtol=1e-6, atol=0)


def test_mismatched_arguments_are_rejected(implementation: str) -> None:
    weights = [torch.zeros(3), torch.zeros(2)]
    with pytest.raises(ValueError, match="2 weights have 1 anchors and 0 slopes"):
        drift_term(weights, 1.0, weights[:1])
    if implementation == "compiled":
        with pytest.raises(RuntimeError, match=r"an anchor has shape \[1\], not \[3\]"):
            drift_term(weights, 1.0, [torch.zeros(1), torch.zeros(2)])
        with pytest.raises(RuntimeError, match="gradients for weights alone"):
            drift_term(weights, 1.0, [torch.zeros(3, requires_grad=True), torch.zeros(2)])
        weight = torch.zeros(3, requires_grad=True)
        (gradient,) = torch.autograd.grad(drift_term([weight], 1.0), weight, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            gradient.sum().backward()
