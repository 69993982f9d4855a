"""Batched fit() and predict(): one computation for several clients.

The clients' parameters are stacked along a leading dimension. ``torch.func.vmap`` maps the method's loss, written for a single
client, over this dimension. Each client's loss depends on its own parameters only, so the gradient of the summed losses contains
every client's gradient. The optimiser is element-wise. Clients change only after the whole computation has succeeded. After a
failure they are computed unbatched.

Rules for batched losses (a loss that breaks them is computed unbatched; ``step.execution.looped_because`` has the reason):

- no Python branch on the value of a tensor, no ``.item()``;
- values that differ between clients come from ``step.models``, ``step.received``, ``step.state`` or the batch, as tensors of
  equal shapes. ``step.client``, ``step.data`` and ``step.rng`` are unavailable, and the step is read-only;
- the loss ends in ``batch.mean(...)`` or respects ``batch.weight``, and the examples of a batch do not influence each other (as
  in batch normalisation), because short batches are padded with examples of weight 0. The executor tests this once for each
  loss and architecture;
- every operation has a batching rule: most of PyTorch's do, ``nn.GRU`` does not, ``raydfl.ops.GRU`` does.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from raydfl.core.types import Batch, Metrics, Ratio
from raydfl.core.users_code import FAILURES
from raydfl.data import Examples
from raydfl.training.call import FitCall
from raydfl.training.moments import Moments, restore_moments, save_moments
from raydfl.training.optimiser import Optimiser
from raydfl.training.plan import draw_order, find_weights
from raydfl.training.precision import GradientScale, autocast
from raydfl.training.randomness import (
    derive_step_seed,
    fit_seed,
    get_generator_states,
    preserve_generators,
    set_generator_states,
)
from raydfl.training.step import Loss, Step, compute_loss
from raydfl.training.together import signature
from raydfl.training.together.batches import StackedBatches, select_first
from raydfl.training.together.handles import TensorSource, UnequalClientsError
from raydfl.training.together.lockstep import NotBatchableError
from raydfl.training.together.stack import MissingSourcesError, StackedClients

_MOST_KINDS = 1000
"""Largest number of kinds in the caches below. A loss with a captured round number is a new kind in every round."""

_refused: dict[Hashable, str] = {}
"""Reasons why computations of a kind cannot be batched."""

_sources: dict[Hashable, tuple[TensorSource, ...]] = {}
"""Sources of losses by kind: the tensors of the step to stack."""


def fit_batched(calls: Sequence[FitCall]) -> list[Metrics]:
    """Compute :func:`raydfl.fit` for several clients. The results equal unbatched ones up to rounding.

    Args:
        calls: calls with equal keys: equal architectures, settings, phase, round and options, and at least one example each. The
            losses of the first call serve all clients.

    Returns:
        Metrics of ``fit`` for each client.

    Raises:
        NotBatchableError: the reason why the calls cannot be batched. No client has changed.
    """
    steps, call = [call.step for call in calls], calls[0]
    first, losses, data = call.step, call.losses, [call.select_examples() for call in calls]
    kind = make_kind("fit", call, data[0])
    draws = [step.rng.bit_generator.state for step in steps]
    try:
        with convert_failures(kind, remember=False):
            seeds = [fit_seed(step) for step in steps]
            whole = [
                [index for _ in range(call.epochs) for index in draw_order(step, examples, call.plan)]
                for step, examples in zip(steps, data, strict=True)
            ]
            plans = [plan[: step.clock.most_batches] for step, plan in zip(steps, whole, strict=True)]
            order = sorted(range(len(steps)), key=lambda client: -len(plans[client]))
            group = StackedClients([steps[i] for i in order], list(first.models), tuple(call.models))
            weights = [own for i in order if (own := find_weights(steps[i], data[i])) is not None]
            batches = StackedBatches(
                [data[i] for i in order],
                [plans[i] for i in order],
                first.device,
                [seeds[i] for i in order],
                weights=weights or None,
            )
            seed = torch.tensor([seeds[i] for i in order]).to(first.device)
            check_kind(group, kind, losses, batches.batch(0), seed)
            ordered = [calls[i].rates for i in order]
            values, done, reports, moments = compute_with_sources(
                group, kind, lambda: _run_steps(group, losses, batches, seed, ordered)
            )
            group.write_back()
            for position, step in enumerate(group.steps):
                save_moments(moments, step.moments, position)
    except BaseException:
        # The unbatched computation must draw the same batches.
        for step, state in zip(steps, draws, strict=True):
            step.rng.bit_generator.state = state
        raise
    results: list[Metrics] = [{}] * len(steps)
    reported = {name: report.tolist() for name, report in reports.items()}
    for row, (position, metrics) in enumerate(
        zip(order, _to_metrics(values, batches.sizes[:done], len(losses)), strict=True)
    ):
        results[position] = {**metrics, **{name: Ratio(*report[row]) for name, report in reported.items()}}
        steps[position].clock.steps += int(cast(Ratio, metrics["steps"]).total)
    for position in order[: batches.clients(done) if done < len(batches) else 0]:
        steps[position].clock.cut = True
    for step, plan, used in zip(steps, whole, plans, strict=True):
        step.clock.cut |= len(used) < len(plan)
    return results


def make_kind(name: str, call: FitCall, examples: Examples) -> Hashable:
    """Make the key of a kind of training, for the caches of this module.

    Args:
        name: kind of batched computation.
        call: call of ``fit``.
        examples: training examples of the client.
    """
    step = call.step
    return (
        name,
        tuple(map(signature.kind, call.losses)),
        _make_architecture_key(step),
        step.phase,
        signature.identity(dict(step.options)),
        tuple(call.models),
        tuple((view_name, view.length) for view_name, view in examples.views.items()),
        tuple(examples.columns),
    )


def check_kind(group: StackedClients, kind: Hashable, losses: Sequence[Loss], batch: Batch, seeds: Tensor) -> None:
    """Check the losses of a new kind of training: padding must not change them.

    Raises:
        NotBatchableError: the reason why this kind cannot be batched.
    """
    if kind in _sources:
        return
    if len(_sources) >= _MOST_KINDS:
        _sources.clear()
    with convert_failures(kind, remember=True), preserve_generators():
        _check_padding(group, losses, batch, seeds)
    _sources[kind] = group.sources


@torch.no_grad()
def predict_batched(steps: Sequence[Step], model: str, examples: Sequence[Examples], batch_size: int) -> list[Tensor]:
    """Compute :func:`raydfl.predict` for several clients.

    Args:
        steps: steps with the same architecture of the named model.
        model: name of the model.
        examples: examples of each client, not empty, all of the same form. If all are the same object, they are read once.
        batch_size: examples of each client in a batch.

    Returns:
        Logits float32 [examples, classes] on the CPU, for each client.

    Raises:
        NotBatchableError: the reason why the calls cannot be batched. No client has changed.
    """
    kind = ("predict", _make_architecture_key(steps[0]), model)
    # An evaluation on the server's data has the same clips for all clients: read them once.
    shared = all(client_examples is examples[0] for client_examples in examples)
    distinct = examples[:1] if shared else examples
    plans = [client_examples.order(batch_size, None) for client_examples in distinct]
    order = sorted(range(len(distinct)), key=lambda client: -len(plans[client]))
    with convert_failures(kind, remember=True):
        batches = StackedBatches([distinct[i] for i in order], [plans[i] for i in order], steps[0].device)
        group = StackedClients(steps if shared else [steps[i] for i in order], [model], ())
        group.start()

        def forward(step: Step, batch: Batch) -> Tensor:
            return step.forward(model, batch)

        parts: list[list[Tensor]] = [[] for _ in steps]
        for number in range(len(batches)):
            batch, sizes = batches.batch(number), batches.sizes[number].tolist()
            if shared:
                batch, sizes = select_first(batch), sizes * len(steps)
            else:
                group.truncate(batches.clients(number))
            with autocast(steps[0].training.precision, steps[0].device):
                logits = group.compute(forward, batch, None, shared)
            for part, values, size in zip(parts, logits, sizes, strict=False):  # finished clients have no values
                part.append(values[:size])
        stacked = [torch.cat(part).cpu() for part in parts]
    if shared:
        return stacked
    results = list(stacked)
    for position, logits in zip(order, stacked, strict=True):
        results[position] = logits
    return results


def _make_architecture_key(step: Step) -> Hashable:
    """Return a hashable description of a client's architectures, without references to its tensors."""
    shapes = tuple((n, k, v.shape, v.dtype) for n, m in step.models.items() for k, v in m.state_dict().items())
    return (step.client.models, tuple((n, type(m)) for n, m in step.models.items()), shapes, step.device)


