"""Near and far: each recording of the Free Spoken Digit Dataset, and the same recording by a distant microphone in a room.

The two views have one event in common, so they are correlated given the class. Views of different events, as in
``spoken_and_written``, are independent given the class. The response of the room is simulated:

    h(0) = 1,    h(t) = g n(t) 10^(-3 t / T60) for 0 < t <= T60,
    g such that sum of h(t)^2 over t > 0 is 10^(-DRR / 10)

n is white Gaussian noise, T60 the reverberation time (decay by 60 dB), and DRR the direct-to-reverberant ratio in dB. Each clip has
its own n. Polack's model of late reverberation (1988); early reflections and the room's colour are neglected. White noise of the
microphone is added after the room.

Training and test clips have the same kind of room. With ``t60: 0`` and ``snr_db: null`` both views are equal. The job
``jobs/modality_mirror/near_and_far.yaml`` trains ModalityMirror and its baselines on this set
(docs/modality-mirror.md#two-microphones-of-one-event). docs/data.md#views explains views.

    data:
      name: near_and_far
      root: PATH/TO/fsdd
      first: far
      features: {sample_rate: 8000, seconds: 1.0}
      views: {near: {column: near, features: {sample_rate: 8000, seconds: 1.0}}}
      missing: {near: 0.3}
      partition: {by: dirichlet, clients: 20, alpha: 0.5}
    models: {model: crnn_tiny, near: {name: crnn_tiny, view: near}}
    method: multifl
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.seeds import generator, seed_for
from raydfl.data.dataset import Card
from raydfl.data.noise import add_noise
from raydfl.data.packed import span_address
from raydfl.data.sets.fsdd import FSDD

# Part of the identity of each far clip. Increase it when a change gives different samples for the same options.
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class NearAndFar(FSDD):
    """Spoken digits by a near and a far microphone.

    Groups are speakers. Extra columns: ``take``, ``near`` and ``far``.
    """

    card: ClassVar[Card] = Card(
        title="Free Spoken Digit Dataset by a near and a far microphone",
        layout=FSDD.card.layout,
        licence=FSDD.card.licence,
        url=FSDD.card.url,
        classes=10,
    )

    first: Annotated[
        Literal["near", "far"],
        Field(description="Microphone of the first view (data.features), which every client has: near or far."),
    ] = "near"
    t60: Annotated[
        float,
        Field(ge=0, le=3, description="Reverberation time of the far view (decay by 60 dB) in s. 0: no reverberation."),
    ] = 0.5
    drr_db: Annotated[
        float,
        Field(
            ge=-40,
            le=60,
            description="Ratio of direct to reverberant sound in the far view, in dB. 0: both are equal, as at the room's critical "
            "distance. Twice the distance lowers it by 6.",
        ),
    ] = 0.0
    snr_db: Annotated[
        float | None,
        Field(
            ge=-40,
            le=100,
            description="Ratio of the far view's sound, with its reverberation, to white noise, in dB. null: no noise.",
        ),
    ] = 10.0
    seed: Annotated[int, Field(ge=0, description="Seed of the rooms and the noise.")] = 0

    def manifest(self) -> pa.Table:
        """List the recordings.

        Extra columns: ``take`` (int64), ``near`` (the file) and ``far`` (an address of the same file for the far view).
        """
        table = super().manifest()
        paths = table.column("path").to_pylist()
        # All bytes of the file under another name. read() thereby knows the view.
        far = [span_address(path, "far", 0, Path(path).stat().st_size) for path in paths]
        table = table.append_column("near", pa.array(paths)).append_column("far", pa.array(far))
        return table.set_column(table.column_names.index("path"), "path", table.column(self.first))

    def read(self, row: Mapping[str, Any]) -> tuple[npt.NDArray[np.float32], int]:
        """Read a recording, or simulate it at the far microphone, longer by the reverberation time."""
        samples, rate = super().read(row)
        if row["path"] != row["far"]:
            return samples, rate
        response = draw_room_response(self.t60, self.drr_db, rate, generator(self.seed, 0, row["clip"], "room"))
        far = np.stack([np.convolve(channel, response) for channel in samples.T], axis=1).astype(np.float32)
        if self.snr_db is not None:
            seed = seed_for(self.seed, 0, row["clip"], "noise of the set")
            far = np.stack([add_noise(channel, self.snr_db, seed) for channel in far.T], axis=1)
        return far / max(1.0, np.abs(far).max()), rate  # a lower gain of the microphone instead of clipping

    def part(self, row: Mapping[str, Any]) -> str | None:
        """Return the room and the noise of a far clip, or ``None`` for a near one."""
        if row["path"] != row["far"]:
            return None
        return f"room {_VERSION}, {(self.t60, self.drr_db, self.snr_db, self.seed)}, {row['clip']}"


def draw_room_response(t60: float, drr_db: float, rate: int, random: np.random.Generator) -> npt.NDArray[np.float64]:
    """Draw the impulse response of a room: the direct sound, then exponentially decaying noise.

    Args:
        t60: reverberation time in s. 0: direct sound alone.
        drr_db: ratio of direct to reverberant energy, in dB.
        rate: sample rate in Hz.
        random: generator of the noise.

    Returns:
        float64 [1 + t60 * rate], starting with the direct sound 1.
    """
    time = np.arange(1, round(t60 * rate) + 1) / rate
    if not len(time):
        return np.ones(1)
    tail = random.standard_normal(len(time)) * 10 ** (-3 * time / t60)
    return np.concatenate([[1.0], tail * np.sqrt(10 ** (-drr_db / 10) / np.sum(tail**2))])
