"""fit() and predict(): the only training and inference loops of the project.

A method's code calls them for one client. If the engine runs several clients in lockstep (together/lockstep.py), equal calls are
computed in one batch (together/executor.py). Otherwise the loops below compute each client.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.types import Batch, Metrics, Ratio, view_of
from raydfl.data import Examples
from raydfl.training.call import FitCall
from raydfl.training.moments import restore_moments, save_moments
from raydfl.training.optimiser import Optimiser
from raydfl.training.ownership import set_training_mode
from raydfl.training.plan import Plan, draw_order, find_weights
from raydfl.training.precision import GradientScale, autocast
from raydfl.training.private import fit_private
from raydfl.training.randomness import derive_step_seed, fit_seed, use_step_seed
from raydfl.training.step import Loss, Step, compute_loss
from raydfl.training.together import lockstep, signature
from raydfl.training.together.batches import StackedBatches, select_first, trim_padding
from raydfl.training.together.executor import fit_batched, predict_batched


def _list_trainable(step: Step, models: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Return the trainable parameters by model and flat name."""
    _check_fixed(step, models)
    return {name: {key: p for key, p in step.named_parameters(name).items() if p.requires_grad} for name in models}


def _check_fixed(step: Step, models: Sequence[str]) -> None:
    """Check that no fixed parameter is trainable. Its change would be lost after this client.

    Raises:
        ConfigError: a fixed parameter requires gradients.
    """
    for name in models if step.fixed else ():
        for key, parameter in step.models[name].named_parameters():
            if parameter.requires_grad and f"{name}/{key}" in step.fixed:
                raise ConfigError(
                    f"{key!r} of model {name!r} requires gradients, but is fixed (neither sent nor kept), because it was frozen "
                    f"when the model was built. Build the model with a trainable parameter, or set fixed = None in the method."
                )


def fit(
    step: Step,
    *losses: Loss,
    models: tuple[str, ...] = (),
    epochs: int | None = None,
    batches: Plan | None = None,
    lr: float | Mapping[str, float] | None = None,
) -> Metrics:
    """Train models on the client's training data.

    Each batch gets one optimiser step for each loss, in order, with gradients at the current parameters. Parameters without
    an influence on a loss do not change in its step.

    Args:
        losses: functions of (step, batch) that return a scalar, normally from ``batch.mean(...)``, or a scalar and a mapping of
            reports, ``{"accepted": (sum, count)}``, with numbers or scalar tensors. One call may serve several clients:
            raydfl/training/together/executor.py lists the rules for such losses.
        models: names of the models to train. Default: all.
        epochs: passes over the data. Default: ``train.local_epochs``.
        batches: composition of the batches. Default: ``train.batch_size`` examples of ``step.data.train``.
        lr: learning rate of this client, for all models or by model name. It overrides ``train.optimiser.lr`` and ``.models``,
            is decayed in the same way, and may differ between clients.

    Returns:
        ``loss``: mean per example over all batches, summed over losses. ``steps``: number of optimiser steps, fewer if
        ``train.deadline`` cut the training. Reports of the losses, summed over all batches.

    Raises:
        DeadlineExceededError: the client is left out of the round for its deadline. Do not catch it.
        ConfigError: ``lr`` is negative or not finite, or names a model that is not trained.
    """
    models, epochs = models or tuple(step.models), step.training.local_epochs if epochs is None else epochs
    rates = _resolve_rates(lr, models)
    with step.clock.pause():
        metrics = cast(Metrics, lockstep.answer(_Fit(step, losses, models, epochs, batches, rates)))
    step.clock.examples.update(dict.fromkeys(models, int(cast(Ratio, metrics["loss"]).count)))
    return metrics


def _resolve_rates(lr: float | Mapping[str, float] | None, models: Sequence[str]) -> Mapping[str, float]:
    """Return the overridden learning rates by model."""
    rates = lr if isinstance(lr, Mapping) else {} if lr is None else dict.fromkeys(models, lr)
    for name, rate in rates.items():
        if name not in models:
            raise ConfigError(f"fit(lr=...): no model {name!r} is trained here. {nearest(name, models)}")
        if not (isinstance(rate, (int, float)) and math.isfinite(rate) and rate >= 0):
            raise ConfigError(f"fit(lr={rate!r}): a learning rate must be finite and not negative.")
    return rates


def predict(step: Step, model: str, examples: Examples, batch_size: int = 64) -> Tensor:
    """Predict examples with a model in evaluation mode.

    Args:
        step: step of the client.
        model: name of the model.
        examples: examples to predict. Only the model's view is read from disk.
        batch_size: examples in a batch.

    Returns:
        Logits float32 [examples, classes], on the CPU.
    """
    if isinstance(examples, Examples):
        examples = examples.select_view(view_of(step.models[model]))
    with step.clock.pause():
        return cast(Tensor, lockstep.answer(_Predict(step, model, examples, batch_size)))


