"""Harmony: each view is a federation of its own; then the clients that have all views fuse them, in groups of like bias.

X. Ouyang, Z. Xie, H. Fu, S. Cheng, L. Pan, N. Ling, G. Xing, J. Zhou, J. Huang, Harmony: Heterogeneous Multi-Modal Federated
Learning through Disentangled Model Training, MobiSys 2023.

Phase ``unimodal``: for each view FedAvg of its network, encoder and head, over all clients that have the view; a client with
several views trains their networks one after another, the student's first. Phase ``fusion``, of the clients that have all views:
each fine-tunes its own copies of the encoders, from the first phase's, with the fusion classifier on them, and sends

    the classifier's update  d_i,   and of each view m the bias  b_im = 1 - cos(w_im, w_m)

where w_m is the first phase's encoder and w_im the client's. The server divides the biases of each view by their maximum,
clusters the clients by k-means into ``groups``, and adds to a group's classifier the mean of its members' updates. Encoders stay
with the clients.

Readings and deviations:

- Clients take part when they are drawn, not all in every round: a client belongs to the group that it was last in, and a group
  keeps the name of the former group with the most members in common. A group's new classifier is the mean of what its members
  trained. A client that was in no group yet receives the mean of the last round's classifiers.
- Who has fewer drawn clients than ``groups`` has as many groups as clients.
- The release trains the classifier at 1e-3 and encoders at 1e-4: ``train.phases.fusion.optimiser.models`` says so.
- The mean is uniform; ``rule: weighted_mean`` weighs by examples.
- Where nobody has all views the second phase has no clients, and changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar, cast

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.clustering import match
from raydfl.core.types import Client, Metrics, Ratio, State, Task, Update
from raydfl.data import Examples
from raydfl.methods._copies import retain
from raydfl.methods._method import UpdateCounter, sample_clients
from raydfl.methods._views import ALL, FUSION, GLOBAL, WithViews, list_encoders, select_clients
from raydfl.training import Step, fit

UNIMODAL, FUSING = "unimodal", "fusion"
BIAS = "bias/"
"""The beginning of the names of what says how far a client's encoder of a view has moved."""

_ENCODER = "encoder/"
_GROUPS, _FOLLOWING = "groups", "following"


