"""Differentially private training by example: clipped gradients of single examples plus Gaussian noise.

M. Abadi, A. Chu, I. Goodfellow, H. B. McMahan, I. Mironov, K. Talwar, L. Zhang, Deep Learning with Differential Privacy, CCS 2016,
algorithm 1. Each step draws every example with probability batch / examples, independently:

    g = (sum of g_i min(1, clip / ||g_i||) + z) / batch,      z ~ N(0, (noise clip)^2 I)

g_i is the gradient of the loss of example i as a batch of its own, over all trained models as one vector. ``batch`` is the expected
number of examples, a constant. Leaving out any example moves the sum by at most ``clip``. The optimiser's moments, its weight decay
and all later steps depend on the data through g alone.

The gradients of all examples come from one batched computation: the network of the client is stacked once for each example, as the
networks of different clients are (:mod:`raydfl.training.together`). A loss without a batched form is computed example by example.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.types import Batch, Metrics, Ratio
from raydfl.data import Examples
from raydfl.training.call import FitCall
from raydfl.training.moments import restore_moments, save_moments
from raydfl.training.optimiser import Optimiser
from raydfl.training.ownership import set_training_mode
from raydfl.training.precision import autocast
from raydfl.training.randomness import use_step_seed
from raydfl.training.settings import PrivateSettings
from raydfl.training.step import compute_loss
from raydfl.training.together.batches import trim_padding
from raydfl.training.together.executor import check_kind, compute_with_sources, convert_failures, make_kind
from raydfl.training.together.lockstep import NotBatchableError
from raydfl.training.together.stack import StackedClients
from raydfl.training.withheld import REMEDY, PrivateTask

_MOST_EXAMPLES = 64
"""Largest number of examples in a computation of gradients."""
_MOST_ELEMENTS = 1 << 25
"""Largest number of elements of gradients computed at once, unless a single example has more."""


@dataclass(frozen=True, slots=True)
class ExampleGradients:
    """Gradients of single examples."""

    losses: Tensor
    """Loss of each example, float32 [examples]."""
    gradients: Mapping[str, Tensor]
    """Gradients [examples, ...] by the parameter's flat name."""
    reports: Mapping[str, Tensor]
    """Reports of the loss by name, [examples, 2]: sum and count."""

    def sum_clipped(self, clip: float) -> dict[str, Tensor]:
        """Clip the gradient of each example, and add them up in float64.

        An example whose gradient is not finite counts as an example without a gradient.

        Args:
            clip: Largest Euclidean norm of an example's gradient over all parameters.
        """
        flat = {name: gradient.flatten(1).double() for name, gradient in self.gradients.items()}
        squares = [gradient.square().sum(dim=1) for gradient in flat.values()]
        norms = torch.stack(squares).sum(dim=0).sqrt()
        finite = norms.isfinite()
        factors = torch.where(finite, (clip / norms).clamp(max=1.0), 0.0)
        if not bool(finite.all()):
            flat = {name: gradient.where(finite.unsqueeze(1), 0.0) for name, gradient in flat.items()}
        return {name: (factors @ flat[name]).view(self.gradients[name].shape[1:]) for name in flat}


def count_steps(examples: int, batch_size: int, epochs: int) -> int:
    """Count the private steps of a client in a round.

    Args:
        examples: Number of its training examples.
        batch_size: Expected number of examples in a step.
        epochs: Expected passes over its examples.
    """
    return epochs * math.ceil(examples / batch_size)


