"""Generate sounds with pictures, and their list seen_and_heard/list.csv. Every fourth row has no picture."""

import csv
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

folder = Path("seen_and_heard")
folder.mkdir(exist_ok=True)
rng = np.random.default_rng(1)
with (folder / "list.csv").open("w", newline="") as file:
    rows = csv.writer(file)
    rows.writerow(["path", "label", "group", "split", "picture"])
    for number in range(60):
        label, time = number % 3, np.arange(4000) / 8000
        soundfile.write(folder / f"{number}.wav", 0.3 * np.sin(2 * np.pi * 400 * (label + 1) * time), 8000)
        Image.fromarray(rng.integers(60 * label, 60 * label + 90, (16, 16)).astype(np.uint8)).save(
            folder / f"{number}.png"
        )
        picture = f"{number}.png" if number % 4 else ""  # every fourth has none
        rows.writerow(
            [f"{number}.wav", "abc"[label], f"place-{number % 5}", "test" if number < 15 else "train", picture]
        )
