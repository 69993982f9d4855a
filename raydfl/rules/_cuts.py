"""Expansion of cut updates to whole tensors, with weight 0 outside the cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from raydfl.core.errors import RaydflError
from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Tensors, Update
from raydfl.rules._tensor_sum import weight_shape
from raydfl.rules._weights import flatten_current, read_float64_weight


def whole_layout(update: Update, sent: Layout, server: Mapping[str, tuple[int, ...]]) -> Layout:
    """Compute the layout of an update's tensors before they were cut.

    Args:
        update: the update, with or without cuts.
        sent: the layout of its tensors.
        server: shapes of the server's tensors.

    Raises:
        RaydflError: a cut does not fit the server's tensor.
    """
    if not update.cuts:
        return sent
    shapes = dict(zip(sent.names, sent.shapes, strict=True))
    for name in update.cuts:
        misfit = _find_misfit(update, name, shapes, server)
        if misfit:
            raise RaydflError(f"client {update.client_id!r}: the cut of {name!r} does not fit: {misfit}")
        shapes[name] = server[name]
    return Layout.from_shapes(shapes)


def cut_misfit(update: Update, sent: Mapping[str, tuple[int, ...]], server: Mapping[str, tuple[int, ...]]) -> str:
    """Compare the cuts of an update with its tensors and the server's.

    Args:
        update: the update.
        sent: shapes of its tensors.
        server: shapes of the server's tensors.

    Returns:
        The reason why a cut does not fit, or an empty string.
    """
    for name in update.cuts:
        misfit = _find_misfit(update, name, sent, server)
        if misfit:
            return f"the cut of the update's tensor {name!r} does not fit: {misfit}"
    return ""


def _find_misfit(
    update: Update, name: str, sent: Mapping[str, tuple[int, ...]], server: Mapping[str, tuple[int, ...]]
) -> str:
    if name not in sent:
        return "the update does not contain this tensor"
    if name not in server:
        return f"the server does not have this tensor under the key {update.key!r}"
    cut = update.cuts[name]
    misfit = cut.misfit(server[name])
    if not misfit and cut.shape(server[name]) != sent[name]:
        return f"the tensor has the shape {sent[name]}, but the cut has {cut.shape(server[name])}"
    return misfit


def fill_cuts(update: Update, current: Tensors) -> Update:
    """Expand a cut update to whole tensors. Elements outside the cut get the server's values and weight 0.

    Args:
        update: an update without cuts is returned unchanged.
        current: the server's tensors of the update's key.

    Raises:
        RaydflError: a cut does not fit, or a weight is missing, negative, not finite or has the wrong shape.
    """
    if not update.cuts:
        return update
    sent = FlatTensors.from_tensors(update.tensors)
    layout = whole_layout(update, sent.layout, {name: tuple(tensor.shape) for name, tensor in current.items()})
    vector = flatten_current({name: current[name] for name in update.cuts}, layout)
    weights: dict[str, float | Tensor] = {}
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        sent_shape = sent.layout.shapes[sent.layout.positions[name]]
        values = sent.vector[sent.layout.columns(name)].reshape(sent_shape)
        weight = read_float64_weight(update, update.weight, name, sent_shape)
        target = vector[layout.columns(name)].reshape(shape)
        if name in update.cuts:
            cut = update.cuts[name]
            target[cut.place(shape)] = values
            elements = np.zeros(weight_shape(cut, weight, shape))
            elements[cut.place(elements.shape)] = weight
            weights[name] = torch.from_numpy(elements)
        else:
            target[...] = values
            weights[name] = weight if isinstance(weight, float) else torch.from_numpy(weight)
    return dataclasses.replace(update, tensors=FlatTensors(layout, vector), weight=weights, cuts={})
