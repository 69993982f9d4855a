"""Clips of a client in differentially private training (``train.optimiser.private``). Only ``fit`` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from raydfl.core.errors import ConfigError
from raydfl.core.noise_key import NoiseKey
from raydfl.data import ClientData

REMEDY = (
    "Choose a method that trains once in a round and uses clips in training alone (fedavg, fedprox, fedntd, fedadam)"
)
"""End of messages about methods without differential privacy by example."""


@dataclass(slots=True)
class PrivateTask:
    """Secrets of a client's training in a round. Copies of a step share it."""

    key: NoiseKey
    """Source of the batches and of the noise, for this client and round only."""
    data: ClientData
    outside: bool
    """Whether ``fit`` returns the loss, outside the guarantee (``privacy.metrics``)."""
    trained: bool = False
    """Whether ``fit`` was called."""


class WithheldData:
    """Stand-in for ``step.data``. Any use raises an error, because noise protects only the gradients of ``fit``."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        # Protocols of Python (copies, pickles) look up names with two underscores.
        error: Any = AttributeError if name.startswith("__") else ConfigError
        raise error(
            f"train.optimiser.private: the method reads step.data.{name}, and noise protects only the gradients of fit(). "
            f"{REMEDY}"
        )
