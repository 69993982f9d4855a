"""What the processor time of a round is made of, and what its products would take at the speed of one large product.

    python benchmarks/anatomy.py --root PATH/TO/fsdd [--works crnn_base crnn_lite --rounds 12]

The work is that of rounds.py. Two measurements, each in processes of its own:

- In one process, without Ray: rounds under PyTorch's profiler, whose self times of operators are added up by kind; these are by the
  clock, so nothing else may run. What is left of the processor time of as many rounds without it is Python's and raydfl's own.
- With a server actor and two client actors: the processor time of every process that belongs to them.

The last column: the multiplications and additions of all matrix products and convolutions (counted from their shapes, with the
gradients') at the speed of ``torch.mm`` on one thread here. It is no floor: raydfl's kernels may be faster than that product, and
Winograd's convolution has fewer of them. What else is done, activations above all, is not in it.
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

import torch
from processes import Mark
from rounds import KERNEL, WARM_UP, WORKS, configuration, fsdd
from torch.profiler import ProfilerActivity, profile

from raydfl.cluster.server import Server
from raydfl.core.yaml import to_yaml
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress

KINDS: Mapping[str, Callable[[str], bool]] = {
    "products of matrices": lambda name: (
        name.removeprefix("aten::") in ("mm", "addmm", "bmm", "baddbmm", "addmv", "dot")
    ),
    "convolution, ReLU and pooling in time": lambda name: name.startswith(("raydfl::conv_", "raydfl_conv")),
    "GRU, its products and gates": lambda name: name.startswith("raydfl::gru_"),
    "optimiser": lambda name: "_foreach" in name or name.startswith(("Optimizer", "aten::_fused")),
    "other operators": lambda name: name.startswith(("aten::", "raydfl::")),
}
"""The first kind that takes an operator has its self time."""
PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "raydfl::conv_forward",
    "raydfl::conv_backward",
    "raydfl::gru_backward",
)
REST = "Python: the loop over batches and clients, plan, aggregation, record, commit"


def kind_of(name: str) -> str:
    """Return the kind of an operator."""
    return next((kind for kind, takes in KINDS.items() if takes(name)), REST)


def peak() -> float:
    """Return multiplications and additions a second of a large product of matrices, the best of ten."""
    one, two = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best = float("inf")
    for _ in range(10):
        began = time.process_time()
        torch.mm(one, two)
        best = min(best, time.process_time() - began)
    return float(2 * 1024**3 / best)


def operations(name: str, shapes: list[list[int]]) -> int:
    """Return the multiplications and additions of a call; 0 of what is no product. All of a GRU counts with its backward."""
    if name not in PRODUCTS:
        return 0
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
    once = 2 * x[0] * x[1] * int(torch.Size(weight).numel())  # an input and a weight meet once at each frame
    return once if forward else 2 * once


def alone(config: Path, rounds: int) -> None:
    """Print, of rounds in this process, a line for each kind: name, ms a round, and ms of its products by torch.mm."""
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
        took[kind_of(row.key)] += row.self_cpu_time_total / 1e6
        counted[kind_of(row.key)] += row.count * operations(row.key, row.input_shapes)
    speed = peak()
    took[REST] = plain - sum(seconds for kind, seconds in took.items() if kind != REST)
    for kind in [*KINDS, REST]:
        print(kind, 1000 * took[kind] / rounds, 1000 * counted[kind] / speed / rounds, sep="\t", flush=True)
    print("peak", speed, 0, sep="\t", flush=True)


def with_ray(config: Path, rounds: int) -> dict[str, float]:
    """Return ms of the processor a round, by kind of process, of rounds with actors."""
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
    parser.add_argument("--works", nargs="+", default=["crnn_base", "crnn_lite"], choices=list(WORKS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        alone(given.alone, given.rounds)
        return
    if not given.root:
        parser.error("--root is missing: the folder of the Free Spoken Digit Dataset")
    print(f"Kernel {KERNEL}; ms of the processor a round; {given.rounds} rounds.")
    with tempfile.TemporaryDirectory(prefix="raydfl-anatomy-") as folder:
        for work in given.works:
            files = {}
            for actors in (0, 2):
                config = configuration(fsdd(given.root.resolve()), Path(folder), work, actors)
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
            for name, took in with_ray(files[2], given.rounds).items():
                print(f"| {name} | {took:.0f} |", flush=True)


if __name__ == "__main__":
    main()
