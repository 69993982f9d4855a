"""Domains, from which settings are drawn: a range, or a list of values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, model_validator

from raydfl.core.settings import Settings

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_DIGITS = 4
"""Significant digits of a drawn number: so that it can be read and typed."""

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
            known = ", ".join(_KINDS)
            raise ValueError(
                f"a domain is exactly one of {known}, such as {{uniform: [0.1, 0.9]}}; here are "
                f"{' and '.join(given) if given else 'none'}"
            )
        values = getattr(self, given[0])
        if given[0] in ("choice", "grid"):
            texts = [repr(value) for value in values]
            if len(set(texts)) < len(texts):
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
        """The name of the one that is given."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @property
    def values(self) -> tuple[Any, ...]:
        """The listed values; of a range its ends (and step)."""
        return tuple(getattr(self, self.kind))

    @property
    def listed(self) -> bool:
        """True of a list of values, not of a range."""
        return self.kind in ("choice", "grid")

    def ends(self) -> list[Any]:
        """Return every listed value, or the two ends of a range: what a corner of the space has."""
        return list(self.values) if self.listed else [self.values[0], self._high()]

    def _high(self) -> Any:
        if self.kind != "quniform":
            return self.values[1]
        low, high, step = self.values
        return _readable(low + step * math.floor((high - low) / step + 1e-9))

    def draw(self, rng: np.random.Generator) -> Any:
        """Return a random value, with few digits so that it can be typed."""
        if self.listed:
            return self.values[int(rng.integers(len(self.values)))]
        low, high = self.values[:2]
        if self.kind == "randint":
            return int(rng.integers(low, high, endpoint=True))
        if self.kind == "quniform":
            step = self.values[2]
            return _readable(low + step * int(rng.integers(math.floor((high - low) / step + 1e-9), endpoint=True)))
        if self.kind == "loguniform":
            return min(high, max(low, _readable(math.exp(rng.uniform(math.log(low), math.log(high))))))
        return min(high, max(low, _readable(rng.uniform(low, high))))

    def neighbour(self, value: Any, factor: float, up: bool) -> Any:
        """Return a value as population based training changes it: times ``factor`` or divided by it, or the next of a list."""
        if self.listed:
            place = self.values.index(value) + (1 if up else -1)
            return self.values[min(len(self.values) - 1, max(0, place))]
        low, high = self.values[0], self._high()
        moved = value * factor if up else value / factor
        if self.kind == "randint":
            moved = value + 1 if up and round(moved) == value else value - 1 if round(moved) == value else round(moved)
            return int(min(high, max(low, moved)))
        if self.kind == "quniform":
            step = self.values[2]
            steps = max(1, round(abs(moved - value) / step))
            moved = value + steps * step if up else value - steps * step
        return min(high, max(low, _readable(moved)))

    def position(self, value: Any) -> float:
        """Return where a value lies between the ends, 0 to 1; in its logarithm for loguniform. Of a list: its place."""
        if self.listed:
            place = next((index for index, known in enumerate(self.values) if known == value), 0)
            return place / max(1, len(self.values) - 1)
        low, high = self.values[0], self._high()
        if self.kind == "loguniform":
            return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
        return float((value - low) / (high - low))

    def distribution(self) -> BaseDistribution:
        """Return the same for Optuna; of a list the places."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.listed:
            return CategoricalDistribution(tuple(range(len(self.values))))
        low, high = self.values[:2]
        if self.kind == "randint":
            return IntDistribution(low, high)
        if self.kind == "quniform":
            return FloatDistribution(low, self._high(), step=self.values[2])
        return FloatDistribution(low, high, log=self.kind == "loguniform")

    def from_optuna(self, suggested: Any) -> Any:
        """Return the value that a suggestion stands for."""
        if self.listed:
            return self.values[int(suggested)]
        return _readable(suggested) if self.kind == "quniform" else suggested


def _readable(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
