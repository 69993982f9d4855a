"""The CTC loss, compared with a sum over all paths, and batched over clients."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from raydfl.core.ops import ctc_loss


def sum_over_paths(log_probabilities: np.ndarray, target: list[int]) -> float:
    """Sum the probabilities of all token sequences of the target, float64 [tokens, outputs]."""
    tokens, outputs = log_probabilities.shape
    total = 0.0
    for path in itertools.product(range(outputs), repeat=tokens):
        merged = [output for output, _ in itertools.groupby(path)]
        if [output for output in merged if output] == target:
            total += np.exp(sum(log_probabilities[token, output] for token, output in enumerate(path)))
    return -float(np.log(total)) if total else np.inf


def draw(rng: np.random.Generator, batch: int, tokens: int, outputs: int, longest: int) -> tuple[Tensor, Tensor]:
    """Draw logits float64 [batch, tokens, outputs], and targets for this number of tokens."""
    targets = np.full((batch, longest), -1)
    for row in targets:
        while True:
            drawn = rng.integers(1, outputs, size=rng.integers(0, min(tokens, longest) + 1))
            if len(drawn) + np.count_nonzero(drawn[1:] == drawn[:-1]) <= tokens:
                break
        row[: len(drawn)] = drawn
    return torch.from_numpy(3 * rng.standard_normal((batch, tokens, outputs))), torch.from_numpy(targets)


def test_the_loss_equals_a_sum_over_all_paths() -> None:
    rng = np.random.default_rng(0)
    for case in range(200):
        tokens, outputs = (int(rng.integers(1, 5)), 4) if case % 2 else (int(rng.integers(1, 7)), 3)
        logits, targets = draw(rng, 1, tokens, outputs, 4)
        log_probabilities = logits.log_softmax(dim=2)
        expected = sum_over_paths(log_probabilities[0].numpy(), [unit for unit in targets[0].tolist() if unit > 0])
        assert ctc_loss(log_probabilities, targets).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_gradients_equal_finite_differences() -> None:
    rng = np.random.default_rng(1)
    for _ in range(10):
        logits, targets = draw(rng, 2, 5, 4, 3)
        assert torch.autograd.gradcheck(
            lambda values, y=targets: ctc_loss(values.log_softmax(dim=2), y), logits.requires_grad_()
        )


def test_targets_too_long_for_their_tokens_have_no_loss_and_no_gradient() -> None:
    """They occur in padding examples of weight 0. Infinity times 0 would be NaN."""
    logits = torch.randn(1, 2, 3, requires_grad=True)
    loss = ctc_loss(logits.log_softmax(dim=2), torch.tensor([[1, 1]]))
    loss.sum().backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_clients_are_batched_in_one_call_with_the_same_results() -> None:
    drawn = [draw(np.random.default_rng(seed), 3, 6, 4, 3) for seed in range(4)]
    logits, targets = (torch.stack(parts) for parts in zip(*drawn, strict=True))

    def compute(values: Tensor, y: Tensor) -> Tensor:
        return ctc_loss(values.log_softmax(dim=2), y).mean()

    values = logits.clone().requires_grad_()
    batched = torch.func.vmap(compute)(values, targets)
    batched.sum().backward()
    mapped = torch.func.vmap(torch.func.grad(compute))(logits, targets)
    for client in range(4):
        alone = logits[client].clone().requires_grad_()
        loss = compute(alone, targets[client])
        loss.backward()
        assert torch.equal(loss, batched[client])
        torch.testing.assert_close(values.grad[client], alone.grad, rtol=1e-12, atol=1e-12)  # type: ignore[index]
        torch.testing.assert_close(mapped[client], alone.grad, rtol=1e-12, atol=1e-12)


def test_second_derivatives_are_an_error() -> None:
    logits = torch.randn(1, 3, 3, requires_grad=True)
    loss = ctc_loss(logits.log_softmax(dim=2), torch.tensor([[1]])).sum()
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="ctc_loss of raydfl.ops cannot be differentiated twice"):
        gradient.sum().backward()
