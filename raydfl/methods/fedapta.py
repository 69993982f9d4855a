"""FedAPTA: clients prune what they receive as far as their device asks for, and are grouped by what they have learnt.

FedAPTA: Federated Multi-task Learning for Heterogeneous Devices with Adaptive Layer-wise Pruning and Task-aware Aggregation,
algorithm 1 and equations 1 to 5. A round, with w_ref the model that client i was sent, rho_i its pruning ratio, N_k the weights of
layer k and M_i its mask (1 is kept):

    (1)  sum_k p_k N_k = rho_i sum_k N_k, where a less important layer loses no smaller a share p_k
    (2)  in layer k the p_k C_k filters of the smallest L1 norm are pruned, anew in each round from w_ref
         loss   CE + (a_i / 2) ||w - (w_ref - h_i)||^2 + <w - w_ref, s_i g - g_i>,    s_i = mean(n) / n_i,  a_i = alpha s_i
    (3)  w_i = M_i * w_i^ + (1 - M_i) * w_ref
         D_i = w_i - w_ref,    h_i <- h_i + D_i,    g_i <- g_i - s_i g - D_i / (lr E ceil(mean(n) / B))
    (4)  clients are clustered by 1 - cos of their D_i of the last layer (HDBSCAN)
    (5)  of each cluster  w <- sum_i n_i w_i / sum_i n_i + mean_i h_i
         g <- g + (1 / N) sum_i (g_i after - g_i before) / s_i

The drift terms are those of FedDC (L. Gao, H. Fu, L. Li, Y. Chen, M. Xu, C. Xu, FedDC: Federated Learning with Non-IID Data via
Local Drift Decoupling and Correction, CVPR 2022). A client keeps h_i and g_i; the server keeps g for each group.

The paper's release cannot run: its solver, pruning, recovery and clustering are missing. Every reading is in docs/fedapta.md; in
short:

- Equation 1 has many solutions: ``solver`` says which is taken; ``importance`` is the mean of a layer's |w|, or the sum.
- What is pruned: convolutions that train, and of recurrent layers hidden units, which the paper does not have.
- ``drift: full`` is the loss above. ``server`` leaves the client's terms out, as the release does in effect (its terms have no
  gradient); ``off`` has no h and no g.
- The last term of the loss is written with w - w_ref, not w: the same gradient, and a loss that can be compared with others.
- Means of h are over the clients of the round and group; N is the group's clients.
- ``recover: false`` averages a filter over those who kept it (what nobody kept stays).
- The learning rate in g's formula is the one before decay, as in the release. With momentum E ceil(mean(n) / B) is replaced by the
  effective number of steps, as in :mod:`raydfl.methods._control`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, cast

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.needs import Needs
from raydfl.core.part_names import plain_name
from raydfl.core.types import Batch, BuiltModels, Client, Metrics, State, Task, Update
from raydfl.methods._control import (
    CONTROL,
    DRIFT,
    drift_penalty,
    move_controls,
    put_drift_terms,
    renew_drifts,
    tell_mean_examples,
    zero_controls,
)
from raydfl.methods._masking import ByRatio, PruningMethod
from raydfl.methods._method import CLIENTS, Counted
from raydfl.methods._pruning import (
    MASK,
    Importance,
    Solver,
    kept_by,
    layers_by_tensor,
    masked,
    prunable_layers,
    pruned_masks,
    put_masks,
    recovered,
)
from raydfl.training import Step, fit

_PRUNED = "pruned"


@dataclass(frozen=True, kw_only=True)
class FedAPTA(PruningMethod, ByRatio):
    """Pruning by device, recovery, drift correction, and a model for each discovered task."""

    changes: ClassVar[tuple[str, ...]] = (CONTROL, DRIFT)

    additions: ClassVar[tuple[str, ...]] = (MASK, DRIFT)

    grouping: ClassVar[str] = "hdbscan"

    ratio: Annotated[float, Field(ge=0, lt=1, description="share of the weights that every client prunes")] = 0.4
    solver: Annotated[Solver, Field(description="how the ratio is spread over the layers (equation 1)")] = "ramp"
    importance: Annotated[
        Importance,
        Field(description="of a layer: mean or sum of its weights' magnitudes; the least important loses most"),
    ] = "mean"
    recover: Annotated[
        bool,
        Field(description="the server puts in what a client pruned (equation 3); false: it averages what was kept"),
    ] = True
    drift: Annotated[
        Literal["off", "server", "full"],
        Field(
            description="FedDC's correction: none, the server adds the mean drift, or the clients' loss has its terms too"
        ),
    ] = "full"
    alpha: Annotated[
        float,
        Field(ge=0, description="weight of the drift's penalty in the loss; the release: 0.1, and 0.01 for CIFAR-10"),
    ] = 0.1

    @property
    def needs(self) -> Needs:
        """SGD with the full correction, whose scale is that of SGD's steps."""
        return Needs(optimiser="sgd" if self.drift == "full" else "")

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """FedAvg's state; with the full correction the server's g, zero.

        Raises:
            ConfigError: there is nothing to prune, or a client's ratio is none.
        """
        state = super().init(clients, models, rng)
        extra = dict(state.extra)
        if self.prunes:
            extra[_PRUNED] = layers_by_tensor(models, self.fixed, self.prune)
        tensors = dict(state.tensors["global"])
        if self.drift == "full":
            extra[CLIENTS] = len(clients)
            tensors |= zero_controls(state, models)
        return dataclasses.replace(state, tensors={**state.tensors, "global": tensors}, extra=extra)

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Tell clients how many examples they have on average, where the correction needs it."""
        tasks = super().plan(state, clients, rng, cohort)
        return tell_mean_examples(tasks, clients) if self.drift == "full" else tasks

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Cross-entropy of the masked model, and with the full correction FedDC's two terms over what is kept."""
        with masked(step, "model") as pruned:
            value = super().loss(step, batch)
        if self.drift != "full":
            return value
        kept = {name: pruned.get(name, parameter) for name, parameter in step.parameters().items()}
        return value + drift_penalty(step, kept)

    def local(self, step: Step) -> Update:
        """Prune, train, and send what is kept with the masks."""
        masks: dict[str, Tensor] = {}
        if self.prunes:
            layers = prunable_layers(step.models, step.fixed, self.prune)
            ratio = self.ratio_for(step.client)
            masks = pruned_masks(layers, step.parameters(), ratio, self.solver, self.importance)
            put_masks(step, layers, masks)
        if self.drift == "full":
            put_drift_terms(step, self.alpha)
        metrics = fit(step, self.loss)
        tensors, of_tensors = self.take_masked(step)
        if self.drift != "off":
            tensors |= renew_drifts(step, tensors, of_tensors, controls=self.drift == "full")
        tensors |= {MASK + name: mask for name, mask in masks.items()}
        return step.update(metrics, tensors=tensors)

    def complete(self, state: State, update: Update) -> Update:
        """Put back the pruned weights (equation 3): masked weights, and where the mask is 0 what the client was sent.

        Drifts get the server's names of their tensors, and a weight of 1.
        """
        besides = {plain_name(name): value for name, value in update.tensors.items() if name.startswith((MASK, DRIFT))}
        if not besides or isinstance(update.weight, Mapping):
            return update
        layer_of = cast("Mapping[str, str]", state.extra.get(_PRUNED, {}))
        number, kept = update.weight, {} if self.recover else kept_by(update, layer_of)
        whole = recovered(update, state.tensors[update.key], layer_of).tensors
        tensors: dict[str, Tensor] = {}
        weights: dict[str, float | Tensor] = {}
        for name, value in whole.items():
            plain = plain_name(name)
            if plain.startswith(DRIFT):
                continue
            tensors[name], weights[name] = value, 1.0 if plain.startswith(CONTROL) else number
            if name in kept:
                weights[name] = kept[name] * number
            if DRIFT + plain in besides:
                tensors[DRIFT + name], weights[DRIFT + name] = besides[DRIFT + plain], 1.0
        return dataclasses.replace(update, tensors=tensors, weight=weights)

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Average the completed models (equation 5), add the mean drift, and move g by the share of clients that came."""
        arriving = Counted(self.complete(state, update) for update in updates)
        averaged, report = super().aggregate(state, arriving, rng)
        new = move_controls(state, averaged, arriving.senders)
        for name in arriving.senders:
            if name.startswith(DRIFT):
                plain = name.removeprefix(DRIFT)
                new[plain] = new[plain] + new.pop(name)
        return dataclasses.replace(averaged, tensors={**averaged.tensors, "global": new}), report
