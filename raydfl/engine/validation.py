"""Check what clients send: one client's nonsense costs that client's update, and no more.

What an update says by itself is checked where it is made (:func:`check_form` and those after it). How it fits the server's state
and the other clients is checked where the updates come together, in client order (:class:`UpdateChecker`).
"""

from __future__ import annotations

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
from raydfl.rules import cut_misfit, read_weight

MAX_METRICS = 1_000
"""Names of metrics that one client may send. Each becomes rows and curves, so without a limit one client could stall the run."""
_REASON = 500
"""Characters that are kept of why a client was left out."""
_ADVICE = {
    "not finite": "lower train.optimiser.lr or set train.optimiser.clip_norm, and start afresh",
    "error": "mend the method, or raise run.max_failed, and resume the run",
    "late": "raise train.deadline, and start afresh",
    "lost": "check memory (an out-of-memory kill ends an actor), lower ray.actors or raise ray.retries, then resume the run",
}
"""What to do, by the kind of failure with which a reason begins."""


def reason_of(text: str) -> str:
    """Return why a client was left out as it is recorded, in one line."""
    return " ".join(text.split())[:_REASON]


def shown_reason(reason: str) -> str:
    """Return why a client was left out as it is recorded and shown: it may have been written by somebody else's process."""
    return printable(" ".join(reason.split()))


def check_form(update: Any, who: str) -> None:
    """Check that what a method's ``local`` returned is an update of tensors.

    Args:
        update: what it returned.
        who: the client, for the message.

    Raises:
        RaydflError: it is something else.
    """
    if not isinstance(update, Update):
        raise RaydflError(
            f"{who}: local() returned a {type(update).__name__}, not an Update; end it with: return step.update(metrics)"
        )
    if not isinstance(update.key, str):
        raise RaydflError(f"{who}: the update's key is {update.key!r}, not a text")
    for name, tensor in update.tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise RaydflError(
                f"{who}: the update holds {name!r}: {type(tensor).__name__}; it is made of tensors by their names"
            )
    if not isinstance(update.cuts, Mapping) or not all(isinstance(cut, Cut) for cut in update.cuts.values()):
        raise RaydflError(
            f"{who}: the update's cuts are {update.cuts!r:.80}; give a Cut by the name of each tensor cut"
        )


def check_weights(update: Update, layout: Layout) -> None:
    """Check that an update's weights are finite, not negative, and fit its tensors.

    Raises:
        RaydflError: one does not; it is named.
    """
    if not isinstance(update.weight, Mapping):
        read_weight(update, update.weight, "", ())
        return
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        read_weight(update, update.weight, name, shape)


def check_number(metrics: Collection[str], who: str) -> None:
    """Check that there are at most :data:`MAX_METRICS` metrics.

    Args:
        metrics: their names.
        who: the client, for the message.

    Raises:
        RaydflError: there are more.
    """
    if len(metrics) > MAX_METRICS:
        raise RaydflError(
            f"{who}: {len(metrics):,} metrics; a client may send at most {MAX_METRICS:,} in a round, so send fewer names"
        )


def checked_metrics(metrics: Any, who: str) -> Metrics:
    """Return metrics with plain numbers in their ratios.

    Args:
        metrics: what a method's ``local`` or ``evaluate`` returned.
        who: the client, for the message.

    Raises:
        RaydflError: one is neither a ratio nor an array of numbers nor scores, a confusion matrix is not square, or there are too
            many.
    """
    if not isinstance(metrics, Mapping):
        raise RaydflError(
            f"{who}: the metrics are a {type(metrics).__name__}; give a dict of raydfl.Ratio(total, count)"
        )
    check_number(metrics, who)
    found: dict[str, Metric] = {}
    for name, value in metrics.items():
        if isinstance(value, Ratio):
            try:
                found[name] = Ratio(float(value.total), float(value.count))
                continue
            except (TypeError, ValueError, RuntimeError):
                pass  # as anything else that is no number
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            if base_name(name) == "confusion" and not (value.ndim == 2 and value.shape[0] == value.shape[1]):
                raise RaydflError(
                    f"{who}: metric {name!r} is an array {list(value.shape)}; a confusion matrix is square"
                )
            found[name] = value
            continue
        elif isinstance(value, Scores) and value.values.ndim in (1, 2) and value.values.shape == value.truth.shape:
            found[name] = value
            continue
        raise RaydflError(
            f"{who}: metric {name!r} is {value!r:.80}; give a raydfl.Ratio(total, count) of numbers, or a NumPy array of numbers"
        )
    return found


