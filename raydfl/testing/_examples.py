"""Make batches and examples of one view, for tests of losses and networks."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from raydfl.core.settings import FIRST_VIEW
from raydfl.core.types import Batch
from raydfl.data import Examples, Frames


def make_batch(x: Tensor, y: Tensor, lengths: Tensor | None = None, **fields: Any) -> Batch:
    """Make a batch of one view from its values and labels; other arguments as the fields of :class:`Batch`."""
    return Batch({FIRST_VIEW: x}, y, {} if lengths is None else {FIRST_VIEW: lengths}, **fields)


def make_examples(labels: np.ndarray, *view: Any) -> Examples:
    """Make examples of one view from their labels (int64 [examples]); other arguments as the fields of :class:`Frames`."""
    return Examples({FIRST_VIEW: Frames(*view)}, labels, np.arange(len(labels)))
