"""Updates as changes: how far a client went from the server's tensors, over all that it sends for one key."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from raydfl.core.ops import ClientVectors
from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Tensors, Update
from raydfl.rules._weights import absent, check_shapes, flat


class Base:
    """The server's tensors, from which changes are measured; 0 where it has none. They are flattened once for each layout."""

    def __init__(self, current: Mapping[str, Tensors]) -> None:
        """Args: current: the server's tensors by key."""
        self._current = current
        self._flat: dict[tuple[str, Layout], np.ndarray] = {}

    def under(self, update: Update, layout: Layout) -> np.ndarray:
        """Return the server's values where an update has its own: float32 [layout.size]; not to be written to.

        Raises:
            RaydflError: a tensor of the update has another shape at the server.
        """
        key = (update.key, layout)
        if key not in self._flat:
            tensors = self._current.get(update.key, {})
            check_shapes(update, layout, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
            self._flat[key] = flat(tensors, layout)
        return self._flat[key]

    def length(self, update: Update) -> float:
        """Return the Euclidean length of an update's change, elements without weight left out."""
        sent = FlatTensors.of(update.tensors)
        base = self.under(update, sent.layout)
        mask = absent(update, sent.layout)
        vector = sent.vector if mask is None else np.where(mask, base, sent.vector)
        return math.sqrt(ClientVectors([vector]).squared_distances(base)[0])

    def shortened(self, update: Update, factor: float) -> Update:
        """Return the same update with its change multiplied by a factor, in new memory."""
        sent = FlatTensors.of(update.tensors)
        base = self.under(update, sent.layout)
        vector = sent.vector - base
        vector *= np.float32(factor)
        vector += base
        return dataclasses.replace(update, tensors=FlatTensors(sent.layout, vector))
