"""FedBABU: the body of the network is trained and averaged, the head stays as it was drawn; each client fine-tunes for itself.

J. Oh, S. Kim, S.-Y. Yun, FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022, algorithm 1:

    clients    train the body with the head of the first model, which never changes; send the body
    server     w_body <- sum_k n_k w_k,body / sum_k n_k
    personal   a client's model after some passes over its training data, from the server's body and the head

The head is fixed: everybody knows it from the run's seed, so it is in no message and no commit. The server measures the body with
that head. A client is measured so too (``model/...``), and after fine-tuning (``personal/...``): ``evaluate.fine_tune``, here 5
epochs by default.

Readings and deviations:

- The paper fine-tunes once, after the last round; here each evaluation of clients (``evaluate.every``) does, by the run's optimiser
  at the round's learning rate, restarted.
- The head is the network's last layer, named by the beginnings of its tensors' names. ``head: []`` and
  ``evaluate.fine_tune: {epochs: 0}`` are FedAvg.
- The paper's code counts all clients the same (``rule: uniform_mean``), its algorithm their examples.
- FedAPTA describes FedBABU as learning representations by attention; there is no attention in it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.methods._method import Method


@dataclass(frozen=True, kw_only=True)
class FedBABU(Method):
    """Federated averaging of the body under a head that never changes, and fine-tuning for each client."""

    tensor_options: ClassVar[tuple[str, ...]] = ("head",)

    fine_tuning: ClassVar[int] = 5

    head: Annotated[
        tuple[str, ...],
        Field(description="beginnings of the names of the head's tensors, which stay as drawn; empty: nothing does"),
    ] = ("model/output",)

    @property
    def fixed(self) -> tuple[str, ...]:
        """The head."""
        return self.head
