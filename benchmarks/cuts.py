"""Measure the savings of partial networks: memory and time of the server, and time, memory and bytes of a device.

``python benchmarks/cuts.py server`` aggregates 50 updates of a ResNet-18 and prints the process's peak memory above the
memory at its start, with a separate process for each kind of update: whole updates with a weight for each element
(masks, as sent by pruned devices), with a weight for each filter, cut updates, and whole updates with one weight.
``streamed``: one after another, as a mean takes them; ``held``: all at once. Time is processor time for all of them
held, the median of five after a warm-up; a read is NumPy's sum of all their values.

``python benchmarks/cuts.py device`` trains each network with several fractions of its channels, and with the same
fraction of its filters masked instead of omitted; the contestants alternate. Memory is counted, not measured: weights,
gradients and the tensors that the backward pass needs. Time is processor time for one step, as a ratio to the whole
network's in the same turn.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raydfl.core.cuts import Cut
from raydfl.core.tensors import FlatTensors
from raydfl.core.types import ModelSpec, Update
from raydfl.models import build_model, narrow
from raydfl.rules import WeightedMean

CLIENTS = 50
KINDS = ("mask by element", "mask by filter", "cut", "one weight")
NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "crnn_base": (64, (16, 101, 64)),
    "cnn": ((3, 32, 32), (16, 3, 32, 32)),
    "split_cnn": (64, (16, 96, 64)),
    "resnet18": ((3, 32, 32), (16, 3, 32, 32)),
    "shufflenet_v2": ((3, 32, 32), (16, 3, 32, 32)),
}
"""Networks with their inputs and a batch's shape."""


def resnet18() -> dict[str, Tensor]:
    """Return tensors with the shapes of a ResNet-18 for 1000 classes, 11,689,512 elements."""
    shapes: dict[str, tuple[int, ...]] = {"conv1": (64, 3, 7, 7), "norm1": (64,)}
    before = 64
    for stage, channels in enumerate((64, 128, 256, 512)):
        for block in range(2):
            for number in (1, 2):
                shapes[f"layer{stage}.{block}.conv{number}"] = (channels, before if number == 1 else channels, 3, 3)
                shapes[f"layer{stage}.{block}.norm{number}"] = (channels,)
            if before != channels:
                shapes[f"layer{stage}.{block}.down"] = (channels, before, 1, 1)
                shapes[f"layer{stage}.{block}.down_norm"] = (channels,)
            before = channels
    tensors = {"model/fc.weight": torch.randn(1000, 512), "model/fc.bias": torch.randn(1000)}
    for name, shape in shapes.items():
        tensors[f"model/{name}.weight"] = torch.randn(shape)
        if len(shape) == 1:
            tensors[f"model/{name}.bias"] = torch.randn(shape)
    return tensors


def updates(server: Mapping[str, Tensor], kind: str, share: float) -> Iterator[Update]:
    """Return the updates of devices with this fraction of each layer's filters."""
    for number in range(CLIENTS):
        rng = np.random.default_rng(number)
        sent: dict[str, Tensor] = {}
        weights: dict[str, Tensor | float] = {}
        cuts: dict[str, Cut] = {}
        for name, value in server.items():
            kept = [np.sort(rng.choice(size, int(size * share) or 1, replace=False)) for size in value.shape[:2]]
            weights[name], sent[name] = float(number + 1), value
            if kind == "cut" and value.ndim:
                # The inputs of the first layer and the outputs of the last stay whole.
                first, last = value.ndim == 4 and value.shape[1] == 3, name.startswith("model/fc")
                chosen = [None if last else kept[0], *(None if first else each for each in kept[1:])]
                cuts[name] = Cut([*chosen, *[None] * (value.ndim - len(chosen))])
                sent[name] = torch.from_numpy(cuts[name].take(value.numpy()))
            elif kind.startswith("mask") and value.ndim == 4:
                filters = torch.zeros(len(value), 1, 1, 1)
                filters[torch.from_numpy(kept[0])] = number + 1
                weights[name] = filters.expand_as(value).contiguous() if kind == "mask by element" else filters
        yield Update(FlatTensors.from_tensors(sent), weights, client_id=f"c{number:03d}", cuts=cuts)


