"""The bare loop: plain torch.nn code for one GPU, without a framework. One model, clients one after another."""

from __future__ import annotations

import itertools
import time

import torch
import torch.nn.functional as F
from peers.bare import raydfls
from peers.model import ARCHITECTURES
from peers.work import Work
from torch import Tensor

from raydfl.core import ops


class Loop:
    """Federated averaging on a device; data, weights and sums stay there. CRNNs are torch.nn's (cuDNN's GRU)."""

    def __init__(self, work: Work, device: str) -> None:
        self.work = work
        self.device = torch.device(device)
        self.x, self.y = work.x.to(self.device), work.y.to(self.device)
        self.model = (work.build() if work.architectures["model"] in ARCHITECTURES else raydfls(work)).to(self.device)
        self.weights = {name: value.clone() for name, value in self.model.state_dict().items()}

    def round(self, index: int, ends: float = float("inf")) -> int:
        """Do a round.

        Args:
            index: its number.
            ends: a time of time.perf_counter. Afterwards no further client starts, and the round does not count.

        Returns:
            Number of trained clients.
        """
        sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in self.weights.items()}
        total = 0
        for done, client in enumerate(self.work.cohorts[index], start=1):
            total += self._train(index, client, sums)
            if time.perf_counter() > ends:
                return done
        self.weights = {name: (value / total).float() for name, value in sums.items()}
        return len(self.work.cohorts[index])

    def rate(self, seconds: float) -> float:
        """Return clients a second over ``seconds``, measured after the device has finished its work."""
        started, clients = time.perf_counter(), 0
        for index in itertools.cycle(range(len(self.work.cohorts))):
            clients += self.round(index, started + seconds)
            if time.perf_counter() - started > seconds:
                break
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return clients / (time.perf_counter() - started)

    def _train(self, round_index: int, client: int, sums: dict[str, Tensor]) -> int:
        start, stop = self.work.offsets[client : client + 2]
        self.model.load_state_dict(self.weights)
        optimiser = torch.optim.SGD(self.model.parameters(), lr=self.work.lr)
        order = (start + self.work.order(round_index, client)).to(self.device)
        for batch in order.split(self.work.batch_size):
            optimiser.zero_grad()
            with ops.use("torch"):
                F.cross_entropy(self.model(self.x[batch]), self.y[batch]).backward()
            optimiser.step()
        for name, value in self.model.state_dict().items():
            sums[name] += (stop - start) * value.double()
        return stop - start
