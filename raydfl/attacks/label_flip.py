"""Label flipping: attackers train on wrong labels.

V. Tolpegin, S. Truex, M. E. Gursoy, L. Liu, Data Poisoning Attacks Against Federated Learning Systems, ESORICS 2020.

The paper flips one source class to one target class (``to: {yes: no}``); ``next`` and ``random`` are the common forms in which
every label is wrong. Wrong labels are drawn once for the run, so that an attacker says the same of a clip in every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.attacks._attack import Attack, class_index
from raydfl.core.errors import ConfigError
from raydfl.data.features import AnyFeatures


@dataclass(frozen=True, kw_only=True)
class LabelFlip(Attack):
    """Attackers train on wrong labels."""

    to: Annotated[
        Literal["next", "random"] | dict[str, str],
        Field(
            description="next: the next class (of the last: the first); random: any other class, drawn for each clip; "
            "{class: other class ...}: these classes, the others keep their labels"
        ),
    ] = "next"

    def check(self, classes: Sequence[str], features: AnyFeatures) -> None:
        """Check that there are two classes at least, and that those that are named exist."""
        if len(classes) < 2:
            raise ConfigError(f"attack: label_flip needs at least 2 classes, the data have {len(classes)}")
        for pair in self.to.items() if isinstance(self.to, dict) else ():
            for name in pair:
                class_index(name, classes, "attack.to")

    def labels(
        self, labels: np.ndarray, altered: np.ndarray, classes: Sequence[str], rng: np.random.Generator
    ) -> np.ndarray:
        """See :class:`Attack`."""
        if self.to == "next":
            return (labels + 1) % len(classes)
        if self.to == "random":
            return (labels + rng.integers(1, len(classes), len(labels))) % len(classes)
        names = list(classes)
        becomes = np.arange(len(names))
        for name, other in self.to.items():
            becomes[names.index(name)] = names.index(other)
        flipped: np.ndarray = becomes[labels]
        return flipped
