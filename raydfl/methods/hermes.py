"""Hermes: every client has a small model of its own; what all of a round have kept is averaged for everybody.

A. Li, J. Sun, P. Li, Y. Pu, H. Li, Y. Chen, Hermes: An Efficient Federated Learning Framework for Heterogeneous Mobile Clients,
MobiCom 2021. A round, with v_k client k's own model and m_k its mask:

    client   where its accuracy on its hold-out has reached ``threshold`` and it has pruned less than ``target``, it prunes
             ``step`` more of the filters of each layer, those of least L1;  it trains m_k * v_k and sends both
    server   of what all clients of the round have kept, the mean weighted by n_k;  it goes into every client's model
    the rest of v_k is the client's own

The paper keeps the clients' models at the server. Here they stay with the clients: the server has the last mean of each filter and
the round that it is of, and a client that comes again takes over what was averaged since. That is the same, also for clients that
were not chosen for some rounds. The server's ``global`` is that of a client that has never taken part.

Deviations: a client without a hold-out measures on its training data; hidden units of recurrent layers are pruned too, which the
paper does not have; filters are masked (:mod:`raydfl.methods._pruning`). What a client pruned it never gets back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, cast

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.needs import Needs
from raydfl.core.part_names import plain_name
from raydfl.core.types import BuiltModels, Client, Metrics, Ratio, State, Update
from raydfl.data import Examples
from raydfl.methods._copies import find_retained, retain
from raydfl.methods._masking import PruningMethod
from raydfl.methods._pruning import (
    MASK,
    PrunableLayer,
    find_prunable_layers,
    make_mask,
    map_prunable_tensors,
)
from raydfl.training import Step

ROUND = "round/"
"""Beginning of the names of what says in which round each unit of a layer was last averaged: float32 [units], 0 for never."""

_OWN, _SEEN, _SHARE, _PRUNED = "own/", "seen", "share", "pruned"


@dataclass(frozen=True, kw_only=True)
class Hermes(PruningMethod):
    """Models of one's own, pruned step by step, that share what all have kept."""

    needs = Needs(objectives=("classify",))

    target: Annotated[
        float, Field(ge=0, lt=1, description="share of each layer that a client prunes at most; 0 is FedAvg")
    ] = 0.5
    step: Annotated[float, Field(gt=0, le=1, description="share of each layer that it prunes at a time")] = 0.2
    threshold: Annotated[
        float, Field(ge=0, le=1, description="accuracy on its own hold-out from which on a client prunes")
    ] = 0.5

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """FedAvg's state, and that no unit was averaged yet.

        Raises:
            ConfigError: there is nothing to prune.
        """
        state = super().init(clients, models, rng)
        if self.target == 0:
            return state
        layer_of = map_prunable_tensors(models, self.fixed, self.prune)
        layers = [
            layer
            for built in models
            for layer in find_prunable_layers(built, (), self.prune)
            if layer.name in layer_of.values()
        ]
        rounds = {ROUND + layer.name: torch.zeros(layer.units) for layer in layers}
        tensors = {**state.tensors, "global": {**state.tensors["global"], **rounds}}
        return dataclasses.replace(state, tensors=tensors, extra={**state.extra, _PRUNED: layer_of})

    def local(self, step: Step) -> Update:
        """Bring the client's own model up to date, prune it further if it is good enough, train it, and send what is kept."""
        if self.target == 0:
            return super().local(step)
        layers = find_prunable_layers(step.models, step.fixed, self.prune)
        self._take_over(step, layers)
        share = float(step.state.get(_SHARE, torch.zeros(())))
        if share < self.target and self._accuracy(step) >= self.threshold:
            share = min(self.target, share + self.step)
        parameters = step.parameters()
        masks = {layer.name: make_mask(layer.magnitudes(parameters), share) for layer in layers}
        metrics, tensors = self.train_masked(step, layers, masks)
        retain(step, _OWN, tensors)
        step.state[_SHARE], step.state[_SEEN] = torch.tensor(share), torch.tensor(float(step.round_index))
        return step.update(metrics, tensors={**tensors, **{MASK + name: mask for name, mask in masks.items()}})

    @torch.no_grad()
    def _take_over(self, step: Step, layers: Sequence[PrunableLayer]) -> None:
        """Give the network the client's own model, with what was averaged since it last took part."""
        if _SEEN not in step.state:
            return
        share, live = float(step.state[_SHARE]), step.floating_state()
        layer_of = {name: layer for layer in layers for name in layer.tensors}
        own = find_retained(step, _OWN)
        for name, value in own.items():
            if name not in layer_of:
                continue  # the last mean, which is what was received
            layer = layer_of[name]
            # What it pruned it does not get back: those are the units of its own model that are 0.
            kept = make_mask(layer.magnitudes(own), share).to(value.device)
            newer = (step.reference(ROUND + layer.name) > step.state[_SEEN]) & (kept > 0)
            live[name].copy_(torch.where(layer.spread(newer, name, value), live[name], value))

    def _accuracy(self, step: Step) -> float:
        """Return the accuracy on the hold-out, or without one on the training data."""
        examples = step.data.validation if len(step.data.validation) else step.data.train
        found = self.objective.evaluate(step, "model", examples, 64)["accuracy"]
        return cast(Ratio, found).value

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        """Measure the client's own model where it has one."""
        self._take_over(step, find_prunable_layers(step.models, step.fixed, self.prune))
        return super().evaluate(step, examples, batch_size)

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Average what all clients of the round have kept; the rest stays what it was."""
        if self.target == 0:
            return super().aggregate(state, updates, rng)
        kept: dict[str, Tensor] = {}
        averaged, report = super().aggregate(state, _without_masks(updates, kept), rng)
        before, entry = state.tensors["global"], dict(averaged.tensors["global"])
        layer_of = cast("Mapping[str, str]", state.extra[_PRUNED])
        for name, value in entry.items():
            mask = kept.get(layer_of.get(plain_name(name), ""))
            if mask is not None:
                whole = mask.repeat(value.shape[0] // len(mask)).view(-1, *[1] * (value.ndim - 1))
                entry[name] = torch.where(whole, value, before[name])
        for layer, mask in kept.items():
            rounds = before[ROUND + layer]
            entry[ROUND + layer] = torch.where(mask, torch.full_like(rounds, state.round_index + 1), rounds)
        shares = [float(mask.float().mean()) for mask in kept.values()]
        common = {"hermes/kept_by_all": Ratio(sum(shares), len(shares))} if shares else {}
        return dataclasses.replace(averaged, tensors={**averaged.tensors, "global": entry}), {**report, **common}


def _without_masks(updates: Iterable[Update], kept: dict[str, Tensor]) -> Iterator[Update]:
    """Yield updates without their masks; ``kept`` says afterwards by layer which units all have kept: bool [units]."""
    for update in updates:
        for name, mask in update.tensors.items():
            plain = plain_name(name)
            if plain.startswith(MASK):
                layer, own = plain.removeprefix(MASK), mask > 0.5
                kept[layer] = kept[layer] & own if layer in kept else own
        tensors = {name: value for name, value in update.tensors.items() if not name.startswith(MASK)}
        yield dataclasses.replace(update, tensors=tensors)
