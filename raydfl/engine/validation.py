"""Validation of clients' updates and metrics. An invalid update costs only its own client.

The worker checks an update by itself (:func:`check_form`, :func:`check_weights`, :func:`check_metrics`). The server checks it
against its state and the round's earlier updates, in client order (:class:`UpdateChecker`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raydfl.core.cuts import Cut
from raydfl.core.errors import ClientError, RaydflError, printable
from raydfl.core.metrics import base_name, kind_of_metric
from raydfl.core.tensors import Layout
from raydfl.core.types import Metric, Metrics, Ratio, Scores, Tensors, Update
from raydfl.engine.orders import Reply
from raydfl.rules import cut_misfit, read_weight

MAX_METRICS = 1_000
"""Largest number of metric names of a client. Each becomes rows and curves, so without a limit one client could stall the run."""
_REASON = 500
"""Largest number of characters of a recorded reason."""
_ADVICE = {
    "not finite": "Lower train.optimiser.lr or set train.optimiser.clip_norm, then start a new run",
    "error": "Fix the method, or raise run.max_failed, then resume the run",
    "late": "Raise train.deadline, then start a new run",
    "lost": "The actors were probably killed for lack of memory. Lower ray.actors, or raise ray.retries, then resume the run",
}
"""Remedies by kind of failure, the prefix of a reason."""


def shorten_reason(text: str) -> str:
    """Shorten the reason of a rejection to one line of at most 500 characters."""
    return " ".join(text.split())[:_REASON]


def make_printable(reason: str) -> str:
    """Return the reason of a rejection in one line without control characters, because a client's process may have written it."""
    return printable(" ".join(reason.split()))


def check_form(update: Any, who: str) -> None:
    """Check that the result of a method's ``local`` is an update of tensors.

    Args:
        update: Return value of ``local``.
        who: The client in words, for the message.

    Raises:
        RaydflError: The result is not an update, or its key, tensors or cuts have a wrong type.
    """
    if not isinstance(update, Update):
        raise RaydflError(
            f"{who}: local() returned a {type(update).__name__}, not an Update. End it with: return step.update(metrics)"
        )
    if not isinstance(update.key, str):
        raise RaydflError(f"{who}: the update's key is {update.key!r}, not a string")
    for name, tensor in update.tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise RaydflError(f"{who}: the update's entry {name!r} is a {type(tensor).__name__}. Map names to tensors")
    if not isinstance(update.cuts, Mapping) or not all(isinstance(cut, Cut) for cut in update.cuts.values()):
        raise RaydflError(
            f"{who}: the update's cuts are {update.cuts!r:.80}. Map the names of cut tensors to Cut objects"
        )


def check_weights(update: Update, layout: Layout) -> None:
    """Check that an update's weights are finite and non-negative, and fit its tensors.

    Raises:
        RaydflError: A weight is invalid. The message names it.
    """
    if not isinstance(update.weight, Mapping):
        read_weight(update, update.weight, "", ())
        return
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        read_weight(update, update.weight, name, shape)


def check_number(metrics: Collection[str], who: str) -> None:
    """Check that there are at most :data:`MAX_METRICS` metrics.

    Args:
        metrics: Names of the metrics.
        who: The client in words, for the message.

    Raises:
        RaydflError: There are more metrics.
    """
    if len(metrics) > MAX_METRICS:
        raise RaydflError(
            f"{who}: {len(metrics):,} metrics exceed the limit of {MAX_METRICS:,} for a client in a round. Use fewer names"
        )


def check_metrics(metrics: Any, who: str) -> Metrics:
    """Check metrics, and convert the values of ratios to Python floats.

    Args:
        metrics: Metrics of a method's ``local`` or ``evaluate``.
        who: The client in words, for the message.

    Raises:
        RaydflError: A metric is neither a ratio, an array of numbers nor scores, a confusion matrix is not square, or there are too
            many metrics.
    """
    if not isinstance(metrics, Mapping):
        raise RaydflError(
            f"{who}: the metrics are a {type(metrics).__name__}. Return a dict of raydfl.Ratio(total, count)"
        )
    check_number(metrics, who)
    checked: dict[str, Metric] = {}
    for name, value in metrics.items():
        if isinstance(value, Ratio):
            try:
                checked[name] = Ratio(float(value.total), float(value.count))
                continue
            except (TypeError, ValueError, RuntimeError):
                pass  # raises the error for invalid metrics below
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            if base_name(name) == "confusion" and not (value.ndim == 2 and value.shape[0] == value.shape[1]):
                raise RaydflError(
                    f"{who}: metric {name!r} is an array {list(value.shape)}, but a confusion matrix must be square"
                )
            checked[name] = value
            continue
        elif isinstance(value, Scores) and value.values.ndim in (1, 2) and value.values.shape == value.truth.shape:
            checked[name] = value
            continue
        raise RaydflError(
            f"{who}: metric {name!r} is {value!r:.80}. Use a raydfl.Ratio(total, count) of numbers, or a NumPy array of numbers"
        )
    return checked


