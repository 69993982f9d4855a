"""Cost of a run behind a URI, compared with a run in a folder: seconds and bytes per round, with private state of every client.

    python benchmarks/object_store.py
    python benchmarks/object_store.py --uri s3://BUCKET/runs

Without ``--uri``, a process of moto emulates an object store on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from raydfl import Config, load_config, run
from raydfl.core.remote import RemoteFolder, below
from raydfl.engine.storage import read_rows

JOB = Path(__file__).parent.parent / "jobs" / "tiny.yaml"


@contextlib.contextmanager
def emulate_store() -> Iterator[str]:
    """Start moto in a process, and provide the URI of a bucket."""
    import boto3
    from botocore.exceptions import EndpointConnectionError

    os.environ.update({f"AWS_{name}": "emulated" for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL)
    try:
        client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1")
        for _ in range(300):
            with contextlib.suppress(EndpointConnectionError):
                client.create_bucket(Bucket="bucket")
                break
            time.sleep(0.2)
        yield f"s3://bucket/runs?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
    finally:
        server.terminate()
        server.wait()


def measure(config: Config) -> list[float]:
    """Train, and return the seconds of each round after the first."""
    result = run(config)
    rows = read_rows(result.run_dir).to_pylist()
    return [row["value"] for row in rows if row["metric"] == "seconds/round" and not row["client"]][1:]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uri", help="URI of a folder for runs (default: an emulated store)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of a run after the first (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="runs of each kind (default: %(default)s)")
    given = parser.parse_args()
    with contextlib.ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        uri = given.uri or opened.enter_context(emulate_store())
        seconds: dict[str, list[float]] = {"folder": [], "URI": []}
        for turn in range(given.turns):
            for name, place in (("folder", f"{folder}/runs"), ("URI", uri)):
                settings = [
                    f"run.dir={place}",
                    f"run.name=turn-{turn}",
                    f"data.cache={folder}/cache",
                    "data.speakers=22",
                ]
                settings += [f"train.rounds={given.rounds + 1}", "evaluate.every=1000", "ray.actors=2"]
                settings += ["method={name: fedper, personal: [model]}", "models.model=crnn_lite"]
                seconds[name] += measure(load_config(JOB, settings))
        files = RemoteFolder(below(uri, "turn-0"), "check the URI").files()
        segments = [size for name, size in files.items() if name.endswith(".seg")]
    for name, values in seconds.items():
        print(f"{name}: median {statistics.median(values):.2f} s a round ({min(values):.2f} to {max(values):.2f})")
    print(f"private state at the URI: {len(segments)} files with {sum(segments) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
