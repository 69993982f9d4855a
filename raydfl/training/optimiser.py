"""The clients' optimiser, over one client's parameters or over those of several clients stacked.

All of them act on each element by itself, so that on stacked parameters they do for each client what they do for it alone.

The operations are PyTorch's own. What ``torch.optim`` puts around them stays out of the training loop: making one of its optimisers
takes a client 0.15 ms, its ``step`` longer than a small network's update itself, and the first in a process imports PyTorch's
compiler (1 s, and 66 MB more in every client actor).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from raydfl.training.settings import OptimiserSettings


class Optimiser:
    """Parameters that are trained, and what is kept for each."""

    def __init__(
        self,
        parameters: Mapping[str, Sequence[Tensor]],
        settings: OptimiserSettings,
        round_index: int,
        rates: Mapping[str, float | Tensor] | None = None,
    ) -> None:
        """Begin.

        Args:
            parameters: leaf tensors by the name of their model.
            settings: which one; a model's own learning rate is used where it has one.
            round_index: rounds completed, by which the learning rates are decayed.
            rates: learning rates by model, in place of the settings'; float32 [clients] where stacked clients have different ones.
        """
        self.settings = settings
        self.param_groups = _groups(parameters, settings, round_index, rates)
        """For each model ``params`` and ``lr``."""
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        """By parameter, under the names that torch.optim has for them: moments, and ``step`` with Adam."""

    @torch.no_grad()
    def advance(self) -> None:
        """Take one step, as the ``step`` of :func:`torch_optimiser` does. Parameters without a gradient stay as they are."""
        settings = self.settings
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [parameter.grad for parameter in parameters]
            if not parameters:
                continue
            if settings.name != "sgd":
                self._adam(parameters, gradients, group["lr"])
                continue
            if settings.weight_decay:
                gradients = list(torch._foreach_add(gradients, parameters, alpha=settings.weight_decay))
            if settings.momentum:
                gradients = self._with_momentum(parameters, gradients)
            if isinstance(group["lr"], Tensor):
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.sub_(gradient * _like(group["lr"], parameter))
                continue
            torch._foreach_add_(parameters, gradients, alpha=-group["lr"])

    def _with_momentum(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the moments after these gradients."""
        moments = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            kept = self.state.get(parameter)
            moment = (
                gradient.clone()
                if kept is None
                else kept["momentum_buffer"].mul_(self.settings.momentum).add_(gradient)
            )
            self.state[parameter] = {"momentum_buffer": moment}
            moments.append(moment)
        return moments

    def _adam(self, parameters: list[Tensor], gradients: list[Tensor], lr: float | Tensor) -> None:
        for parameter in parameters:
            if parameter not in self.state:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        steps, means, squares = (
            [self.state[parameter][name] for parameter in parameters] for name in ("step", "exp_avg", "exp_avg_sq")
        )
        torch._foreach_add_(steps, 1)
        if isinstance(lr, Tensor) or steps[0].ndim:
            for each in zip(parameters, gradients, means, squares, steps, strict=True):
                self._adam_of_each(*each, lr)
            return
        operation = torch._fused_adam_ if self.settings.name == "adam" else torch._fused_adamw_
        operation(
            parameters,
            gradients,
            means,
            squares,
            [],
            steps,
            lr=lr,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            weight_decay=self.settings.weight_decay,
            eps=self.settings.eps,
            amsgrad=False,
            maximize=False,
        )

    def _adam_of_each(
        self, parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: Tensor, lr: float | Tensor
    ) -> None:
        """Do the same for stacked clients that have different rates or numbers of steps, which the fused operations do not know."""
        settings, (first, second) = self.settings, self.settings.betas
        rate = _like(lr, parameter) if isinstance(lr, Tensor) else lr
        count = (_like(step, parameter) if step.ndim else step).double()  # 1 - 0.999 needs the digits
        if settings.weight_decay and settings.name == "adam":
            gradient = gradient + settings.weight_decay * parameter
        elif settings.weight_decay:
            parameter.mul_(1 - rate * settings.weight_decay)
        mean.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        deviation = square.sqrt() / (1 - second**count).sqrt().float() + settings.eps
        parameter.sub_((rate / (1 - first**count)).float() * mean / deviation)

    def forget_gradients(self) -> None:
        """Set all gradients to ``None``."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def torch_optimiser(
    parameters: Mapping[str, Sequence[Tensor]], settings: OptimiserSettings, round_index: int
) -> torch.optim.Optimizer:
    """Return the same as one of torch.optim's, for training loops of a method's own; arguments as of :class:`Optimiser`."""
    groups = _groups(parameters, settings, round_index)
    if settings.name == "sgd":
        return torch.optim.SGD(
            groups, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay, foreach=True
        )
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return kind(
        groups,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def _like(of_clients: Tensor, stacked: Tensor) -> Tensor:
    """One number for each client as something that fits to a stacked parameter."""
    return of_clients.view(-1, *[1] * (stacked.ndim - 1))


def _groups(
    parameters: Mapping[str, Sequence[Tensor]],
    settings: OptimiserSettings,
    round_index: int,
    rates: Mapping[str, float | Tensor] | None = None,
) -> list[dict[str, Any]]:
    decay = settings.decay**round_index
    known = {name: settings.models.get(name, settings.lr) for name in parameters} | dict(rates or {})
    return [{"params": list(tensors), "lr": known[name] * decay} for name, tensors in parameters.items() if tensors]
