"""FedMP: a bandit at the server chooses each client's pruning ratio, and the server restores the pruned weights.

Z. Jiang, Y. Xu, H. Xu, Z. Wang, C. Qiao, Y. Zhao, FedMP: Federated Learning through Adaptive Model Pruning in Heterogeneous Edge
Computing, ICDE 2022. A round:

    server   chooses a ratio p_k for each client k, and prunes the fraction p_k of each layer's filters with the smallest L1 norm
    client   trains the remaining filters
    server   adds the residual, the pruned weights of the global model (R2SP), and averages the models
    reward   of client k's ratio:  (L before - L) / (1 + |T_k - mean T| / mean T),   L the cohort's mean training loss

Deviations:

- The paper's bandit divides a continuous range of ratios. Here each client tries every element of ``ratios`` once, and then the
  ratio with the largest discounted mean + exploration sqrt(ln(all tries) / tries) (UCB).
- T_k is not measured but modelled, n_k (1 - p_k) / speed_k, so that results do not depend on the machine or on a resume. The
  paper divides by |T_k - mean T| alone, which may be 0. Here 1 is added to its ratio to the mean.
- The pruned model is sent as a masked model. Masks save neither time nor memory nor bytes (docs/fedapta.md#masks-save-nothing).
- Means are weighted by examples, so that ``ratios: [0]`` is FedAvg.

Each round records ``fedmp/ratio``, the cohort's mean ratio.

    raydfl run jobs/tiny.yaml run.name=fedmp method=fedmp method.ratios='[0.0, 0.5]'
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, cast

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.options import OURS
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
    """FedAvg with pruning ratios chosen by a bandit."""

    reads_metrics: ClassVar[bool] = True

    ratios: Annotated[
        tuple[Share, ...], Field(min_length=1, description="Pruning ratios to choose from. [0] is FedAvg."), OURS
    ] = (0.0, 0.2, 0.4, 0.6, 0.8)
    exploration: Annotated[
        float, Field(ge=0, description="Bonus of rarely tried ratios. 0: always choose the best ratio so far."), OURS
    ] = 0.1
    discount: Annotated[
        float,
        Field(gt=0, le=1, description="Decay of earlier rewards with each new reward. 1: all rewards count equally."),
        OURS,
    ] = 0.9
    speed_from: Annotated[
        str | None, Field(description="Column of the clients' profile with their speeds. null: equal speeds."), OURS
    ] = None

    @property
    def prunes(self) -> bool:
        """True if any ratio is above 0."""
        return max(self.ratios) > 0

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return FedAvg's state, and a bandit without rewards.

        Raises:
            ConfigError: No network has a prunable layer, or a client's speed is not a number above 0.
        """
        state = super().init(clients, models, rng)
        if not self.prunes:
            return state
        extra: dict[str, Any] = {**state.extra, _BANDIT: {}, _LOSS: None}
        extra[_PRUNED] = map_prunable_tensors(models, self.fixed, self.prune)
        if self.speed_from is not None:
            extra[_SPEEDS] = {client.id: self._read_speed(client, self.speed_from) for client in clients}
        return dataclasses.replace(state, extra=extra)

    def _read_speed(self, client: Client, column: str) -> float:
        owner = f"client {client.id!r}"
        return read_number(client.profile, column, "speed_from", "above 0", lambda speed: 0 < speed < math.inf, owner)

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Choose a ratio for each client of the cohort."""
        tasks = super().plan(state, clients, rng, cohort)
        if not self.prunes:
            return tasks
        rewards = state.extra[_BANDIT]
        return [
            dataclasses.replace(
                task, options={_RATIO: self.ratios[self._choose_ratio(rewards.get(task.client_id, {}))]}
            )
            for task in tasks
        ]

    def _choose_ratio(self, rewards: Mapping[str, Sequence[float]]) -> int:
        """Return the position of a client's next ratio: an untried ratio, or else the largest upper confidence bound.

        Args:
            rewards: Discounted number and sum of the client's rewards, by the ratio's position.
        """
        bounds: list[float] = []
        tries = sum(number for number, _ in rewards.values())
        for position in range(len(self.ratios)):
            number, total = rewards.get(str(position), (0.0, 0.0))
            if number == 0:
                return position
            bounds.append(total / number + self.exploration * math.sqrt(math.log(max(tries, 1.0)) / number))
        return int(np.argmax(bounds))

    def local(self, step: Step) -> Update:
        """Prune by the chosen ratio, train, and send the model with the masks."""
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
        outcomes: dict[str, tuple[float, float, float]] = {}
        new, report = super().aggregate(state, self._recover(state, updates, outcomes), rng)
        losses = [(loss, examples) for loss, examples, _ in outcomes.values() if math.isfinite(loss)]
        examples = sum(number for _, number in losses)
        if not examples:
            return new, report
        mean_loss = sum(loss * number for loss, number in losses) / examples
        extra = {**new.extra, _LOSS: mean_loss}
        before = state.extra[_LOSS]
        if before is not None:  # The first round has no loss to compare with, so it gives no rewards.
            extra[_BANDIT] = self._compute_rewards(state, before - mean_loss, outcomes)
        mean = Ratio(sum(ratio for _, _, ratio in outcomes.values()), len(outcomes))
        return dataclasses.replace(new, extra=extra), {**report, "fedmp/ratio": mean}

    def _recover(
        self, state: State, updates: Iterable[Update], outcomes: dict[str, tuple[float, float, float]]
    ) -> Iterator[Update]:
        """Yield complete models, and write each client's training loss, examples and ratio to ``outcomes``."""
        rewards = state.extra[_BANDIT]
        for update in updates:
            loss, ratio = update.metrics.get("loss"), self.ratios[self._choose_ratio(rewards.get(update.client_id, {}))]
            value = loss.value if isinstance(loss, Ratio) else math.nan
            outcomes[update.client_id] = value, cast(float, update.weight), ratio
            yield recover_pruned(update, state.tensors[update.key], state.extra[_PRUNED])

    def _compute_rewards(
        self, state: State, progress: float, outcomes: Mapping[str, tuple[float, float, float]]
    ) -> dict[str, dict[str, list[float]]]:
        """Return the bandit's rewards after a round that lowered the loss by ``progress``."""
        speeds = state.extra.get(_SPEEDS, {})
        times = {client: n * (1 - ratio) / speeds.get(client, 1.0) for client, (_, n, ratio) in outcomes.items()}
        mean = sum(times.values()) / len(times)
        rewards = {client: dict(arms) for client, arms in state.extra[_BANDIT].items()}
        for client, (_, _, ratio) in outcomes.items():
            reward = progress / (1 + (abs(times[client] - mean) / mean if mean > 0 else 0.0))
            earlier = {arm: [self.discount * value for value in sums] for arm, sums in rewards.get(client, {}).items()}
            arm = str(self.ratios.index(ratio))
            number, total = earlier.get(arm, [0.0, 0.0])
            rewards[client] = {**earlier, arm: [number + 1, total + reward]}
        return rewards