class Kinds:
    """Kinds of metrics and of added tensors, in which all clients of a round must agree.

    The majority of the first three clients decides. Without a majority, the first client with the name decides.

    Args:
        voices: Kinds by name of the first three clients.
    """

    def __init__(self, voices: Iterable[Mapping[str, str]] = ()) -> None:
        counts: dict[str, Counter[str]] = {}
        for voice in voices:
            for name, kind in voice.items():
                counts.setdefault(name, Counter())[kind] += 1
        # most_common lists equal counts in the order of insertion, so the first client decides a tie.
        self._known = {name: count.most_common(1)[0][0] for name, count in counts.items()}

    def misfit(self, kinds: Mapping[str, str]) -> str:
        """Describe the first kind of a client that differs from the known kinds; empty: none does.

        Kinds of a misfit are not adopted for later clients.
        """
        for name, kind in kinds.items():
            known = self._known.get(name, kind)
            if known != kind:
                return f"{name} is {kind}, but {known} at other clients. Use the same kind at all clients"
        self._known.update(kinds)
        return ""


def kinds_of(metrics: Metrics, prefix: str = "") -> dict[str, str]:
    """Return the kind of each metric. Only metrics of the same kind can be added."""
    return {f"metric {prefix + name!r}": kind_of_metric(value) for name, value in metrics.items()}


class UpdateChecker:
    """Checker of a round's updates against the server's tensors and against earlier updates.

    Args:
        layouts: Layouts of the server's tensors by key.
        additions: ``Method.additions``.
        first: Updates and metrics of the first three clients, whose majority decides the kinds.
    """

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        additions: tuple[str, ...],
        first: Iterable[tuple[Update, Metrics]] = (),
    ) -> None:
        self._shapes = {key: dict(zip(layout.names, layout.shapes, strict=True)) for key, layout in layouts.items()}
        self._additions = additions
        self._results: dict[tuple[str, Layout], tuple[str, dict[str, str]]] = {}
        """Results of :meth:`_compare` by key and layout. Usually all clients have the same."""
        self._kinds = Kinds([self._compare(update)[1] | kinds_of(metrics) for update, metrics in first])

    def misfit(self, update: Update, metrics: Metrics) -> str:
        """Describe why an update cannot be used; empty: it can."""
        misfit, added = self._compare(update)
        return misfit or self._kinds.misfit(added | kinds_of(metrics))

    def find_misfit(self, reply: Reply) -> str:
        """Describe why a client's updates cannot be used; empty: they can."""
        return next(filter(None, (self.misfit(update, update.metrics) for update in reply.updates)), "")

    def find_misfit_of_block(self, replies: Iterable[Reply]) -> str:
        """Describe why the sums of a block cannot be used; empty: they can."""
        # Usually all clients have the same kinds.
        measured = [reply.measured["train"] for reply in replies if not reply.rejected]
        kinds = {
            tuple((name, kind_of_metric(value)) for name, value in metrics.items()): metrics for metrics in measured
        }
        misfits = itertools.chain(
            (self.misfit(update, {}) for reply in replies for update in reply.sums),
            (self._kinds.misfit(kinds_of(metrics)) for metrics in kinds.values()),
        )
        return next(filter(None, misfits), "")

    def _compare(self, update: Update) -> tuple[str, dict[str, str]]:
        """Compare an update with the server's tensors.

        Returns:
            A description of the first misfit, and the shapes of tensors that the server does not have.
        """
        layout = Layout.from_tensors(update.tensors)
        if update.cuts:
            known = self._shapes.get(update.key, {})
            shapes = dict(zip(layout.names, layout.shapes, strict=True))
            misfit = cut_misfit(update, shapes, known)
            if misfit:
                return misfit, {}
            layout = Layout.from_shapes({**shapes, **{name: known[name] for name in update.cuts}})
        kind = (update.key, layout)
        if kind not in self._results:
            added: dict[str, str] = {}
            self._results[kind] = self._compare_layout(update.key, layout, added), added
        return self._results[kind]

    def _compare_layout(self, key: str, layout: Layout, added: dict[str, str]) -> str:
        known = self._shapes.get(key)
        remedy = "Put it into the state in init(), or name it in the class variable additions"
        if known is None and not (layout.names and all(name.startswith(self._additions) for name in layout.names)):
            keys = ", ".join(map(repr, self._shapes))
            return f"the update has the key {key!r}, but the server's state has only {keys}. {remedy}"
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            expected = (known or {}).get(name)
            if expected is None and not name.startswith(self._additions):
                return (
                    f"the update holds the tensor {name!r}, but the server has no such tensor under {key!r}. {remedy}"
                )
            if expected is None:
                added[f"tensor {name!r} under {key!r}"] = f"of shape {shape}"
            elif expected != shape:
                return (
                    f"the update's tensor {name!r} has the shape {shape}, but {expected} under {key!r}. Use different keys for "
                    f"networks of different shapes, or do not share this tensor"
                )
        return ""


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has no NaN and no infinity. Integer tensors are always finite."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    lowest, highest = torch.aminmax(tensor)  # both are NaN if there is a NaN
    return math.isfinite(lowest) and math.isfinite(highest)


