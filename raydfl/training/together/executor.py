"""fit() and predict() for several clients at once: one batched computation instead of one after another.

The clients' parameters are stacked along a leading dimension, and ``torch.func.vmap`` runs the method's own loss, written for
one client, over it; the gradients of the summed losses are each client's own, because no client's loss depends on another's
parameters; the optimiser acts on the stacked parameters element by element. Nothing of a client is changed before all is done,
so whatever goes wrong on the way, the clients can still be computed one after another.

Rules for a loss that can be computed so (one that breaks them is computed looped, and ``step.execution.looped_because`` says why):

- no Python branch on a tensor's value, no ``.item()``;
- what differs between clients comes from ``step.models``, ``step.received``, ``step.state`` or the batch, as tensors of equal
  shapes; ``step.client``, ``step.data`` and ``step.rng`` are not to be had, and nothing is written into the step;
- it ends in ``batch.mean(...)`` or respects ``batch.weight``, and no example of a batch influences another (as in batch
  normalisation): short batches are padded with examples of weight 0. This is tried once for each loss and architecture;
- every operation has a batching rule: PyTorch's own mostly do, ``nn.GRU`` has none, ``raydfl.ops.GRU`` has.
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
from raydfl.training.moments import Moments, begin_with_kept, keep
from raydfl.training.optimiser import Optimiser
from raydfl.training.plan import order_of
from raydfl.training.precision import GradientScale, computing_in
from raydfl.training.randomness import fit_seed, generator_states, preserved, seed_of_step, set_generator_states
from raydfl.training.step import Loss, Step, computed
from raydfl.training.together import signature as alike
from raydfl.training.together.batches import StackedBatches, batch_of_first
from raydfl.training.together.handles import Source, UnlikeError
from raydfl.training.together.lockstep import NotBatchableError
from raydfl.training.together.stack import MoreSourcesError, StackedClients

_REMEMBERED = 1000
"""Kinds of losses of which something is remembered: one that captures a number of its round is another kind in each."""

_refused: dict[Hashable, str] = {}
"""The reasons why computations of a kind cannot be vectorised, once found out."""

_sources: dict[Hashable, tuple[Source, ...]] = {}
"""Which of a step's tensors losses of this kind read, so that only those are stacked."""


def fit_together(calls: Sequence[FitCall]) -> list[Metrics]:
    """Do :func:`raydfl.fit` for several clients; every client ends as it would have alone, to float tolerance.

    Args:
        calls: of clients with equal architectures, settings, phase, round and options, each with training data. Their losses are
            alike: the first client's are computed.

    Returns:
        What ``fit`` returns, for each client.

    Raises:
        NotBatchableError: it cannot be done, and why; nothing has been changed.
    """
    steps, call = [call.step for call in calls], calls[0]
    first, losses, data = call.step, call.losses, [call.data() for call in calls]
    kind = (
        "fit",
        tuple(map(alike.kind, losses)),
        _kind(first),
        first.phase,
        alike.identity(dict(first.options)),
        tuple(call.models),
        tuple((name, view.length) for name, view in data[0].views.items()),
        tuple(data[0].columns),
    )
    draws = [step.rng.bit_generator.state for step in steps]
    try:
        with _failures(kind, remember=False):
            seeds = [fit_seed(step) for step in steps]
            plans = [
                [index for _ in range(call.epochs) for index in order_of(step, own, call.plan)]
                for step, own in zip(steps, data, strict=True)
            ]
            order = sorted(range(len(steps)), key=lambda client: -len(plans[client]))
            group = StackedClients([steps[i] for i in order], list(first.models), tuple(call.models))
            batches = StackedBatches(
                [data[i] for i in order], [plans[i] for i in order], first.device, [seeds[i] for i in order]
            )
            seed = torch.tensor([seeds[i] for i in order]).to(first.device)
            if kind not in _sources:
                if len(_sources) >= _REMEMBERED:
                    _sources.clear()
                with _failures(kind, remember=True), preserved():
                    _try(group, losses, batches.batch(0), seed)
                _sources[kind] = group.sources
            ordered = [calls[i].rates for i in order]
            values, done, reports, moments = _complete(
                group, kind, lambda: _train(group, losses, batches, seed, ordered)
            )
            group.write_back()
            for position, step in enumerate(group.steps):
                keep(moments, step.moments, position)
    except BaseException:
        for step, state in zip(steps, draws, strict=True):
            step.rng.bit_generator.state = state
        raise
    found: list[Metrics] = [{}] * len(steps)
    reported = {name: report.tolist() for name, report in reports.items()}
    for place, (position, metrics) in enumerate(
        zip(order, _metrics(values, batches.sizes[:done], len(losses)), strict=True)
    ):
        found[position] = {**metrics, **{name: Ratio(*report[place]) for name, report in reported.items()}}
        steps[position].clock.steps += int(cast(Ratio, metrics["steps"]).total)
    for position in order[: batches.clients(done) if done < len(batches) else 0]:
        steps[position].clock.cut = True
    return found


