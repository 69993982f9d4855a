"""Compare the time of raydfl's operations, and of their training step, with PyTorch's own modules on one thread.

For networks on images, including sound as images, whole steps are compared, with PyTorch's operations in the same
network.

The work: one batch of 16 log-mel clips of 64 x 101, CRNN-Lite and CRNN-Base with kernel 5, forward, cross-entropy,
backward and fused SGD; and FedMLAC's pair, Lite and Base trained on the same batch with each other's predictions as
soft targets.

    python benchmarks/ops.py --turns 40 --clients 4

Contestants alternate within one process, so that a busy machine affects all of them. Times are minimum processor times
over all turns. A ratio is the median over turns of a contestant's time relative to PyTorch's modules in the same turn.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydfl.core import ops
from raydfl.models.cnn import CNN
from raydfl.models.crnn import ARCHITECTURES, CRNN
from raydfl.models.film_cnn import FilmCNN
from raydfl.models.resnet18 import ResNet18
from raydfl.models.shufflenet_v2 import ShuffleNetV2
from raydfl.models.split_cnn import SplitCNN

BATCH, FRAMES, BANDS, CLASSES = 16, 101, 64, 10
Contestants = Mapping[str, tuple[Callable[[], object], int]]  # a function, and its steps per call


class PlainCRNN(nn.Module):
    """The same network of PyTorch's modules, in a researcher's plain code."""

    def __init__(self, network: CRNN) -> None:
        """Copy the parameters of ``network``."""
        super().__init__()
        self.pool = network.pool
        self.convolutions = nn.ModuleList(
            nn.Conv1d(c.in_channels, c.out_channels, c.kernel_size[0], padding=c.padding[0])
            for c in network.convolutions
        )
        gru = network.gru
        self.gru = nn.GRU(gru.input_size, gru.hidden_size, batch_first=True, bidirectional=gru.bidirectional)
        self.output = nn.Linear(network.output.in_features, network.output.out_features)
        self.load_state_dict(network.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [batch, classes] for x [batch, frames, bands]."""
        x = x.transpose(1, 2)
        for convolution in self.convolutions:
            x = F.max_pool1d(F.relu(convolution(x)), self.pool)
        logits: Tensor = self.output(self.gru(x.transpose(1, 2))[0].mean(dim=1))
        return logits