def _make_common_key(step: Step) -> Hashable:
    """Return the common part of the keys of ``fit`` and ``predict``."""
    return (
        step.device,
        step.phase,
        step.round_index,
        id(step.training),
        signature.identity(step.shared),
        step.client.models,
    )


def _batches(step: Step, data: Examples, plan: Plan | None, epochs: int, seed: int) -> Iterator[Batch]:
    """Yield the batches of all epochs, without synchronising a GPU.

    Args:
        step: step of the client.
        data: training examples.
        plan: composition of the batches, or ``None``.
        epochs: passes over the data.
        seed: seed of the fit, for the transforms.
    """
    done = 0
    for _ in range(epochs):
        if not isinstance(data, Examples):  # a user's class
            yield from data.batches(step.training.batch_size, step.rng, step.device)
            continue
        order = draw_order(step, data, plan)
        weights = find_weights(step, data)
        if step.device.type == "cpu":
            made = _transform_batches(data, order, done, seed) if data.changed else map(data.batch, order)
            for batch, index in zip(made, order, strict=True):
                yield batch if weights is None else dataclasses.replace(batch, weight=torch.from_numpy(weights[index]))
        elif order:
            batches = StackedBatches([data], [order], step.device, [seed], done, None if weights is None else [weights])
            for number in range(len(batches)):
                yield select_first(batches.batch(number))
        done += len(order)


_EXAMPLES_AT_ONCE = 64
"""Examples transformed at once on the CPU. For a single small batch, the overhead of the operations exceeds the arithmetic."""


