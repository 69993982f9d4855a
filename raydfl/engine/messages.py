"""Messages: what a client receives of the server's tensors, and its updates as they go to the server.

Neither need be the whole model: a client of a part (``data.parts``) has tensors of its own under the server's names, a client may
lack models that the method has, and a cut (``Task.cuts``) sends slices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

from raydfl.core import part_names
from raydfl.core.cuts import cut_size, cut_tensors
from raydfl.core.errors import RaydflError
from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Update
from raydfl.engine.orders import Order
from raydfl.engine.validation import check_form


def received(order: Order, broadcast: Mapping[str, FlatTensors], lacks: frozenset[str]) -> dict[str, FlatTensors]:
    """Return what the order's client gets of the server's tensors: of those that parts have of their own, its part's; some cut.

    Args:
        lacks: models of the method that the client does not have.
    """
    whole = _of_part(order, broadcast, lacks)
    cuts, whose = order.task.cuts, order.subject
    return {key: cut_tensors(tensors, cuts, whose) for key, tensors in whole.items()} if cuts else whole


def _of_part(order: Order, broadcast: Mapping[str, FlatTensors], lacks: frozenset[str]) -> dict[str, FlatTensors]:
    return {key: _without_models(_own_tensors(broadcast[key], order.part), lacks) for key in order.task.receive}


def _own_tensors(sent: FlatTensors, part: str) -> FlatTensors:
    """Return an entry of the server's state as a client of a part receives it."""
    if all(part_names.plain_name(name) == name for name in sent):
        return sent
    return FlatTensors.from_tensors(part_names.select_part(sent, part))


def _without_models(tensors: FlatTensors, models: frozenset[str]) -> FlatTensors:
    """Return tensors but those of some models."""
    names = [name for name in tensors if name.partition("/")[0] not in models] if models else ()
    return (
        tensors
        if not models or len(names) == len(tensors)
        else FlatTensors.from_tensors({n: tensors[n] for n in names})
    )


def received_bytes(order: Order, broadcast: Mapping[str, FlatTensors], lacks: frozenset[str]) -> int:
    """Return the bytes that the order's client gets of the server's tensors, without the entries that it has already."""
    total = 0
    for key in order.task.receive:
        if key in order.task.has:
            continue
        layout = _own_tensors(broadcast[key], order.part).layout
        if lacks:
            shapes = zip(layout.names, layout.shapes, strict=True)
            layout = Layout.from_shapes({name: shape for name, shape in shapes if name.partition("/")[0] not in lacks})
        total += cut_size(layout, order.task.cuts)
    return 4 * total


def sent_updates(found: Update, who: str, shared: Callable[[str], bool], fixed: Collection[str]) -> list[Update]:
    """Return what a method's ``local`` returned as a list of updates, each to another key.

    Args:
        found: by ``local``.
        who: the client, for messages.
        shared: of the method.
        fixed: names of the fixed tensors.

    Raises:
        RaydflError: it is something else, two updates are to one key, or an update holds a tensor that may not be sent.
    """
    check_form(found, who)
    updates = [dataclasses.replace(found, further=()), *found.further]
    for update in found.further:
        check_form(update, who)
        if update.further:
            raise RaydflError(f"{who}: a further update has further ones itself; put all of them beside the first")
    keys = [update.key for update in updates]
    for key in keys:
        if keys.count(key) > 1:
            raise RaydflError(f"{who}: local() returned two updates to the key {key!r}; join their tensors in one")
    names = [name for update in updates for name in update.tensors]
    for kept, why in (
        ([name for name in names if not shared(name)], "the method's shared() keeps private"),
        ([name for name in names if name in fixed], "are fixed, because they do not train"),
    ):
        if kept:
            raise RaydflError(
                f"{who}: the update holds tensors that {why}: {', '.join(kept[:5])}; leave them out of step.update(tensors=...)"
            )
    return updates


def by_servers_names(update: Update, part: str, broadcast: Mapping[str, FlatTensors]) -> Update:
    """Return an update of a part's client with its tensors and their weights under the names that the server has for them."""
    known = broadcast.get(update.key, ())
    weight = update.weight
    return dataclasses.replace(
        update,
        tensors=part_names.mark_names(update.tensors, part, known),
        weight=part_names.mark_names(weight, part, known) if isinstance(weight, Mapping) else weight,
        cuts=part_names.mark_names(update.cuts, part, known),
    )