def compare(title: str, contestants: Contestants, turns: int) -> None:
    """Alternate the contestants and print a line for each. The first is the reference."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(-3, turns):  # the first three are for warm-up
        for name, (call, steps) in contestants.items():
            started = time.process_time()
            call()
            if turn >= 0:
                seconds[name].append((time.process_time() - started) / steps)
    print(f"\n{title}\n{'':34}{'us (least)':>12}{'ratio (median)':>16}{'range':>16}")
    baseline = next(iter(seconds.values()))
    for name, times in seconds.items():
        ratios = [one / other for one, other in zip(times, baseline, strict=True)]
        spread = f"{min(ratios):.2f} - {max(ratios):.2f}"
        print(f"  {name:32}{1e6 * min(times):12.0f}{statistics.median(ratios):16.3f}{spread:>16}")


def both_ways(forward: Callable[[], Tensor]) -> None:
    """Return the forward and backward pass of one layer."""
    output = forward()
    output.backward(torch.ones_like(output))


def call_uncompiled(call: Callable[[], object]) -> None:
    """Return the call with operations in PyTorch."""
    with ops.use("torch"):
        call()


def layers(architecture: str, turns: int) -> None:
    """Compare the layers of one network, one by one."""
    network = crnn(architecture)
    plain = PlainCRNN(network)
    frames, x = FRAMES, torch.randn(BATCH, FRAMES, BANDS)
    for mine, theirs in zip(network.convolutions, plain.convolutions, strict=True):

        def torch_pooled(x: Tensor = x, layer: nn.Module = theirs) -> Tensor:
            return F.max_pool1d(F.relu(layer(x.transpose(1, 2))), 2).transpose(1, 2)

        call = partial(both_ways, partial(mine.pooled, x, 2))
        contestants: Contestants = {
            "torch.nn": (partial(both_ways, torch_pooled), 1),
            "raydfl.ops": (call, 1),
            "raydfl.ops, not compiled": (partial(call_uncompiled, call), 1),
        }
        compare(f"{architecture}: convolution, ReLU, pooling of {list(x.shape)}", contestants, turns)
        frames //= 2
        x = torch.randn(BATCH, frames, mine.out_channels, requires_grad=True)

    def torch_gru() -> Tensor:
        output: Tensor = plain.gru(x)[0]
        return output

    call = partial(both_ways, partial(network.gru.outputs, x))
    contestants = {
        "torch.nn": (partial(both_ways, torch_gru), 1),
        "raydfl.ops": (call, 1),
        "raydfl.ops, not compiled": (partial(call_uncompiled, call), 1),
    }
    compare(f"{architecture}: GRU of {list(x.shape)}", contestants, turns)


def crnn(architecture: str) -> CRNN:
    """Return a network without dropout, in training mode."""
    return CRNN(BANDS, CLASSES, **{**ARCHITECTURES[architecture][1], "kernel": 5, "dropout": 0.0})


def losses(logits: list[Tensor], y: Tensor) -> Tensor:
    """Return the cross-entropy of each network, and for a pair the divergence of each from its partner."""
    total = torch.stack([F.cross_entropy(one, y) for one in logits]).sum()
    if len(logits) == 2:
        first, second = (one.log_softmax(dim=1) for one in logits)
        total = total + (second.detach().exp() * (second.detach() - first)).sum(dim=1).mean()
        total = total + (first.detach().exp() * (first.detach() - second)).sum(dim=1).mean()
    return total


def step_of(networks: list[nn.Module], x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return one training step of one client."""
    networks = copy.deepcopy(networks)
    optimiser = torch.optim.SGD([p for network in networks for p in network.parameters()], lr=0.01, fused=True)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        losses([network(x) for network in networks], y).backward()
        optimiser.step()

    return step


def make_mapped_step(networks: list[nn.Module], clients: int) -> Callable[[], None]:
    """Return one training step of several clients with torch.func.vmap."""
    parameters = [
        {name: p.detach().expand(clients, *p.shape).clone().requires_grad_() for name, p in network.named_parameters()}
        for network in networks
    ]
    optimiser = torch.optim.SGD([p for group in parameters for p in group.values()], lr=0.01, fused=True)
    x, y = torch.randn(clients, BATCH, FRAMES, BANDS), torch.randint(0, CLASSES, (clients, BATCH))

    def loss(parameters: list[dict[str, Tensor]], x: Tensor, y: Tensor) -> Tensor:
        logits = [torch.func.functional_call(n, p, (x,)) for n, p in zip(networks, parameters, strict=True)]
        return losses(logits, y)

    mapped = torch.func.vmap(loss)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        mapped(parameters, x, y).sum().backward()
        optimiser.step()

    return step


def steps(architectures: list[str], clients: int, turns: int) -> None:
    """Compare whole training steps."""
    networks: list[nn.Module] = [crnn(architecture) for architecture in architectures]
    x, y = torch.randn(BATCH, FRAMES, BANDS), torch.randint(0, CLASSES, (BATCH,))
    mine = step_of(networks, x, y)
    contestants: Contestants = {
        "torch.nn": (step_of([PlainCRNN(n) for n in networks if isinstance(n, CRNN)], x, y), 1),
        "raydfl.ops": (mine, 1),
        f"raydfl.ops, vmap of {clients} clients": (make_mapped_step(networks, clients), clients),
        "raydfl.ops, not compiled": (partial(call_uncompiled, mine), 1),
    }
    compare(f"training step of {' and '.join(architectures)}", contestants, turns)


