"""Measure memory and processor time of preparing recordings inside shards, Parquet or Arrow files.

    python benchmarks/packed.py                                        # 1, 2 and 5 GB of each kind
    python benchmarks/packed.py --kinds webdataset --gigabytes 50

A file of about 256 MB is written once; the set consists of this file under many names (hard links), so it has the full
size for readers, but not on disk. Recordings are noise, 10 s at 48 kHz, 16 bits; the features are small. A fresh
process prepares each size: it lists the clips, reads and hashes all files, computes features and divides the clips.
Printed is the largest resident memory of this process and of its helpers. README.md beside this file has the table.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

RATE = 48_000
SECONDS = 10
CLIPS = 280
"""Recordings in a file of about 256 MB."""
GB = 10**9


def write_file(kind: str, folder: Path) -> Path:
    """Write one file of recordings."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(CLIPS):
        file = io.BytesIO()
        soundfile.write(file, 0.1 * rng.standard_normal(RATE * SECONDS), RATE, format="WAV")
        rows.append({"audio": {"bytes": file.getvalue(), "path": f"{number}.wav"}, "label": str(number % 4)})
    if kind == "webdataset":
        with tarfile.open(folder / "shard.tar", "w") as archive:
            for number, row in enumerate(rows):
                for ending, content in (("wav", row["audio"]["bytes"]), ("cls", row["label"].encode())):
                    info = tarfile.TarInfo(f"{number:05d}.{ending}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
        return folder / "shard.tar"
    table = pa.Table.from_pylist(rows)
    if kind == "parquet":
        pq.write_table(table, folder / "shard.parquet", row_group_size=100)  # as on the hub
        return folder / "shard.parquet"
    with pa.OSFile(str(folder / "shard.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return folder / "shard.arrow"


def prepare(kind: str, root: Path, cache: Path) -> dict[str, float]:
    """Prepare the set in this process."""
    from raydfl.data import build_population
    from raydfl.data.settings import DataSettings

    features = {"sample_rate": RATE, "bands": 8, "hop_ms": 100, "seconds": 1.0}
    name = "webdataset" if kind == "webdataset" else "huggingface"
    data = DataSettings(
        name=name,
        root=root,
        cache=cache,
        features=features,
        split={"test": {"by": "clip", "fraction": 0.2}},
        partition={"by": "iid", "clients": 10},
    )
    population = build_population(data, 0)
    own, helpers = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    # Not ru_maxrss, which includes the parent's memory: a helper's value is at least this process's.
    (peak,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return {
        "clips": len(population.stores[0]),
        "own_mb": int(peak.split()[1]) / 1000,
        "helper_mb": helpers.ru_maxrss / 1000,
        "cpu_s": own.ru_utime + own.ru_stime + helpers.ru_utime + helpers.ru_stime,
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["webdataset", "parquet", "arrow"])
    parser.add_argument("--gigabytes", nargs="+", type=float, default=[1.0, 2.0, 5.0])
    parser.add_argument("--folder", type=Path, help="where the files are written; default: a temporary folder")
    parser.add_argument("--one", nargs=3, metavar=("KIND", "ROOT", "CACHE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        kind, root, cache = arguments.one
        print(json.dumps(prepare(kind, Path(root), Path(cache))))
        return
    print("kind         GB read     clips    process MB    helper MB    processor s    processor s/GB")
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            one = write_file(kind, Path(folder))
            for size in arguments.gigabytes:
                root = Path(folder) / f"{size:g}"
                root.mkdir()
                files = max(1, round(size * GB / one.stat().st_size))
                for number in range(files):
                    (root / f"shard-{number:05d}{one.suffix}").hardlink_to(one)
                command = [sys.executable, __file__, "--one", kind, str(root), str(Path(folder) / f"cache-{size:g}")]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                found = json.loads(done.stdout.splitlines()[-1])
                read = files * one.stat().st_size / GB
                print(
                    f"{kind:12} {read:7.2f} {found['clips']:9.0f} {found['own_mb']:13.0f} {found['helper_mb']:12.0f} "
                    f"{found['cpu_s']:14.0f} {found['cpu_s'] / read:17.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
