"""Write the small sets of this folder with the libraries of their formats: webdataset, datasets and lhotse.

    pip install webdataset datasets lhotse
    python tests/data/packed/write.py

Each set has eight clips: takes 0 to 3 of a hum and a whistle. Take 3 is the test set. ``samples.npz`` has the samples
of each cut as Lhotse reads them.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import soundfile

RATE = 8000
CLIPS = [(label, take) for take in range(4) for label in range(2)]


def make_tone(label: int, take: int) -> np.ndarray:
    """Synthesise a make_tone with noise: float32 [400]."""
    time = np.arange(400) / RATE
    noise = 0.01 * np.random.default_rng([label, take]).standard_normal(400)
    return (0.2 * np.sin(2 * np.pi * 300 * (1 + label) * time) + noise).astype(np.float32)


def encode(wave: np.ndarray, kind: str = "FLAC") -> bytes:
    """Encode a wave as the bytes of an audio file."""
    file = io.BytesIO()
    soundfile.write(file, wave, RATE, format=kind)
    return file.getvalue()


def write_webdataset(folder: Path) -> None:
    import webdataset

    for split, takes in (("train", (0, 1, 2)), ("test", (3,))):
        with webdataset.ShardWriter(f"{folder}/{split}-%06d.tar", maxcount=4, verbose=0) as shards:
            for label, take in CLIPS:
                if take in takes:
                    metadata = {"speaker": f"s{take}", "snr": 1.5 * take}
                    sample = {
                        "flac": encode(make_tone(label, take)),
                        "cls": label,
                        "json": metadata,
                        "txt": f"take {take}",
                    }
                    shards.write({"__key__": f"{label}/{take}", **sample})


def write_datasets(hub: Path, disk: Path) -> None:
    from datasets import Audio, ClassLabel, Dataset, DatasetDict, Features, Value

    features = Features(
        {"audio": Audio(sampling_rate=RATE), "label": ClassLabel(names=["hum", "whistle"]), "speaker": Value("string")}
    )
    bare = Features({**features, "audio": {"bytes": Value("binary"), "path": Value("string")}})

    def make_split(*takes: int) -> Dataset:
        rows = [
            {
                "audio": {"bytes": encode(make_tone(label, take)), "path": f"{label}_{take}.flac"},
                "label": label,
                "speaker": f"s{take}",
            }
            for label, take in CLIPS
            if take in takes
        ]
        # Cast afterwards: to encode Audio itself, the library needs a decoder.
        return Dataset.from_list(rows, features=bare).cast(features)

    whole = DatasetDict(train=make_split(0, 1, 2), test=make_split(3))
    whole.save_to_disk(str(disk))
    (hub / "data").mkdir(parents=True, exist_ok=True)
    for name, split in whole.items():
        split.to_parquet(str(hub / "data" / f"{name}-00000-of-00001.parquet"), batch_size=2)


def write_lhotse(folder: Path) -> None:
    from lhotse import CutSet, MonoCut, Recording, SupervisionSegment

    os.chdir(folder)  # makes the recording's path relative
    time = np.arange(RATE) / RATE
    soundfile.write("day.flac", np.stack([make_sine(200, time), make_sine(900, time)], axis=1), RATE)
    recording = Recording.from_file("day.flac")
    cuts = [
        MonoCut(
            id=f"cut-{number}",
            start=start,
            duration=duration,
            channel=channel,
            recording=recording,
            supervisions=[
                SupervisionSegment(
                    id=f"said-{number}",
                    recording_id=recording.id,
                    start=0.0,
                    duration=duration,
                    channel=channel,
                    text=("yes", "no")[number % 2],
                    speaker=f"s{number}",
                    custom={"label": ("hum", "whistle")[channel], "snr": 3.5},
                )
            ],
        )
        # 0.10006 s and 0.0250625 s end between two samples.
        for number, (start, duration, channel) in enumerate(
            [(0.0, 0.25, 0), (0.10006, 0.0250625, 1), (0.5, 0.25, 0), (0.0, 1.0, 1)]
        )
    ]
    CutSet.from_cuts(cuts[:3]).to_file("cuts_train.jsonl.gz")
    CutSet.from_cuts(cuts[3:]).to_file("cuts_dev.jsonl.gz")
    np.savez_compressed("samples.npz", **{cut.id: cut.load_audio()[0] for cut in cuts})


def make_sine(pitch: float, time: np.ndarray) -> np.ndarray:
    return 0.2 * np.sin(2 * np.pi * pitch * time)


if __name__ == "__main__":
    folder = Path(__file__).resolve().parent
    for name in ("webdataset", "hub", "disk", "lhotse"):
        (folder / name).mkdir(exist_ok=True)
    write_webdataset(folder / "webdataset")
    write_datasets(folder / "hub", folder / "disk")
    write_lhotse(folder / "lhotse")
