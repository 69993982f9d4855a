"""FoolsGold: clients whose changes have been alike over the rounds count less.

C. Fung, C. J. M. Yoon, I. Beschastnikh, The Limitations of Federated Learning in Sybil Settings, RAID 2020, algorithm 1:

    h_k       the sum of client k's changes so far, of the indicative features
    cs_kj     cosine of h_k and h_j;          v_k = max over j of cs_kj
    pardoning cs_kj <- cs_kj v_k / v_j  where v_j > v_k
    a_k       1 - max over j of cs_kj;        a <- a / max(a);     a_k <- confidence (ln(a_k / (1 - a_k)) + 0.5), within 0..1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.errors import RaydflError
from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Tensors, Update
from raydfl.rules._changes import Base
from raydfl.rules._collecting import one_thread
from raydfl.rules._cuts import filled
from raydfl.rules._rule import Aggregate, Rule
from raydfl.rules._weights import absent, check_shapes
from raydfl.rules.weighted_mean import WeightedMean

MEMORY = "foolsgold/"
"""The key of the server's state that holds what is remembered of the clients of ``key`` is ``foolsgold/key``: by client id."""


def trust(histories: np.ndarray, confidence: float) -> np.ndarray:
    """Return how much each client counts: float64 [clients], 0..1.

    Args:
        histories: float64 [clients, features]: the sums of their changes.
        confidence: kappa.
    """
    lengths = np.linalg.norm(histories, axis=1, keepdims=True)
    directions = histories / np.where(lengths > 0, lengths, 1)
    alike = np.maximum(directions @ directions.T, 0)
    np.fill_diagonal(alike, 0)
    most = alike.max(axis=1)
    pardon = np.minimum(most[:, None] / np.where(most > 0, most, 1), 1)
    alone = 1 - (alike * pardon).max(axis=1)
    alone[alone < _ROUNDING] = 0
    if alone.any():
        alone /= alone.max()
    with np.errstate(divide="ignore"):
        odds = np.log(alone) - np.log1p(-alone)
    return np.asarray(np.clip(confidence * (odds + 0.5), 0, 1))


_ROUNDING = 1e-6
"""Cosines that close to 1 are 1: float32 histories of clients that always sent the same."""


@dataclass(frozen=True)
class FoolsGold(Rule):
    """The mean in which clients count the less, the more their changes over all rounds resemble another client's.

    A client's factor multiplies its weight, and the mean is by these products: where the changes have nothing in common it is
    the weighted mean (the paper adds the factored changes up, unweighted). Opposite changes count as unlike (cosines below 0
    are 0). Where all are alike to rounding nobody counts, and the server keeps its model. One client alone counts in full.
    Elements without weight (masks) have not changed; clients without any are neither compared nor remembered.

    What is remembered of each client are the changes of the indicative features only, by default those of the last module sent, the
    output layer: the server's state, and every commit of it, grows by that layer for each client that ever took part (5 KB
    for 128 units and 10 classes; 500 MB for 100,000 clients). The influence is each client's factor.
    """

    relative: ClassVar[bool] = True

    confidence: Annotated[
        float, Field(gt=0, description="kappa: the larger, the sharper is alike told from unlike")
    ] = 1.0
    features: Annotated[
        str | None,
        Field(
            description="beginning of the names of the tensors that are compared (model/output); null: the last module"
        ),
    ] = None

    def __call__(
        self, updates: Iterable[Update], current: Mapping[str, Tensors], rng: np.random.Generator | None = None
    ) -> Aggregate:
        """See :class:`Rule`.

        Raises:
            RaydflError: also where two updates come from one client, or one lacks the tensors that are compared.
        """
        sent = [filled(update, current.get(update.key, {})) for update in updates]
        by_key: dict[str, list[int]] = {}
        for position, update in enumerate(sent):
            if _any(update.weight):
                by_key.setdefault(update.key, []).append(position)
        base, factors = Base(current), np.ones(len(sent))
        memory: dict[str, dict[str, Tensor]] = {}
        for key, positions in by_key.items():
            those = [sent[position] for position in positions]
            known = current.get(MEMORY + key, {})
            renewed = self._remembered(those, known, base)
            memory[MEMORY + key] = {**known, **renewed}
            with one_thread():
                factors[positions] = trust(
                    np.stack([renewed[update.client_id].double().numpy() for update in those]), self.confidence
                )
        weighed = (
            dataclasses.replace(update, weight=_times(update.weight, float(factor)))
            for update, factor in zip(sent, factors, strict=True)
        )
        tensors = WeightedMean()(weighed, current).tensors
        return Aggregate({**tensors, **memory}, {}, factors)

    def _remembered(self, updates: Sequence[Update], known: Tensors, base: Base) -> dict[str, Tensor]:
        """Return the histories with this round in them: float32 [features] by client id."""
        renewed: dict[str, Tensor] = {}
        names: list[str] = []
        shapes: dict[str, tuple[int, ...]] = {}
        for update in updates:
            check_shapes(update, Layout.of(update.tensors), shapes)
            names = names or self._indicative(update)
            missing = [name for name in names if name not in update.tensors]
            if missing or not names:
                raise RaydflError(
                    f"foolsgold compares the clients by {', '.join(names) or self.features}, which client "
                    f"{update.client_id!r} did not send whole; set method.rule.features to the beginning of names "
                    f"that all clients send, one of {', '.join(list(update.tensors)[-4:])}"
                )
            if update.client_id in renewed:
                raise RaydflError(
                    f"foolsgold remembers clients by their id, but two updates come from {update.client_id!r}; give each "
                    f"client an id of its own"
                )
            layout = Layout(tuple(names), tuple(tuple(update.tensors[name].shape) for name in names))
            change = FlatTensors.of({name: update.tensors[name] for name in names}).vector - base.under(update, layout)
            mask = absent(update, layout)
            if mask is not None:
                change[mask] = 0
            renewed[update.client_id] = torch.from_numpy(change)
            if update.client_id in known:
                renewed[update.client_id] += known[update.client_id]
        return renewed

    def _indicative(self, update: Update) -> list[str]:
        """Return the names of the tensors that are compared, in the order in which they were sent."""
        start = self.features
        if start is None:
            last = list(update.tensors)[-1]
            start = last.rpartition(".")[0] + "." if "." in last else last
        return [name for name in update.tensors if name.startswith(start)]


def _any(weight: float | Mapping[str, float | Tensor]) -> bool:
    """Return whether anything of an update counts."""
    values = weight.values() if isinstance(weight, Mapping) else [weight]
    return any(bool(np.any(np.asarray(value))) for value in values)


def _times(weight: float | Mapping[str, float | Tensor], factor: float) -> Any:
    """Multiply a weight of any form."""
    if isinstance(weight, Mapping):
        return {name: value * factor for name, value in weight.items()}
    return weight * factor
