"""Cut updates as whole ones: what a client did not send has no weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from raydfl.core.errors import RaydflError
from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Tensors, Update
from raydfl.rules._tensor_sum import spread
from raydfl.rules._weights import flat, number_or_elements


def whole_layout(update: Update, sent: Layout, server: Mapping[str, tuple[int, ...]]) -> Layout:
    """Return the layout that an update's tensors have at the server.

    Args:
        update: may be cut.
        sent: the layout of what it holds.
        server: shapes of the server's tensors.

    Raises:
        RaydflError: a cut does not fit.
    """
    if not update.cuts:
        return sent
    shapes = dict(zip(sent.names, sent.shapes, strict=True))
    for name in update.cuts:
        misfit = _misfit(update, name, shapes, server)
        if misfit:
            raise RaydflError(f"client {update.client_id!r}: the cut of {name!r} does not fit: {misfit}")
        shapes[name] = server[name]
    return Layout.of_shapes(shapes)


def cut_misfit(update: Update, sent: Mapping[str, tuple[int, ...]], server: Mapping[str, tuple[int, ...]]) -> str:
    """Return why the cuts of an update do not fit what it sends and what the server has, or nothing."""
    for name in update.cuts:
        misfit = _misfit(update, name, sent, server)
        if misfit:
            return f"the cut of the update's tensor {name!r} does not fit: {misfit}"
    return ""


def _misfit(
    update: Update, name: str, sent: Mapping[str, tuple[int, ...]], server: Mapping[str, tuple[int, ...]]
) -> str:
    if name not in sent:
        return "the update does not hold this tensor"
    if name not in server:
        return f"the server has no such tensor under {update.key!r}"
    cut = update.cuts[name]
    misfit = cut.misfit(server[name])
    if not misfit and cut.shape(server[name]) != sent[name]:
        return f"the tensor has the shape {sent[name]}, the cut leaves {cut.shape(server[name])}"
    return misfit


def filled(update: Update, current: Tensors) -> Update:
    """Return a cut update as a whole one: the server's values with weight 0 where the client sent nothing.

    Args:
        update: returned as it is where it is not cut.
        current: the server's tensors of its key.

    Raises:
        RaydflError: a cut does not fit, or a weight is missing, negative, not finite or of another shape than its tensor.
    """
    if not update.cuts:
        return update
    sent = FlatTensors.of(update.tensors)
    layout = whole_layout(update, sent.layout, {name: tuple(tensor.shape) for name, tensor in current.items()})
    vector = flat({name: current[name] for name in update.cuts}, layout)
    weights: dict[str, float | Tensor] = {}
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        own = sent.layout.shapes[sent.layout.positions[name]]
        part = sent.vector[sent.layout.columns(name)].reshape(own)
        weight = number_or_elements(update, update.weight, name, own)
        place = vector[layout.columns(name)].reshape(shape)
        if name in update.cuts:
            cut = update.cuts[name]
            place[cut.place(shape)] = part
            elements = np.zeros(spread(cut, weight, shape))
            elements[cut.place(elements.shape)] = weight
            weights[name] = torch.from_numpy(elements)
        else:
            place[...] = part
            weights[name] = weight if isinstance(weight, float) else torch.from_numpy(weight)
    return dataclasses.replace(update, tensors=FlatTensors(layout, vector), weight=weights, cuts={})
