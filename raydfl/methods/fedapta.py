r"""FedAPTA: clients prune the received model to their device's ratio, and are clustered by their updates.

FedAPTA: Federated Multi-task Learning for Heterogeneous Devices with Adaptive Layer-wise Pruning and Task-aware Aggregation,
algorithm 1 and equations 1 to 5. A round, with the model w_ref that client i receives, its pruning ratio rho_i, the weights N_k of
layer k and the mask M_i (1 is kept):

    (1)  sum_k p_k N_k = rho_i sum_k N_k. A less important layer never loses a smaller fraction p_k
    (2)  in layer k the p_k C_k filters of the smallest L1 norm are pruned, in each round again from w_ref
         loss   CE + (a_i / 2) ||w - (w_ref - h_i)||^2 + <w - w_ref, s_i g - g_i>,    s_i = mean(n) / n_i,  a_i = alpha s_i
    (3)  w_i = M_i * w_i^ + (1 - M_i) * w_ref
         D_i = w_i - w_ref,    h_i <- h_i + D_i,    g_i <- g_i - s_i g - D_i / (lr E ceil(mean(n) / B))
    (4)  clients are clustered by 1 - cos of their D_i of the last layer (HDBSCAN)
    (5)  of each cluster  w <- sum_i n_i w_i / sum_i n_i + mean_i h_i
         g <- g + (1 / N) sum_i (g_i after - g_i before) / s_i

The drift terms are those of FedDC (L. Gao, H. Fu, L. Li, Y. Chen, M. Xu, C. Xu, FedDC: Federated Learning with Non-IID Data via
Local Drift Decoupling and Correction, CVPR 2022). A client keeps h_i and g_i; the server keeps g for each group. ``train.groups``
is ``hdbscan`` by default (docs/methods.md#groups-of-clients). With ``ratio: 0``, ``drift: off`` and ``train.groups: none`` it is
FedAvg to the bit.

The paper's release cannot run: its solver, pruning, recovery and clustering are missing. Readings (more in
docs/fedapta.md#readings-of-fedapta):

- Equation 1 and the paper's numbers of parameters (table 5) count only the weights of prunable layers. ``ratio_of: all`` counts
  all weights N of the network: sum_k p_k N_k = rho_i N. A ratio above the prunable fraction is then rejected.
- Equation 1 has many solutions. ``solver`` selects one. ``importance`` is the mean of a layer's |w|, or the sum.
- Trainable convolutions are pruned, and also hidden units of recurrent layers, absent from the paper.
- ``drift: full`` is the loss above. ``server`` omits the client's terms, like the release in effect (its terms have no gradient).
  ``off`` has no h and no g.
- The last term of the loss has w - w_ref instead of w. The gradient is the same, and the loss is comparable with other methods'.
- Means of h are over the clients of the round and group. N is the number of the group's clients.
- ``recover: false`` averages a filter over the clients that kept it. A filter that no client kept stays unchanged.
- The learning rate in g's formula is the one before decay, as in the release. With momentum, the number of plain steps that move
  equally far along a constant gradient replaces E ceil(mean(n) / B). ``drift: full`` accepts only ``train.optimiser.name: sgd``.

    raydfl run jobs/tiny.yaml run.name=fedapta train.rounds=1 method=fedapta \
      method.ratio_from=device train.optimiser='{name: sgd, lr: 0.1}' \
      data.profile='{device: {values: [0.0, 0.2, 0.4, 0.6, 0.8]}}'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, cast

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.core.errors import ConfigError
from raydfl.core.needs import Needs
from raydfl.core.options import OURS, PAPER, RELEASE
from raydfl.core.part_names import plain_name
from raydfl.core.types import Batch, BuiltModels, Client, Metrics, State, Task, Tensors, Update
from raydfl.methods._control import (
    CONTROL,
    DRIFT,
    add_mean_examples,
    drift_penalty,
    move_controls,
    put_drift_terms,
    renew_drifts,
    zero_controls,
)
from raydfl.methods._masking import PruningMethod, RatioMasking
from raydfl.methods._method import CLIENTS, UpdateCounter
from raydfl.methods._pruning import (
    MASK,
    Importance,
    PrunableLayer,
    Solver,
    apply_masks,
    count_kept,
    find_kept,
    find_prunable_layers,
    make_masks,
    map_prunable_tensors,
    put_masks,
    recover_pruned,
)
from raydfl.training import Step, find_fixed_tensors, fit

_PRUNED = "pruned"


@dataclass(frozen=True, kw_only=True)
class FedAPTA(PruningMethod, RatioMasking):
    """Device-specific pruning, recovery, drift correction, and a model for each discovered task."""

    changes: ClassVar[tuple[str, ...]] = (CONTROL, DRIFT)

    additions: ClassVar[tuple[str, ...]] = (MASK, DRIFT)

    grouping: ClassVar[str] = "hdbscan"

    ratio: Annotated[
        float, Field(ge=0, lt=1, description="Fraction of the weights that every client prunes. 0: no pruning."), OURS
    ] = 0.4
    ratio_of: Annotated[
        Literal["prunable", "all"],
        Field(
            description="Base of the ratio. prunable: the weights of the layers in prune. all: all weights of the network. Only "
            "the layers in prune lose weights."
        ),
        PAPER,
    ] = "prunable"
    solver: Annotated[
        Solver, Field(description="Method of dividing the ratio among the layers (equation 1)."), OURS
    ] = "ramp"
    importance: Annotated[
        Importance,
        Field(
            description="Importance of a layer: mean or sum of its weights' magnitudes. The least important layer loses most."
        ),
        OURS,
    ] = "mean"
    recover: Annotated[
        bool,
        Field(
            description="Replace pruned weights by the client's received ones (equation 3). false: average only kept weights."
        ),
        PAPER,
    ] = True
    drift: Annotated[
        Literal["off", "server", "full"],
        Field(
            description="FedDC's correction. off: none. server: the server adds the mean drift. full: also in the clients' loss."
        ),
        OURS,
    ] = "full"
    alpha: Annotated[
        float,
        Field(ge=0, description="Weight of the drift's penalty in the loss. The release: 0.1, and 0.01 for CIFAR-10."),
        RELEASE,
    ] = 0.1

    @property
    def needs(self) -> Needs:
        """SGD for the full correction, because its scale assumes SGD's steps."""
        return Needs(optimiser="sgd" if self.drift == "full" else "")

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return FedAvg's state, with the server's g of zeros for the full correction.

        Raises:
            ConfigError: A network has no prunable layer, a client's profile has no valid ratio, or a ratio is too large.
        """
        state = super().init(clients, models, rng)
        extra = dict(state.extra)
        if self.prunes:
            extra[_PRUNED] = map_prunable_tensors(models, self.fixed, self.prune)
            if self.ratio_of == "all":
                self._check_ratio(max(self.ratio_for(client) for client in clients), models)
        tensors = dict(state.tensors["global"])
        if self.drift == "full":
            extra[CLIENTS] = len(clients)
            tensors |= zero_controls(state, models)
        return dataclasses.replace(state, tensors={**state.tensors, "global": tensors}, extra=extra)

    def _check_ratio(self, largest: float, models: BuiltModels) -> None:
        """Reject a ratio above the prunable fraction of a network's weights.

        Raises:
            ConfigError: The prunable layers have too few weights.
        """
        for built in models:
            layers = find_prunable_layers(built, find_fixed_tensors(built, self.fixed), self.prune)
            parameters = {f"{name}/{key}": p for name, model in built.items() for key, p in model.named_parameters()}
            scale = self._scale_ratio(layers, parameters)
            if largest * scale >= 1:
                raise ConfigError(
                    f"method.ratio_of is all, and the largest ratio is {largest:g}, but the layers of "
                    f"method.prune={list(self.prune)} have only {1 / scale:.0%} of the weights. Lower the ratio, add a type of "
                    f"layer to method.prune, or set method.ratio_of=prunable."
                )

    def _scale_ratio(self, layers: Sequence[PrunableLayer], parameters: Tensors) -> float:
        """Return the factor from ``ratio`` to a fraction of the prunable layers' weights.

        Args:
            layers: The prunable layers.
            parameters: All parameters of the network, by flat name.
        """
        if self.ratio_of == "prunable":
            return 1.0
        total = sum(parameter.numel() for parameter in parameters.values())
        return total / sum(layer.weights(parameters) for layer in layers)

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Plan FedAvg's tasks, with the mean number of examples for the full correction."""
        tasks = super().plan(state, clients, rng, cohort)
        return add_mean_examples(tasks, clients) if self.drift == "full" else tasks

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return cross-entropy of the masked model, plus FedDC's terms over kept weights for the full correction."""
        with apply_masks(step, "model") as pruned:
            value = super().loss(step, batch)
        if self.drift != "full":
            return value
        kept = {name: pruned.get(name, parameter) for name, parameter in step.parameters().items()}
        return value + drift_penalty(step, kept)

    def local(self, step: Step) -> Update:
        """Prune, train, and send the masked tensors with the masks."""
        masks: dict[str, Tensor] = {}
        if self.prunes:
            layers = find_prunable_layers(step.models, step.fixed, self.prune)
            parameters = {n: p for model in step.models for n, p in step.named_parameters(model).items()}
            ratio = self.ratio_for(step.client) * self._scale_ratio(layers, parameters)
            masks = make_masks(layers, step.parameters(), ratio, self.solver, self.importance)
            put_masks(step, layers, masks)
        if self.drift == "full":
            put_drift_terms(step, self.alpha)
        metrics = fit(step, self.loss)
        tensors, tensor_masks = self.take_masked(step)
        if self.drift != "off":
            tensors |= renew_drifts(step, tensors, tensor_masks, controls=self.drift == "full")
        tensors |= {MASK + name: mask for name, mask in masks.items()}
        return step.update({**metrics, **count_kept(step, tensor_masks)}, tensors=tensors)

    def complete(self, state: State, update: Update) -> Update:
        """Replace the pruned weights by the received ones (equation 3).

        Drifts get the server's names of their tensors, and a weight of 1.
        """
        extras = {plain_name(name): value for name, value in update.tensors.items() if name.startswith((MASK, DRIFT))}
        if not extras or isinstance(update.weight, Mapping):  # A weight per tensor marks a complete update.
            return update
        layer_of = cast("Mapping[str, str]", state.extra.get(_PRUNED, {}))
        number, kept = update.weight, {} if self.recover else find_kept(update, layer_of)
        whole = recover_pruned(update, state.tensors[update.key], layer_of).tensors
        tensors: dict[str, Tensor] = {}
        weights: dict[str, float | Tensor] = {}
        for name, value in whole.items():
            plain = plain_name(name)
            if plain.startswith(DRIFT):
                continue
            tensors[name], weights[name] = value, 1.0 if plain.startswith(CONTROL) else number
            if name in kept:
                weights[name] = kept[name] * number
            if DRIFT + plain in extras:
                tensors[DRIFT + name], weights[DRIFT + name] = extras[DRIFT + plain], 1.0
        return dataclasses.replace(update, tensors=tensors, weight=weights)

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Average the completed models (equation 5), add the mean drift, and update g by the cohort's fraction."""
        counter = UpdateCounter(self.complete(state, update) for update in updates)
        averaged, report = super().aggregate(state, counter, rng)
        new = move_controls(state, averaged, counter.senders)
        for name in counter.senders:
            if name.startswith(DRIFT):
                plain = name.removeprefix(DRIFT)
                new[plain] = new[plain] + new.pop(name)
        return dataclasses.replace(averaged, tensors={**averaged.tensors, "global": new}), report
