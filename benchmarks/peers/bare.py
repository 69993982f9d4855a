"""The bare loops: a researcher's code without a framework. One model, one loop over clients, tensors in memory.

Networks other than CRNNs are raydfl's, computed by PyTorch's own operations.

    PYTHONPATH=benchmarks python -m peers.bare WORK [--threads 2] [--processes 2] [--rounding]

With two processes each trains half of the cohort and the first sums up. ``--rounding`` changes the last digit of every
initial weight: the resulting difference is the possible difference of two exact programs.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peers.model import ARCHITECTURES
from peers.turns import serve
from peers.work import Work
from raydfl import ops
from raydfl.models import find_architecture

State = dict[str, Tensor]
_ROUNDING = 6e-8
"""Half of the distance of a float32 from the next, relative to it."""


class FedAvg:
    """Federated averaging, weighted by examples."""

    def __init__(self, work: Work, helper: Connection | None = None) -> None:
        """Create the loop. A helper is a process that runs :func:`help_with`."""
        self.work = work
        self.data = [tuple(part.clone() for part in work.data(client)) for client in range(len(work.offsets) - 1)]
        self.model = work.build() if work.architectures["model"] in ARCHITECTURES else raydfls(work)
        # Batch norm counts its batches, but nothing reads the count: raydfl sends no integers.
        found = self.model.state_dict().items()
        self.weights = {name: value.clone() for name, value in found if value.is_floating_point()}
        self.helper = helper
        self.round_index = 0

    def train(self, round_index: int, clients: list[int], weights: State) -> tuple[State, int]:
        """Return the sum of the clients' models, weighted by their numbers of examples; float64."""
        sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in weights.items()}
        total = 0
        for client in clients:
            x, y = self.data[client]
            order = self.work.order(round_index, client)
            self.model.load_state_dict(weights)
            optimiser = torch.optim.SGD(self.model.parameters(), lr=self.work.lr)
            for batch in order.split(self.work.batch_size):
                optimiser.zero_grad()
                with ops.use("torch"):
                    F.cross_entropy(self.model(x[batch]), y[batch]).backward()
                optimiser.step()
            now = self.model.state_dict()
            for name in sums:
                sums[name] += len(y) * now[name].double()
            total += len(y)
        return sums, total

    def run(self, rounds: int) -> None:
        """Do the given number of rounds."""
        for _ in range(rounds):
            cohort = self.work.cohorts[self.round_index]
            if self.helper is None:
                sums, total = self.train(self.round_index, cohort, self.weights)
            else:
                self.helper.send((self.round_index, cohort[1::2], {n: w.numpy() for n, w in self.weights.items()}))
                sums, total = self.train(self.round_index, cohort[::2], self.weights)
                others, count = self.helper.recv()
                sums, total = {name: value + others[name] for name, value in sums.items()}, total + count
            self.weights = {name: (value / total).float() for name, value in sums.items()}
            self.round_index += 1


def raydfls(work: Work, name: str = "model") -> nn.Module:
    """Return a network of raydfl's, computed by PyTorch's operations."""
    kind, weights = work.architectures[name], work.weights[name]
    cls, options = find_architecture(kind, kind)
    inputs = {"image": lambda: tuple(work.images.shape[1:]), "fusion": lambda: weights["hidden.weight"].shape[1]}
    model: nn.Module = cls(inputs.get(name, lambda: work.x.shape[2])(), work.classes, **options)
    model.load_state_dict(weights)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return model


def help_with(path: Path, driver: Connection) -> None:
    """Train the received clients until the pipe is closed: the second process."""
    torch.set_num_threads(1)
    loop = FedAvg(Work.load(path))
    while True:
        try:
            round_index, clients, weights = driver.recv()
        except EOFError:
            return
        sums, total = loop.train(round_index, clients, {n: torch.from_numpy(w) for n, w in weights.items()})
        driver.send(({name: value.numpy() for name, value in sums.items()}, total))


class FedMLAC:
    """Mutual learning of a shared plug-in and private local models, with layer-wise pruning in the aggregation."""

    alpha, prune = 0.5, 0.1

    def __init__(self, work: Work) -> None:
        self.work = work
        self.data = [tuple(part.clone() for part in work.data(client)) for client in range(len(work.offsets) - 1)]
        self.plugin, self.local = work.build("plugin"), work.build("local")
        self.weights = {name: value.clone() for name, value in self.plugin.state_dict().items()}
        first = self.local.state_dict()
        self.private = [{name: value.clone() for name, value in first.items()} for _ in self.data]
        self.round_index = 0

    def train(self, client: int) -> State:
        """Train one client's two models; return its plug-in."""
        x, y = self.data[client]
        self.plugin.load_state_dict(self.weights)
        self.local.load_state_dict(self.private[client])
        optimiser = torch.optim.SGD([*self.plugin.parameters(), *self.local.parameters()], lr=self.work.lr)
        for batch in self.work.order(self.round_index, client).split(self.work.batch_size):
            optimiser.zero_grad()
            local, plugin = self.local(x[batch]), self.plugin(x[batch])
            p_local, p_plugin = F.log_softmax(local, dim=1), F.log_softmax(plugin, dim=1)
            to_local = F.kl_div(p_local, p_plugin.detach(), reduction="batchmean", log_target=True)
            to_plugin = F.kl_div(p_plugin, p_local.detach(), reduction="batchmean", log_target=True)
            loss = self.alpha * F.cross_entropy(local, y[batch]) + (1 - self.alpha) * to_local + to_plugin
            loss.backward()
            optimiser.step()
        self.private[client] = {name: value.clone() for name, value in self.local.state_dict().items()}
        return {name: value.clone() for name, value in self.plugin.state_dict().items()}

    def aggregate(self, states: list[State], sizes: list[int]) -> State:
        """Average each layer without the clients nearest to and farthest from the mean."""
        result = {}
        for layer in sorted({name.rpartition(".")[0] for name in self.weights}):
            names = [name for name in self.weights if name.rpartition(".")[0] == layer]
            vectors = torch.stack([torch.cat([state[name].flatten() for name in names]) for state in states]).double()
            order = (vectors - vectors.mean(0)).norm(dim=1).argsort(stable=True).tolist()
            out = int(self.prune * len(states) + 1e-9)
            kept = sorted(order[out : len(order) - out])
            total = sum(sizes[index] for index in kept)
            for name in names:
                result[name] = (sum(sizes[index] * states[index][name].double() for index in kept) / total).float()
        return result

    def run(self, rounds: int) -> None:
        """Do the given number of rounds."""
        for _ in range(rounds):
            cohort = self.work.cohorts[self.round_index]
            states = [self.train(client) for client in cohort]
            self.weights = self.aggregate(states, [len(self.data[client][1]) for client in cohort])
            self.round_index += 1


