"""The mean in which all clients count the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic.dataclasses import dataclass
from torch import Tensor

from raydfl.rules.weighted_mean import WeightedMean


@dataclass(frozen=True)
class UniformMean(WeightedMean):
    """The mean in which every client (with masks: every client's element) of a weight above 0 counts the same."""

    def _counted(self, weight: Any) -> Any:
        if isinstance(weight, Mapping):
            return {name: self._counted(value) for name, value in weight.items()}
        return weight.sign() if isinstance(weight, Tensor) else float(np.sign(weight))
