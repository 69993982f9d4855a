"""Batch means exclude padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from raydfl.testing import make_batch


@pytest.mark.parametrize("weight", [None, [1.0, 0.0, 1.0, 1.0, 0.0], [1.0] * 5, [0.0] * 5])
def test_cross_entropy_is_the_mean_over_unpadded_examples(weight: list[float] | None) -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(5, 3)), np.array([0, 2, 1, 1, 0])
    counts = np.ones(5) if weight is None else np.array(weight)
    losses = -log_softmax(logits, axis=1)[np.arange(5), labels]
    gradient = (np.exp(log_softmax(logits, axis=1)) - np.eye(3)[labels]) * counts[:, None] / max(1.0, counts.sum())

    predictions = torch.tensor(logits, requires_grad=True)
    batch = make_batch(
        torch.zeros(5, 1, 1), torch.from_numpy(labels), weight=None if weight is None else torch.tensor(weight)
    )
    value = batch.cross_entropy(predictions)
    value.backward()  # type: ignore[no-untyped-call]

    np.testing.assert_allclose(value.item(), losses @ counts / max(1.0, counts.sum()), rtol=1e-12)
    assert predictions.grad is not None
    np.testing.assert_allclose(predictions.grad.numpy(), gradient, rtol=1e-12, atol=1e-15)
