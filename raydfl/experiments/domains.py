"""Domains of settings: ranges and lists of values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from raydfl.core.settings import Settings
from raydfl.core.yaml import to_yaml

_DIGITS = 4
"""Significant digits of a drawn number. Few digits are easy to type."""

_KINDS = ("uniform", "loguniform", "quniform", "randint", "choice", "grid")


class Domain(Settings):
    """A domain of exactly one kind."""

    uniform: tuple[float, float] | None = Field(None, description="[low, high]: numbers, uniformly distributed.")
    loguniform: tuple[float, float] | None = Field(
        None, description="[low, high]: numbers above 0 with a uniformly distributed logarithm."
    )
    quniform: tuple[float, float, float] | None = Field(
        None, description="[low, high, step]: low, low + step, low + 2 step ... up to high."
    )
    randint: tuple[int, int] | None = Field(None, description="[low, high]: integers, including both ends.")
    choice: list[Any] | None = Field(None, min_length=1, description="[a, b, ...]: values drawn at random.")
    grid: list[Any] | None = Field(
        None, min_length=1, description="[a, b, ...]: values to combine in full (searcher: grid)."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Domain:
        kinds = [name for name in _KINDS if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError(
                f"a domain is exactly one of {', '.join(_KINDS)}, such as {{uniform: [0.1, 0.9]}}, but this domain has "
                f"{' and '.join(kinds) if kinds else 'none'}"
            )
        kind, values = kinds[0], getattr(self, kinds[0])
        if kind in ("choice", "grid"):
            if len({repr(value) for value in values}) < len(values):
                raise ValueError(f"{kind}: a value is listed twice")
            return self
        low, high = values[:2]
        if low >= high:
            raise ValueError(f"{kind}: the low end {low:g} must be below the high end {high:g}")
        if kind == "loguniform" and low <= 0:
            raise ValueError(f"loguniform: the low end must be above 0, not {low:g}")
        if kind == "quniform" and not 0 < values[2] <= high - low:
            raise ValueError(f"quniform: the step must be above 0 and at most high - low, not {values[2]:g}")
        return self

    def __str__(self) -> str:
        return f"{self.kind} {to_yaml(list(self.values))}"

    @property
    def kind(self) -> str:
        """The name of the kind."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of a list, or the ends (and step) of a range."""
        return tuple(getattr(self, self.kind))

    @property
    def listed(self) -> bool:
        """True if the domain is a list of values."""
        return self.kind in ("choice", "grid")

    def ends(self) -> list[Any]:
        """Return all values of a list, or the two ends of a range."""
        if self.listed:
            return list(self.values)
        low, high = self.values[:2]
        return [low, _round_readably(low + self.values[2] * self._count_steps()) if self.kind == "quniform" else high]

    def is_extreme(self, value: Any) -> bool:
        """Return whether a value is the smallest or the largest number of the domain."""
        ends = self.ends()
        numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends)
        return numbers and len(ends) > 1 and value in (min(ends), max(ends))

    def _count_steps(self) -> int:
        low, high, step = self.values
        return int((high - low) / step + 1e-9)

    def draw(self, rng: np.random.Generator) -> Any:
        """Draw a value, rounded to few digits."""
        if self.listed:
            return self.values[int(rng.integers(len(self.values)))]
        low, high = self.values[:2]
        if self.kind == "randint":
            return int(rng.integers(low, high, endpoint=True))
        if self.kind == "quniform":
            return _round_readably(low + self.values[2] * int(rng.integers(self._count_steps(), endpoint=True)))
        if self.kind == "loguniform":
            return self.clip(_round_readably(math.exp(rng.uniform(math.log(low), math.log(high)))))
        return self.clip(_round_readably(rng.uniform(low, high)))

    def clip(self, value: Any) -> Any:
        """Clip a number to a range and round it to its steps. Return values of lists unchanged."""
        if self.listed:
            return value
        low, high = self.ends()
        if self.kind == "quniform":
            value = _round_readably(low + self.values[2] * round((value - low) / self.values[2]))
        return min(high, max(low, round(value) if self.kind == "randint" else value))

    def contains(self, value: Any) -> bool:
        """Return whether the domain contains a value."""
        return value in self.values if self.listed else math.isclose(self.clip(value), value)

    def position(self, value: Any) -> float:
        """Return the relative position of a value in 0..1: logarithmic for loguniform, by index for a list."""
        if self.listed:
            index = next((index for index, known in enumerate(self.values) if known == value), 0)
            return index / max(1, len(self.values) - 1)
        low, high = self.ends()
        if self.kind == "loguniform":
            return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
        return float((value - low) / (high - low))

    def to_tune(self) -> Any:
        """Convert the domain for Ray Tune's searchers."""
        from ray import tune  # Importing it takes a second.

        if self.listed:
            return tune.choice(list(self.values))
        low, high = self.ends()
        if self.kind == "randint":
            return tune.randint(low, high + 1)
        if self.kind == "quniform":
            return tune.quniform(low, high, self.values[2])
        return tune.loguniform(low, high) if self.kind == "loguniform" else tune.uniform(low, high)


def _round_readably(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
