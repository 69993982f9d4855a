"""Batches and examples with a single view, for tests of losses and networks."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from raydfl.core.settings import FIRST_VIEW
from raydfl.core.types import Batch
from raydfl.data import Examples, Frames


def make_batch(x: Tensor, y: Tensor, lengths: Tensor | None = None, **fields: Any) -> Batch:
    """Make a batch with a single view.

    Args:
        x: Inputs, float32 [batch, ...].
        y: Labels, int64 [batch].
        lengths: Lengths of the inputs in frames, int64 [batch]. None: equal lengths.
        fields: Further fields of :class:`Batch`.
    """
    return Batch({FIRST_VIEW: x}, y, {} if lengths is None else {FIRST_VIEW: lengths}, **fields)


def make_examples(labels: np.ndarray, *view: Any) -> Examples:
    """Make examples with a single view.

    Args:
        labels: int64 [examples].
        view: Fields of :class:`Frames`, in order.
    """
    return Examples({FIRST_VIEW: Frames(*view)}, labels, np.arange(len(labels)))
