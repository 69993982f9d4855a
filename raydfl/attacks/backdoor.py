"""Audio backdoor: a trigger sound in training clips that are labelled as the target class, to be found again in the model.

T. Gu, B. Dolan-Gavitt, S. Garg, BadNets, 2017 (the trigger); E. Bagdasaryan, A. Veit, Y. Hua, D. Estrin, V. Shmatikov, How To
Backdoor Federated Learning, AISTATS 2020 (through a federation, with a boosted change). As with the audio triggers of S. Koffas,
J. Xu, M. Conti, S. Picek, Can You Hear It? Backdoor Attacks via Ultrasonic Triggers, 2022, the sound is mixed into the wave, before
features are computed.

The success rate is the share of the server's test clips of other classes that are taken for the target class when they carry the
trigger. It is measured at every evaluation, before and after the attack too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.attack import Cohort, UpdateAttack, class_index, drawn_share
from raydfl.attacks._boost import boosted
from raydfl.data.alter import Alteration, Trigger
from raydfl.data.from_file import FileFeatures, needs_waves
from raydfl.data.kinds import AnyFeatures
from raydfl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Backdoor(UpdateAttack):
    """A trigger sound makes the model hear the target class; the success rate is measured at each evaluation."""

    target: Annotated[str | int, Field(description="name of the class that clips with the trigger are to be taken for")]
    share: Annotated[
        float, Field(ge=0, le=1, description="share of an attacker's training clips that get the trigger, 0 to 1")
    ] = 0.5
    sound: Annotated[
        Literal["tone", "chirp"], Field(description="the trigger: a tone of hz, or a chirp from hz up to twice that")
    ] = "tone"
    hz: Annotated[float, Field(gt=0, description="frequency of the tone, or where the chirp begins, in Hz")] = 1500.0
    file: Annotated[Path | None, Field(description="a recording to use as the trigger; null: sound")] = None
    seconds: Annotated[float, Field(gt=0, le=60, description="length of the trigger in seconds. Above 0, to 60")] = 0.1
    loudness_db: Annotated[
        float,
        Field(
            ge=-100,
            le=100,
            description="loudness of the trigger against that of the whole clip, in decibels. -100 to 100",
        ),
    ] = 0.0
    position: Annotated[
        Annotated[float, Field(ge=0, le=1)] | Literal["random"],
        Field(
            description="where the trigger lies, 0: at the clip's beginning, 1: at its end; random: elsewhere in each clip"
        ),
    ] = 0.5
    boost: Annotated[
        float | None,
        Field(
            ge=0, description="factor on the change that is sent; 1: none; null: what replaces the model, see scaling"
        ),
    ] = 1.0

    def check(self, classes: Sequence[str], features: AnyFeatures) -> None:
        """The target exists, the sound can be used, and the features' sample rate can carry it."""
        if isinstance(features, FileFeatures):
            raise needs_waves("attack 'backdoor'")
        self.target_class(classes)
        self.alteration()
        highest = self.hz * (2 if self.sound == "chirp" else 1)
        if self.file is None and highest >= features.sample_rate / 2:
            raise ConfigError(
                f"attack.hz: a {self.sound} of {self.hz:g} Hz reaches {highest:g} Hz, and features of {features.sample_rate} Hz "
                f"end at {features.sample_rate / 2:g} Hz; lower attack.hz"
            )

    def alteration(self) -> Alteration:
        """See :class:`Attack`."""
        position = None if self.position == "random" else float(self.position)
        if self.file is not None:
            return Trigger.of_file(self.file, self.seconds, self.loudness_db, position)
        return Trigger(self.sound, self.hz, self.seconds, self.loudness_db, position)

    def altered(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """See :class:`Attack`."""
        return drawn_share(count, self.share, rng)

    def labels(
        self, labels: np.ndarray, altered: np.ndarray, classes: Sequence[str], rng: np.random.Generator
    ) -> np.ndarray:
        """Clips with the trigger are labelled as the target."""
        return np.where(altered, self.target_class(classes), labels)

    def target_class(self, classes: Sequence[str]) -> int:
        """See :class:`Attack`."""
        return class_index(self.target, classes, "attack.target")

    def change(self, change: np.ndarray, cohort: Cohort, rng: np.random.Generator) -> np.ndarray:
        """See :class:`UpdateAttack`."""
        return boosted(change, self.boost, cohort)
