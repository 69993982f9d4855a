"""A data set of chords of generated tones. A label is the set of its tones, such as low|high."""

import numpy as np
from pydantic.dataclasses import dataclass

from raydfl import Dataset, make_manifest

PITCHES = {"low": 300, "middle": 900, "high": 2400}


@dataclass(frozen=True, kw_only=True)
class Chords(Dataset):
    """Chords of each player."""

    players: int = 6

    def manifest(self):
        """List five takes of each chord and player. The first is in the test set."""
        chords = ["low", "high", "low|high", "middle|low", "|", "high|middle"]
        return make_manifest(
            [
                {
                    "clip": f"{player}/{chord}/{take}",
                    "path": None,
                    "label": chord,
                    "group": f"player{player}",
                    "split": "test" if take == 0 else "train",
                }
                for player in range(self.players)
                for chord in chords
                for take in range(5)
            ],
            "Chords",
        )

    def read(self, row):
        """Generate a second of sound at 8 kHz: float32 [samples, 1]."""
        rng = np.random.default_rng([ord(letter) for letter in row["clip"]])
        time = np.arange(8000) / 8000
        wave = 0.05 * rng.standard_normal(8000)
        for tone in row["label"].strip("|").split("|"):
            wave += 0.2 * np.sin(2 * np.pi * PITCHES.get(tone, 0) * (1 + 0.02 * rng.standard_normal()) * time)
        return wave.astype(np.float32)[:, None], 8000

    def identity(self, row):
        """Return the key of a clip in the feature cache."""
        return f"chords/{row['clip']}"
