"""Check what clients send: one client's nonsense costs that client's update, and no more.

What an update says by itself is checked where it is made (:func:`check_form` and those after it). How it fits the server's state
and the other clients is checked where the updates come together, in client order (:class:`UpdateChecker`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raydfl.core.errors import RaydflError
from raydfl.core.metrics import base_name
from raydfl.core.tensors import Layout
from raydfl.core.types import Metrics, Ratio, Tensors, Update
from raydfl.rules import weight_of


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


def check_weights(update: Update, layout: Layout) -> None:
    """Check that an update's weights are finite, not negative, and fit its tensors.

    Raises:
        RaydflError: one does not; it is named.
    """
    if not isinstance(update.weight, Mapping):
        weight_of(update, update.weight, "", ())
        return
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        weight_of(update, update.weight, name, shape)


def checked_metrics(metrics: Any, who: str) -> Metrics:
    """Return metrics with plain numbers in their ratios.

    Args:
        metrics: what a method's ``local`` or ``evaluate`` returned.
        who: the client, for the message.

    Raises:
        RaydflError: one is neither a ratio nor an array of numbers, or a confusion matrix is not square.
    """
    if not isinstance(metrics, Mapping):
        raise RaydflError(
            f"{who}: the metrics are a {type(metrics).__name__}; give a dict of raydfl.Ratio(total, count)"
        )
    found: dict[str, Ratio | np.ndarray] = {}
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
        raise RaydflError(
            f"{who}: metric {name!r} is {value!r:.80}; give a raydfl.Ratio(total, count) of numbers, or a NumPy array of numbers"
        )
    return found


class Kinds:
    """What several clients must agree in: the kind of each of their metrics, and the shape of what the server does not know.

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
    return {
        f"metric {prefix + name!r}": f"an array {list(value.shape)}" if isinstance(value, np.ndarray) else "a ratio"
        for name, value in metrics.items()
    }


class UpdateChecker:
    """Checks the updates of one round against what the server has, and against each other in the order in which they come.

    Args:
        tensors: the server's, by key.
        may_send: Method.may_send: what clients may send besides.
        first: updates and metrics of the first three clients, which decide what all have to agree in.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensors],
        may_send: Callable[[str, str], bool],
        first: Iterable[tuple[Update, Metrics]] = (),
    ) -> None:
        self._shapes = {
            key: {name: tuple(tensor.shape) for name, tensor in group.items()} for key, group in tensors.items()
        }
        self._may_send = may_send
        self._found: dict[tuple[str, Layout], tuple[str, dict[str, str]]] = {}
        """What :meth:`_compared` said about keys and layouts: as a rule there is one."""
        self._kinds = Kinds([self._compared(update)[1] | kinds_of(metrics) for update, metrics in first])

    def misfit(self, update: Update, metrics: Metrics) -> str:
        """Return why an update cannot be used, or nothing."""
        misfit, added = self._compared(update)
        return misfit or self._kinds.misfit(added | kinds_of(metrics))

    def _compared(self, update: Update) -> tuple[str, dict[str, str]]:
        """What does not fit the server's tensors, and the kinds of those that it does not have."""
        layout = Layout.of(update.tensors)
        kind = (update.key, layout)
        if kind not in self._found:
            added: dict[str, str] = {}
            self._found[kind] = self._compare(update.key, layout, added), added
        return self._found[kind]

    def _compare(self, key: str, layout: Layout, added: dict[str, str]) -> str:
        known = self._shapes.get(key)
        declare = "put it into the state in init(), or let may_send(key, name) allow it"
        if known is None and not (layout.names and all(self._may_send(key, name) for name in layout.names)):
            return f"the update has the key {key!r}, the server's state has {', '.join(map(repr, self._shapes))}; {declare}"
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            wanted = (known or {}).get(name)
            if wanted is None and not self._may_send(key, name):
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
