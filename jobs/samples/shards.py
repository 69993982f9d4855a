"""Write the recordings of recordings.csv as WebDataset shards, as a Hugging Face Parquet file, and as Lhotse cuts."""

import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

rows, cuts = [], []
Path("shards").mkdir(exist_ok=True)
with tarfile.open("shards/sounds-000000.tar", "w") as shard:
    for path in sorted(Path("recordings").glob("*/*.wav")):
        device, content, label = path.stem.partition("_")[0], path.read_bytes(), path.parent.name
        about = json.dumps({"label": label, "device": device}).encode()
        for ending, part in (("wav", content), ("json", about)):
            member = tarfile.TarInfo(f"{label}-{path.stem}.{ending}")
            member.size = len(part)
            shard.addfile(member, io.BytesIO(part))
        rows.append({"audio": {"bytes": content, "path": path.name}, "label": label, "device": device})
        source = {"type": "file", "channels": [0], "source": str(path)}
        recording = {
            "id": path.stem,
            "sources": [source],
            "sampling_rate": 16000,
            "num_samples": 16000,
            "duration": 1.0,
        }
        supervision = {
            "id": path.stem,
            "recording_id": path.stem,
            "start": 0,
            "duration": 0.5,
            "speaker": device,
            "text": label,
        }
        cut = {"id": f"{label}-{path.stem}", "type": "MonoCut", "start": 0.25, "duration": 0.5, "channel": 0}
        cuts.append(json.dumps(cut | {"recording": recording, "supervisions": [supervision]}))
pq.write_table(pa.Table.from_pylist(rows), "sounds.parquet")
Path("cuts.jsonl").write_text("\n".join(cuts))
