"""Helpers of the tests of robust rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from raydfl.core.types import Update
from raydfl.rules import Aggregate, Rule


def make_row_updates(matrix: np.ndarray, weights: Sequence[Any] | None = None, name: str = "net/w") -> list[Update]:
    """Make an update from each row of a matrix [clients, elements]."""
    weights = [1.0] * len(matrix) if weights is None else weights
    return [
        Update({name: torch.as_tensor(np.asarray(row, np.float32))}, weight, client_id=f"c{index:03d}")
        for index, (row, weight) in enumerate(zip(matrix, weights, strict=True))
    ]


def call(rule: Rule, matrix: np.ndarray, weights: Sequence[Any] | None = None, server: Any = None) -> Aggregate:
    """Call the rule with the rows of a matrix. ``server`` is the server's tensor, if it has one."""
    current = {} if server is None else {"global": {"net/w": torch.as_tensor(np.asarray(server, np.float32))}}
    return rule(make_row_updates(matrix, weights), current, np.random.default_rng(5))


def get_vector(result: Aggregate) -> np.ndarray:
    """Return the aggregated tensor of :func:`call`."""
    return result.tensors["global"]["net/w"].numpy()


def draw_honest_clients(clients: int, elements: int, seed: int = 0) -> np.ndarray:
    """Draw clients around a common point: float32 [clients, elements]."""
    generator = np.random.default_rng(seed)
    return (generator.normal(size=elements) + 0.1 * generator.normal(size=(clients, elements))).astype(np.float32)


def find_influential_clients(result: Aggregate) -> list[int]:
    """Return the positions of the clients with a positive influence."""
    assert result.influence is not None
    return np.flatnonzero(result.influence).tolist()
