"""The work in pfl-research's simulation, as in its tutorials, on two processes joined by torch.distributed.

    PYTHONPATH=benchmarks .venv-peers/bin/python -m peers.pfl_research WORK

It follows the protocol of peers/turns.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peers.turns import serve
from peers.work import Work

PROCESSES = 2
_RANK, _ADDRESSES = "PFL_WORKER_RANK", "PFL_WORKER_ADDRESSES"


class Trainable(nn.Module):
    """The network with the two methods required by pfl-research."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy."""
        self.train()
        return F.cross_entropy(self.network(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, object]:
        """Return none, because nothing is evaluated here."""
        return {}


def participants(work: Work) -> Iterator[tuple[int, int]]:
    """Yield (round, client) of all participants, in order."""
    for round_index, cohort in enumerate(work.cohorts):
        for client in cohort:
            yield round_index, client


def agree_on_rounds(rounds: int = 0) -> int:
    """Return the first process's number of rounds in every process; the others wait for it."""
    said = torch.tensor([rounds])
    torch.distributed.broadcast(said, 0)
    return int(said)


def main() -> None:
    """Run both processes: the first follows the protocol, the second follows the first."""
    path = Path(sys.argv[1])
    torch.set_num_threads(1)
    if _RANK not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ[_ADDRESSES] = ",".join([f"127.0.0.1:{port}"] * PROCESSES)
        command = [sys.executable, "-m", "peers.pfl_research", str(path)]
        other = subprocess.Popen(command, env={**os.environ, _RANK: "1"}, stdout=sys.stderr)
        os.environ[_RANK] = "0"

    # They read their rank when they are imported.
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    work = Work.load(path)
    cohort = len(work.cohorts[0])
    if cohort % PROCESSES:
        raise ValueError(f"pfl-research deals clients to processes in turn: {cohort} cannot be dealt to {PROCESSES}")
    network = work.build()

    def dataset(participant: tuple[int, int]) -> PyTorchTensorDataset:
        round_index, client = participant
        x, y = work.data(client)
        order = work.order(round_index, client)
        return PyTorchTensorDataset((x[order], y[order]), user_id=str(client))

    everybody = participants(work)
    users = FederatedDataset(dataset, lambda: next(everybody))
    backend = SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByDatapoints()])
    model = PyTorchModel(
        Trainable(network),
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch_size)
    algorithm = FederatedAveraging()
    algorithm._current_central_iteration = 1  # at iteration 0 it would evaluate
    done = 1

    def run(rounds: int) -> None:
        nonlocal done
        done += rounds
        settings = NNAlgorithmParams(
            central_num_iterations=done, evaluation_frequency=10**9, train_cohort_size=cohort, val_cohort_size=0
        )
        algorithm.run(settings, backend, model, local)

    if os.environ[_RANK] == "0":
        serve(lambda rounds: run(agree_on_rounds(rounds)), network.state_dict)
        agree_on_rounds(0)
        other.wait(30)
        return
    while rounds := agree_on_rounds():
        run(rounds)


if __name__ == "__main__":
    main()
