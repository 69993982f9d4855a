"""Every test of an operation runs with the compiled operators, where they were built, and with PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from raydfl.core import ops


@pytest.fixture(params=["compiled", "torch"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "compiled" and not ops.is_compiled():
        pytest.skip("the operators in C++ were not built here (make installs them where there is a compiler)")
    with ops.use("auto" if request.param == "compiled" else "torch"):
        yield request.param


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small operations on several threads of a busy machine wait for one another
    yield
    torch.set_num_threads(before)