@dataclass(frozen=True, kw_only=True)
class Harmony(WithViews):
    """A federation for each view, then fusion in groups of clients with like modality bias."""

    phases: ClassVar[tuple[str, ...]] = (UNIMODAL, FUSING)

    additions: ClassVar[tuple[str, ...]] = (BIAS,)

    groups: Annotated[
        int, Field(ge=1, description="groups of clients, by k-means on their modality bias; 1: all are one group")
    ] = 2

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Draw from all clients; in the second phase from those that have all views, with their group's classifier."""
        if state.phase != FUSING:
            return super().plan(state, clients, rng, cohort)
        members = select_clients(state, clients, ALL)
        return [
            Task(client.id, phase=FUSING, receive=_keys(state, client.id))
            for client in sample_clients(members, rng, min(cohort, len(members)))
        ]

    def local(self, step: Step) -> Update:
        """Train each network by itself; or the fusion, with encoders of the client's own."""
        if step.phase != FUSING:
            metrics = self.train_views(step)
            sent = step.floating_state(*list_encoders(step))
            return step.update(metrics, tensors={name: value for name, value in sent.items() if self.shared(name)})
        self._load_encoders(step)
        metrics = fit(step, self.fusion_loss)
        tensors = {name: value for name, value in step.floating_state(FUSION).items() if self.shared(name)}
        for name in list_encoders(step):
            own = _encoder(step, name)
            retain(step, _ENCODER, own)
            tensors[BIAS + name] = _bias(own, {key: step.received[GLOBAL][key] for key in own})
        return step.update(metrics, tensors=tensors)

    def _load_encoders(self, step: Step) -> None:
        """Put the client's own encoders in the place of those that it received, where it has some."""
        with torch.no_grad():
            for name in list_encoders(step):
                for key, value in _encoder(step, name).items():
                    value.copy_(step.state.get(_ENCODER + key, value))

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Average each view's network; in the second phase find the groups, and average their classifiers."""
        if state.phase != FUSING:
            arriving = UpdateCounter(updates)
            new, report = super().aggregate(state, arriving, rng)
            return new, {**report, "clients/trained": Ratio(len(arriving.clients), 1)}
        sent = list(updates)
        if not sent:
            return state, {"groups": Ratio(0, 1)}
        before = cast("Mapping[str, str]", state.extra.get(_GROUPS, {}))
        labels = self._labels(sent, rng)
        names = match(labels, [before.get(update.client_id, "") for update in sent])
        following = int(state.extra.get(_FOLLOWING, 1))
        for label in dict.fromkeys(labels):
            if label not in names:
                names[label], following = f"group{following}", following + 1
        after = {**before, **{update.client_id: names[label] for update, label in zip(sent, labels, strict=True)}}
        start = {name: value for name, value in state.tensors[GLOBAL].items() if name.startswith(f"{FUSION}/")}
        entries = {GLOBAL: state.tensors[GLOBAL]}
        entries |= {key: state.tensors.get(key, start) for key in dict.fromkeys(after.values())}
        regrouped = [_classifier(update, after[update.client_id]) for update in sent]
        everybody = [dataclasses.replace(update, key=GLOBAL) for update in regrouped]
        given = dataclasses.replace(state, tensors=entries)
        new, report = super().aggregate(given, [*regrouped, *everybody], rng)
        extra = {**state.extra, _GROUPS: after, _FOLLOWING: following}
        return dataclasses.replace(new, extra=extra), {**report, "groups": Ratio(len(set(labels)), 1)}

    def _labels(self, updates: Sequence[Update], rng: np.random.Generator) -> list[int]:
        """Return the cluster of each client by its biases; one that a client does not send as a number is 0: it has not moved."""
        names = sorted({name for update in updates for name in update.tensors if name.startswith(BIAS)})
        sent = [[update.tensors.get(name) for name in names] for update in updates]
        biases = np.array([[0.0 if b is None or b.numel() != 1 else float(b) for b in row] for row in sent])
        return clusters(biases, self.groups, int(rng.integers(2**31))) if names else [0] * len(updates)

    def plan_evaluation(self, state: State, clients: Sequence[Client]) -> list[Task]:
        """Measure the networks of all views, and the fusion once it is trained; clients have their group's."""
        names = list(dict.fromkeys(name.partition("/")[0] for name in state.tensors[GLOBAL]))
        fuses = state.phase == FUSING
        options = {"models": [name for name in names if fuses or name != FUSION]}
        return [
            Task(client, phase="evaluate", receive=_keys(state, client) if fuses else (GLOBAL,), options=options)
            for client in ([each.id for each in clients] or [""])
        ]

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        """Measure them with the client's own encoders, where it has some."""
        self._load_encoders(step)
        return super().evaluate(step, examples, batch_size)


def clusters(biases: np.ndarray, groups: int, seed: int) -> list[int]:
    """Return the cluster of each client, from 0 on in the order of first appearance.

    Args:
        biases: float64 [clients, views]; those of each view are divided by their maximum first, where that is above 0.
        groups: how many clusters there are at most.
        seed: of k-means.
    """
    from sklearn.cluster import KMeans  # it takes half a second

    most = biases.max(axis=0)
    scaled = biases / np.where(most > 0, most, 1.0)
    distinct = len(np.unique(scaled, axis=0))
    found = KMeans(min(groups, distinct), n_init=10, random_state=seed).fit(scaled).labels_.tolist()
    order = {label: place for place, label in enumerate(dict.fromkeys(found))}
    return [order[label] for label in found]


def _keys(state: State, client: str) -> tuple[str, ...]:
    """Return what a client receives: its group's classifier first."""
    own = cast("Mapping[str, str]", state.extra.get(_GROUPS, {})).get(client)
    return (own, GLOBAL) if own else (GLOBAL,)


def _encoder(step: Step, name: str) -> dict[str, Tensor]:
    """Return the tensors of an encoder, without the head."""
    return {key: value for key, value in step.floating_state(name).items() if not key.startswith(f"{name}/output.")}


def _bias(own: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Tensor:
    """Return 1 - cos of two encoders, each taken as one vector: a scalar."""
    a, b = (torch.cat([value.detach().flatten().double() for value in of.values()]) for of in (own, reference))
    return (1 - torch.nn.functional.cosine_similarity(a, b, dim=0)).clamp_min(0).float()


def _classifier(update: Update, key: str) -> Update:
    """Return an update of the fusion alone, to the entry of a group."""
    tensors = {name: value for name, value in update.tensors.items() if name.startswith(f"{FUSION}/")}
    return dataclasses.replace(update, tensors=tensors, key=key)
