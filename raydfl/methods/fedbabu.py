"""FedBABU: the body of the network is trained and averaged, the head stays as it was drawn; each client fine-tunes for itself.

J. Oh, S. Kim, S.-Y. Yun, FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022, algorithm 1:

    clients    train the body with the head of the first model, which never changes; send the body
    server     w_body <- sum_k n_k w_k,body / sum_k n_k
    personal   a client's model after ``fine_tune_epochs`` passes over its training data, from the server's body and the head

The head is fixed: everybody knows it from the run's seed, so it is in no message and no commit. The server measures the body with
that head. A client is measured so too (``model/...``), and after fine-tuning (``personal/...``), which is done in every evaluation
that measures clients, from where the server's model is then, and leaves nothing behind.

Readings and deviations:

- The paper fine-tunes once, after the last round; here whenever clients are measured (``evaluate.every``), by the run's optimiser
  at the round's learning rate, begun anew.
- The head is the network's last layer, named by the beginnings of its tensors' names. ``head: []`` and ``fine_tune_epochs: 0`` are
  FedAvg.
- The paper's code counts all clients the same (``rule: uniform_mean``), its algorithm their examples.
- FedAPTA describes FedBABU as learning representations by attention; there is no attention in it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import nn

from raydfl.core.errors import ConfigError
from raydfl.core.types import Client, Metrics, State
from raydfl.data import Examples
from raydfl.methods._layers import check_prefixes
from raydfl.methods._method import Method
from raydfl.training import Step, fit

_TUNED = "tuned/"


@dataclass(frozen=True, kw_only=True)
class FedBABU(Method):
    """Federated averaging of the body under a head that never changes, and fine-tuning for each client."""

    pure: ClassVar[bool] = True

    head: Annotated[
        tuple[str, ...],
        Field(description="beginnings of the names of the head's tensors, which stay as drawn; empty: nothing does"),
    ] = ("model/output",)
    fine_tune_epochs: Annotated[
        int,
        Field(
            ge=0, description="passes over a client's data that make its personal model when it is measured; 0: none"
        ),
    ] = 5
    fine_tune_part: Annotated[
        Literal["all", "head"], Field(description="what is fine-tuned: all of the network, or its head")
    ] = "all"

    def fixed(self, name: str, trains: bool) -> bool:
        """Fix the head, and what does not train."""
        return super().fixed(name, trains) or name.startswith(self.head)

    def init(
        self, clients: Sequence[Client], models: Sequence[Mapping[str, nn.Module]], rng: np.random.Generator
    ) -> State:
        """FedAvg's state without the head.

        Raises:
            ConfigError: an entry of ``head`` names no tensor; or there is no head, and it is to be fine-tuned.
        """
        check_prefixes(models, self.head, "method.head")
        if not self.head and self.fine_tune_part == "head" and self.fine_tune_epochs:
            raise ConfigError("method.fine_tune_part is head, but method.head is empty; name its tensors, or take all")
        return super().init(clients, models, rng)

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        """Measure the network as it is, and at a client with training data its personal model too: ``personal/loss`` ..."""
        measured = dict(super().evaluate(step, examples, batch_size))
        if self.fine_tune_epochs and "model" in step.models and len(step.data.train):
            tuned = dataclasses.replace(step, models={"personal": self._personal(step)})
            measured.update(super().evaluate(tuned, examples, batch_size))
        return measured

    def _personal(self, step: Step) -> nn.Module:
        """Return the client's fine-tuned network; what was trained is remembered in ``step.state`` for the next split."""
        network = copy.deepcopy(step.models["model"])
        for name, parameter in network.named_parameters():
            in_head = f"model/{name}".startswith(self.head)
            if in_head or self.fine_tune_part == "head":
                parameter.requires_grad_(in_head)
        fixed = frozenset(name for name in step.fixed if not name.startswith(self.head))
        own = dataclasses.replace(step, models={"model": network}, fixed=fixed, state={}, moments={})
        live = own.floating_state()
        if all(_TUNED + name in step.state for name in live):
            for name, value in live.items():
                value.copy_(step.state[_TUNED + name])
        else:
            fit(own, self.loss, epochs=self.fine_tune_epochs)
            step.state.update({_TUNED + name: value.clone() for name, value in live.items()})
        return network
