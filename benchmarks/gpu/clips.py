"""Generated data: short clips with a second recording and an image each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image

RATE = 8000
CLASSES = ("low", "middle", "high")
CLIENTS, TESTS = 6, 9
TESTING, WITHOUT_FAR = -1, 1
"""Numbers in place of a client in the list: of the test clips, and of the client without second recordings."""
FEATURES: Mapping[str, Any] = {"sample_rate": RATE, "bands": 16, "window_ms": 25, "hop_ms": 10}


def write(folder: Path, takes: int = 5) -> Path:
    """Write clips of tones and their list.

    Args:
        folder: the folder to create.
        takes: minimum number of training clips of a client.

    Returns:
        ``list.csv``: a clip's recording, its class (``label``) and set of classes (``labels``), client, split, a
        noisier recording of the same clip (``far``), which one client lacks, and an image (``picture``).
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    rows = ["path,label,labels,group,split,far,picture"]
    whose = [TESTING] * TESTS + [client for client in range(CLIENTS) for _ in range(takes + client % 3)]
    for number, client in enumerate(whose):
        label = number % len(CLASSES)
        seconds = 0.2 + 0.01 * (number % 5)
        time = np.arange(round(RATE * seconds)) / RATE
        tone = 0.3 * np.sin(2 * np.pi * 300 * 2**label * time)
        for name, noise in (("", 0.02), ("far", 0.1)):
            wave = (tone + noise * rng.standard_normal(len(time))).clip(-1, 1)
            soundfile.write(folder / f"{name}{number}.wav", wave, RATE)
        picture = (60 * label + rng.integers(0, 60, (16, 16, 3))).astype(np.uint8)
        Image.fromarray(picture).save(folder / f"{number}.png")
        labels = CLASSES[label] if number % 4 else f"{CLASSES[label]}|{CLASSES[(label + 1) % len(CLASSES)]}"
        split = "test" if client == TESTING else "train"
        far = "" if client == WITHOUT_FAR else f"far{number}.wav"
        rows.append(f"{number}.wav,{CLASSES[label]},{labels},client{client},{split},{far},{number}.png")
    path = folder / "list.csv"
    path.write_text("\n".join(rows))
    return path
