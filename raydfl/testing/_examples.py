"""Make batches and examples of one view, for tests of losses and networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from raydfl.core.settings import FIRST_VIEW
from raydfl.core.types import Batch
from raydfl.data import Examples, Frames
from raydfl.data.features import FeatureStore
from raydfl.data.transforms import PLAIN, Pipeline


def make_batch(
    x: Tensor, y: Tensor, lengths: Tensor | None = None, views: Mapping[str, Tensor] | None = None, **fields: Any
) -> Batch:
    """Make a batch.

    Args:
        x: the first view, as :attr:`Batch.x`.
        y: labels, as :attr:`Batch.y`.
        lengths: of the first view, int64 [batch]; ``None``: all frames count.
        views: the other views by name.
        fields: other fields of the batch.
    """
    of_first = {} if lengths is None else {FIRST_VIEW: lengths}
    of_others = fields.pop("view_lengths", {})
    return Batch({FIRST_VIEW: x, **(views or {})}, y, {**of_first, **of_others}, **fields)


def make_examples(
    store: FeatureStore,
    starts: np.ndarray,
    counts: np.ndarray,
    labels: np.ndarray,
    length: int | None,
    pipeline: Pipeline = PLAIN,
) -> Examples:
    """Make examples of one view, each a clip of its own: fields as those of :class:`Frames`, ``labels`` int64 [examples]."""
    return Examples({FIRST_VIEW: Frames(store, starts, counts, length, pipeline)}, labels, np.arange(len(labels)))
