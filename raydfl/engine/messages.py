"""Messages between server and client: the received tensors, and the client's updates.

A message may lack tensors of the global model. A client of a part (``data.parts``) has only its part's tensors, a client may lack
some models of the method, and a cut (``Task.cuts``) sends slices.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping

from raydfl.core import part_names
from raydfl.core.cuts import cut_size, cut_tensors
from raydfl.core.errors import ClientError, RaydflError
from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Update
from raydfl.engine.orders import Order
from raydfl.engine.validation import check_form


@contextlib.contextmanager
def blame_method(order: Order) -> Iterator[None]:
    """Raise failed checks of a method's results as ClientError with the round."""
    try:
        yield
    except RaydflError as error:
        raise ClientError(f"round {order.round_number}, {error}") from None


def select_received(
    order: Order, broadcast: Mapping[str, FlatTensors], lacks: frozenset[str]
) -> dict[str, FlatTensors]:
    """Select the tensors that the order's client receives, under the names of its part, and cut them.

    Args:
        order: Order of the client.
        broadcast: Server's tensors by key.
        lacks: Models of the method that the client does not have.
    """
    entries = {
        key: _drop_models(_select_part(broadcast[order.find_entry(key)], order.part), lacks)
        for key in order.task.receive
    }
    cuts, subject = order.task.cuts, order.subject
    return {key: cut_tensors(tensors, cuts, subject) for key, tensors in entries.items()} if cuts else entries


def _select_part(entry: FlatTensors, part: str) -> FlatTensors:
    """Select a part's tensors of an entry of the server's state, under their plain names."""
    if all(part_names.plain_name(name) == name for name in entry):
        return entry
    return FlatTensors.from_tensors(part_names.select_part(entry, part))


def _drop_models(tensors: FlatTensors, models: frozenset[str]) -> FlatTensors:
    """Return the tensors without the tensors of some models."""
    names = [name for name in tensors if name.partition("/")[0] not in models] if models else ()
    if not models or len(names) == len(tensors):
        return tensors
    return FlatTensors.from_tensors({name: tensors[name] for name in names})


def count_received_bytes(order: Order, broadcast: Mapping[str, FlatTensors], lacks: frozenset[str]) -> int:
    """Count the bytes of the order's downloads, without the client's existing entries (``Task.has``)."""
    total = 0
    for key in order.task.receive:
        if key in order.task.has:
            continue
        layout = _select_part(broadcast[order.find_entry(key)], order.part).layout
        if lacks:
            shapes = zip(layout.names, layout.shapes, strict=True)
            layout = Layout.from_shapes({name: shape for name, shape in shapes if name.partition("/")[0] not in lacks})
        total += cut_size(layout, order.task.cuts)
    return 4 * total  # float32


def split_updates(result: Update, who: str, shared: Callable[[str], bool], fixed: Collection[str]) -> list[Update]:
    """Split the result of a method's ``local`` into one update for each key, and check it.

    Args:
        result: Return value of ``local``.
        who: The client, for messages.
        shared: The method's ``shared``.
        fixed: Names of the fixed tensors.

    Raises:
        RaydflError: The result is no update, two updates have the same key, or an update has a private or fixed tensor.
    """
    check_form(result, who)
    updates = [dataclasses.replace(result, further=()), *result.further]  # each update names its own key
    for update in result.further:
        check_form(update, who)
        if update.further:
            raise RaydflError(
                f"{who}: an update in `further` has further updates. Put all of them into the first update"
            )
    keys = [update.key for update in updates]
    for key in keys:
        if keys.count(key) > 1:
            raise RaydflError(
                f"{who}: local() returned two updates to the key {key!r}. Join their tensors in one update"
            )
    names = [name for update in updates for name in update.tensors]
    for forbidden, reason in (
        ([name for name in names if not shared(name)], "the method's shared() keeps private"),
        ([name for name in names if name in fixed], "are fixed, because they do not train"),
    ):
        if forbidden:
            raise RaydflError(
                f"{who}: the update holds tensors that {reason}: {', '.join(forbidden[:5])}. Omit them from "
                f"step.update(tensors=...)"
            )
    return updates


def rename_for_server(update: Update, order: Order, broadcast: Mapping[str, FlatTensors]) -> Update:
    """Rename the tensors and weights of an update of a part's client to the server's names."""
    known = broadcast.get(order.find_entry(update.key), ())
    weight, part = update.weight, order.part
    return dataclasses.replace(
        update,
        tensors=part_names.mark_names(update.tensors, part, known),
        weight=part_names.mark_names(weight, part, known) if isinstance(weight, Mapping) else weight,
        cuts=part_names.mark_names(update.cuts, part, known),
    )