class Kinds:
    """Kinds in which clients must agree: of each of their metrics, and the shape of what the server does not know.

    Of the first three that say something, two that agree decide; else, and for what none of them mentions, the first.

    Args:
        voices: what the first three say: kinds by what they are of.
    """

    def __init__(self, voices: Iterable[Mapping[str, str]] = ()) -> None:
        counted: dict[str, Counter[str]] = {}
        for voice in voices:
            for what, kind in voice.items():
                counted.setdefault(what, Counter())[kind] += 1
        self._known = {what: count.most_common(1)[0][0] for what, count in counted.items()}  # of equal ones the first

    def misfit(self, said: Mapping[str, str]) -> str:
        """Return in what a client differs from the others, or nothing. One that differs decides nothing for those after it."""
        for what, kind in said.items():
            known = self._known.get(what, kind)
            if known != kind:
                return f"{what} is {kind}, at other clients it is {known}; all have to be of one kind"
        self._known.update(said)
        return ""


def kinds_of(metrics: Metrics, prefix: str = "") -> dict[str, str]:
    """Return what kind each metric is of; those of one kind can be added up."""
    return {f"metric {prefix + name!r}": kind_of_metric(value) for name, value in metrics.items()}


class UpdateChecker:
    """Checks the updates of one round against what the server has, and against each other in the order in which they come.

    Args:
        tensors: the server's, by key.
        additions: Method.additions.
        first: updates and metrics of the first three clients, which decide what all have to agree in.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensors],
        additions: tuple[str, ...],
        first: Iterable[tuple[Update, Metrics]] = (),
    ) -> None:
        self._shapes = {
            key: {name: tuple(tensor.shape) for name, tensor in group.items()} for key, group in tensors.items()
        }
        self._additions = additions
        self._found: dict[tuple[str, Layout], tuple[str, dict[str, str]]] = {}
        """What :meth:`_compared` said about keys and layouts: as a rule there is one."""
        self._kinds = Kinds([self._compared(update)[1] | kinds_of(metrics) for update, metrics in first])

    def misfit(self, update: Update, metrics: Metrics) -> str:
        """Return why an update cannot be used, or nothing."""
        misfit, added = self._compared(update)
        return misfit or self._kinds.misfit(added | kinds_of(metrics))

    def _compared(self, update: Update) -> tuple[str, dict[str, str]]:
        """Return what does not fit the server's tensors, and the kinds of those that it does not have."""
        layout = Layout.from_tensors(update.tensors)
        if update.cuts:
            known = self._shapes.get(update.key, {})
            shapes = dict(zip(layout.names, layout.shapes, strict=True))
            misfit = cut_misfit(update, shapes, known)
            if misfit:
                return misfit, {}
            layout = Layout.from_shapes({**shapes, **{name: known[name] for name in update.cuts}})
        kind = (update.key, layout)
        if kind not in self._found:
            added: dict[str, str] = {}
            self._found[kind] = self._compare(update.key, layout, added), added
        return self._found[kind]

    def _compare(self, key: str, layout: Layout, added: dict[str, str]) -> str:
        known = self._shapes.get(key)
        declare = "put it into the state in init(), or name it in the class variable additions"
        if known is None and not (layout.names and all(name.startswith(self._additions) for name in layout.names)):
            return f"the update has the key {key!r}, the server's state has {', '.join(map(repr, self._shapes))}; {declare}"
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            wanted = (known or {}).get(name)
            if wanted is None and not name.startswith(self._additions):
                return f"the update holds the tensor {name!r}, which the server does not have under {key!r}; {declare}"
            if wanted is None:
                added[f"tensor {name!r} under {key!r}"] = f"of shape {shape}"
            elif wanted != shape:
                return (
                    f"the update's tensor {name!r} has the shape {shape}, under {key!r} it is {wanted}; give networks of different "
                    f"shapes different keys, or do not share this tensor"
                )
        return ""


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds no NaN and nothing infinite; one that holds no fractions never does."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    lowest, highest = torch.aminmax(tensor)  # a NaN is both
    return math.isfinite(lowest) and math.isfinite(highest)