def _find_overflows(after: Mapping[str, Tensors], before: Mapping[str, Tensors]) -> list[tuple[str, str]]:
    """Return key and name of each non-finite tensor that is new or was finite before."""
    return [
        (key, name)
        for key, group in after.items()
        for name, tensor in group.items()
        if tensor is not (old := before.get(key, {}).get(name))
        and not is_finite(tensor)
        and (old is None or is_finite(old))
    ]


def reject_misfit(round_index: int, client: str, misfit: str, on_error: str) -> str:
    """Return the reason of a client's rejection, for an update or metrics that do not fit.

    Raises:
        ClientError: ``on_error`` is ``"stop"``.
    """
    text = f"round {round_index}, client {client!r}: {misfit}"
    if on_error == "stop":
        raise ClientError(text)
    return shorten_reason(f"error: {text}")


def check_failed(
    round_index: int, failed: Mapping[str, str], clients: int, max_failed: float, run_dir: Path | None = None
) -> None:
    """Check that not too many clients of a round failed.

    Args:
        round_index: Number of the round.
        failed: Reasons by client id.
        clients: Number of clients that took part.
        max_failed: Largest fraction of clients that may fail.
        run_dir: Run directory, to suggest a replay; ``None``: no suggestion.

    Raises:
        ClientError: More clients failed. The message has the reason of the first one, and a remedy.
    """
    if len(failed) <= max_failed * clients:
        return
    client, reason = next(iter(failed.items()))
    advice = _ADVICE[reason.partition(":")[0]]
    if run_dir is not None:
        advice += f". Inspect a client with: raydfl replay {run_dir} --round {round_index} --client '{client}'"
    raise ClientError(
        f"round {round_index}: {len(failed)} of {clients} clients were rejected "
        f"(client {client!r}: {reason}), more than run.max_failed={max_failed:g} allows. {advice}"
    )


def check_overflow(
    round_index: int,
    after: Mapping[str, Tensors],
    before: Mapping[str, Tensors],
    largest: Mapping[str, float],
    attackers: Sequence[str],
) -> None:
    """Check that the aggregated state has not overflowed. Sums and squares of finite updates may be infinite.

    Args:
        round_index: Number of the round.
        after: Tensors of the new state by key.
        before: Tensors before the round.
        largest: Largest magnitude in each client's update.
        attackers: Ids of the round's attackers.

    Raises:
        ClientError: A tensor overflowed. The message names it, and the client with the largest value.
    """
    overflows = _find_overflows(after, before)
    if not overflows:
        return
    names = ", ".join(f"{name!r} of {key!r}" for key, name in overflows[:3]) + (" ..." if len(overflows) > 3 else "")
    origin = ""
    if largest:
        client = max(largest, key=lambda name: largest[name])
        origin = f". The largest value in an update is {largest[client]:.3g}, of client {client!r}"
    if attackers:
        origin += f"; attackers: {', '.join(map(repr, attackers[:5]))}{' ...' if len(attackers) > 5 else ''}"
    raise ClientError(
        f"round {round_index}: the aggregated state is not finite: {names}{origin}. The last commit remains valid. Choose a rule "
        f"that limits a client's influence (method.rule=median), lower train.optimiser.lr or set train.optimiser.clip_norm, then "
        f"start a new run"
    )
