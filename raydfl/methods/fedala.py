"""FedALA: clients start training from a learnt mixture of their last model and the global one.

J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan, FedALA: Adaptive Local Aggregation for Personalized Federated Learning,
AAAI 2023, algorithm 1 and equations 4 and 5. With the client's last model w_i, the received model w, and weights W_i, initially 1,
elementwise:

    start   v = w_i + (w - w_i) W_i    in the upper layers, v = w in the others                          (4)
    learn   W_i <- clip(W_i - eta grad of F_i(v) for W_i, 0, 1)                                          (5)
    client  w_i <- local training from v, sent back;      server   w <- sum_i n_i w_i / sum_i n_i

At a client's first participation v = w. At the second, W_i is learnt for ``start_epochs`` epochs, and later for one epoch.
Clients are measured with w (``model``) and v (``personal``).

Readings and deviations:

- Name prefixes of tensors select the upper layers. Without upper layers it is FedAvg.
- Weights are clipped after all epochs, and mixed as if clipped before. The released code clips them after every batch, trains until
  the loss settles, and uses 80 % of the data.
- The run's optimiser learns W_i, with the rate eta. Use a smaller ``eta`` with Adam.
- W_i is the private model ``weights``.

    raydfl run jobs/tiny.yaml run.name=fedala method=fedala method.start_epochs=2
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.options import OURS, RELEASE
from raydfl.core.types import Batch, Metrics, Update
from raydfl.data import Examples
from raydfl.methods._copies import find_retained, retain
from raydfl.methods._method import Method
from raydfl.training import Step, fit, substitute_tensors

_LAST, _STARTED = "last/", "started"


@dataclass(frozen=True, kw_only=True)
class FedALA(Method):
    """FedAvg with adaptive local aggregation."""

    tensor_options: ClassVar[tuple[str, ...]] = ("layers",)

    models: ClassVar[Mapping[str, str]] = {"model": "crnn_base", "weights": "crnn_base"}

    copies: ClassVar[Mapping[str, str]] = {"weights": "model"}

    layers: Annotated[
        tuple[str, ...], Field(description="Name prefixes of the upper layers' tensors. Empty is FedAvg."), RELEASE
    ] = ("model/output",)
    eta: Annotated[float, Field(gt=0, description="Learning rate of the mixing weights."), RELEASE] = 1.0
    start_epochs: Annotated[
        int, Field(ge=1, description="Epochs of the first training of the mixing weights."), OURS
    ] = 10

    def mixing_loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the objective's loss of the mixture, with gradients only for the weights."""
        tensors = {name: value.detach() for name, value in step.parameters("model").items()} | self._mix(step)
        with substitute_tensors("model", step.models["model"], tensors):
            return self.loss(step, batch)

    def _mix(self, step: Step) -> dict[str, Tensor]:
        """Return the upper layers of v, or nothing before the first participation."""
        mixed: dict[str, Tensor] = {}
        for weight_name, weight in step.parameters("weights").items():
            name = "model/" + weight_name.removeprefix("weights/")
            if name.startswith(self.layers) and _LAST + name in step.state:
                last = step.state[_LAST + name]
                clipped = (
                    weight + (weight.clamp(0, 1) - weight).detach()
                )  # Straight-through: keep the gradient outside 0..1.
                mixed[name] = last + (step.reference(name) - last) * clipped
        return mixed

    def local(self, step: Step) -> Update:
        """Learn the weights, mix, train, and retain the upper layers."""
        if not find_retained(step, _LAST):
            with torch.no_grad():
                for weight in step.floating_state("weights").values():
                    weight.fill_(1)
        elif self.layers:
            epochs = 1 if _STARTED in step.state else self.start_epochs
            fit(step, self.mixing_loss, models=("weights",), epochs=epochs, lr=self.eta)
            step.state[_STARTED] = torch.ones(())
            with torch.no_grad():
                for weight in step.floating_state("weights").values():
                    weight.clamp_(0, 1)
                live = step.floating_state("model")
                for name, value in self._mix(step).items():
                    live[name].copy_(value)
        metrics = fit(step, self.loss, models=("model",))
        upper = {name: value for name, value in step.floating_state("model").items() if name.startswith(self.layers)}
        retain(step, _LAST, upper)
        return step.update(metrics)

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        """Measure the global model, and the mixture v as ``personal``."""
        models = {name: model for name, model in step.models.items() if name != "weights"}
        if "weights" in step.models:
            models["personal"] = self._build_personal(step)
        return super().evaluate(dataclasses.replace(step, models=models), examples, batch_size)

    @torch.no_grad()
    def _build_personal(self, step: Step) -> nn.Module:
        """Build the personal network: the paper's mixture v of the global and the local model."""
        network, mixed = copy.deepcopy(step.models["weights"]), self._mix(step)
        received = next(iter(step.received.values()))
        for key, value in network.state_dict().items():
            name = f"model/{key}"
            if name in received:
                value.copy_(mixed.get(name, received[name]))
        return network
