r"""Harmony: a federation for each view, then groups of clients with all views and similar modality bias train a fusion.

X. Ouyang, Z. Xie, H. Fu, S. Cheng, L. Pan, N. Ling, G. Xing, J. Zhou, J. Huang, Harmony: Heterogeneous Multi-Modal Federated
Learning through Disentangled Model Training, MobiSys 2023.

The method has two phases (docs/configuration.md#trainphases). Phase ``unimodal`` is FedAvg of each view's network, encoder and
head, over all clients with the view. A client with several views trains their networks in turn, the student's first. In phase
``fusion``, each client with all views fine-tunes its own copies of the first phase's encoders together with the fusion
classifier, and sends

    the classifier's update  d_i,   and for each view m the bias  b_im = 1 - cos(w_im, w_m)

with the first phase's encoder w_m and the client's encoder w_im. The server divides the biases of each view by their maximum,
clusters the clients by k-means into ``groups``, and adds the mean of the members' updates to each group's classifier. Encoders
stay with the clients. The audio model is thus FedAvg's over all clients, to the bit. For this model alone, set
``train.phases.unimodal.rounds`` to ``train.rounds``.

Readings and deviations:

- Only the sampled clients take part in a round. A client stays in its last group, and a group keeps the name of the former group
  with the most common members. A group's new classifier is the mean of its members' classifiers. A client without a group
  receives the mean of the last round's classifiers.
- With fewer sampled clients than ``groups``, each client is a group.
- The release trains the classifier at 1e-3 and encoders at 1e-4. Set ``train.phases.fusion.optimiser.models`` for this.
- The mean is uniform (``uniform_mean``). ``rule: weighted_mean`` weights by examples.
- If no client has all views, the second phase has no clients and changes nothing.

Networks and data are as in all methods of several views (docs/methods.md#methods-of-several-views).

    raydfl run jobs/tiny.yaml run.name=harmony train.rounds=2 method=harmony \
      models='{a: crnn_tiny, b: crnn_tiny}'
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
from raydfl.core.options import RELEASE
from raydfl.core.types import Client, Metrics, Ratio, State, Task, Update
from raydfl.data import Examples
from raydfl.methods._copies import retain
from raydfl.methods._method import UpdateCounter, sample_clients
from raydfl.methods._views import ALL, FUSION, GLOBAL, WithViews, list_encoders, select_clients
from raydfl.training import Step, fit

UNIMODAL, FUSING = "unimodal", "fusion"
BIAS = "bias/"
"""Name prefix of the modality bias of each view, the distance between a client's encoder and the first phase's."""

_ENCODER = "encoder/"
_GROUPS, _FOLLOWING = "groups", "following"


@dataclass(frozen=True, kw_only=True)
class Harmony(WithViews):
    """Federated training per view, then fusion in groups of clients with similar modality bias."""

    phases: ClassVar[tuple[str, ...]] = (UNIMODAL, FUSING)

    additions: ClassVar[tuple[str, ...]] = (BIAS,)

    groups: Annotated[
        int, Field(ge=1, description="Number of client groups, by k-means on modality bias. 1: one group."), RELEASE
    ] = 2

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Sample from all clients. In the second phase, sample clients with all views, and send their group's classifier."""
        if state.phase != FUSING:
            return super().plan(state, clients, rng, cohort)
        members = select_clients(state, clients, ALL)
        return [
            Task(client.id, phase=FUSING, receive=_list_entries(state, client.id))
            for client in sample_clients(members, rng, min(cohort, len(members)))
        ]

    def local(self, step: Step) -> Update:
        """Train each view's network. In the second phase, train the fusion with the client's own encoders."""
        if step.phase != FUSING:
            metrics = self.train_views(step)
            state = step.floating_state(*list_encoders(step))
            return step.update(metrics, tensors={name: value for name, value in state.items() if self.shared(name)})
        self._load_encoders(step)
        metrics = fit(step, self.fusion_loss)
        tensors = {name: value for name, value in step.floating_state(FUSION).items() if self.shared(name)}
        for name in list_encoders(step):
            encoder = _select_encoder(step, name)
            retain(step, _ENCODER, encoder)
            tensors[BIAS + name] = _compute_bias(encoder, {key: step.received[GLOBAL][key] for key in encoder})
        return step.update(metrics, tensors=tensors)

    def _load_encoders(self, step: Step) -> None:
        """Replace the received encoders by the client's own, if it has any."""
        with torch.no_grad():
            for name in list_encoders(step):
                for key, value in _select_encoder(step, name).items():
                    value.copy_(step.state.get(_ENCODER + key, value))

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Average each view's network. In the second phase, cluster the clients and average each group's classifier."""
        if state.phase != FUSING:
            counter = UpdateCounter(updates)
            new, report = super().aggregate(state, counter, rng)
            return new, {**report, "clients/trained": Ratio(len(counter.clients), 1)}
        cohort = list(updates)
        if not cohort:
            return state, {"groups": Ratio(0, 1)}
        before = cast("Mapping[str, str]", state.extra.get(_GROUPS, {}))
        labels = self._cluster(cohort, rng)
        names = match(labels, [before.get(update.client_id, "") for update in cohort])
        following = int(state.extra.get(_FOLLOWING, 1))
        for label in dict.fromkeys(labels):
            if label not in names:
                names[label], following = f"group{following}", following + 1
        after = {**before, **{update.client_id: names[label] for update, label in zip(cohort, labels, strict=True)}}
        start = {name: value for name, value in state.tensors[GLOBAL].items() if name.startswith(f"{FUSION}/")}
        entries = {GLOBAL: state.tensors[GLOBAL]}
        entries |= {key: state.tensors.get(key, start) for key in dict.fromkeys(after.values())}
        grouped = [_select_classifier(update, after[update.client_id]) for update in cohort]
        # Clients without a group receive the mean over all groups.
        common = [dataclasses.replace(update, key=GLOBAL) for update in grouped]
        new, report = super().aggregate(dataclasses.replace(state, tensors=entries), [*grouped, *common], rng)
        extra = {**state.extra, _GROUPS: after, _FOLLOWING: following}
        return dataclasses.replace(new, extra=extra), {**report, "groups": Ratio(len(set(labels)), 1)}

    def _cluster(self, updates: Sequence[Update], rng: np.random.Generator) -> list[int]:
        """Return the cluster of each client by its modality biases. Missing and invalid biases count as 0."""
        names = sorted({name for update in updates for name in update.tensors if name.startswith(BIAS)})
        rows = [[update.tensors.get(name) for name in names] for update in updates]
        biases = np.array([[0.0 if b is None or b.numel() != 1 else float(b) for b in row] for row in rows])
        # Without any bias there is nothing to cluster.
        return cluster_biases(biases, self.groups, int(rng.integers(2**31))) if names else [0] * len(updates)

    def plan_evaluation(self, state: State, clients: Sequence[Client]) -> list[Task]:
        """Measure the networks of all views, and once it is trained the fusion, at clients their group's."""
        names = list(dict.fromkeys(name.partition("/")[0] for name in state.tensors[GLOBAL]))
        fuses = state.phase == FUSING
        options = {"models": [name for name in names if fuses or name != FUSION]}
        return [
            Task(
                client, phase="evaluate", receive=_list_entries(state, client) if fuses else (GLOBAL,), options=options
            )
            for client in ([client.id for client in clients] or [""])
        ]

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        """Measure the models with the client's own encoders, if it has any."""
        self._load_encoders(step)
        return super().evaluate(step, examples, batch_size)