def overflown(after: Mapping[str, Tensors], before: Mapping[str, Tensors]) -> list[tuple[str, str]]:
    """Return keys and names of the tensors that are not finite any more, or new and not finite."""
    return [
        (key, name)
        for key, group in after.items()
        for name, tensor in group.items()
        if tensor is not (old := before.get(key, {}).get(name))
        and not is_finite(tensor)
        and (old is None or is_finite(old))
    ]


def left_out(round_index: int, client: str, misfit: str, on_error: str) -> str:
    """Return the reason for which a client is left out whose work does not fit.

    Raises:
        ClientError: clients are not to be left out.
    """
    text = f"round {round_index}, client {client!r}: {misfit}"
    if on_error == "stop":
        raise ClientError(text)
    return reason_of(f"error: {text}")


def check_failed(
    round_index: int, failed: Mapping[str, str], clients: int, max_failed: float, run_dir: Path | None = None
) -> None:
    """Check that not too many clients of a round have failed.

    Args:
        round_index: of the round.
        failed: reasons by client id.
        clients: that took part.
        max_failed: the share of them that may fail.
        run_dir: the run's folder, where one of them can be looked at by a replay.

    Raises:
        ClientError: names one of them, and says what to do.
    """
    if len(failed) <= max_failed * clients:
        return
    client, reason = next(iter(failed.items()))
    advice = _ADVICE[reason.partition(":")[0]]
    if run_dir is not None:
        advice += f", or look at one with: raydfl replay {run_dir} --round {round_index} --client '{client}'"
    raise ClientError(
        f"round {round_index}: {len(failed)} of {clients} clients were rejected "
        f"(client {client!r}: {reason}), more than run.max_failed={max_failed:g} allows; {advice}"
    )


def check_overflow(
    round_index: int,
    after: Mapping[str, Tensors],
    before: Mapping[str, Tensors],
    largest: Mapping[str, float],
    attackers: Sequence[str],
) -> None:
    """Check that a state has not overflowed: what clients send is finite, but not every sum or square of it.

    Args:
        round_index: of the round.
        after: the state's tensors by key.
        before: those before the round.
        largest: the largest magnitude that each client computed.
        attackers: ids of the round's attackers.

    Raises:
        ClientError: names the tensors and the client that sent the largest number.
    """
    lost = overflown(after, before)
    if not lost:
        return
    names = ", ".join(f"{name!r} of {key!r}" for key, name in lost[:3]) + (" ..." if len(lost) > 3 else "")
    sent = ""
    if largest:
        client = max(largest, key=lambda name: largest[name])
        sent = f"; the largest number that a client computed is {largest[client]:.3g}, of client {client!r}"
    if attackers:
        sent += f"; attackers: {', '.join(map(repr, attackers[:5]))}{' ...' if len(attackers) > 5 else ''}"
    raise ClientError(
        f"round {round_index}: the aggregated state is not finite: {names}{sent}; the last commit counts. Take a rule that "
        f"limits a client's influence (method.rule=median), lower train.optimiser.lr or set train.optimiser.clip_norm, and "
        f"start afresh"
    )
