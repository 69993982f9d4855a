"""Domains of settings: a range, or a list of values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from raydfl.core.settings import Settings

_DIGITS = 4
"""Significant digits of a drawn number, so that users can type it."""

_KINDS = ("uniform", "loguniform", "quniform", "randint", "choice", "grid")


class Domain(Settings):
    """A range or list of exactly one kind."""

    uniform: tuple[float, float] | None = Field(None, description="[low, high]: any number between them")
    loguniform: tuple[float, float] | None = Field(
        None, description="[low, high], above 0: any number between them, uniform in its logarithm"
    )
    quniform: tuple[float, float, float] | None = Field(
        None, description="[low, high, step]: low, low + step, low + 2 step ... up to high"
    )
    randint: tuple[int, int] | None = Field(None, description="[low, high]: whole numbers, both ends included")
    choice: list[Any] | None = Field(None, min_length=1, description="[a, b, ...]: one of these values")
    grid: list[Any] | None = Field(None, min_length=1, description="[a, b, ...]: each of these values (searcher: grid)")

    @model_validator(mode="after")
    def _one_kind(self) -> Domain:
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a domain is exactly one of {', '.join(_KINDS)}, such as {{uniform: [0.1, 0.9]}}; here are "
                f"{' and '.join(given) if given else 'none'}"
            )
        values = getattr(self, given[0])
        if given[0] in ("choice", "grid"):
            if len({repr(value) for value in values}) < len(values):
                raise ValueError(f"{given[0]}: a value stands twice")
            return self
        low, high = values[:2]
        if low >= high:
            raise ValueError(f"{given[0]}: the low end {low:g} must be below the high end {high:g}")
        if given[0] == "loguniform" and low <= 0:
            raise ValueError(f"loguniform: the low end must be above 0, not {low:g}")
        if given[0] == "quniform" and not 0 < values[2] <= high - low:
            raise ValueError(f"quniform: the step must be above 0 and at most high - low, not {values[2]:g}")
        return self

    @property
    def kind(self) -> str:
        """The name of the kind."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @property
    def values(self) -> tuple[Any, ...]:
        """The listed values; of a range its ends (and step)."""
        return tuple(getattr(self, self.kind))

    @property
    def listed(self) -> bool:
        """True of a list of values, False of a range."""
        return self.kind in ("choice", "grid")

    def ends(self) -> list[Any]:
        """Return every listed value, or the two ends of a range."""
        if self.listed:
            return list(self.values)
        low, high = self.values[:2]
        return [low, _readable(low + self.values[2] * self._steps()) if self.kind == "quniform" else high]

    def _steps(self) -> int:
        low, high, step = self.values
        return int((high - low) / step + 1e-9)

    def draw(self, rng: np.random.Generator) -> Any:
        """Return a random value with few digits."""
        if self.listed:
            return self.values[int(rng.integers(len(self.values)))]
        low, high = self.values[:2]
        if self.kind == "randint":
            return int(rng.integers(low, high, endpoint=True))
        if self.kind == "quniform":
            return _readable(low + self.values[2] * int(rng.integers(self._steps(), endpoint=True)))
        if self.kind == "loguniform":
            return self.clip(_readable(math.exp(rng.uniform(math.log(low), math.log(high)))))
        return self.clip(_readable(rng.uniform(low, high)))

    def clip(self, value: Any) -> Any:
        """Return the value of a range that is nearest to a number; of a list the number itself."""
        if self.listed:
            return value
        low, high = self.ends()
        if self.kind == "quniform":
            value = _readable(low + self.values[2] * round((value - low) / self.values[2]))
        return min(high, max(low, round(value) if self.kind == "randint" else value))

    def contains(self, value: Any) -> bool:
        """Return whether a value is listed, or a step of the range."""
        return value in self.values if self.listed else math.isclose(self.clip(value), value)

    def position(self, value: Any) -> float:
        """Return the place of a value between the ends, 0 to 1: in its logarithm for loguniform, by its index in a list."""
        if self.listed:
            place = next((index for index, known in enumerate(self.values) if known == value), 0)
            return place / max(1, len(self.values) - 1)
        low, high = self.ends()
        if self.kind == "loguniform":
            return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
        return float((value - low) / (high - low))

    def to_tune(self) -> Any:
        """Return the same domain for Ray Tune's searchers."""
        from ray import tune  # takes a second

        if self.listed:
            return tune.choice(list(self.values))
        low, high = self.ends()
        if self.kind == "randint":
            return tune.randint(low, high + 1)
        if self.kind == "quniform":
            return tune.quniform(low, high, self.values[2])
        return tune.loguniform(low, high) if self.kind == "loguniform" else tune.uniform(low, high)


def _readable(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
