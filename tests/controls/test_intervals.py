"""Intervals of scores by hand, by SciPy, and by their definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from raydfl.controls import auc_interval, wilson_interval


def test_wilson_by_hand() -> None:
    """For 8 of 10: z^2 = 3.8415, the centre (8 + 1.9207) / 13.8415 = 0.7167, half 1.96 sqrt(1.6 + 0.9604) / 13.8415 = 0.2266."""
    assert wilson_interval(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)


@given(count=st.integers(1, 2000), share=st.floats(0, 1))
def test_wilson_equals_scipy(count: int, share: float) -> None:
    right = round(share * count)
    expected = binomtest(right, count).proportion_ci(method="wilson")
    assert wilson_interval(right / count, count) == pytest.approx((expected.low, expected.high), abs=1e-9)


def error(auc: float, anomalous: int, normal: int) -> float:
    """Standard error of an AUC, written as in Hanley and McNeil's equation 1."""
    q1, q2 = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    first, second = (anomalous - 1) * (q1 - auc**2), (normal - 1) * (q2 - auc**2)
    return math.sqrt((auc * (1 - auc) + first + second) / (anomalous * normal))


@given(auc=st.floats(0.01, 0.99), anomalous=st.integers(1, 300), normal=st.integers(1, 300))
def test_ends_of_an_auc_are_1_96_errors_away(auc: float, anomalous: int, normal: int) -> None:
    low, high = auc_interval(auc, anomalous, normal)
    assert 0 < low < auc < high < 1
    for end in (low, high):
        assert abs(auc - end) == pytest.approx(1.959964 * error(end, anomalous, normal), abs=1e-6)


@pytest.mark.parametrize("auc", [0.0, 1.0])
def test_a_perfect_auc_has_a_width(auc: float) -> None:
    """An end equals the AUC. Ten times the clips halve the width at least."""
    ends = [auc_interval(auc, clips, clips) for clips in (5, 50, 500)]
    assert all(auc in pair for pair in ends)
    widths = np.array([high - low for low, high in ends])
    assert (widths[:-1] > 2 * widths[1:]).all()
    assert widths[0] < 0.5
