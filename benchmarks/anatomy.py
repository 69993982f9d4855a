"""Measure the parts of a round's processor time, and the time of its products at the speed of one large product.

    python benchmarks/anatomy.py --root PATH/TO/fsdd [--works crnn_base crnn_lite --rounds 12]
    python benchmarks/anatomy.py --root PATH/TO/fsdd --pictures PATH/TO/mnist --works cnn

The work is that of rounds.py. Two measurements, each in separate processes:

- In one process, without Ray: rounds under PyTorch's profiler, whose self times of operators are summed by kind. They
  are clock times, so the machine must be idle. The rest of the processor time of the same number of rounds without the
  profiler belongs to Python and raydfl.
- With a server actor and two client actors: the processor time of each of their processes, and the waits of a round by
  the clock, from the run's metrics (means over rounds).

The last column: the multiplications and additions of all matrix products and convolutions (counted from their shapes,
including gradients) at the speed of ``torch.mm`` on one thread here. It is not a lower bound: raydfl's kernels may be
faster than this product, and Winograd's convolution has fewer operations. It excludes everything else, above all
activations.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from processes import Mark
from rounds import KERNEL, WARM_UP, configuration, fsdd, mnist
from torch.profiler import ProfilerActivity, profile

from raydfl.cluster.server import Server
from raydfl.core.yaml import to_yaml
from raydfl.engine.storage import record
from raydfl.engine.telemetry import TIMELINE
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress

KINDS: Mapping[str, Callable[[str], bool]] = {
    "products of matrices": lambda name: (
        name.removeprefix("aten::") in ("mm", "addmm", "bmm", "baddbmm", "addmv", "dot")
    ),
    "convolution, ReLU and pooling in time": lambda name: name.startswith(("raydfl::conv_", "raydfl_conv")),
    "convolution of images": lambda name: name.startswith("raydfl::conv2d_"),
    "normalisation, ReLU and pooling of images": lambda name: name.startswith("raydfl::norm_"),
    "GRU, its products and gates": lambda name: name.startswith("raydfl::gru_"),
    "optimiser": lambda name: "_foreach" in name or name.startswith(("Optimizer", "aten::_fused")),
    "other operators": lambda name: name.startswith(("aten::", "raydfl::")),
}
"""An operator's self time belongs to its first matching kind."""
PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "raydfl::conv_forward",
    "raydfl::conv_backward",
    "raydfl::conv2d_backward",
    "raydfl::gru_backward",
)
CLIPS = ("crnn_base", "crnn_lite", "fedmlac")
"""Works on clips of the usual shape."""
REST = "Python: the loop over batches and clients, plan, aggregation, record, commit"


def find_kind(name: str) -> str:
    """Return the kind of an operator."""
    return next((kind for kind, takes in KINDS.items() if takes(name)), REST)


def peak() -> float:
    """Return multiplications and additions a second of a large matrix product, the best of ten."""
    one, two = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best = float("inf")
    for _ in range(10):
        began = time.process_time()
        torch.mm(one, two)
        best = min(best, time.process_time() - began)
    return float(2 * 1024**3 / best)


def operations(name: str, shapes: list[list[int]]) -> int:
    """Return the multiplications and additions of a call; 0 if it is no product.

    A GRU and a convolution of images count with their backward pass. The convolution of a single channel has no
    gradient of its input.
    """
    if name not in PRODUCTS:
        return 0
    if name == "raydfl::conv2d_backward":
        dy, _, weight = shapes[:3]
        once = 2 * dy[0] * dy[2] * dy[3] * int(torch.Size(weight).numel())
        return once * (2 if weight[1] == 1 else 3)
    if name == "raydfl::gru_backward":
        hidden, (batch, frames, inputs) = shapes[1][-1], shapes[3]
        return 3 * 2 * batch * frames * 3 * hidden * (inputs + hidden)
    if name == "aten::addmm":
        shapes = shapes[1:]
    if name.startswith("aten::"):
        first, second = shapes[:2]
        return 2 * int(torch.Size(first).numel()) * second[-1]
    forward = name.endswith("forward")
    x, weight = (shapes[0], shapes[1]) if forward else (shapes[2], shapes[3])
    once = 2 * x[0] * x[1] * int(torch.Size(weight).numel())  # one product of an input and a weight per frame
    return once if forward else 2 * once


def profile_rounds(config: Path, rounds: int) -> None:
    """Print rounds in this process by kind: name, ms a round, and ms of the products by torch.mm."""
    from raydfl import load_config

    torch.set_num_threads(1)
    given = load_config(config)
    server = Server(create(given, Progress("quiet")), given)

    def do() -> float:
        began = time.process_time()
        for _ in range(rounds):
            server.round()
        server.finish()
        return time.process_time() - began

    for _ in range(WARM_UP):
        server.round()
    before = do()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        do()
    plain = (before + do()) / 2
    server.close()
    took: dict[str, float] = defaultdict(float)
    counted: dict[str, int] = defaultdict(int)
    for row in profiler.key_averages(group_by_input_shape=True):
        took[find_kind(row.key)] += row.self_cpu_time_total / 1e6
        counted[find_kind(row.key)] += row.count * operations(row.key, row.input_shapes)
    speed = peak()
    took[REST] = plain - sum(seconds for kind, seconds in took.items() if kind != REST)
    for kind in [*KINDS, REST]:
        print(kind, 1000 * took[kind] / rounds, 1000 * counted[kind] / speed / rounds, sep="\t", flush=True)
    print("peak", speed, 0, sep="\t", flush=True)


