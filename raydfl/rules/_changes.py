"""Changes: differences between a client update and the server's tensors of the same key."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from raydfl.core.ops import ClientVectors
from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Tensors, Update
from raydfl.rules._weights import check_shapes, find_unweighted, flatten_current


class ServerTensors:
    """The server's tensors, flattened once for each layout of an update. Missing tensors count as 0.

    Args:
        current: the server's tensors by key.
    """

    def __init__(self, current: Mapping[str, Tensors]) -> None:
        self._current = current
        self._flat: dict[tuple[str, Layout], np.ndarray] = {}

    def flatten_like(self, update: Update, layout: Layout) -> np.ndarray:
        """Flatten the server's tensors in the layout of an update.

        Returns:
            float32 [layout.size], shared between calls: do not write to it.

        Raises:
            RaydflError: a tensor has different shapes in the update and at the server.
        """
        key = (update.key, layout)
        if key not in self._flat:
            tensors = self._current.get(update.key, {})
            check_shapes(update, layout, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
            self._flat[key] = flatten_current(tensors, layout)
        return self._flat[key]

    def change_norm(self, update: Update) -> float:
        """Compute the Euclidean norm of an update's change, without elements of weight 0."""
        sent = FlatTensors.from_tensors(update.tensors)
        base = self.flatten_like(update, sent.layout)
        mask = find_unweighted(update, sent.layout)
        vector = sent.vector if mask is None else np.where(mask, base, sent.vector)
        return math.sqrt(ClientVectors([vector]).compute_squared_distances(base)[0])

    def scale_change(self, update: Update, factor: float) -> Update:
        """Multiply the change of an update by a factor and return the result as a new update."""
        sent = FlatTensors.from_tensors(update.tensors)
        base = self.flatten_like(update, sent.layout)
        vector = sent.vector - base
        vector *= np.float32(factor)
        vector += base
        return dataclasses.replace(update, tensors=FlatTensors(sent.layout, vector))
