"""Measure the cost of a large federation: seconds a round, peak memory of each process, bytes on disk.

    python benchmarks/scale.py jobs/gsc_shape.yaml [key=value ...]

Runs the job like a user, watches all its processes, and prints a table at the end. Memory is reported as a process's
own anonymous pages, and as all resident pages. The latter include the mapped features, which belong to the page cache
and are shared by all processes of a node.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from processes import Mark

TITLES = {
    "ray::ClientActor": "client actor",
    "ray::ServerActor": "server actor",
    "raydfl run": "driver",
    "/raylet --": "raylet",
}


def watch(mark: Mark, peaks: dict[str, tuple[int, int]], over: threading.Event) -> None:
    """Sample the largest (own, resident) bytes of each listed process with the mark, twice a second."""
    while not over.wait(0.5):
        for word, title in TITLES.items():
            for pid in mark.pids(word):
                with contextlib.suppress(OSError, KeyError):  # it has ended
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                    status = dict(line.split(":", 1) for line in lines)
                    now = [1024 * int(status[name].split()[0]) for name in ("RssAnon", "VmRSS")]
                    own, resident = peaks.get(f"{title} {pid}", (0, 0))
                    peaks[f"{title} {pid}"] = (max(own, now[0]), max(resident, now[1]))


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    """Run, watch, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="the job, a YAML file")
    parser.add_argument("overrides", nargs="*", help="settings of the run, key=value")
    given = parser.parse_args()
    mark = Mark()
    peaks: dict[str, tuple[int, int]] = {}
    over = threading.Event()
    command = [sys.executable, "-m", "raydfl", "run", given.file, *given.overrides, "--json"]
    started = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **mark.environment}
    ) as process:
        watcher = threading.Thread(target=watch, args=(mark, peaks, over), daemon=True)
        watcher.start()
        rounds, run_dir = [], None
        assert process.stdout is not None  # noqa: S101
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "round":
                rounds.append(event)
                print(f"round {event['round']}: {event['clients']} clients in {event['seconds']:.1f} s", flush=True)
            run_dir = event.get("run_dir", run_dir)
        over.set()
        watcher.join()
    if process.returncode or run_dir is None:
        sys.exit(f"the run ended with exit code {process.returncode}")
    seconds = [event["seconds"] for event in rounds]
    total = time.perf_counter() - started
    print(f"\n{len(rounds)} rounds, {statistics.median(seconds):.1f} s a round (median), {total:.0f} s in all")
    print(f"{'process':24}{'own, MB':>12}{'resident, MB':>14}")
    for title, (own, resident) in sorted(peaks.items()):
        print(f"{title:24}{own / 1e6:12.0f}{resident / 1e6:14.0f}")
    folder = Path(run_dir)
    parts = {
        name: size_of(folder / name)
        for name in ("private", "commits", "rows", "population")
        if (folder / name).exists()
    }
    print("on the disk: " + ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in parts.items()))


if __name__ == "__main__":
    main()
