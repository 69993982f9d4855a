"""fit() and predict(): the only training and inference loops of the project.

A method's code calls them for one client. Where the engine carries out several clients side by side (together/lockstep.py), calls
that are alike are computed for all of those clients at once (together/executor.py); else a client is computed by itself, here.
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
from raydfl.training.fates import begin_training
from raydfl.training.moments import begin_with_kept, keep
from raydfl.training.optimiser import Optimiser, torch_optimiser
from raydfl.training.plan import Plan, order_of
from raydfl.training.precision import GradientScale, computing_in
from raydfl.training.randomness import fit_seed, seed_of_step, step_randomness
from raydfl.training.step import Loss, Step, computed
from raydfl.training.together import lockstep as together
from raydfl.training.together import signature as alike
from raydfl.training.together.batches import StackedBatches, batch_of_first
from raydfl.training.together.executor import fit_together, predict_together


def make_optimiser(step: Step, models: tuple[str, ...] = ()) -> torch.optim.Optimizer:
    """Return the configured optimiser over the named models' parameters (all by default), learning rates decayed to this round."""
    trained = _trainable(step, models or tuple(step.models))
    parameters = {name: [*own.values()] for name, own in trained.items()}
    return torch_optimiser(parameters, step.training.optimiser, step.round_index)


