"""Everything about sums is tested as it was installed and as it is where nothing could be compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raydfl.core import ops
from raydfl.core.ops import slices
from raydfl.core.ops import sums as rows


@pytest.fixture(scope="module", params=["compiled", "numpy"])
def sums(request: pytest.FixtureRequest) -> Iterator[str]:
    """How sums are done in the tests of a module, each of which runs twice."""
    if request.param == "numpy":
        with ops.use("torch"):
            yield "numpy"
        return
    if not rows.sums_are_compiled():
        pytest.skip("the operators in C++ are not compiled here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "_FEW", 0)  # small sums too, which NumPy does as a rule
        yield "compiled"
