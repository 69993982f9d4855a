"""Fixture: one head for all tests of jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from head import Head


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    one = Head()
    yield one
    one.close()