def _trainable(step: Step, models: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Return by model the parameters that train, by flat name."""
    _check_fixed(step, models)
    return {name: {key: p for key, p in step.named_parameters(name).items() if p.requires_grad} for name in models}


def _check_fixed(step: Step, models: Sequence[str]) -> None:
    """Refuse to train what is fixed: the next client would not see it.

    Raises:
        ConfigError: naming one such parameter.
    """
    for name in models if step.fixed else ():
        for key, parameter in step.models[name].named_parameters():
            if parameter.requires_grad and f"{name}/{key}" in step.fixed:
                raise ConfigError(
                    f"{key!r} of model {name!r} is to train, but it did not when the model was built, so it is fixed: neither sent "
                    f"nor kept; let the method's fixed(name, trains) return False for it"
                )


def fit(
    step: Step,
    *losses: Loss,
    models: tuple[str, ...] = (),
    epochs: int | None = None,
    batches: Plan | None = None,
    lr: float | Mapping[str, float] | None = None,
) -> Metrics:
    """Train on the client's training data, batch by batch.

    For each batch, each loss in turn is computed with the parameters as they are then and followed by one optimiser step; a
    parameter that a loss does not depend on does not move.

    Args:
        losses: functions of (step, batch) that return a scalar, normally ending in ``batch.mean(...)``; or that and a mapping of
            reports, ``{"accepted": (sum, count)}``, numbers or scalar tensors. They may be called for several clients at once:
            raydfl/training/together/executor.py has the rules under which that is possible.
        models: names of the models to train; all by default.
        epochs: passes over the data; ``train.local_epochs`` by default.
        batches: which examples of which pools each batch has; by default ``train.batch_size`` of ``step.data.train``.
        lr: this client's learning rate, in place of ``train.optimiser.lr`` and ``.models``; or by name those of some models. It is
            decayed like these, and may differ between clients.

    Returns:
        ``loss``: the mean per example over all batches (the sum over losses, if there are several); ``steps``: optimiser steps,
        fewer than asked for where ``train.deadline`` ended the training; and what the losses reported, added up over all batches.

    Raises:
        DeadlineExceededError: this client is left out of the round for its deadline; let it pass.
        ConfigError: ``lr`` is negative or not finite, or names a model that is not trained.
    """
    models, epochs = models or tuple(step.models), step.training.local_epochs if epochs is None else epochs
    rates = _checked_rates(lr, models)
    with step.clock.waiting():
        return cast(Metrics, together.answer(_Fit(step, losses, models, epochs, batches, rates)))


def _checked_rates(lr: float | Mapping[str, float] | None, models: Sequence[str]) -> Mapping[str, float]:
    """Return the learning rates by model that are not the configuration's."""
    rates = lr if isinstance(lr, Mapping) else {} if lr is None else dict.fromkeys(models, lr)
    for name, rate in rates.items():
        if name not in models:
            raise ConfigError(f"fit(lr=...): no model {name!r} is trained here; {nearest(name, models)}")
        if not (isinstance(rate, (int, float)) and math.isfinite(rate) and rate >= 0):
            raise ConfigError(f"fit(lr={rate!r}): a learning rate is a finite number, and not negative")
    return rates


def predict(step: Step, model: str, examples: Examples, batch_size: int = 64) -> Tensor:
    """Return logits float32 [examples, classes] on the CPU, of the named model in evaluation mode.

    Only the view that the model reads is read from the disk.
    """
    if isinstance(examples, Examples):
        examples = examples.select_view(view_of(step.models[model]))
    with step.clock.waiting():
        return cast(Tensor, together.answer(_Predict(step, model, examples, batch_size)))


def _common(step: Step) -> Hashable:
    """Return what clients must have in common to be computed together, whatever is computed."""
    return (
        step.device,
        step.phase,
        step.round_index,
        id(step.training),
        alike.identity(step.shared),
        step.client.models,
    )


def _batches(step: Step, data: Examples, plan: Plan | None, epochs: int, seed: int) -> Iterator[Batch]:
    """Yield the batches of all epochs; on a GPU no batch is waited for.

    Args:
        seed: of the fit.
    """
    done = 0
    for _ in range(epochs):
        if not isinstance(data, Examples):  # a user's own
            yield from data.batches(step.training.batch_size, step.rng, step.device)
            continue
        order = order_of(step, data, plan)
        if step.device.type == "cpu":
            if data.changed:
                yield from _transformed(data, order, done, seed)
            else:
                yield from (data.batch(index) for index in order)
        elif order:
            batches = StackedBatches([data], [order], step.device, [seed], done)
            for number in range(len(batches)):
                yield batch_of_first(batches.batch(number))
        done += len(order)


_AT_ONCE = 64
"""Examples that are transformed at once, on the CPU: for one batch the many small steps take longer than the numbers."""


def _transformed(data: Examples, order: Sequence[np.ndarray], first: int, seed: int) -> Iterator[Batch]:
    """Yield batches of examples that transforms change, several made at once.

    Args:
        order: positions of each batch.
        first: number of the first batch in the fit.
        seed: of the fit.
    """
    at_once = max(1, _AT_ONCE // max(map(len, order), default=1))
    for start in range(0, len(order), at_once):
        part = order[start : start + at_once]
        drawn = [data.draw(index, seed, first + start + number) for number, index in enumerate(part)]
        joined = {
            view: {name: np.concatenate([each[view][name] for each in drawn]) for name in drawn[0][view]}
            for view in drawn[0]
        }
        tensors = data.batch(np.concatenate(part), drawn=joined).tensors()
        place = 0
        for index in part:
            yield _trimmed(
                Batch.from_tensors({name: tensor[place : place + len(index)] for name, tensor in tensors.items()})
            )
            place += len(index)


def _trimmed(batch: Batch) -> Batch:
    """Return a batch without frames that are padding in all of its examples, where lengths differ."""
    views = dict(batch.views)
    for name, lengths in batch.view_lengths.items():
        views[name] = views[name][:, : max(1, int(lengths.max()))].contiguous()
    return dataclasses.replace(batch, views=views)


@contextlib.contextmanager
def _computing(steps: Sequence[Step]) -> Iterator[None]:
    """Something is computed for all of these clients."""
    with contextlib.ExitStack() as clocks:
        for step in steps:
            clocks.enter_context(step.clock.computing())
        yield


_DIFFERENT_LOSSES = (
    "the losses given to fit() captured something that differs between clients, or that can be changed (a tensor, a list, an "
    "object); put tensors into step.state, and what is small and equal for all into step.options"
)


class _Fit(FitCall):
    """A call of fit."""

    def key(self) -> Hashable | None:
        step, data = self.step, self.data()
        if not isinstance(data, Examples) or len(data) == 0 or not self.losses or self.epochs < 1:
            return None
        return (
            _Fit,
            _common(step),
            alike.identity(dict(step.options)),
            tuple(step.received),
            alike.architecture(step.models),
            alike.identity(self.losses),
            tuple(self.models),
            self.epochs,
            alike.identity(self.plan),
            tuple(self.rates),
            data.form,
        )

    def several(self, others: Sequence[_Fit]) -> list[Metrics]:
        steps = [self.step, *(other.step for other in others)]
        try:
            with _computing(steps):
                answers = fit_together([self, *others])
        except together.NotBatchableError as error:
            for step in steps:
                step.execution.looped_because = str(error)
            raise
        for step in steps:
            step.execution.together, step.execution.looped_because = len(steps), ""
        return answers

    def apart(self, others: Sequence[_Fit | _Predict]) -> None:
        calls = [self, *(other for other in others if isinstance(other, _Fit))]
        plain = [dataclasses.replace(call, losses=self.losses).key() for call in calls]
        if len(calls) > 1 and plain[0] is not None and len(set(plain)) == 1:  # else they have other work to do
            for call in calls:
                call.step.execution.looped_because = _DIFFERENT_LOSSES

    def alone(self) -> Metrics:
        with self.step.clock.computing():
            return self._alone()

    def _alone(self) -> Metrics:
        step, losses = self.step, self.losses
        step.execution.together = 1
        parameters = _trainable(step, self.models)
        trained = [parameter for those in parameters.values() for parameter in those.values()]
        lists = {name: [*those.values()] for name, those in parameters.items()}
        optimiser = Optimiser(lists, step.training.optimiser, step.round_index, self.rates)
        named = {name: parameter for those in parameters.values() for name, parameter in those.items()}
        moments = begin_with_kept(optimiser, named, [step])
        clip_norm, precision = step.training.optimiser.clip_norm, step.training.precision
        scale = GradientScale((), step.device) if precision == "float16" else None

        def clip() -> None:
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(trained, clip_norm)

        known = step.execution.networks_of(step.models)
        if step.fixed or known is None or not all(layer.training for layer in known.layers):
            begin_training(step.models.items(), step.fixed)
        seed_of_fit = fit_seed(step)
        seed = torch.tensor(seed_of_fit).to(step.device)

        def compute(number: int, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            optimiser.forget_gradients()
            with step_randomness(seed_of_step(seed, number)), computing_in(precision, step.device):
                value, reports = computed(losses[number % len(losses)], step, batch)
            (value if scale is None else value * scale.scale).backward()  # type: ignore[no-untyped-call]
            return value.detach(), reports

        values: list[Tensor] = []  # read at the end only: on a GPU reading one would wait for it
        sizes: list[int] = []
        sums: dict[str, Tensor] = {}
        for batch in _batches(step, self.data(), self.plan, self.epochs, seed_of_fit):
            if step.clock.expired:
                step.clock.cut = True
                break
            for _ in losses:
                value, reports = compute(len(values), batch)
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
        optimiser.forget_gradients()
        keep(moments, step.moments)
        if not values:
            return {"loss": Ratio(0.0, 0), "steps": Ratio(0, 1)}
        total = sum(value * size for value, size in zip(torch.stack(values).tolist(), sizes, strict=True))
        reported = {name: Ratio(*report.tolist()) for name, report in sums.items()}
        return {"loss": Ratio(total, sum(sizes) / len(losses)), "steps": Ratio(len(values), 1), **reported}


@dataclass(frozen=True, slots=True, eq=False)
class _Predict:
    """A call of predict."""

    step: Step
    model: str
    examples: Examples
    batch_size: int

    def key(self) -> Hashable | None:
        examples = self.examples
        if not isinstance(examples, Examples) or len(examples) == 0:
            return None
        network = alike.architecture({self.model: self.step.models[self.model]})
        return (
            _Predict,
            _common(self.step),
            network,
            self.model,
            self.batch_size,
            examples.form,
        )

    def several(self, others: Sequence[_Predict]) -> list[Tensor]:
        calls = (self, *others)
        steps = [call.step for call in calls]
        with _computing(steps):
            return predict_together(steps, self.model, [call.examples for call in calls], self.batch_size)

    def apart(self, others: Sequence[_Fit | _Predict]) -> None: ...

    def alone(self) -> Tensor:
        with self.step.clock.computing():
            return self._alone()

    @torch.no_grad()
    def _alone(self) -> Tensor:
        step = self.step
        network = step.models[self.model]
        network.eval()
        batches = self.examples.batches(self.batch_size, None, step.device)
        with computing_in(step.training.precision, step.device):
            parts = [step.forward(self.model, batch).cpu() for batch in batches]
        if not parts:
            return torch.zeros((0, next(spec.width for spec in step.client.models if spec.name == self.model)))
        return torch.cat(parts)