def cluster_biases(biases: np.ndarray, groups: int, seed: int) -> list[int]:
    """Cluster clients by their biases, after a division of each view's biases by their maximum.

    Args:
        biases: Non-negative, float64 [clients, views].
        groups: Maximum number of clusters.
        seed: Seed of k-means.

    Returns:
        The cluster of each client, 0 for the first client, and in the order of first appearance.
    """
    from sklearn.cluster import KMeans  # The import takes half a second.

    maxima = biases.max(axis=0)
    scaled = biases / np.where(maxima > 0, maxima, 1.0)
    distinct = len(np.unique(scaled, axis=0))
    labels = KMeans(min(groups, distinct), n_init=10, random_state=seed).fit(scaled).labels_.tolist()
    order = {label: position for position, label in enumerate(dict.fromkeys(labels))}
    return [order[label] for label in labels]


def _list_entries(state: State, client: str) -> tuple[str, ...]:
    """Return the keys of the entries that a client receives, its group's classifier first."""
    group = cast("Mapping[str, str]", state.extra.get(_GROUPS, {})).get(client)
    return (group, GLOBAL) if group else (GLOBAL,)


def _select_encoder(step: Step, name: str) -> dict[str, Tensor]:
    """Return the tensors of an encoder, without the head."""
    return {key: value for key, value in step.floating_state(name).items() if not key.startswith(f"{name}/output.")}


def _compute_bias(encoder: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Tensor:
    """Return 1 - cos of two encoders' concatenated tensors, a scalar."""
    a, b = (torch.cat([t.detach().flatten().double() for t in tensors.values()]) for tensors in (encoder, reference))
    return (1 - torch.nn.functional.cosine_similarity(a, b, dim=0)).clamp_min(0).float()


def _select_classifier(update: Update, key: str) -> Update:
    """Return an update with only the fusion, for the entry of a group."""
    tensors = {name: value for name, value in update.tensors.items() if name.startswith(f"{FUSION}/")}
    return dataclasses.replace(update, tensors=tensors, key=key)
