"""Sums over clients that have parts of a tensor: some of its rows and columns, or a weight of its own for each element.

What is summed up is a float64 vector, read as a matrix where rows and columns are meant. As in :mod:`raydfl.core.ops.sums`, each
element is one chain of rounded products and sums in the order of the clients, so the bits are the same with and without compiled
operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raydfl.core.ops.sums import STRIP, as_tensors, sums_are_compiled

_ALL = np.zeros(0, np.int64)
_FEW = 2048  # elements of a total to which NumPy has added a slice before the compiled operator has its arguments


@dataclass(frozen=True)
class Slice:
    """Some rows and columns of a matrix, and what each row counts."""

    weights: np.ndarray
    """float64 [rows], or [1] for all of them."""
    values: np.ndarray | None = None
    """float32 [rows * columns], contiguous; ``None``: 1 everywhere."""
    rows: np.ndarray | None = None
    """int64 [rows], 1 or more, in the order of ``values``: which of the matrix; ``None``: all."""
    columns: np.ndarray | None = None
    """int64, 1 or more, in the order of ``values``: which groups of ``unit`` columns each; ``None``: all."""
    unit: int = 1


def add_slices(total: np.ndarray, height: int, slices: Sequence[Slice]) -> None:
    """Add each slice's values, times the weight of their row, to their place in ``total``.

    Args:
        total: float64 [height * columns], contiguous.
        height: rows of the matrix, 1 or more.
        slices: all with values, or all without.
    """
    if len(total) > _FEW and sums_are_compiled():
        of = [[each.values for each in slices if each.values is not None]]
        of.append([_ALL if each.rows is None else each.rows for each in slices])
        of.append([each.weights for each in slices])
        of.append([_ALL if each.columns is None else each.columns for each in slices])
        arrays = [as_tensors(each) for each in of]
        torch.ops.raydfl.add_slices(torch.from_numpy(total), height, *arrays, [each.unit for each in slices])
        return
    matrix = total.reshape(height, -1)
    for each in slices:
        rows = np.arange(height) if each.rows is None else each.rows
        columns = slice(None) if each.columns is None else each.columns
        if each.columns is not None and each.unit > 1:
            columns = (each.columns[:, None] * each.unit + np.arange(each.unit)).reshape(-1)
        values = None if each.values is None else each.values.reshape(len(rows), -1)
        weights = each.weights[:, None]
        step = max(1, STRIP // matrix.shape[1])
        for begin in range(0, len(rows), step):
            part = slice(begin, begin + step)
            products = weights if len(weights) == 1 else weights[part]
            if values is not None:
                products = values[part].astype(np.float64) * products  # faster than a product of two types
            if each.columns is None:
                matrix[rows[part]] += products
            else:
                matrix[rows[part, None], columns] += products


def add_elements(
    total: np.ndarray, counted: np.ndarray, vectors: Sequence[np.ndarray], weights: Sequence[np.ndarray]
) -> None:
    """Add vectors, each element with a weight of its own, to ``total``, and the weights to ``counted``.

    Args:
        total: float64 [elements], contiguous.
        counted: the same.
        vectors: float32 [elements], contiguous.
        weights: float32 or float64 [elements], contiguous, all of one type.
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