@torch.no_grad()
def predict_together(steps: Sequence[Step], model: str, examples: Sequence[Examples], batch_size: int) -> list[Tensor]:
    """Do :func:`raydfl.predict` for several clients: logits float32 [examples, classes] on the CPU, for each.

    Args:
        steps: of clients in which the named model has one architecture.
        model: its name.
        examples: of each client, not empty, all of the same form; where all are the same object they are read once.
        batch_size: examples of each client at a time.

    Raises:
        NotBatchableError: it cannot be done, and why; nothing has been changed.
    """
    kind = ("predict", _kind(steps[0]), model)
    # The same clips at all clients, as in an evaluation on the server's data, are read once.
    shared = all(own is examples[0] for own in examples)
    own = examples[:1] if shared else examples
    plans = [each.order(batch_size, None) for each in own]
    order = sorted(range(len(own)), key=lambda client: -len(plans[client]))
    with _failures(kind, remember=True):
        batches = StackedBatches([own[i] for i in order], [plans[i] for i in order], steps[0].device)
        group = StackedClients(steps if shared else [steps[i] for i in order], [model], ())
        group.start()

        def forward(step: Step, batch: Batch) -> Tensor:
            return step.forward(model, batch)

        parts: list[list[Tensor]] = [[] for _ in steps]
        for number in range(len(batches)):
            batch, sizes = batches.batch(number), batches.sizes[number].tolist()
            if shared:
                batch, sizes = batch_of_first(batch), sizes * len(steps)
            else:
                group.keep(batches.clients(number))
            with computing_in(steps[0].training.precision, steps[0].device):
                logits = group.compute(forward, batch, None, shared)
            for part, values, size in zip(parts, logits, sizes, strict=False):  # clients that are done have no values
                part.append(values[:size])
        stacked = [torch.cat(part).cpu() for part in parts]
    if shared:
        return stacked
    found = list(stacked)
    for position, logits in zip(order, stacked, strict=True):
        found[position] = logits
    return found


def _kind(step: Step) -> Hashable:
    """Return the architectures of a client in a form that outlives it."""
    shapes = tuple((n, k, v.shape, v.dtype) for n, m in step.models.items() for k, v in m.state_dict().items())
    return (step.client.models, tuple((n, type(m)) for n, m in step.models.items()), shapes, step.device)


@contextlib.contextmanager
def _failures(kind: Hashable, remember: bool) -> Iterator[None]:
    """Whatever fails inside means that the clients are computed one after another, where a real mistake shows again."""
    if kind in _refused:
        raise NotBatchableError(_refused[kind])
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise NotBatchableError(f"not enough memory for so many clients at once: {error}") from error
    except FAILURES as error:
        reason = str(error) if isinstance(error, NotBatchableError) else f"{type(error).__name__}: {error}"
        if remember and not isinstance(error, UnlikeError):
            if len(_refused) >= _REMEMBERED:
                _refused.clear()
            _refused[kind] = reason
        raise NotBatchableError(reason) from error


