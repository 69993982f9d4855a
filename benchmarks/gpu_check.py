"""Check raydfl on a GPU: correctness, memory of a share, and speed. Ten minutes at most.

    make gpu-check
    python benchmarks/gpu_check.py [--device cpu --dry-run] [--out FOLDER]

1. Tiny federations of every method and objective, family of networks, transform and attack end with the CPU's result.
2. The memory cap of a share of the GPU holds, exceeding it gives a clear message, and the measured share is sufficient.
3. The group size chosen by train.together: auto, and its gain.
4. Clients a second for three networks at 12, 100 and 500 clients a round, beside a bare loop of torch.nn's modules
   (cuDNN) over the same batches, and the fraction of the time in which the GPU computes.

It prints one table at the end and writes gpu_check.json. The exit code is 0 if nothing failed, else 1. docs/speed.md#gpus has
the details.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpu import clips, equality, federations, memory, speed
from gpu.lines import Line, Watch, table

from raydfl import __version__
from raydfl.core import ops

SECONDS = 600.0
PARTS = {"equality": 230.0, "memory": 110.0, "together": 90.0, "speed": 150.0}
"""Seconds of each part, on a GPU. The last part also gets the unused time."""
PART_NAMES = tuple(PARTS)


def environment(device: str) -> dict[str, Any]:
    """Return the environment of the measurement: device, driver, versions, commit."""
    found: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "raydfl": __version__,
        "commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "changed files": len(_output("git", "-C", str(Path(__file__).parent), "status", "--short").splitlines()),
        "python": platform.python_version(),
        "pytorch": torch.__version__,
        "compiled operators": ops.is_compiled(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {
            "device": properties.name,
            "memory": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def _output(*command: str) -> str:
    """Return the output of a program; empty if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def check(
    device: str, dry: bool, parts: list[str], folder: Path, seconds: float = SECONDS, ray: bool = True
) -> list[Line]:
    """Run the check.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        dry: run everything with tiny sizes, to test the check itself.
        parts: of :data:`PARTS`.
        folder: for data and runs.
        seconds: time limit for the whole check.
        ray: run the parts that need Ray.

    Returns:
        The lines of the table.
    """
    watch = Watch(seconds)
    listed = clips.write(folder / "clips", takes=2 if dry else 5)
    lines: list[Line] = []
    for number, part in enumerate(parts):
        watch.begin(seconds if number == len(parts) - 1 else PARTS[part] * seconds / SECONDS)
        print(f"--- {part}", flush=True)
        if part == "equality":
            lines += equality.check(federations.cases(dry), listed, folder, device, watch)
        elif part == "memory":
            lines += memory.check(listed, folder, device, watch, ray)
        elif part == "together":
            lines += speed.check_together(folder, device, dry, watch)
        else:
            lines += speed.check_speed(folder, device, dry, watch)
    return lines


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dry-run", action="store_true", help="run everything with tiny sizes, also without a GPU")
    parser.add_argument("--parts", nargs="+", choices=PART_NAMES, default=list(PART_NAMES))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit in seconds (default: 600)")
    parser.add_argument(
        "--out", type=Path, default=Path(), help="folder of gpu_check.json (default: the current folder)"
    )
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.dry_run:
        parser.error("--device cpu measures nothing of a GPU; give --dry-run too, which tries whether the check runs")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(
            f"gpu_check: there is no GPU that PyTorch {torch.__version__} can use (torch.cuda.is_available() is False). Install "
            "a PyTorch with CUDA on a machine with an NVIDIA GPU, or try the check itself: --device cpu --dry-run",
            file=sys.stderr,
        )
        return 2
    if arguments.seconds <= 0:
        parser.error(f"--seconds {arguments.seconds:g}: give a time above 0")
    warnings.filterwarnings("ignore", message="There is a performance drop")  # of networks under vmap
    torch.set_num_threads(1)
    around = environment(arguments.device)
    print(", ".join(f"{name} {value}" for name, value in around.items()), flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="raydfl-gpu-check-") as folder:
        lines = check(arguments.device, arguments.dry_run, arguments.parts, Path(folder), arguments.seconds)
    took = time.monotonic() - started
    bad = sum(line.result == "FAILED" for line in lines)
    cut = sum(line.result == "cut short" for line in lines)
    print(f"\n{table(lines)}\n")
    print(
        f"{len(lines)} lines, {bad} failed, {cut} cut short, {took:.0f} s"
        + (", a dry run" if arguments.dry_run else "")
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "gpu_check.json"
    report = {
        "environment": around,
        "dry run": arguments.dry_run,
        "seconds": took,
        "lines": [asdict(line) for line in lines],
    }
    path.write_text(json.dumps(report, indent=1))
    print(f"written to {path}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
