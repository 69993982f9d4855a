"""Soundscapes: environmental sounds of ESC-10 or ESC-50 at known times, over noise. The label lists the events with their times.

A soundscape has events of different classes over low-pass noise. An event is a section of a recording, with silence cut off at both
ends. Times, sections, levels and noise are drawn by ``seed``. The folds divide the recordings: test soundscapes and training
soundscapes have no recording in common. Clients share recordings, but each draws its own soundscapes.

    data:
      name: soundscapes
      root: PATH/TO/ESC-10
      events: {}
      features: {sample_rate: 16000, bands: 64, window_ms: 64, hop_ms: 20, seconds: 10}
      partition: {by: group}
    objective: events
    models: {model: crnn_lite}

The job ``jobs/detect_events.yaml`` trains on this set (docs/objectives.md#events).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.errors import ConfigError, DataError
from raydfl.core.seeds import generator
from raydfl.data.audio import read_audio
from raydfl.data.dataset import Card
from raydfl.data.manifest import make_manifest
from raydfl.data.noise import draw_noise, rms
from raydfl.data.sets.esc import ESC
from raydfl.data.steps.events import write_events

_RATE = 44_100
_BLOCK = 882
"""Samples of a block, 20 ms, for cutting off silence."""
_FADE = 441
"""Samples of the linear fade at both ends of an event."""
_RUMBLE = 0.9
_SILENCE = 1e-3
"""Power of a silent block, relative to the recording's loudest block."""
_SECONDS = (0.5, 3.0)
"""Least and largest length of an event. Recordings with less sound give shorter events."""
_LEVEL = 0.01
"""RMS of the noise. A soundscape above full scale is scaled down."""
# Part of the identity of each clip. Increase it when a change gives different samples for the same options.
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Soundscapes(ESC):
    """Mixtures of environmental sounds with known times.

    Groups are clients: ``client-0``, ``client-1`` ... For tests at the clients, set ``data.split: {test: null, client_test: {by:
    split, values: [test]}}``. Extra column: ``mix`` (recordings, sections, times and levels).
    """

    card: ClassVar[Card] = Card(
        title="Soundscapes of ESC-50 or ESC-10",
        layout=ESC.card.layout,
        licence=ESC.card.licence,
        url=ESC.card.url,
    )

    test_folds: Annotated[
        tuple[int, ...],
        Field(min_length=1, description="Folds (1 to 5) with the recordings of test soundscapes."),
    ] = (4,)
    clients: Annotated[int, Field(ge=1, description="Number of clients.")] = 10
    clips: Annotated[int, Field(ge=1, description="Training soundscapes of each client.")] = 60
    test_clips: Annotated[int, Field(ge=1, description="Test soundscapes of each client.")] = 15
    client_classes: Annotated[
        int | None,
        Field(ge=1, description="Number of classes in the soundscapes of a client, drawn by the seed. null: all."),
    ] = None
    polyphony: Annotated[
        tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1)]],
        Field(description="Least and largest number of events in a soundscape, each of another class."),
    ] = (1, 4)
    snr_db: Annotated[
        tuple[Annotated[float, Field(ge=-40, le=100)], Annotated[float, Field(ge=-40, le=100)]],
        Field(description="Least and largest ratio of an event's power to the power of the noise, in dB."),
    ] = (0.0, 20.0)
    seconds: Annotated[float, Field(ge=4, le=60, description="Length of a soundscape in s.")] = 10.0
    seed: Annotated[int, Field(ge=0, description="Seed of the soundscapes.")] = 0

    def manifest(self) -> pa.Table:
        """Draw the soundscapes.

        Raises:
            ConfigError: a largest value is below the least, or there are too few classes.
            DataError: the recordings are missing or unreadable, or a class lacks them for the training or the test.
        """
        for name, (least, largest) in {"polyphony": self.polyphony, "snr_db": self.snr_db}.items():
            if largest < least:
                raise ConfigError(f"data.{name}: the largest value, {largest:g}, is below the least, {least:g}")
        recordings: dict[str, dict[str, list[str]]] = {"train": {}, "test": {}}
        for row in super().manifest().to_pylist():
            recordings[row["split"]].setdefault(row["label"], []).append(row["path"])
        names = sorted(recordings["train"])
        missing = {*names} ^ {*recordings["test"]}
        if missing:
            raise DataError(
                f"{self.card.title}: class {min(missing)!r} has recordings in the training folds or in the test folds only. Change "
                f"data.test_folds"
            )
        fewest = max(self.polyphony[1], self.client_classes or 0)
        if fewest > min(len(names), self.client_classes or len(names)):
            raise ConfigError(
                f"data.polyphony and data.client_classes need {fewest} classes, but a client has only "
                f"{min(len(names), self.client_classes or len(names))}. Lower them"
            )
        bounds: dict[str, tuple[float, float]] = {}
        rows = []
        for number in range(self.clients):
            group = f"client-{number}"
            count = self.client_classes or len(names)
            own = generator(self.seed, 0, group, "soundscape classes").choice(names, count, replace=False).tolist()
            rows += self._draw(group, own, recordings["train"], self.clips, "train", bounds)
            rows += self._draw(group, own, recordings["test"], self.test_clips, "test", bounds)
        return make_manifest(rows, f"{self.card.title} in {self.root}")

    def _draw(
        self,
        group: str,
        names: list[str],
        recordings: Mapping[str, list[str]],
        count: int,
        split: str,
        bounds: dict[str, tuple[float, float]],
    ) -> list[dict[str, Any]]:
        """Draw the training or test soundscapes of a client.

        Args:
            group: name of the client.
            names: the classes.
            recordings: the files by class.
            count: number of soundscapes.
            split: split of the soundscapes.
            bounds: start and end of the sound in each file, completed in place.
        """
        random, rows = generator(self.seed, 0, group, f"{split} soundscapes"), []
        for number in range(count):
            mix, events = [], []
            chosen = random.choice(names, random.integers(self.polyphony[0], self.polyphony[1] + 1), replace=False)
            for label in chosen.tolist():
                path = recordings[label][int(random.integers(len(recordings[label])))]
                if path not in bounds:
                    bounds[path] = _find_sound(path)
                start, end = bounds[path]
                length = min(float(random.uniform(*_SECONDS)), end - start)
                first = start + random.random() * max(0.0, end - start - length)
                onset = round(random.uniform(0, self.seconds - length), 3)
                snr = random.uniform(*self.snr_db)
                mix.append([path, round(first, 3), round(length, 3), onset, round(snr, 1)])
                events.append((onset, round(onset + round(length, 3), 3), label))
            rows.append(
                {
                    "clip": f"{group}/{split}-{number}",
                    "path": None,
                    "label": write_events(events),
                    "group": group,
                    "split": split,
                    "seconds": self.seconds,
                    "mix": json.dumps(mix),
                }
            )
        return rows

    def read(self, row: Mapping[str, Any]) -> tuple[npt.NDArray[np.float32], int]:
        """Mix the events of a soundscape with noise."""
        noise = draw_noise(
            round(self.seconds * _RATE), _RUMBLE, generator(self.seed, 0, row["clip"], "soundscape noise")
        )
        wave = noise * (_LEVEL / rms(noise))
        for path, first, length, onset, snr in json.loads(row["mix"]):
            size = round(length * _RATE)
            sound = _read(path)[round(first * _RATE) :][:size]
            ramp = np.minimum(np.arange(1, len(sound) + 1) / _FADE, 1.0)
            level = _LEVEL * 10 ** (snr / 20) / max(rms(sound), 1e-9)
            start = round(onset * _RATE)
            piece = (sound * (level * ramp * ramp[::-1]))[: len(wave) - start]
            wave[start : start + len(piece)] += piece
        return (wave / max(1.0, float(np.abs(wave).max()))).astype(np.float32)[:, None], _RATE

    def identity(self, row: Mapping[str, Any]) -> str:
        """Return the drawn values and digests of the recordings of a soundscape."""
        digest = hashlib.blake2b(digest_size=16)
        parts = json.loads(row["mix"])
        for path, *_ in parts:
            digest.update(Path(path).read_bytes())
        drawn = [values for _, *values in parts]
        return f"soundscape {_VERSION}, {self.seed}, {row['clip']}, {self.seconds}, {drawn}, {digest.hexdigest()}"


def _read(path: str) -> npt.NDArray[np.float32]:
    """Read the first channel of a recording, float32 [samples].

    Raises:
        DataError: the recording has another sample rate.
    """
    samples, rate = read_audio(path)
    if rate != _RATE:
        raise DataError(f"{path} has {rate} Hz, but recordings of ESC have {_RATE} Hz. Download it again")
    return samples[:, 0]


def _find_sound(path: str) -> tuple[float, float]:
    """Return the start and the end of the sound in a recording, in s.

    Raises:
        DataError: the recording is silent.
    """
    wave = _read(path)
    blocks = wave[: len(wave) // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    power = np.square(blocks, dtype=np.float64).mean(axis=1)
    if not power.size or not power.max():
        raise DataError(f"{path} is silent. Remove it")
    loud = np.flatnonzero(power > _SILENCE * power.max())
    return float(loud[0] * _BLOCK / _RATE), float((loud[-1] + 1) * _BLOCK / _RATE)
