"""Generate sounds of three sites, and their list sounds.parquet with the columns file, sound, site and room."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

rng = np.random.default_rng(0)
rows = []
for site in ("north", "south", "west"):
    for sound, pitch in (("hum", 150), ("whistle", 2000)):
        for take in range(6):
            time = np.arange(8000) / 8000
            wave = 0.2 * np.sin(2 * np.pi * pitch * rng.uniform(0.9, 1.1) * time) + 0.02 * rng.standard_normal(8000)
            path = Path("sounds", sound, f"{site}-{take}.wav")
            path.parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(path, wave, 8000)
            rows.append({"file": str(path), "sound": sound, "site": site, "room": f"{site}-{take % 2}"})
pq.write_table(pa.Table.from_pylist(rows), "sounds.parquet")