class ModalityMirror:
    """Encoders and a fusion of two views, averaged over their owners; then a student of the first view."""

    temperature, kd_weight = 2.0, 1.0

    def __init__(self, work: Work) -> None:
        self.work = work
        self.data = [
            (*(part.clone() for part in work.data(client)), work.sees(client))
            for client in range(len(work.offsets) - 1)
        ]
        self.models = {"audio": work.build("audio"), "image": raydfls(work, "image"), "fusion": raydfls(work, "fusion")}
        self.weights = {
            f"{model}/{name}": value.clone()
            for model, network in self.models.items()
            for name, value in network.state_dict().items()
        }
        self.teacher: dict[str, nn.Module] | None = None
        self.round_index = 0

    def run(self, rounds: int) -> None:
        """Do the given number of rounds."""
        for _ in range(rounds):
            if self.round_index == self.work.first_rounds:
                self.load(self.weights)
                self.teacher = {name: copy.deepcopy(network).eval() for name, network in self.models.items()}
                self.weights = {name: value for name, value in self.weights.items() if name.startswith("audio/")}
            sums: State = {}
            senders: dict[str, int] = {}
            for client in self.work.cohorts[self.round_index]:
                for name, value in self.train(client).items():
                    sums[name] = sums[name] + value.double() if name in sums else value.double()
                    senders[name] = senders.get(name, 0) + 1
            self.weights = self.weights | {name: (value / senders[name]).float() for name, value in sums.items()}
            self.round_index += 1

    def train(self, client: int) -> State:
        """Train one client; return its update."""
        x, y, images = self.data[client]
        self.load(self.weights)
        together = images is not None and self.teacher is None
        names = ("audio", "image", "fusion") if together else ("audio",)
        parameters = [value for name in names for value in self.models[name].parameters()]
        optimiser = torch.optim.SGD(parameters, lr=self.work.lr)
        for batch in self.work.order(self.round_index, client).split(self.work.batch_size):
            optimiser.zero_grad()
            with ops.use("torch"):
                if together:
                    loss = F.cross_entropy(fuse(self.models, x[batch], images[batch]), y[batch])
                else:
                    logits = self.models["audio"](x[batch])
                    loss = F.cross_entropy(logits, y[batch])
                    if self.teacher is not None:
                        with torch.no_grad():
                            taught = fuse(self.teacher, x[batch], images[batch])
                        loss = loss + self.kd_weight * self.divergence(logits, taught)
                loss.backward()
            optimiser.step()
        heads = ("audio/output.", "image/output.") if together else ()
        return {
            f"{model}/{name}": value.clone()
            for model in names
            for name, value in self.models[model].state_dict().items()
            if not f"{model}/{name}".startswith(heads)
        }

    def divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        """T^2 KL(teacher || student), softened."""
        t = self.temperature
        log_student, log_teacher = F.log_softmax(student / t, dim=1), F.log_softmax(teacher / t, dim=1)
        return t * t * F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True)

    def load(self, weights: State) -> None:
        """Load the available tensors into the networks."""
        for model, network in self.models.items():
            own = {name.partition("/")[2]: value for name, value in weights.items() if name.startswith(f"{model}/")}
            if own:
                network.load_state_dict(own)


def fuse(models: dict[str, nn.Module], x: Tensor, images: Tensor) -> Tensor:
    """Return the logits of the fusion of both encoders."""
    return models["fusion"](torch.cat([models["audio"].embed(x), models["image"].embed(images)], dim=1))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--rounding", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    work = Work.load(arguments.work)
    if "plugin" in work.architectures:
        loop: FedAvg | FedMLAC | ModalityMirror = FedMLAC(work)
    elif work.images is not None:
        loop = ModalityMirror(work)
    elif arguments.processes == 1:
        loop = FedAvg(work)
    else:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        context.Process(target=help_with, args=(arguments.work, theirs), daemon=True).start()
        theirs.close()
        loop = FedAvg(work, ours)
    if arguments.rounding:
        random = torch.Generator().manual_seed(0)
        for value in loop.weights.values():
            if value.is_floating_point():
                value.mul_(1 + _ROUNDING * torch.randn(value.shape, generator=random))
    serve(loop.run, lambda: loop.weights)


if __name__ == "__main__":
    main()