def fit_private(call: FitCall, trainable: Mapping[str, Mapping[str, Tensor]]) -> Metrics:
    """Compute :func:`raydfl.fit` for a client with ``train.optimiser.private``.

    Args:
        call: Call of ``fit``.
        trainable: Trainable parameters by model and flat name.

    Returns:
        Metrics of ``fit``. Without ``privacy.metrics: outside`` the loss has no examples, and the loss's reports are missing.

    Raises:
        ConfigError: The method or a model does not permit a guarantee.
    """
    step, task = call.step, cast(PrivateTask, call.step.execution.private)
    settings, examples = cast(PrivateSettings, step.training.optimiser.private), task.data.train
    _check_call(call, task)
    task.trained = True
    step.execution.together = 1
    check_networks(step.models, step.fixed)
    parameters = {name: tensor for tensors in trainable.values() for name, tensor in tensors.items()}
    lists = {name: [*tensors.values()] for name, tensors in trainable.items()}
    optimiser = Optimiser(lists, step.training.optimiser, step.round_index, call.rates)
    moments = restore_moments(optimiser, parameters, [step])
    size = sum(parameter.numel() for parameter in parameters.values())
    expected = min(step.training.batch_size, len(examples))
    loss, count, reports = 0.0, 0, dict[str, Tensor]()
    steps = count_steps(len(examples), step.training.batch_size, call.epochs)
    for number in range(steps):
        total = torch.zeros(size, dtype=torch.float64, device=step.device)
        rng = task.key.generator(number, "batch")
        seed = int(rng.integers(2**62))
        drawn = np.flatnonzero(rng.random(len(examples)) < expected / len(examples))
        seeds = torch.from_numpy(rng.integers(2**62, size=len(drawn))).to(step.device)
        at_once = max(1, min(_MOST_EXAMPLES, _MOST_ELEMENTS // max(1, size)))
        for first in range(0, len(drawn), at_once):
            part = slice(first, first + at_once)
            # Random numbers of the transforms depend on the position in the batch, so they come from the secret key too.
            values = examples.draw(drawn[part], seed, first) if examples.changed else None
            batch = examples.batch(drawn[part], step.device, values)
            computed = compute_example_gradients(call, batch, seeds[part], parameters)
            sums = computed.sum_clipped(settings.clip)
            total += torch.cat([sums[name].flatten() for name in parameters])
            loss, count = loss + float(computed.losses.double().sum()), count + len(computed.losses)
            for name, report in computed.reports.items():
                reports[name] = reports.get(name, 0) + report.double().sum(dim=0)
        if settings.noise:
            noise = torch.from_numpy(task.key.normals(number, "noise", size)).to(step.device)
            total += settings.noise * settings.clip * noise
        gradients = torch.split((total / expected).float(), [parameter.numel() for parameter in parameters.values()])
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad = gradient.view(parameter.shape)
        optimiser.advance()
        step.clock.steps += 1
    optimiser.clear_gradients()
    save_moments(moments, step.moments)
    if task.outside:
        reported = {name: Ratio(*report.tolist()) for name, report in reports.items()}
        return {"loss": Ratio(loss, count), "steps": Ratio(steps, 1), **reported}
    step.clock.examples.update(dict.fromkeys(call.models, steps * expected))
    return {"loss": Ratio(0.0, 0), "steps": Ratio(steps, 1)}


def _check_call(call: FitCall, task: PrivateTask) -> None:
    """Reject calls of ``fit`` outside the accounting.

    Raises:
        ConfigError: The call has a plan, several losses, more epochs than the settings, or is not the first of its round.
    """
    reason = ""
    if call.plan is not None:
        reason = "composes its batches (fit(batches=...)), so they are no Poisson samples"
    elif len(call.losses) != 1:
        reason = f"takes {len(call.losses)} optimiser steps with each batch, and the accounting knows a single step"
    elif task.trained:
        reason = "trains more than once in a round, and the accounting knows a single training"
    elif call.epochs != call.step.training.local_epochs:
        reason = f"trains {call.epochs} epochs, and the accounting knows train.local_epochs={call.step.training.local_epochs}"
    elif not isinstance(task.data.train, Examples):
        reason = "trains on data of its own"
    if reason:
        raise ConfigError(f"train.optimiser.private: the method {reason}. {REMEDY}")


def check_networks(models: Mapping[str, nn.Module], fixed: frozenset[str]) -> None:
    """Set networks to training mode, and reject batch normalisation and statistics of inputs in trained layers.

    Args:
        models: Networks by name.
        fixed: Flat names of the fixed tensors.

    Raises:
        ConfigError: A layer mixes the examples of a batch, or keeps statistics of them.
    """
    set_training_mode(models.items(), fixed)
    for name, network in models.items():
        for path, layer in network.named_modules():
            mixes = isinstance(layer, nn.modules.batchnorm._BatchNorm)
            keeps = isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats
            if layer.training and (mixes or keeps):
                raise ConfigError(
                    f"train.optimiser.private: the layer {path!r} of models.{name} is a {type(layer).__name__}. It mixes "
                    f"examples, or keeps statistics of them without noise. Choose a model with group normalisation"
                )


def compute_example_gradients(
    call: FitCall, batch: Batch, seeds: Tensor, parameters: Mapping[str, Tensor]
) -> ExampleGradients:
    """Compute the gradient of each example of a batch.

    Args:
        call: Call of ``fit`` with a single loss.
        batch: Examples.
        seeds: Seed of each example, int64 [examples].
        parameters: Trainable parameters by flat name.
    """
    try:
        return _compute_batched(call, batch, seeds, parameters)
    except NotBatchableError as error:
        call.step.execution.looped_because = str(error)
        return _compute_in_turn(call, batch, seeds, parameters)


def _compute_batched(call: FitCall, batch: Batch, seeds: Tensor, parameters: Mapping[str, Tensor]) -> ExampleGradients:
    """Compute the gradients of all examples at once.

    Raises:
        NotBatchableError: The loss has no batched form, or padding changes it.
    """
    step, loss = call.step, call.losses[0]
    rows = Batch.from_tensors({name: tensor.unsqueeze(1) for name, tensor in batch.tensors().items()})
    kind = make_kind("private", call, cast(PrivateTask, step.execution.private).data.train)

    def run() -> ExampleGradients:
        with autocast(step.training.precision, step.device):
            values, reports = group.compute(functools.partial(compute_loss, loss), rows, seeds)
        if values.shape != (len(seeds),):
            raise NotBatchableError(f"the loss is not a scalar but {tuple(values.shape[1:])}")
        values.sum().backward()
        # Names in a stack are "model/path.key", also for an empty path.
        leaves = {
            name.replace("/.", "/", 1): leaf for tensors in group.leaves.values() for name, leaf in tensors.items()
        }
        gradients = {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for name, leaf in ((name, leaves[name]) for name in parameters)
        }
        return ExampleGradients(
            values.detach().float(), gradients, {name: report.detach() for name, report in reports.items()}
        )

    with convert_failures(kind, remember=False):
        group = StackedClients([step] * len(seeds), list(step.models), tuple(call.models))
        check_kind(group, kind, [loss], rows, seeds)
        return cast(ExampleGradients, compute_with_sources(group, kind, run))


def _compute_in_turn(call: FitCall, batch: Batch, seeds: Tensor, parameters: Mapping[str, Tensor]) -> ExampleGradients:
    """Compute the gradients example by example."""
    step, tensors = call.step, batch.tensors()
    buffers = [(buffer, buffer.clone()) for network in step.models.values() for buffer in network.buffers()]
    losses: list[Tensor] = []
    gradients: dict[str, list[Tensor]] = {name: [] for name in parameters}
    reports: dict[str, list[Tensor]] = {}
    for row, seed in enumerate(seeds):
        example = trim_padding(Batch.from_tensors({name: tensor[row : row + 1] for name, tensor in tensors.items()}))
        with use_step_seed(seed), autocast(step.training.precision, step.device):
            value, reported = compute_loss(call.losses[0], step, example)
        computed: Sequence[Tensor | None] = torch.autograd.grad(value, [*parameters.values()], allow_unused=True)
        losses.append(value.detach().float())
        for (name, parameter), gradient in zip(parameters.items(), computed, strict=True):
            gradients[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
        for name, report in reported.items():
            reports.setdefault(name, []).append(report)
    with torch.no_grad():
        for buffer, before in buffers:  # statistics of examples would leave the client without noise
            buffer.copy_(before)
    return ExampleGradients(
        torch.stack(losses),
        {name: torch.stack(rows) for name, rows in gradients.items()},
        {name: torch.stack(rows) for name, rows in reports.items()},
    )