@contextlib.contextmanager
def convert_failures(kind: Hashable, remember: bool) -> Iterator[None]:
    """Convert failures inside a ``with`` block to :class:`NotBatchableError`.

    The clients are then computed unbatched. An error in a method's code appears again there.

    Args:
        kind: kind of the computation.
        remember: whether to refuse later computations of this kind at once.
    """
    if kind in _refused:
        raise NotBatchableError(_refused[kind])
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise NotBatchableError(f"not enough memory for so many clients at once: {error}") from error
    except FAILURES as error:
        reason = str(error) if isinstance(error, NotBatchableError) else f"{type(error).__name__}: {error}"
        if remember and not isinstance(error, UnequalClientsError):
            if len(_refused) >= _MOST_KINDS:
                _refused.clear()
            _refused[kind] = reason
        raise NotBatchableError(reason) from error


def compute_with_sources(group: StackedClients, kind: Hashable, computation: Callable[[], Any]) -> Any:
    """Run a computation, and repeat it with more stacked tensors while its loss reads further tensors."""
    group.sources = _sources[kind]
    while True:
        group.start()
        try:
            with preserve_generators(unless_done=True):
                return computation()
        except MissingSourcesError:
            _sources[kind] = group.sources


def _run_steps(
    group: StackedClients,
    losses: Sequence[Loss],
    batches: StackedBatches,
    seeds: Tensor,
    rates: Sequence[Mapping[str, float]],
) -> tuple[list[Tensor], int, dict[str, Tensor], Moments]:
    """Take all optimiser steps of the group.

    Returns:
        The losses [active clients] of each step, the number of batches until the end or a client's deadline, the summed reports
        by name (float64 [clients, 2]), and the moments to keep.

    Raises:
        NotBatchableError: a client's deadline passed before the first batch.
    """
    first = group.steps[0]
    settings = first.training.optimiser
    optimiser = Optimiser(
        {name: list(leaves.values()) for name, leaves in group.leaves.items()},
        settings,
        first.round_index,
        {name: _stack_rates([client_rates[name] for client_rates in rates], first.device) for name in rates[0]},
    )
    # Names in a stack are "model/path.key", also for an empty path. Moments are kept by flat names.
    leaves = {name.replace("/.", "/", 1): leaf for tensors in group.leaves.values() for name, leaf in tensors.items()}
    moments = restore_moments(optimiser, leaves, group.steps, stacked=True)
    precision = first.training.precision
    scale = GradientScale((group.active,), first.device) if precision == "float16" else None

    def clip() -> None:
        if settings.clip_norm is not None:
            _clip_gradients(optimiser, settings.clip_norm)

    values: list[Tensor] = []
    sums: dict[str, Tensor] = {}
    for number in range(len(batches)):
        clients = batches.clients(number)
        if any(step.clock.expired for step in group.steps[:clients]):
            if number == 0:
                raise NotBatchableError("a client's deadline passed before the first batch")
            return values, number, sums, moments
        if clients < group.active:
            group.truncate(clients)
            _shrink_optimiser(optimiser, group)
            seeds = seeds[:clients]
            if scale is not None:
                scale.truncate(clients)
        batch = batches.batch(number)
        for position, loss in enumerate(losses):
            optimiser.clear_gradients()
            with autocast(precision, first.device):
                value, reports = group.compute(
                    functools.partial(compute_loss, loss),
                    batch,
                    derive_step_seed(seeds, number * len(losses) + position),
                )
            if value.shape != (clients,):
                raise NotBatchableError(f"the loss is not a scalar but {tuple(value.shape[1:])}")
            if scale is None:
                value.sum().backward()
                clip()
                optimiser.advance()
            else:
                (value * scale.scale).sum().backward()
                scale.advance(optimiser, clip)
            values.append(value.detach())
            for name, report in reports.items():
                total = sums.setdefault(
                    name, torch.zeros(len(group.steps), 2, dtype=torch.float64, device=report.device)
                )
                total[:clients] += report.detach()
    return values, len(batches), sums, moments


