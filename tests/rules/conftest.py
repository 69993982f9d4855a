"""Run the tests of sums with compiled operators and with NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raydfl.core import ops
from raydfl.core.ops import slices
from raydfl.core.ops import sums as rows


@pytest.fixture(scope="module", params=["compiled", "numpy"])
def sums(request: pytest.FixtureRequest) -> Iterator[str]:
    """The implementation of sums. Each test of the module runs once with each."""
    if request.param == "numpy":
        with ops.use("torch"):
            yield "numpy"
        return
    if not rows.sums_are_compiled():
        pytest.skip("the operators in C++ are not compiled here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "_FEW", 0)  # compiled even for small sums, which NumPy computes by default
        yield "compiled"
