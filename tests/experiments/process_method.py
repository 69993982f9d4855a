"""FedAvg with the process of each client's training as a metric."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from raydfl.core.types import Ratio, Update
from raydfl.methods.fedavg import FedAvg
from raydfl.training.step import Step


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class InProcess(FedAvg):
    """Measure the id of the process, or fail if the method is ``broken``."""

    broken: bool = False

    def local(self, step: Step) -> Update:
        if self.broken:
            raise ValueError("broken")
        update: Any = super().local(step)
        return dataclasses.replace(update, metrics={**update.metrics, "process": Ratio(float(os.getpid()), 1.0)})
