"""Hermes: each client prunes its own model step by step, and the server averages the filters that the whole cohort keeps.

A. Li, J. Sun, P. Li, Y. Pu, H. Li, Y. Chen, Hermes: An Efficient Federated Learning Framework for Heterogeneous Mobile Clients,
MobiCom 2021. A round, with client k's own model v_k and mask m_k:

    client   prunes a further fraction step of each layer's filters with the smallest L1 norm, up to target, if its
             held-out accuracy reaches threshold. Then it trains m_k * v_k, and sends the model and the mask.
    server   averages the filters kept by the whole cohort, weighted by n_k, and writes them into every client's model.
             All other filters remain the client's own.

The paper stores the clients' models at the server. Here they stay with the clients. The server stores each filter's last mean and
its round, and a returning client takes over all means since its last participation. Both are equivalent, also for clients that
pause. The server's ``global`` is the model of a client before its first participation.

Deviations: a client without held-out clips measures on its training data. Hidden units of recurrent layers, absent from the
paper, are pruned too. Filters are masked. Masks save neither time nor memory nor bytes (docs/fedapta.md#masks-save-nothing). A
client never regains pruned filters.

The objective must be ``classify``. Clients are measured with their own models, the server with the model before the first
participation. Each round records ``hermes/kept_by_all``, the fraction of filters kept by the whole cohort.

    raydfl run jobs/tiny.yaml run.name=hermes method=hermes method.threshold=0
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
from raydfl.core.options import OURS
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
"""Name prefix of the last round with a mean of each unit of a layer, float32 [units]. 0: never."""

_OWN, _SEEN, _SHARE, _PRUNED = "own/", "seen", "share", "pruned"


@dataclass(frozen=True, kw_only=True)
class Hermes(PruningMethod):
    """Personal models, pruned step by step, with shared means of commonly kept filters."""

    needs = Needs(objectives=("classify",))

    target: Annotated[
        float, Field(ge=0, lt=1, description="Maximum pruned fraction of each layer. 0 is FedAvg."), OURS
    ] = 0.5
    step: Annotated[float, Field(gt=0, le=1, description="Fraction of each layer pruned at a time."), OURS] = 0.2
    threshold: Annotated[
        float,
        Field(ge=0, le=1, description="Minimum held-out accuracy of a client before it prunes. 0: always prune."),
        OURS,
    ] = 0.5

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return FedAvg's state, and round 0 for all units.

        Raises:
            ConfigError: No network has a prunable layer.
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
        """Update the client's own model, prune it if it is accurate enough, train it, and send it with its masks."""
        if self.target == 0:
            return super().local(step)
        layers = find_prunable_layers(step.models, step.fixed, self.prune)
        self._load_personal(step, layers)
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
    def _load_personal(self, step: Step, layers: Sequence[PrunableLayer]) -> None:
        """Load the client's own model, with all means since its last participation."""
        if _SEEN not in step.state:
            return
        share, live = float(step.state[_SHARE]), step.floating_state()
        layer_of = {name: layer for layer in layers for name in layer.tensors}
        own = find_retained(step, _OWN)
        for name, value in own.items():
            if name not in layer_of:
                continue  # The network has the received mean already.
            layer = layer_of[name]
            # Pruned units, the zeros of the client's own model, stay pruned.
            kept = make_mask(layer.magnitudes(own), share).to(value.device)
            newer = (step.reference(ROUND + layer.name) > step.state[_SEEN]) & (kept > 0)
            live[name].copy_(torch.where(layer.spread(newer, name, value), live[name], value))

    def _accuracy(self, step: Step) -> float:
        """Return the accuracy on held-out clips, or without any on the training data."""
        examples = step.data.validation if len(step.data.validation) else step.data.train
        accuracy = self.objective.evaluate(step, "model", examples, 64)["accuracy"]
        return cast(Ratio, accuracy).value

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        """Measure the client's own model, if it has one."""
        self._load_personal(step, find_prunable_layers(step.models, step.fixed, self.prune))
        return super().evaluate(step, examples, batch_size)

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Average the units that the whole cohort keeps. All others keep their values."""
        if self.target == 0:
            return super().aggregate(state, updates, rng)
        kept: dict[str, Tensor] = {}
        averaged, report = super().aggregate(state, _remove_masks(updates, kept), rng)
        before, entry = state.tensors["global"], dict(averaged.tensors["global"])
        layer_of = cast("Mapping[str, str]", state.extra[_PRUNED])
        for name, value in entry.items():
            mask = kept.get(layer_of.get(plain_name(name), ""))
            if mask is not None:
                whole = mask.repeat(value.shape[0] // len(mask)).view(-1, *[1] * (value.ndim - 1))
                entry[name] = torch.where(whole, value, before[name])
        for layer, mask in kept.items():
            # A participation in this round precedes its mean, so the mean's round is higher by 1.
            rounds = before[ROUND + layer]
            entry[ROUND + layer] = torch.where(mask, torch.full_like(rounds, state.round_index + 1), rounds)
        shares = [float(mask.float().mean()) for mask in kept.values()]
        common = {"hermes/kept_by_all": Ratio(sum(shares), len(shares))} if shares else {}
        return dataclasses.replace(averaged, tensors={**averaged.tensors, "global": entry}), {**report, **common}


def _remove_masks(updates: Iterable[Update], kept: dict[str, Tensor]) -> Iterator[Update]:
    """Yield updates without masks, and write each layer's commonly kept units to ``kept``, bool [units]."""
    for update in updates:
        for name, mask in update.tensors.items():
            plain = plain_name(name)
            if plain.startswith(MASK):
                layer, units = plain.removeprefix(MASK), mask > 0.5
                kept[layer] = kept[layer] & units if layer in kept else units
        tensors = {name: value for name, value in update.tensors.items() if not name.startswith(MASK)}
        yield dataclasses.replace(update, tensors=tensors)
