"""Uniform mean of the updates: every positive weight, of a client or of an element, counts as 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.rules.weighted_mean import WeightedMean


@dataclass(frozen=True)
class UniformMean(WeightedMean):
    """Mean with equal weights: every positive weight, of a client or of an element, counts as 1."""

    def _effective_weight(self, weight: Any) -> Any:
        if isinstance(weight, Mapping):
            return {name: self._effective_weight(value) for name, value in weight.items()}
        return weight.sign() if isinstance(weight, Tensor) else float(np.sign(weight))
