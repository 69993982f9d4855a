"""FedMP: the server chooses by a bandit how far each client prunes, and adds back what it pruned.

Z. Jiang, Y. Xu, H. Xu, Z. Wang, C. Qiao, Y. Zhao, FedMP: Federated Learning through Adaptive Model Pruning in Heterogeneous Edge
Computing, ICDE 2022. A round:

    server   chooses a ratio p_k for each client k and prunes the global model: in each layer the share p_k of filters of least L1
    client   trains what is left
    server   adds the residual, that is the pruned weights of the global model (R2SP), and averages the models
    reward   of client k's choice:  (L before - L) / (1 + |T_k - mean T| / mean T),   L the cohort's mean training loss

Deviations:

- The paper's bandit divides a continuous range of ratios; here there are the ``ratios`` given, each tried once by each client, then
  the one of the largest discounted mean + exploration sqrt(ln(all tries) / tries) (UCB).
- T_k is not the clock's but a model's: n_k (1 - p_k) / speed_k, so that a run is the same wherever it is computed and however often
  it is resumed. The paper divides by |T_k - mean T| alone, which may be 0; here 1 is added to its share of the mean.
- The pruned model is sent as a masked one: see :mod:`raydfl.methods._pruning` for what that does and does not mean.
- Means are weighted by examples, so that with ``ratios: [0]`` it is FedAvg.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, cast

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.types import BuiltModels, Client, Metrics, Ratio, State, Task, Update
from raydfl.methods._masking import PruningMethod
from raydfl.methods._profiles import read_number
from raydfl.methods._pruning import (
    MASK,
    find_prunable_layers,
    make_masks,
    map_prunable_tensors,
    recover_pruned,
)
from raydfl.training import Step

_RATIO, _PRUNED, _BANDIT, _LOSS, _SPEEDS = "ratio", "pruned", "bandit", "loss", "speeds"

Share = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class FedMP(PruningMethod):
    """Pruning ratios that the server learns to choose."""

    ratios: Annotated[
        tuple[Share, ...], Field(min_length=1, description="pruning ratios that the server chooses from; [0] is FedAvg")
    ] = (0.0, 0.2, 0.4, 0.6, 0.8)
    exploration: Annotated[
        float, Field(ge=0, description="how much a ratio is favoured that was seldom tried; 0: the best so far")
    ] = 0.1
    discount: Annotated[
        float,
        Field(gt=0, le=1, description="what an earlier reward counts after each further one; 1: as much as the last"),
    ] = 0.9
    speed_from: Annotated[
        str | None, Field(description="name in the clients' profile that says how fast each is; null: all alike")
    ] = None

    @property
    def prunes(self) -> bool:
        """True where any client may prune."""
        return max(self.ratios) > 0

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """FedAvg's state, and what the bandit knows: nothing.

        Raises:
            ConfigError: there is nothing to prune, or a client's speed is no number above 0.
        """
        state = super().init(clients, models, rng)
        if not self.prunes:
            return state
        extra: dict[str, Any] = {**state.extra, _BANDIT: {}, _LOSS: None}
        extra[_PRUNED] = map_prunable_tensors(models, self.fixed, self.prune)
        if self.speed_from is not None:
            extra[_SPEEDS] = {client.id: self._speed(client, self.speed_from) for client in clients}
        return dataclasses.replace(state, extra=extra)

    def _speed(self, client: Client, column: str) -> float:
        who = f"client {client.id!r}"
        return read_number(client.profile, column, "speed_from", "above 0", lambda speed: 0 < speed < math.inf, who)

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Choose a ratio for each client of the cohort."""
        tasks = super().plan(state, clients, rng, cohort)
        if not self.prunes:
            return tasks
        known = state.extra[_BANDIT]
        return [
            dataclasses.replace(task, options={_RATIO: self.ratios[self._choice(known.get(task.client_id, {}))]})
            for task in tasks
        ]

    def _choice(self, rewards: Mapping[str, Sequence[float]]) -> int:
        """Return the position of the ratio to try: of the client's rewards by position, the discounted number and sum of each."""
        bounds: list[float] = []
        tries = sum(number for number, _ in rewards.values())
        for position in range(len(self.ratios)):
            number, total = rewards.get(str(position), (0.0, 0.0))
            if number == 0:
                return position
            bounds.append(total / number + self.exploration * math.sqrt(math.log(max(tries, 1.0)) / number))
        return int(np.argmax(bounds))

    def local(self, step: Step) -> Update:
        """Prune as the server chose, train, and send what is left with the masks."""
        if not self.prunes:
            return super().local(step)
        layers = find_prunable_layers(step.models, step.fixed, self.prune)
        masks = make_masks(layers, step.parameters(), float(step.options[_RATIO]), "uniform")
        metrics, tensors = self.train_masked(step, layers, masks)
        return step.update(metrics, tensors={**tensors, **{MASK + name: mask for name, mask in masks.items()}})

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Add the residuals, average, and reward each client's choice."""
        if not self.prunes:
            return super().aggregate(state, updates, rng)
        came: dict[str, tuple[float, float, float]] = {}
        whole = self._recovered(state, updates, came)
        new, report = super().aggregate(state, whole, rng)
        losses = [(loss, examples) for loss, examples, _ in came.values() if math.isfinite(loss)]
        examples = sum(number for _, number in losses)
        if not examples:
            return new, report
        mean_loss = sum(loss * number for loss, number in losses) / examples
        extra = {**new.extra, _LOSS: mean_loss}
        before = state.extra[_LOSS]
        if before is not None:
            extra[_BANDIT] = self._rewarded(state, before - mean_loss, came)
        mean = Ratio(sum(ratio for _, _, ratio in came.values()), len(came))
        return dataclasses.replace(new, extra=extra), {**report, "fedmp/ratio": mean}

    def _recovered(
        self, state: State, updates: Iterable[Update], came: dict[str, tuple[float, float, float]]
    ) -> Iterator[Update]:
        """Yield whole models; ``came`` has afterwards each client's training loss, examples and ratio."""
        chosen = state.extra[_BANDIT]
        for update in updates:
            loss, ratio = update.metrics.get("loss"), self.ratios[self._choice(chosen.get(update.client_id, {}))]
            value = loss.value if isinstance(loss, Ratio) else math.nan
            came[update.client_id] = value, cast(float, update.weight), ratio
            yield recover_pruned(update, state.tensors[update.key], state.extra[_PRUNED])

    def _rewarded(
        self, state: State, progress: float, came: Mapping[str, tuple[float, float, float]]
    ) -> dict[str, dict[str, list[float]]]:
        """Return what the bandit knows after a round in which the loss fell by ``progress``."""
        speeds = state.extra.get(_SPEEDS, {})
        times = {client: n * (1 - ratio) / speeds.get(client, 1.0) for client, (_, n, ratio) in came.items()}
        mean = sum(times.values()) / len(times)
        found = {client: dict(rewards) for client, rewards in state.extra[_BANDIT].items()}
        for client, (_, _, ratio) in came.items():
            reward = progress / (1 + (abs(times[client] - mean) / mean if mean > 0 else 0.0))
            earlier = {arm: [self.discount * value for value in known] for arm, known in found.get(client, {}).items()}
            arm = str(self.ratios.index(ratio))
            number, total = earlier.get(arm, [0.0, 0.0])
            found[client] = {**earlier, arm: [number + 1, total + reward]}
        return found
