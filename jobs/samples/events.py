"""Generate long recordings with events, and the list long/events.csv with recording, start, stop and event."""

import csv
from pathlib import Path

import numpy as np
import soundfile

rng = np.random.default_rng(0)
Path("long").mkdir(exist_ok=True)
with Path("long", "events.csv").open("w", newline="") as file:
    table = csv.writer(file)
    table.writerow(["recording", "start", "stop", "event"])
    for recording in ("dawn.wav", "noon.wav", "dusk.wav"):
        wave = 0.02 * rng.standard_normal(8000 * 16)
        for number in range(16):
            event, pitch = (("low", 200), ("high", 1500))[number % 2]
            wave[8000 * number : 8000 * number + 6000] += 0.2 * np.sin(2 * np.pi * pitch * np.arange(6000) / 8000)
            table.writerow([recording, number, number + 0.75, event])
        soundfile.write(Path("long", recording), wave, 8000)
