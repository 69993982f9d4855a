"""Every method, rule, attack, objective, transform and data option gives the recorded bits of ``golden.json``.

The recorded bits hold for the kernels of their key. With other kernels, a sum of the server's values with random
signs is compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from golden_cases import cases
from golden_record import FILE, RUNS, SWEEPS, compute_job_digest, configure, list_arrivals, measure
from helpers import marks_of

from raydfl.testing import describe_kernels

GOLDEN: dict[str, Any] = json.loads(FILE.read_text())
UNSTABLE: set[str] = set()
"""Cases with decisions on close values. They may end differently with other kernels."""


def marks_of_case(name: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a federation: of its method, if it is a method's case."""
    kind, _, method = name.partition(" ")
    return marks_of(method) if kind == "method" else []


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of_case(name)) for name in cases()])
def test_a_federation_has_the_recorded_bits(name: str, tmp_path: Path, feature_cache: Path) -> None:
    values = measure(configure(name, cases()[name], tmp_path, feature_cache))
    expected = GOLDEN["cases"][name]
    assert values["ownership"] == expected["ownership"], "clients have different examples, or a different order"
    bits = expected["bits"].get(describe_kernels())
    if bits is not None:
        assert values["bits"] == bits
    elif name not in UNSTABLE:
        assert values["signed_sum"] == pytest.approx(expected["signed_sum"], abs=2e-3)


@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SWEEPS)])
def test_a_job_keeps_its_digest(name: str) -> None:
    assert compute_job_digest(name) == GOLDEN["jobs"][name]


def test_the_arrivals_in_virtual_time_are_those_of_the_record() -> None:
    assert list_arrivals() == GOLDEN["arrivals"]


def test_every_case_is_recorded() -> None:
    assert set(GOLDEN["cases"]) == set(cases())
    assert set(GOLDEN["jobs"]) == {*RUNS, *SWEEPS}