def _stack_rates(rates: Sequence[float], device: torch.device) -> float | Tensor:
    """Return the clients' common learning rate, or float32 [clients] if they differ."""
    is_common = all(rate == rates[0] for rate in rates)
    return rates[0] if is_common else torch.tensor(rates, dtype=torch.float32, device=device)


def _shrink_optimiser(optimiser: Optimiser, group: StackedClients) -> None:
    """Reduce the optimiser's parameters and moments to the active clients."""
    leaves = [[group.live[name] for name in names] for names in group.leaves.values() if names]
    for param_group, new in zip(optimiser.param_groups, leaves, strict=True):
        for old, leaf in zip(param_group["params"], new, strict=True):
            state = optimiser.state.pop(old, {})
            if state:
                optimiser.state[leaf] = {k: v[: len(leaf)] if v.ndim else v for k, v in state.items()}
        param_group["params"] = new
        if isinstance(param_group["lr"], Tensor):
            param_group["lr"] = param_group["lr"][: group.active]


def _clip_gradients(optimiser: Optimiser, largest: float) -> None:
    """Clip each client's gradient norm, like ``clip_grad_norm_``."""
    gradients = [p.grad for param_group in optimiser.param_groups for p in param_group["params"] if p.grad is not None]
    norms = torch.stack([g.flatten(1).norm(dim=1) if g.ndim > 1 else g.abs() for g in gradients]).norm(dim=0)
    factors = (largest / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factors.view(-1, *[1] * (gradient.ndim - 1)))


