"""Tests of operators run with the compiled operators, if they are built, and with PyTorch."""

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
def single_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of small operations wait for each other on a busy machine
    yield
    torch.set_num_threads(before)
