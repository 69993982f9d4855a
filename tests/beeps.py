"""A data set in the style of a user: tones at known times in clips of different lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic.dataclasses import dataclass

from raydfl.core.seeds import generator
from raydfl.data.dataset import Dataset
from raydfl.data.manifest import make_manifest

RATE = 8000
PITCHES = {"high": 2400.0, "low": 400.0, "middle": 1000.0}


@dataclass(frozen=True, kw_only=True)
class Beeps(Dataset):
    """Clips with up to two tones of different pitch. Take 0 has no tone. The last ``weak`` takes have labels without times."""

    groups: int = 2
    takes: int = 6
    weak: int = 0
    equal: bool = False
    """Whether all clips have the same length."""

    def manifest(self) -> pa.Table:
        rows = []
        for group in range(self.groups):
            for take in range(self.takes):
                random = generator(0, group, str(take), "beeps")
                seconds = 1.2 if self.equal else 1.2 + 0.1 * (take % 3)
                pitches = random.choice([*PITCHES], min(take, 2), replace=False).tolist()
                events = []
                for pitch in pitches:
                    onset = round(float(random.uniform(0, 0.7)), 3)
                    events.append(f"{onset:g}-{onset + 0.4:.3g} {pitch}")
                label = "|".join(sorted(pitches) if take >= self.takes - self.weak else events) or "|"
                split = "test" if take % 2 == 0 else "train"
                clip = {"clip": f"g{group}/{take}.wav", "path": None, "label": label, "group": f"g{group}"}
                rows.append({**clip, "split": split, "seconds": seconds, "tones": " ".join(events)})
        return make_manifest(rows, "beeps")

    def read(self, row: Mapping[str, Any]) -> tuple[np.ndarray, int]:
        random = generator(0, 0, row["clip"], "beep noise")
        time = np.arange(round(row["seconds"] * RATE)) / RATE
        wave = 0.02 * random.standard_normal(len(time))
        words = row["tones"].split()
        for times, pitch in zip(words[::2], words[1::2], strict=True):
            onset, offset = map(float, times.split("-"))
            wave += 0.3 * np.sin(2 * np.pi * PITCHES[pitch] * time) * ((time >= onset) & (time < offset))
        return wave.astype(np.float32)[:, None], RATE

    def identity(self, row: Mapping[str, Any]) -> str | None:
        return f"beeps/{row['clip']}/{row['seconds']}/{row['tones']}"


BEEPS = (
    f"data.name={__file__}:Beeps",
    "data.features={sample_rate: 8000, bands: 16, window_ms: 25, hop_ms: 10}",
    "data.events={}",
    "objective=events",
    "data.split={}",
    "data.partition={by: group}",
)
"""Settings of a run with these clips of different lengths."""