IMAGES: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "split_cnn": (lambda: SplitCNN(BANDS, CLASSES), (BATCH, FRAMES, BANDS)),
    "film_cnn, 9 frames": (lambda: FilmCNN(128, CLASSES), (BATCH, 9, 128)),
    "cnn, 28 x 28": (lambda: CNN((1, 28, 28), CLASSES), (BATCH, 1, 28, 28)),
    "cnn_small, 28 x 28": (
        lambda: CNN((1, 28, 28), CLASSES, filters=(8, 16), kernel=3, hidden=64),
        (BATCH, 1, 28, 28),
    ),
    "resnet18, 32 x 32": (lambda: ResNet18((3, 32, 32), CLASSES), (BATCH, 3, 32, 32)),
    "resnet18, 101 x 64": (lambda: ResNet18(BANDS, CLASSES), (BATCH, FRAMES, BANDS)),
    "shufflenet_v2, 32 x 32": (lambda: ShuffleNetV2((3, 32, 32), CLASSES), (BATCH, 3, 32, 32)),
    "shufflenet_v2, 101 x 64": (lambda: ShuffleNetV2(BANDS, CLASSES), (BATCH, FRAMES, BANDS)),
}
"""Networks on images with the shape of a batch."""


def images(turns: int) -> None:
    """Compare training steps of networks on images."""
    for name, (build, shape) in IMAGES.items():
        step = step_of([build()], torch.randn(shape), torch.randint(0, CLASSES, (BATCH,)))
        contestants: Contestants = {
            "PyTorch's operations": (partial(call_uncompiled, step), 1),
            "raydfl.ops": (step, 1),
        }
        compare(f"training step of {name}", contestants, turns)


def drift(name: str, network: nn.Module, turns: int) -> None:
    """Compare the terms against client drift over a network's weights: SCAFFOLD's, FedProx's and FedDC's."""
    weights = list(network.parameters())
    others = [torch.randn_like(weight) for weight in weights]
    for title, anchors, slopes in (("slopes", (), others), ("anchors", others, ()), ("both", others, others)):

        def plain(anchors: Sequence[Tensor] = anchors, slopes: Sequence[Tensor] = slopes) -> Tensor:
            aways = [w - a for w, a in zip(weights, anchors, strict=True)] if anchors else weights
            terms = [(away * s).sum() for away, s in zip(aways, slopes, strict=True)] if slopes else []
            return torch.stack([*terms, *(0.15 * away.square().sum() for away in aways if anchors)]).sum()

        call = partial(both_ways, partial(ops.drift_term, weights, 0.3 if anchors else 0.0, anchors, slopes))
        contestants: Contestants = {
            "a term for each weight": (partial(both_ways, plain), 1),
            "raydfl.ops": (call, 1),
            "raydfl.ops, not compiled": (partial(call_uncompiled, call), 1),
        }
        compare(f"drift term over {name}'s weights, {title}", contestants, turns)
        network.zero_grad()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40, help="timed turns of each contestant")
    parser.add_argument("--clients", type=int, default=4, help="clients to map together")
    parser.add_argument("--images", action="store_true", help="only networks on images")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if ops.is_compiled():
        print(f"compiled operators: {torch.ops.raydfl.instruction_set()}")
    else:
        print("the operators in C++ are not there: all is in PyTorch operations")
    images(arguments.turns)
    if arguments.images:
        return
    for architecture in ("crnn_lite", "crnn_base"):
        layers(architecture, arguments.turns)
        drift(architecture, crnn(architecture), arguments.turns)
    drift("resnet18", ResNet18(BANDS, CLASSES), arguments.turns)
    for architectures in (["crnn_lite"], ["crnn_base"], ["crnn_lite", "crnn_base"]):
        steps(architectures, arguments.clients, arguments.turns)


if __name__ == "__main__":
    main()
