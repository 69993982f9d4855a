"""FedLPS: each client prunes once, after its first training, and trains on with what it kept.

Y. Jia, X. Zhang, A. Beheshti, W. Dou, FedLPS: Heterogeneous Federated Learning for Multiple Tasks with Local Parameter Sharing,
AAAI 2024, as its code has it. In the first round of client k, after the training, with its share p:

    convolutions    the share p of input channels of least L1 (not in the first one), then the share p of filters of least L1
    linear layers   the share p of inputs of least L2
    normalisation   the share p of scales of least magnitude
    from then on    the client computes with these masks, which stay
    server          w <- sum_k n_k w_k / sum_k n_k of the tensors under the masks

What is masked has no gradient, so a client sends it as it got it; as in the code, weight decay moves it all the same. All layers
lose the same share. The frozen, shared encoder is an option of the network (``freeze``), or a stem that does not train.

Deviations: hidden units of recurrent layers are pruned too, which the paper does not have. In each place at least one channel is
kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.types import BuiltModels, Client, State, Update
from raydfl.methods._masking import ByRatio
from raydfl.methods._pruning import MASK, mask_of, prunable_layers, spread_masks
from raydfl.training import Step, fit, fixed_tensors

_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, kw_only=True)
class FedLPS(ByRatio):
    """One pruning for good, by each client."""

    inputs: Annotated[bool, Field(description="prune what convolutions and linear layers read, too")] = True
    norms: Annotated[bool, Field(description="prune scales of normalisation layers, too")] = True

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """FedAvg's state.

        Raises:
            ConfigError: there is nothing to prune, or a client's ratio is none.
        """
        for built in models if self.prunes else ():
            if not self._masks(built, fixed_tensors(built, self.fixed), 0.5):
                made = sorted({type(layer).__name__ for layer in built["model"].modules()})
                raise ConfigError(
                    f"fedlps: there is nothing to prune in a network of {', '.join(made)}; take one with convolutions, recurrent "
                    f"or linear layers that train, or method.ratio=0"
                )
        return super().init(clients, models, rng)

    def local(self, step: Step) -> Update:
        """Train; after the first training prune."""
        metrics = fit(step, self.loss)
        ratio = self.ratio_for(step.client)
        if ratio > 0 and not any(name.startswith(MASK) for name in step.state):
            masks = self._masks(step.models, step.fixed, ratio)
            step.state.update({MASK + name: mask.to(step.device) for name, mask in masks.items()})
        return step.update(metrics)

    def _masks(self, models: Mapping[str, nn.Module], fixed: frozenset[str], ratio: float) -> dict[str, Tensor]:
        """Return masks by tensor name, in forms that broadcast."""
        found: dict[str, Tensor] = {}
        model = models["model"]
        tensors = {f"model/{name}": value.detach() for name, value in model.named_parameters()}
        recurrent = prunable_layers({"model": model}, fixed, ("recurrent",))
        of_units = {layer.name: mask_of(layer.magnitudes(tensors), ratio) for layer in recurrent}
        found.update(spread_masks(recurrent, of_units, tensors))
        first = True
        for path, layer in model.named_modules():
            weight, bias = f"model/{path}.weight", f"model/{path}.bias"
            if weight not in tensors or weight in fixed or not layer.get_parameter("weight").requires_grad:
                continue
            values = tensors[weight].cpu().double()
            if isinstance(layer, _CONVOLUTIONS):
                mask = torch.ones(values.shape[:2])
                if self.inputs and not first:
                    mask = mask * mask_of(_norms(values, 1, 1), ratio)
                shape = (*values.shape[:2], *[1] * (values.ndim - 2))
                units = mask_of(_norms(values * mask.view(shape), 0, 1), ratio)
                found[weight], first = (mask * units[:, None]).view(shape), False
                if bias in tensors:
                    found[bias] = units
            elif isinstance(layer, nn.Linear) and self.inputs:
                found[weight] = mask_of(_norms(values, 1, 2), ratio)[None]
            elif isinstance(layer, _NORMS) and self.norms:
                found[weight] = mask_of(values.abs().flatten().numpy(), ratio).view(values.shape)
        return found


def _norms(values: Tensor, dim: int, order: int) -> np.ndarray:
    """Return the norms of a tensor's slices along a dimension: float64 [slices]."""
    found: np.ndarray = torch.linalg.vector_norm(values.transpose(0, dim).flatten(1), ord=order, dim=1).numpy()
    return found
