"""Updates and calls that the tests of the robust rules share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from raydfl.core.types import Update
from raydfl.rules import Aggregate, Rule


def updates_of(matrix: np.ndarray, weights: Sequence[Any] | None = None, name: str = "net/w") -> list[Update]:
    """One update for each row of a matrix [clients, elements]."""
    weights = [1.0] * len(matrix) if weights is None else weights
    return [
        Update({name: torch.as_tensor(np.asarray(row, np.float32))}, weight, client_id=f"c{index:03d}")
        for index, (row, weight) in enumerate(zip(matrix, weights, strict=True))
    ]


def call(rule: Rule, matrix: np.ndarray, weights: Sequence[Any] | None = None, server: Any = None) -> Aggregate:
    """The rule on the rows of a matrix; ``server``: the server's tensor, by default it has none."""
    current = {} if server is None else {"global": {"net/w": torch.as_tensor(np.asarray(server, np.float32))}}
    return rule(updates_of(matrix, weights), current, np.random.default_rng(5))


def vector(result: Aggregate) -> np.ndarray:
    """What :func:`call` made of the tensor."""
    return result.tensors["global"]["net/w"].numpy()


def honest(clients: int, elements: int, seed: int = 0) -> np.ndarray:
    """Clients around a common point: float32 [clients, elements]."""
    generator = np.random.default_rng(seed)
    return (generator.normal(size=elements) + 0.1 * generator.normal(size=(clients, elements))).astype(np.float32)


def kept(result: Aggregate) -> list[int]:
    """The positions of the clients with any influence."""
    assert result.influence is not None
    return np.flatnonzero(result.influence).tolist()
