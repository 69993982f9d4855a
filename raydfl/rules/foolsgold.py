"""FoolsGold: lower weights for clients with similar histories of changes.

C. Fung, C. J. M. Yoon, I. Beschastnikh, The Limitations of Federated Learning in Sybil Settings, RAID 2020, algorithm 1:

    h_k       sum of client k's changes so far, restricted to the indicative features
    cs_kj     cosine of h_k and h_j;          v_k = max over j of cs_kj
    pardoning cs_kj <- cs_kj v_k / v_j  where v_j > v_k
    a_k       1 - max over j of cs_kj;        a <- a / max(a);     a_k <- confidence (ln(a_k / (1 - a_k)) + 0.5), within 0..1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.errors import RaydflError
from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Tensors, Update
from raydfl.rules._changes import ServerTensors
from raydfl.rules._collecting import one_thread
from raydfl.rules._cuts import fill_cuts
from raydfl.rules._rule import Aggregate, Rule
from raydfl.rules._weights import check_shapes, find_unweighted, scale_weight
from raydfl.rules.weighted_mean import WeightedMean

MEMORY = "foolsgold/"
"""Prefix of the state keys with the clients' histories: ``foolsgold/KEY`` stores them by client id for the key ``KEY``."""

_ROUNDING = 1e-6
"""Tolerance for identical histories: float32 histories of identical clients have cosines slightly below 1."""


def compute_trust(histories: np.ndarray, confidence: float) -> np.ndarray:
    """Compute the factor of each client's weight from the similarity of histories.

    Args:
        histories: float64 [clients, features], the clients' sums of changes.
        confidence: kappa, above 0.

    Returns:
        float64 [clients], from 0 to 1.
    """
    lengths = np.linalg.norm(histories, axis=1, keepdims=True)
    directions = histories / np.where(lengths > 0, lengths, 1)
    similarity = np.maximum(directions @ directions.T, 0)
    np.fill_diagonal(similarity, 0)
    largest = similarity.max(axis=1)
    pardon = np.minimum(largest[:, None] / np.where(largest > 0, largest, 1), 1)
    trust = 1 - (similarity * pardon).max(axis=1)
    trust[trust < _ROUNDING] = 0
    if trust.any():
        trust /= trust.max()
    with np.errstate(divide="ignore"):
        odds = np.log(trust) - np.log1p(-trust)
    return np.asarray(np.clip(confidence * (odds + 0.5), 0, 1))


@dataclass(frozen=True)
class FoolsGold(Rule):
    """Weighted mean with reduced weights for clients with similar changes over all rounds.

    A client's factor multiplies its weight. With dissimilar clients the result is the weighted mean (deviation: the paper adds
    the changes without weights). Cosines below 0 count as 0. If all histories are equal up to rounding, all factors are 0,
    and the server keeps its model. A single client has factor 1. Elements of weight 0 count as unchanged. Clients of weight 0
    are neither compared nor stored.

    The server stores each client's changes of the indicative features, by default the last module of the update (the output
    layer). Its state and every checkpoint therefore grow by this layer for each client that takes part: 5 KB for 128 units
    and 10 classes, or 500 MB for 100,000 clients. The influence of a client is its factor.
    """

    relative: ClassVar[bool] = True

    confidence: Annotated[
        float,
        Field(gt=0, description="kappa: larger values separate similar from dissimilar clients more sharply."),
    ] = 1.0
    features: Annotated[
        str | None,
        Field(
            description="Prefix of the names of the indicative features, for example model/output. null: the last module."
        ),
    ] = None

    @property
    def collects(self) -> bool:
        """Return True."""
        return True

    def __call__(
        self, updates: Iterable[Update], current: Mapping[str, Tensors], rng: np.random.Generator | None = None
    ) -> Aggregate:
        """Update the histories and average the updates with the factors applied.

        Raises:
            RaydflError: as for :class:`Rule`, or two updates come from one client, or an update lacks an indicative feature.
        """
        sent = [fill_cuts(update, current.get(update.key, {})) for update in updates]
        by_key: dict[str, list[int]] = {}
        for position, update in enumerate(sent):
            if _has_weight(update.weight):
                by_key.setdefault(update.key, []).append(position)
        base, factors = ServerTensors(current), np.ones(len(sent))
        memory: dict[str, dict[str, Tensor]] = {}
        for key, positions in by_key.items():
            members = [sent[position] for position in positions]
            stored = current.get(MEMORY + key, {})
            histories = self._update_histories(members, stored, base)
            memory[MEMORY + key] = {**stored, **histories}
            with one_thread():
                factors[positions] = compute_trust(
                    np.stack([histories[update.client_id].double().numpy() for update in members]), self.confidence
                )
        reweighted = (
            dataclasses.replace(update, weight=scale_weight(update.weight, float(factor)))
            for update, factor in zip(sent, factors, strict=True)
        )
        tensors = WeightedMean()(reweighted, current).tensors
        return Aggregate({**tensors, **memory}, {}, factors)

    def _update_histories(self, updates: Sequence[Update], stored: Tensors, base: ServerTensors) -> dict[str, Tensor]:
        """Add the changes of this round to the clients' histories: float32 [features] by client id."""
        histories: dict[str, Tensor] = {}
        names: list[str] = []
        shapes: dict[str, tuple[int, ...]] = {}
        for update in updates:
            check_shapes(update, Layout.from_tensors(update.tensors), shapes)
            names = names or self._choose_indicative(update)
            missing = [name for name in names if name not in update.tensors]
            if missing or not names:
                raise RaydflError(
                    f"foolsgold compares clients by {', '.join(names) or self.features}, but client {update.client_id!r} did not "
                    f"send all of it. Set method.rule.features to a prefix of tensors that all clients send, for example one of "
                    f"{', '.join(list(update.tensors)[-4:])}."
                )
            if update.client_id in histories:
                raise RaydflError(
                    f"foolsgold stores histories by client id, but two updates come from client {update.client_id!r}. Give each "
                    f"client a unique id."
                )
            layout = Layout(tuple(names), tuple(tuple(update.tensors[name].shape) for name in names))
            change = FlatTensors.from_tensors(
                {name: update.tensors[name] for name in names}
            ).vector - base.flatten_like(update, layout)
            mask = find_unweighted(update, layout)
            if mask is not None:
                change[mask] = 0
            histories[update.client_id] = torch.from_numpy(change)
            if update.client_id in stored:
                histories[update.client_id] += stored[update.client_id]
        return histories

    def _choose_indicative(self, update: Update) -> list[str]:
        """Choose the names of the indicative features, in the order of the update."""
        prefix = self.features
        if prefix is None:
            last = list(update.tensors)[-1]
            prefix = last.rpartition(".")[0] + "." if "." in last else last
        return [name for name in update.tensors if name.startswith(prefix)]


def _has_weight(weight: float | Mapping[str, float | Tensor]) -> bool:
    """Return whether any weight of an update is above 0."""
    values = weight.values() if isinstance(weight, Mapping) else [weight]
    return any(bool(np.any(np.asarray(value))) for value in values)
