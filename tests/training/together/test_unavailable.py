"""Fields of a step hidden from a computation: any use raises an error with the field's name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest

from raydfl.training.together.handles import Unavailable
from raydfl.training.together.lockstep import NotBatchableError


@pytest.mark.parametrize(
    "use",
    [
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.mod, operator.lt),
        lambda a, b: operator.pow(b, a),
        lambda a, b: operator.sub(b, a),
        lambda a, b: operator.truediv(b, a),
        lambda a, _: float(a),
        lambda a, _: range(a),
        lambda a, _: a.index,
        lambda a, b: a == b,
        lambda a, _: bool(a),
    ],
)
def test_every_use_names_the_field(use: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(NotBatchableError, match=r"reads step.round_index, which is not the same for all clients"):
        use(Unavailable("round_index"), 0.9)