def _transform_batches(data: Examples, order: Sequence[np.ndarray], first: int, seed: int) -> Iterator[Batch]:
    """Yield transformed batches, several computed at once.

    Args:
        data: training examples.
        order: positions of each batch.
        first: number of the first batch in the fit.
        seed: seed of the fit.
    """
    at_once = max(1, _EXAMPLES_AT_ONCE // max(map(len, order), default=1))
    for start in range(0, len(order), at_once):
        part = order[start : start + at_once]
        drawn = [data.draw(index, seed, first + start + number) for number, index in enumerate(part)]
        joined = {
            view: {name: np.concatenate([values[view][name] for values in drawn]) for name in drawn[0][view]}
            for view in drawn[0]
        }
        tensors = data.batch(np.concatenate(part), drawn=joined).tensors()
        start_row = 0
        for index in part:
            yield trim_padding(
                Batch.from_tensors(
                    {name: tensor[start_row : start_row + len(index)] for name, tensor in tensors.items()}
                )
            )
            start_row += len(index)


@contextlib.contextmanager
def _run_clocks(steps: Sequence[Step]) -> Iterator[None]:
    """Run the clocks of all clients of a batched computation."""
    with contextlib.ExitStack() as clocks:
        for step in steps:
            clocks.enter_context(step.clock.run())
        yield


_DIFFERENT_LOSSES = (
    "the losses given to fit() captured values that differ between clients, or are mutable (a tensor, a list, an object). "
    "Put tensors into step.state, and small values equal for all clients into step.options."
)


class _Fit(FitCall):
    """A client's call of ``fit`` in lockstep."""

    def key(self) -> Hashable | None:
        step = self.step
        if step.execution.private is not None:  # its batch is its examples
            return None
        data = self.select_examples()
        if not isinstance(data, Examples) or len(data) == 0 or not self.losses or self.epochs < 1:
            return None
        return (
            _Fit,
            _make_common_key(step),
            signature.identity(dict(step.options)),
            tuple(step.received),
            signature.architecture(step.models),
            signature.identity(self.losses),
            tuple(self.models),
            self.epochs,
            signature.identity(self.plan),
            tuple(self.rates),
            data.form,
        )

    def compute_batched(self, others: Sequence[_Fit]) -> list[Metrics]:
        steps = [self.step, *(call.step for call in others)]
        try:
            with _run_clocks(steps):
                answers = fit_batched([self, *others])
        except lockstep.NotBatchableError as error:
            for step in steps:
                step.execution.looped_because = str(error)
            raise
        for step in steps:
            step.execution.together, step.execution.looped_because = len(steps), ""
        return answers

    def note_unequal_keys(self, others: Sequence[_Fit | _Predict]) -> None:
        calls = [self, *(call for call in others if isinstance(call, _Fit))]
        keys = [dataclasses.replace(call, losses=self.losses).key() for call in calls]
        if len(calls) > 1 and keys[0] is not None and len(set(keys)) == 1:  # the calls differ only in their losses
            for call in calls:
                call.step.execution.looped_because = _DIFFERENT_LOSSES

    def compute(self) -> Metrics:
        with self.step.clock.run():
            return self._compute()

    def _compute(self) -> Metrics:
        step, losses = self.step, self.losses
        step.execution.together = 1
        trainable = _list_trainable(step, self.models)
        if step.execution.private is not None:
            return fit_private(self, trainable)
        by_name = {name: parameter for tensors in trainable.values() for name, parameter in tensors.items()}
        parameters = [parameter for tensors in trainable.values() for parameter in tensors.values()]
        lists = {name: [*tensors.values()] for name, tensors in trainable.items()}
        optimiser = Optimiser(lists, step.training.optimiser, step.round_index, self.rates)
        moments = restore_moments(optimiser, by_name, [step])
        clip_norm, precision = step.training.optimiser.clip_norm, step.training.precision
        scale = GradientScale((), step.device) if precision == "float16" else None

        def clip() -> None:
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip_norm)

        networks = step.execution.find_networks(step.models)
        # Setting the mode walks all layers, a noticeable share of a small network's step: skip it if it changes nothing.
        if step.fixed or networks is None or not all(layer.training for layer in networks.layers):
            set_training_mode(step.models.items(), step.fixed)
        seed_of_fit = fit_seed(step)
        seed = torch.tensor(seed_of_fit).to(step.device)

        def backpropagate(number: int, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            optimiser.clear_gradients()
            with use_step_seed(derive_step_seed(seed, number)), autocast(precision, step.device):
                value, reports = compute_loss(losses[number % len(losses)], step, batch)
            (value if scale is None else value * scale.scale).backward()  # type: ignore[no-untyped-call]
            return value.detach(), reports

        most = step.clock.most_batches
        values: list[Tensor] = []  # read at the end only: reading a value synchronises a GPU
        sizes: list[int] = []
        sums: dict[str, Tensor] = {}
        for batch in _batches(step, self.select_examples(), self.plan, self.epochs, seed_of_fit):
            if step.clock.expired or (most is not None and len(values) == most * len(losses)):
                step.clock.cut = True
                break
            for _ in losses:
                value, reports = backpropagate(len(values), batch)
                for name, report in reports.items():
                    sums[name] = sums[name] + report if name in sums else report.double()
                if scale is None:
                    clip()
                    optimiser.advance()
                else:
                    scale.advance(optimiser, clip)
                values.append(value)
                sizes.append(len(batch.y))
                step.clock.steps += 1
        optimiser.clear_gradients()
        save_moments(moments, step.moments)
        if not values:
            return {"loss": Ratio(0.0, 0), "steps": Ratio(0, 1)}
        # Each loss is a mean over its batch, and the last batch may be smaller.
        total = sum(value * size for value, size in zip(torch.stack(values).tolist(), sizes, strict=True))
        reported = {name: Ratio(*report.tolist()) for name, report in sums.items()}
        return {"loss": Ratio(total, sum(sizes) / len(losses)), "steps": Ratio(len(values), 1), **reported}


@dataclass(frozen=True, slots=True, eq=False)
class _Predict:
    """A client's call of ``predict`` in lockstep."""

    step: Step
    model: str
    examples: Examples
    batch_size: int

    def key(self) -> Hashable | None:
        examples = self.examples
        if not isinstance(examples, Examples) or len(examples) == 0:
            return None
        network = signature.architecture({self.model: self.step.models[self.model]})
        return (
            _Predict,
            _make_common_key(self.step),
            network,
            self.model,
            self.batch_size,
            examples.form,
        )

    def compute_batched(self, others: Sequence[_Predict]) -> list[Tensor]:
        calls = (self, *others)
        steps = [call.step for call in calls]
        with _run_clocks(steps):
            return predict_batched(steps, self.model, [call.examples for call in calls], self.batch_size)

    def note_unequal_keys(self, others: Sequence[_Fit | _Predict]) -> None: ...

    def compute(self) -> Tensor:
        with self.step.clock.run():
            return self._compute()

    @torch.no_grad()
    def _compute(self) -> Tensor:
        step = self.step
        network = step.models[self.model]
        network.eval()
        batches = self.examples.batches(self.batch_size, None, step.device)
        with autocast(step.training.precision, step.device):
            parts = [step.forward(self.model, batch).cpu() for batch in batches]
        if not parts:
            return torch.zeros((0, next(spec.width for spec in step.client.models if spec.name == self.model)))
        return torch.cat(parts)
