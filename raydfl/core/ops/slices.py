"""Weighted sums over clients with slices of a tensor (rows and columns of a matrix), or with a weight for each element.

The total is a float64 vector, viewed as a matrix for slices. As in :mod:`raydfl.core.ops.sums`, each element accumulates rounded
products in client order, so compiled operators give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raydfl.core.ops.sums import STRIP, as_tensors, sums_are_compiled

_ALL = np.zeros(0, np.int64)
_FEW = 2048  # elements of a total up to which NumPy is faster than preparing the compiled operator's arguments


@dataclass(frozen=True)
class Slice:
    """Values for some rows and columns of a matrix, with row weights."""

    weights: np.ndarray
    """float64 [rows], or [1] for all rows."""
    values: np.ndarray | None = None
    """float32 [rows * columns], contiguous. ``None``: all 1."""
    rows: np.ndarray | None = None
    """int64 [rows]: at least one row index, in the order of ``values``. ``None``: all rows."""
    columns: np.ndarray | None = None
    """int64: at least one index of a group of ``unit`` columns, in the order of ``values``. ``None``: all columns."""
    unit: int = 1
    """Number of columns in a group."""


def add_slices(total: np.ndarray, height: int, slices: Sequence[Slice]) -> None:
    """Add the slices' values, multiplied by their row weights, to ``total`` in place.

    Args:
        total: float64 [height * columns], contiguous.
        height: number of rows in the matrix, at least 1.
        slices: slices. Either all have values, or none.
    """
    if len(total) > _FEW and sums_are_compiled():
        lists = [[part.values for part in slices if part.values is not None]]
        lists.append([_ALL if part.rows is None else part.rows for part in slices])
        lists.append([part.weights for part in slices])
        lists.append([_ALL if part.columns is None else part.columns for part in slices])
        arguments = [as_tensors(arrays) for arrays in lists]
        torch.ops.raydfl.add_slices(torch.from_numpy(total), height, *arguments, [part.unit for part in slices])
        return
    matrix = total.reshape(height, -1)
    for part in slices:
        rows = np.arange(height) if part.rows is None else part.rows
        columns = slice(None) if part.columns is None else part.columns
        if part.columns is not None and part.unit > 1:
            columns = (part.columns[:, None] * part.unit + np.arange(part.unit)).reshape(-1)
        values = None if part.values is None else part.values.reshape(len(rows), -1)
        weights = part.weights[:, None]
        step = max(1, STRIP // matrix.shape[1])
        for begin in range(0, len(rows), step):
            strip = slice(begin, begin + step)
            products = weights if len(weights) == 1 else weights[strip]
            if values is not None:
                products = values[strip].astype(np.float64) * products  # faster than a product of mixed types
            if part.columns is None:
                matrix[rows[strip]] += products
            else:
                matrix[rows[strip, None], columns] += products


def add_elements(
    total: np.ndarray, counted: np.ndarray, vectors: Sequence[np.ndarray], weights: Sequence[np.ndarray]
) -> None:
    """Add vectors with element-wise weights to ``total``, and the weights to ``counted``, in place.

    Args:
        total: float64 [elements], contiguous.
        counted: float64 [elements], contiguous.
        vectors: float32 [elements] each, contiguous.
        weights: float32 or float64 [elements] each, contiguous, all of the same dtype.
    """
    if sums_are_compiled():
        torch.ops.raydfl.add_elements(
            torch.from_numpy(total), torch.from_numpy(counted), as_tensors(vectors), as_tensors(weights)
        )
        return
    for begin in range(0, len(total), STRIP):
        strip = slice(begin, begin + STRIP)
        for vector, weight in zip(vectors, weights, strict=True):
            wide = weight[strip].astype(np.float64)
            counted[strip] += wide
            wide *= vector[strip]
            total[strip] += wide