def measure_waits(run: Path) -> dict[str, float]:
    """Return the waits of a run's recorded rounds with actors, in ms a round by kind."""
    found: dict[str, list[float]] = defaultdict(list)
    rows = [row for row in record.read_rows(run).to_pylist() if row["round"] > WARM_UP]
    times = {(row["round"], row["metric"]): row["value"] for row in rows if row["metric"].startswith("seconds/")}
    for row in rows:
        if row["metric"] != TIMELINE:
            continue
        plan, clients, aggregate, whole = (
            times[row["round"], f"seconds/{part}"] for part in ("plan", "clients", "aggregate", "round")
        )
        spans = np.reshape(row["array"], row["shape"])
        ends = sorted(spans[spans[:, 1] == actor, 3].max() for actor in set(spans[:, 1]))
        begins = sorted(spans[spans[:, 1] == actor, 2].min() for actor in set(spans[:, 1]))
        for what, seconds in {
            "plan, weights into the object store, orders sent": plan,
            "until both actors have begun": begins[-1] - plan,
            "both actors work": ends[0] - begins[-1],
            "one has nothing left, the other works": ends[-1] - ends[0],
            "until its answer is there": plan + clients - ends[-1],
            "aggregation": aggregate,
            "record, and what lies between rounds": whole - plan - clients - aggregate,
            "all": whole,
        }.items():
            found[what].append(1000 * seconds)
    return {what: float(np.mean(each)) for what, each in found.items()}


def measure_actors(config: Path, rounds: int) -> dict[str, float]:
    """Return processor milliseconds a round of rounds with actors, by kind of process."""
    mark = Mark()
    code = (
        "import sys, ray; from pathlib import Path; from peers.ours import Actors; from raydfl import load_config\n"
        f"a = Actors(load_config(Path({str(config)!r}))); a.run({WARM_UP}); print('ready', flush=True); sys.stdin.readline()\n"
        f"a.run({rounds}); print('done', flush=True); sys.stdin.readline(); a.close()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parent,
        env=os.environ
        | mark.environment
        | {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"},
    )
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process has no pipes")

    def used() -> dict[int, tuple[str, float]]:
        found = {}
        for each in mark.processes():
            times, line = each.cpu_times(), " ".join(each.cmdline())
            known = {"ray::ServerActor": "server actor", "ray::ClientActor": "client actors"}
            name = next((kind for word, kind in known.items() if word in line), "Ray's own processes")
            found[each.pid] = ("driver" if each.pid == process.pid else name, times.user + times.system)
        return found

    try:
        process.stdout.readline()
        before = used()
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        after = used()
    finally:
        process.communicate("\n")
    total: dict[str, float] = defaultdict(float)
    for pid, (name, seconds) in after.items():
        total[name] += 1000 * (seconds - before.get(pid, ("", 0.0))[1]) / rounds
    return dict(total)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder of the Free Spoken Digit Dataset")
    parser.add_argument("--pictures", type=Path, help="folder of MNIST's idx files, for cnn")
    parser.add_argument("--works", nargs="+", default=["crnn_base", "crnn_lite"], choices=[*CLIPS, "cnn"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        profile_rounds(given.alone, given.rounds)
        return
    if not given.root:
        parser.error("--root is missing: the folder of the Free Spoken Digit Dataset")
    if "cnn" in given.works and not given.pictures:
        parser.error("--works cnn needs --pictures: the folder of MNIST's idx files")
    print(f"Kernel {KERNEL}; ms of the processor a round; {given.rounds} rounds.")
    with tempfile.TemporaryDirectory(prefix="raydfl-anatomy-") as folder:
        for work in given.works:
            files = {}
            data = mnist(given.pictures.resolve()) if work == "cnn" else fsdd(given.root.resolve())
            for actors in (0, 2):
                config = configuration(data, Path(folder), work, actors)
                files[actors] = Path(folder) / f"{config.run.name}.yaml"
                files[actors].write_text(to_yaml(config.model_dump(mode="json"), flow=False))
            command = [sys.executable, __file__, "--alone", str(files[0]), "--rounds", str(given.rounds)]
            lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
            rows = [
                (kind, float(took), float(products)) for kind, took, products in (line.split("\t") for line in lines)
            ]
            *rows, (_, speed, _) = rows
            whole = sum(took for _, took, _ in rows)
            print(f"\n| {work}, one process | ms | share | products at the speed of torch.mm, ms |\n|---|---|---|---|")
            for kind, took, products in rows:
                print(f"| {kind} | {took:.0f} | {took / whole:.0%} | {f'{products:.0f}' if products else ''} |")
            print(
                f"| all | {whole:.0f} | | {sum(products for *_, products in rows):.0f}, at {speed / 1e9:.0f} GFLOP/s |"
            )
            print(f"\n| {work}, two client actors | ms |\n|---|---|")
            for name, took in measure_actors(files[2], given.rounds).items():
                print(f"| {name} | {took:.0f} |", flush=True)
            print(f"\n| {work}, two client actors, by the clock | ms |\n|---|---|")
            for name, took in measure_waits(Path(folder) / config.run.name).items():
                print(f"| {name} | {took:.1f} |", flush=True)


if __name__ == "__main__":
    main()