def resident() -> int:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """Return the peak bytes of this process in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def aggregate(kind: str, share: float, held: bool, report: Any) -> None:
    """Aggregate in this process. Report memory, bytes of an update and, for held updates, the times of rule and read."""
    torch.set_num_threads(1)
    server = resnet18()
    sizes: list[int] = []

    def iter_updates() -> Iterator[Update]:
        for update in updates(server, kind, share):
            arrays = update.weight.values() if isinstance(update.weight, Mapping) else ()
            own = sum(w.nbytes if isinstance(w, Tensor) else 8 for w in arrays)
            sizes.append(own + 4 * update.tensors.layout.size)  # type: ignore[attr-defined]  # they are flat
            yield update

    next(iter(updates(server, kind, share)))  # what is allocated once
    before = resident()
    arriving = list(iter_updates()) if held else iter_updates()
    WeightedMean()(arriving, {"global": server})
    used = peak() - before
    again = [seconds(lambda: WeightedMean()(arriving, {"global": server})) for _ in range(5)] if held else [0.0]
    read = seconds(lambda: [update.tensors.vector.sum() for update in arriving]) if held else 0.0
    report.send((used, statistics.mean(sizes), statistics.median(again), read))


def seconds(do: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    began = time.process_time()
    do()
    return time.process_time() - began


def server(share: float) -> None:
    """Print the server's table."""
    print(f"{CLIENTS} updates of a ResNet-18, share {share:g}")
    print(
        "| update | bytes of one | streamed: memory | held: memory | time of all | a read |\n|---|---|---|---|---|---|"
    )
    for kind in KINDS:
        found = []
        for held in (False, True):
            here, there = multiprocessing.get_context("spawn").Pipe(duplex=False)
            process = multiprocessing.get_context("spawn").Process(target=aggregate, args=(kind, share, held, there))
            process.start()
            there.close()  # so that a crash without a report is noticed
            found.append(here.recv())
            process.join()
        (streamed, size, *_), (at_once, _, took, read) = found
        print(
            f"| {kind} | {size / 1e6:.1f} MB | {streamed / 1e9:.2f} GB | {at_once / 1e9:.2f} GB | {took:.2f} s | {read:.2f} s |"
        )


class Device:
    """A network and the parts of a training step."""

    def __init__(self, name: str, share: float, masked: bool) -> None:
        inputs, shape = NETWORKS[name]
        torch.manual_seed(0)
        whole = ModelSpec("model", name, inputs, 10)
        self.network = build_model(whole if masked else narrow(whole, share))
        self.x, self.y = torch.randn(shape), torch.randint(10, shape[:1])
        self.optimiser = torch.optim.SGD(self.network.parameters(), lr=1e-6)
        self.masks = self._masks(share) if masked else {}

    def _masks(self, share: float) -> dict[str, Tensor]:
        masks = {}
        for name, parameter in self.network.named_parameters():
            if parameter.ndim > 2:
                kept = torch.zeros(len(parameter), *[1] * (parameter.ndim - 1))
                kept[: int(len(parameter) * share)] = 1
                masks[name] = kept
        return masks

    def step(self) -> None:
        """Make one training step."""
        with torch.no_grad():
            for name, mask in self.masks.items():
                self.network.get_parameter(name).mul_(mask)
        self.optimiser.zero_grad()
        F.cross_entropy(self.network(self.x), self.y).backward()
        self.optimiser.step()

    def bytes(self) -> int:
        """Return the bytes of the network's tensors, sent down and up."""
        return sum(4 * value.numel() for value in self.network.state_dict().values())

    def memory(self) -> int:
        """Return the bytes of weights, gradients and tensors for the backward pass."""
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            F.cross_entropy(self.network(self.x), self.y).backward()
        weights = {p.untyped_storage().data_ptr() for p in self.network.parameters()}
        return 2 * self.bytes() + sum(size for place, size in kept.items() if place not in weights)


def device(turns: int, networks: Sequence[str]) -> None:
    """Print a device's table."""
    torch.set_num_threads(1)
    print("| network | | bytes each way | memory | time of a step |\n|---|---|---|---|---|")
    for name in networks:
        contestants = {"whole": Device(name, 1.0, False)}
        contestants |= {f"share {share:g}": Device(name, share, False) for share in (0.5, 0.25)}
        contestants |= {f"masked, {share:g}": Device(name, share, True) for share in (0.5,)}
        seconds: dict[str, list[float]] = {what: [] for what in contestants}
        for turn in range(turns + 1):
            for what, contestant in contestants.items():
                began = time.process_time()
                for _ in range(5):
                    contestant.step()
                if turn:
                    seconds[what].append((time.process_time() - began) / 5)
        for what, contestant in contestants.items():
            ratios = sorted(a / b for a, b in zip(seconds[what], seconds["whole"], strict=True))
            time_of = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
            if what == "whole":
                time_of = f"1 ({statistics.median(seconds[what]) * 1000:.1f} ms)"
            print(
                f"| {name} | {what} | {contestant.bytes() / 1e6:.2f} MB | {contestant.memory() / 1e6:.1f} MB | {time_of} |",
                flush=True,
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["server", "device"])
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS], help="of the devices")
    arguments = parser.parse_args()
    if arguments.what == "server":
        server(arguments.share)
    else:
        device(arguments.turns, arguments.networks)


if __name__ == "__main__":
    main()
