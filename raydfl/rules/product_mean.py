"""Mean of products: the rule of FlexLoRA for low-rank adapters (docs/pretrained.md#adapters).

J. Bai, D. Chen, B. Qian, L. Yao, Y. Li, Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
Resources, NeurIPS 2024. For each adapter, with the clients' ranks r_k and the weights p_k, of sum 1:

    M = sum of p_k B_k A_k,    M = U S V^T,    B = U_r S_r,    A = V_r^T,    r: the server's rank

The mean of B_k times the mean of A_k, the result of ``weighted_mean``, differs from M. All other tensors have the weighted mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import numpy as np
import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.errors import ConfigError, RaydflError
from raydfl.core.types import Ratio, Tensors, Update
from raydfl.rules._collecting import one_thread
from raydfl.rules._rule import Aggregate, merge_tensors
from raydfl.rules._weights import read_float64_weight
from raydfl.rules.weighted_mean import WeightedMean

_A, _B = ".lora_A.", ".lora_B."

Factors = list[tuple[float, np.ndarray, np.ndarray]]
"""Weight, A [rank, inputs] and B [outputs, rank] of each client, float64."""


@dataclass(frozen=True)
class ProductMean(WeightedMean):
    """Weighted mean of the products B A of low-rank adapters, and of the remaining tensors.

    Clients may have unequal ranks. The mean is truncated to the server's rank by a singular value decomposition of the
    stacked factors, in float64, without a matrix of the layer's size. A run without both factors at the server is rejected.
    The rows of A are orthonormal, and the components are in decreasing order: the method ``heterofl`` sends the largest
    components to clients of a smaller rank. If the sum of the ranks is below the server's rank, the remaining rows of A keep
    their values, and their columns of B are 0.

    The report has the fraction of the norm lost by the truncation (``product_mean/lost``), over all adapters. The rule changes the
    basis of the factors in each round, so methods with control variates or a server optimiser are rejected. Personal models that
    stay near the server's (``ditto``, ``fedala``) do not fit either.
    """

    changes_basis: ClassVar[bool] = True
    associative: ClassVar[bool] = False

    @property
    def collects(self) -> bool:
        """Return True, because the adapters of all clients are held in memory."""
        return True

    def check(self, tensors: Mapping[str, Tensors]) -> None:
        """Reject a state without a pair of factors."""
        if not any(name.replace(_A, _B) in entry for entry in tensors.values() for name in _list_a(entry)):
            raise ConfigError(
                "method.rule: product_mean needs adapters with both factors at the server, but the clients share no pair of lora_A "
                "and lora_B. Set models.model.lora with fixed_a: false, or choose weighted_mean (exact with fixed_a)."
            )

    def __call__(
        self, updates: Iterable[Update], current: Mapping[str, Tensors], rng: np.random.Generator | None = None
    ) -> Aggregate:
        """Average the products of the adapters, and the remaining tensors."""
        pairs: dict[tuple[str, str], Factors] = {}
        rest = super().__call__(_take_factors(updates, pairs, current), current).tensors
        changed: dict[str, dict[str, Tensor]] = {}
        lost = whole = 0.0
        with one_thread():
            for (key, name), factors in pairs.items():
                server = current.get(key, {}).get(name)
                b, a, singular = _multiply(factors)
                rank = max(len(part) for _, part, _ in factors) if server is None else len(server)
                kept = min(rank, len(singular))
                new_a = np.zeros((rank, a.shape[1])) if server is None else server.double().cpu().numpy().copy()
                new_b = np.zeros((len(b), rank))
                new_a[:kept], new_b[:, :kept] = a[:kept], b[:, :kept] * singular[:kept]
                lost, whole = lost + float((singular[kept:] ** 2).sum()), whole + float((singular**2).sum())
                named = {name: new_a, name.replace(_A, _B): new_b}
                changed.setdefault(key, {}).update(
                    {n: torch.from_numpy(v.astype(np.float32)) for n, v in named.items()}
                )
        report = {"product_mean/lost": Ratio(math.sqrt(lost / whole) if whole else 0.0, 1)} if pairs else {}
        return Aggregate(merge_tensors(changed, rest), report)


def _list_a(tensors: Tensors) -> Iterator[str]:
    """Yield the names of factors A."""
    return (name for name in tensors if _A in name)


def _take_factors(
    updates: Iterable[Update], pairs: dict[tuple[str, str], Factors], current: Mapping[str, Tensors]
) -> Iterator[Update]:
    """Yield updates without pairs of factors, and collect the factors of clients with a positive weight."""
    sides = {
        (key, name): (tensors[name].shape[1], len(tensors[name.replace(_A, _B)]))
        for key, tensors in current.items()
        for name in _list_a(tensors)
        if name.replace(_A, _B) in tensors
    }
    for update in updates:
        names = [name for name in _list_a(update.tensors) if name.replace(_A, _B) in update.tensors]
        for name in names:
            partner = name.replace(_A, _B)
            a, b = (update.tensors[n].detach().cpu().double().numpy() for n in (name, partner))
            weights = {w for n, value in ((name, a), (partner, b)) for w in _read_weights(update, n, value.shape)}
            fits = a.ndim == b.ndim == 2 and len(a) == b.shape[1]
            fits = fits and sides.setdefault((update.key, name), (a.shape[1], len(b))) == (a.shape[1], len(b))
            if not fits or len(weights) != 1:
                raise RaydflError(
                    f"client {update.client_id!r}: the factors {name!r} and {partner!r} have the shapes {a.shape} and {b.shape}, "
                    f"and {len(weights)} different weights. product_mean needs equal ranks, the inputs and outputs of the server's "
                    f"layer, and a single weight."
                )
            if weights != {0.0}:
                pairs.setdefault((update.key, name), []).append((weights.pop(), a, b))
        taken = {*names, *(name.replace(_A, _B) for name in names)}
        tensors = {name: value for name, value in update.tensors.items() if name not in taken}
        cuts = {name: cut for name, cut in update.cuts.items() if name not in taken}
        yield dataclasses.replace(update, tensors=tensors, cuts=cuts)


def _read_weights(update: Update, name: str, shape: tuple[int, ...]) -> set[float]:
    """Return the distinct weights of a tensor's elements."""
    return set(np.unique(read_float64_weight(update, update.weight, name, shape)).tolist())


def _multiply(factors: Factors) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the singular value decomposition of the weighted mean of products, without the product itself.

    Returns:
        U [outputs, n], V^T [n, inputs] and the singular values [n] in decreasing order. n is at most the sum of the ranks.
    """
    total = sum(weight for weight, _, _ in factors)
    q_b, r_b = np.linalg.qr(np.concatenate([b for _, _, b in factors], axis=1))
    q_a, r_a = np.linalg.qr(np.concatenate([weight / total * a for weight, a, _ in factors]).T)
    u, singular, v = np.linalg.svd(r_b @ r_a.T)
    n = len(singular)
    return q_b @ u[:, :n], v[:n] @ q_a.T, singular
