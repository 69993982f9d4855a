"""FedAvg: local training, and the mean of the clients' models weighted by examples.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas, Communication-Efficient Learning of Deep Networks from
Decentralized Data, AISTATS 2017, algorithm 1:

    w_{t+1} = sum_{k in S_t} (n_k / sum_{j in S_t} n_j) w_{t+1}^k

These are the defaults of :class:`raydfl.Method`, so the class overrides nothing. Floating-point buffers are averaged like
parameters, and integer buffers are not shared (the paper's networks have neither).

    raydfl run jobs/tiny.yaml run.name=fedavg train.rounds=1 method=fedavg
"""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from raydfl.methods._method import Method


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """Federated averaging."""
