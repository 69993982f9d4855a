"""Label flipping: attackers train on wrong labels.

V. Tolpegin, S. Truex, M. E. Gursoy, L. Liu, Data Poisoning Attacks Against Federated Learning Systems, ESORICS 2020.

The paper flips a source class to a target class (``to: {yes: no}``). With the common variants ``next`` and ``random`` every
label is wrong. Wrong labels are drawn once for the run, so a clip has the same label in every round.
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
    """Training on wrong labels."""

    to: Annotated[
        Literal["next", "random"] | dict[str, str],
        Field(
            description="Wrong labels. next: the next class, cyclically. random: another class, drawn for each clip. "
            "{class: new class, ...}: a mapping; unlisted classes keep their labels."
        ),
    ] = "next"

    def check(self, classes: Sequence[str], features: AnyFeatures) -> None:
        """Check that the data have at least two classes, and all classes of the mapping."""
        if len(classes) < 2:
            raise ConfigError(f"attack: label_flip needs at least 2 classes, but the data have {len(classes)}")
        for pair in self.to.items() if isinstance(self.to, dict) else ():
            for name in pair:
                class_index(name, classes, "attack.to")

    def labels(
        self, labels: np.ndarray, altered: np.ndarray, classes: Sequence[str], rng: np.random.Generator
    ) -> np.ndarray:
        """Return the attackers' flipped labels."""
        if self.to == "next":
            return (labels + 1) % len(classes)
        if self.to == "random":  # a shift by 1 to classes - 1 never keeps a label
            return (labels + rng.integers(1, len(classes), len(labels))) % len(classes)
        names = list(classes)
        mapping = np.arange(len(names))
        for source, target in self.to.items():
            mapping[names.index(source)] = names.index(target)
        flipped: np.ndarray = mapping[labels]
        return flipped
