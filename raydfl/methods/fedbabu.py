r"""FedBABU: clients train and average the body under a fixed random head, and fine-tune for evaluation.

J. Oh, S. Kim, S.-Y. Yun, FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022, algorithm 1:

    clients    train the body with the fixed initial head, and send the body
    server     w_body <- sum_k n_k w_k,body / sum_k n_k
    personal   a client's model after some epochs on its training data, from the server's body and the fixed head

Server and clients know the fixed head from the run's seed, so no payload and no checkpoint contains it. The server measures the
body with this head. A client measures the same model (``model/...``), and the fine-tuned one (``personal/...``).
``evaluate.fine_tune`` (docs/configuration.md#evaluatefine_tune) is 5 epochs by default here. The former options
``fine_tune_epochs`` and ``fine_tune_part`` are still read.

Readings and deviations:

- The paper fine-tunes once, after the last round. Here each evaluation of clients fine-tunes, with a new optimiser at the round's
  learning rate, and discards the result. This may take longer than the training: raise ``evaluate.every``.
- The head is the network's last layer, selected by name prefixes of its tensors. ``head: []`` and
  ``evaluate.fine_tune: {epochs: 0}`` are FedAvg.
- The paper's algorithm weights clients by examples, its code uniformly (``rule: uniform_mean``).
- FedAPTA describes FedBABU as learning representations by attention. FedBABU has no attention.

    raydfl run jobs/tiny.yaml run.name=fedbabu train.rounds=1 method=fedbabu \
      evaluate.fine_tune='{epochs: 1}'
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from raydfl.core.options import PAPER
from raydfl.methods._method import Method


@dataclass(frozen=True, kw_only=True)
class FedBABU(Method):
    """Federated averaging of the body under a fixed head, with fine-tuning at each client."""

    tensor_options: ClassVar[tuple[str, ...]] = ("head",)

    fine_tuning: ClassVar[int] = 5

    head: Annotated[
        tuple[str, ...],
        Field(description="Name prefixes of the head's tensors, fixed at their initial values. Empty: no fixed head."),
        PAPER,
    ] = ("model/output",)

    @property
    def fixed(self) -> tuple[str, ...]:
        """Name prefixes of the head."""
        return self.head