def _complete(group: StackedClients, kind: Hashable, computation: Callable[[], Any]) -> Any:
    """Return the computation's result, begun again while its loss turns out to read tensors that are not stacked yet."""
    group.sources = _sources[kind]
    while True:
        group.start()
        try:
            with preserved(unless_done=True):
                return computation()
        except MoreSourcesError:
            _sources[kind] = group.sources


def _train(
    group: StackedClients,
    losses: Sequence[Loss],
    batches: StackedBatches,
    seeds: Tensor,
    rates: Sequence[Mapping[str, float]],
) -> tuple[list[Tensor], int, dict[str, Tensor], Moments]:
    """Do everybody's steps.

    Returns:
        Each step's losses [active clients], the number of batches until all are done or one's time is over, what the losses
        reported, added up: by name float64 [clients, 2], and the moments to keep.

    Raises:
        NotBatchableError: somebody's time was over before the first batch.
    """
    first = group.steps[0]
    settings = first.training.optimiser
    optimiser = Optimiser(
        {name: list(leaves.values()) for name, leaves in group.leaves.items()},
        settings,
        first.round_index,
        {name: _rate([own[name] for own in rates], first.device) for name in rates[0]},
    )
    leaves = {name.replace("/.", "/", 1): leaf for own in group.leaves.values() for name, leaf in own.items()}
    moments = begin_with_kept(optimiser, leaves, group.steps, stacked=True)
    precision = first.training.precision
    scale = GradientScale((group.active,), first.device) if precision == "float16" else None

    def clip() -> None:
        if settings.clip_norm is not None:
            _clip(optimiser, settings.clip_norm)

    values: list[Tensor] = []
    sums: dict[str, Tensor] = {}
    for number in range(len(batches)):
        clients = batches.clients(number)
        if any(step.clock.expired for step in group.steps[:clients]):
            if number == 0:
                raise NotBatchableError("the deadline of one of the clients was over before they began")
            return values, number, sums, moments
        if clients < group.active:
            group.keep(clients)
            _follow(optimiser, group)
            seeds = seeds[:clients]
            if scale is not None:
                scale.keep(clients)
        batch = batches.batch(number)
        for position, loss in enumerate(losses):
            optimiser.forget_gradients()
            with computing_in(precision, first.device):
                value, reports = group.compute(
                    functools.partial(computed, loss), batch, seed_of_step(seeds, number * len(losses) + position)
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
                so_far = sums.setdefault(
                    name, torch.zeros(len(group.steps), 2, dtype=torch.float64, device=report.device)
                )
                so_far[:clients] += report.detach()
    return values, len(batches), sums, moments


def _rate(of_clients: Sequence[float], device: torch.device) -> float | Tensor:
    """Return one learning rate if all clients have the same, else float32 [clients]."""
    same = all(rate == of_clients[0] for rate in of_clients)
    return of_clients[0] if same else torch.tensor(of_clients, dtype=torch.float32, device=device)


def _follow(optimiser: Optimiser, group: StackedClients) -> None:
    """Let the optimiser go on with the group's leaves, which are prefixes of those that it had, and of its moments."""
    leaves = [[group.live[name] for name in names] for names in group.leaves.values() if names]
    for settings, new in zip(optimiser.param_groups, leaves, strict=True):
        for old, leaf in zip(settings["params"], new, strict=True):
            kept = optimiser.state.pop(old, {})
            if kept:
                optimiser.state[leaf] = {k: v[: len(leaf)] if v.ndim else v for k, v in kept.items()}
        settings["params"] = new
        if isinstance(settings["lr"], Tensor):
            settings["lr"] = settings["lr"][: group.active]


def _clip(optimiser: Optimiser, largest: float) -> None:
    """Clip gradients as ``clip_grad_norm_`` does, for every client by itself."""
    gradients = [p.grad for settings in optimiser.param_groups for p in settings["params"] if p.grad is not None]
    norms = torch.stack([g.flatten(1).norm(dim=1) if g.ndim > 1 else g.abs() for g in gradients]).norm(dim=0)
    factors = (largest / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factors.view(-1, *[1] * (gradient.ndim - 1)))


def _metrics(values: Sequence[Tensor], sizes: np.ndarray, losses: int) -> list[Metrics]:
    """Return what ``fit`` returns, for every client, in the group's order.

    Args:
        values: losses [active clients] of every step.
        sizes: int [batches, clients], examples in the batches that were computed.
        losses: steps of a batch.
    """
    table = np.zeros((len(values), sizes.shape[1]))
    table[np.repeat(sizes, losses, axis=0) > 0] = torch.cat(list(values)).double().cpu().numpy()
    totals = (table * np.repeat(sizes, losses, axis=0)).sum(axis=0)
    examples, steps = sizes.sum(axis=0), (sizes > 0).sum(axis=0) * losses
    return [
        {"loss": Ratio(float(total), float(count)), "steps": Ratio(int(number), 1)}
        for total, count, number in zip(totals, examples, steps, strict=True)
    ]


def _try(group: StackedClients, losses: Sequence[Loss], batch: Batch, seeds: Tensor) -> None:
    """Refuse losses that cannot be batched, or that padding would change.

    A batch's losses are computed as it is and again with an example of weight 0 more (and with more frames, where lengths say
    which of them count), at parameters moved at random, so that a network that starts at zero shows what it depends on.
    """
    layers = [layer for name in group.names for layer in group.steps[0].models[name].modules()]
    dropouts = [layer for layer in layers if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.training]
    for module in dropouts:
        module.eval()
    try:
        for loss in losses:
            states = generator_states()
            value = _at_random_place(group, loss, batch, seeds, states)
            padded = _at_random_place(group, loss, _padded(batch, 1.0), seeds, states)
            if _equal(value, padded):
                continue
            # A model may draw random numbers elsewhere than in dropout layers: then only what is in the padding can be varied.
            again = _at_random_place(group, loss, batch, seeds + 1, None)
            other = _at_random_place(group, loss, _padded(batch, -2.0), seeds, states)
            if _equal(value, again) or not _equal(padded, other):
                raise NotBatchableError(
                    "padding changes the loss: it does not respect batch.weight (end it in batch.mean(...)), or examples of a "
                    "batch influence each other, as in batch normalisation"
                )
    finally:
        for module in dropouts:
            module.train()


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether these losses differ by rounding alone."""
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def _at_random_place(
    group: StackedClients, loss: Loss, batch: Batch, seeds: Tensor, states: Sequence[Tensor] | None
) -> Tensor:
    """Return the losses [clients] at a fixed random distance from the clients' parameters.

    Args:
        states: of PyTorch's generators to begin with; ``None``: as they are.
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
            value, _ = group.compute(functools.partial(computed, loss), batch, seeds)
        except MoreSourcesError:
            continue
        if value.shape != (group.active,):
            raise NotBatchableError(f"the loss is not a scalar but {tuple(value.shape[1:])}")
        value.sum().backward()
        losses: Tensor = value.detach()
        return losses


def _padded(batch: Batch, shift: float) -> Batch:
    """``batch`` and one example more, of weight 0, in every client; and more frames where lengths say which count."""
    tensors = {name: torch.cat([tensor, tensor[:, :1]], dim=1) for name, tensor in batch.tensors().items()}
    for name, x in batch.views.items():
        longer = torch.cat([x, x[:, :1].flip(2) + shift], dim=1)
        tensors[f"views/{name}"] = nn.functional.pad(longer, (0, 0, 0, 5)) if name in batch.view_lengths else longer
    weight = torch.ones(batch.y.shape[:2], device=batch.y.device) if batch.weight is None else batch.weight
    tensors["weight"] = torch.cat([weight, torch.zeros_like(weight[:, :1])], dim=1)
    return Batch.from_tensors(tensors)
