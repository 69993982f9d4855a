"""Generate recordings of two microphones, and their list microphones/list.csv. Every seventh row has no far recording."""

import csv
from pathlib import Path

import numpy as np
import soundfile

folder = Path("microphones")
for name in ("near", "far"):
    (folder / name).mkdir(parents=True, exist_ok=True)
rng = np.random.default_rng(1)
with (folder / "list.csv").open("w", newline="") as file:
    rows = csv.writer(file)
    rows.writerow(["path", "far", "label", "group", "split"])
    for number in range(48):
        tone = 0.3 * np.sin(2 * np.pi * 400 * (1 + number % 2) * np.arange(2000) / 8000)
        for name, noise in (("near", 0.1), ("far", 0.02)):
            soundfile.write(folder / name / f"{number}.wav", tone + noise * rng.standard_normal(2000), 8000)
        far = f"far/{number}.wav" if number % 7 else ""
        split = "test" if number < 12 else "train"
        rows.writerow([f"near/{number}.wav", far, "ab"[number % 2], f"device-{number // 2 % 6}", split])