def _to_metrics(values: Sequence[Tensor], sizes: np.ndarray, losses: int) -> list[Metrics]:
    """Compute the metrics of ``fit`` for every client, in the group's order.

    Args:
        values: losses [active clients] of every step.
        sizes: numbers of examples in the computed batches, int [batches, clients].
        losses: number of losses (steps) for each batch.
    """
    table = np.zeros((len(values), sizes.shape[1]))
    table[np.repeat(sizes, losses, axis=0) > 0] = torch.cat(list(values)).double().cpu().numpy()
    totals = (table * np.repeat(sizes, losses, axis=0)).sum(axis=0)
    examples, steps = sizes.sum(axis=0), (sizes > 0).sum(axis=0) * losses
    return [
        {"loss": Ratio(float(total), float(count)), "steps": Ratio(int(number), 1)}
        for total, count, number in zip(totals, examples, steps, strict=True)
    ]


def _check_padding(group: StackedClients, losses: Sequence[Loss], batch: Batch, seeds: Tensor) -> None:
    """Check the batched losses: padding must not change them.

    Compare the losses of a batch with and without an additional example of weight 0 (and additional frames, if lengths mark
    the valid ones). The parameters are perturbed first, because a network initialised with zeros depends on no input.

    Raises:
        NotBatchableError: a loss changes.
    """
    layers = [layer for name in group.names for layer in group.steps[0].models[name].modules()]
    dropouts = [layer for layer in layers if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.training]
    for module in dropouts:  # their masks depend on the shape of the batch, hence on padding
        module.eval()
    try:
        for loss in losses:
            states = get_generator_states()
            value = _compute_perturbed(group, loss, batch, seeds, states)
            padded = _compute_perturbed(group, loss, _pad_batch(batch, 1.0), seeds, states)
            if _is_equal(value, padded):
                continue
            # A random model outside of dropout layers draws different numbers for different shapes. Compare two paddings then.
            redrawn = _compute_perturbed(group, loss, batch, seeds + 1, None)
            repadded = _compute_perturbed(group, loss, _pad_batch(batch, -2.0), seeds, states)
            if _is_equal(value, redrawn) or not _is_equal(padded, repadded):
                raise NotBatchableError(
                    "padding changes the loss: it does not respect batch.weight (end it in batch.mean(...)), or examples of a "
                    "batch influence each other, as in batch normalisation"
                )
    finally:
        for module in dropouts:
            module.train()


def _is_equal(left: Tensor, right: Tensor) -> bool:
    """Return whether losses are equal up to rounding."""
    return torch.allclose(left, right, rtol=1e-4, atol=1e-5, equal_nan=True)


def _compute_perturbed(
    group: StackedClients, loss: Loss, batch: Batch, seeds: Tensor, states: Sequence[Tensor] | None
) -> Tensor:
    """Compute the losses [clients] at perturbed parameters, with the same perturbation in every call.

    Args:
        group: stacked clients.
        loss: loss of the method.
        batch: batch of the group.
        seeds: seeds of the step, int64 [clients].
        states: initial states of PyTorch's generators. ``None``: their current states.
    """
    while True:
        group.start()
        generator = torch.Generator(seeds.device).manual_seed(0)
        with torch.no_grad():
            for leaf in (leaf for leaves in group.leaves.values() for leaf in leaves.values()):
                leaf.add_(torch.randn(leaf.shape, generator=generator, device=leaf.device), alpha=0.1)
        if states is not None:
            set_generator_states(states)
        try:
            value, _ = group.compute(functools.partial(compute_loss, loss), batch, seeds)
        except MissingSourcesError:
            continue
        if value.shape != (group.active,):
            raise NotBatchableError(f"the loss is not a scalar but {tuple(value.shape[1:])}")
        value.sum().backward()
        losses: Tensor = value.detach()
        return losses


def _pad_batch(batch: Batch, shift: float) -> Batch:
    """Add an example of weight 0 to every client's batch, and five frames to views with lengths.

    Args:
        batch: batch of the group.
        shift: offset of the added example's features.
    """
    tensors = {name: torch.cat([tensor, tensor[:, :1]], dim=1) for name, tensor in batch.tensors().items()}
    for name, x in batch.views.items():
        longer = torch.cat([x, x[:, :1].flip(2) + shift], dim=1)
        tensors[f"views/{name}"] = nn.functional.pad(longer, (0, 0, 0, 5)) if name in batch.view_lengths else longer
    weight = torch.ones(batch.y.shape[:2], device=batch.y.device) if batch.weight is None else batch.weight
    tensors["weight"] = torch.cat([weight, torch.zeros_like(weight[:, :1])], dim=1)
    return Batch.from_tensors(tensors)
