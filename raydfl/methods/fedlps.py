"""FedLPS: each client prunes once, after its first training, and keeps its masks.

Y. Jia, X. Zhang, A. Beheshti, W. Dou, FedLPS: Heterogeneous Federated Learning for Multiple Tasks with Local Parameter Sharing,
AAAI 2024, following its code. After the training in its first round, client k prunes these fractions p:

    convolutions    p of the input channels with the smallest L1 norm (not in the first layer), then p of the filters
    linear layers   p of the inputs with the smallest L2 norm
    normalisation   p of the scales with the smallest magnitude
    later rounds    the client computes with the same masks
    server          w <- sum_k n_k w_k / sum_k n_k of the unmasked tensors

Masked weights get no gradient, so a client returns the received values. As in the code, weight decay still changes them. All
layers lose the same fraction. The frozen, shared encoder is an option of the network (``freeze``,
docs/own-method.md#frozen-tensors), or a stem without training.

Deviations: hidden units of recurrent layers, absent from the paper, are pruned too. Each layer keeps at least one channel.

    raydfl run jobs/tiny.yaml run.name=fedlps method=fedlps method.ratio=0.25
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
from raydfl.core.options import RELEASE
from raydfl.core.types import BuiltModels, Client, State, Update
from raydfl.methods._masking import RatioMasking
from raydfl.methods._pruning import MASK, count_kept, find_prunable_layers, make_mask, spread_masks
from raydfl.training import Step, find_fixed_tensors, fit

_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, kw_only=True)
class FedLPS(RatioMasking):
    """One permanent pruning at each client."""

    inputs: Annotated[bool, Field(description="Also prune inputs of convolutions and linear layers."), RELEASE] = True
    norms: Annotated[bool, Field(description="Also prune scales of normalisation layers."), RELEASE] = True

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return FedAvg's state.

        Raises:
            ConfigError: A network has no prunable layer, or a client's profile has no valid ratio.
        """
        for built in models if self.prunes else ():
            if not self._masks(built, find_fixed_tensors(built, self.fixed), 0.5):
                names = sorted({type(layer).__name__ for layer in built["model"].modules()})
                raise ConfigError(
                    f"models.model: fedlps finds nothing to prune in a network of {', '.join(names)}. Choose a network with "
                    f"trainable convolutions, recurrent or linear layers, or set method.ratio=0."
                )
        return super().init(clients, models, rng)

    def local(self, step: Step) -> Update:
        """Train. After the first training, prune."""
        metrics = fit(step, self.loss)
        ratio = self.ratio_for(step.client)
        if ratio > 0 and not any(name.startswith(MASK) for name in step.state):
            masks = self._masks(step.models, step.fixed, ratio)
            step.state.update({MASK + name: mask.to(step.device) for name, mask in masks.items()})
        kept = {name.removeprefix(MASK): mask for name, mask in step.state.items() if name.startswith(MASK)}
        return step.update({**metrics, **count_kept(step, kept)})

    def _masks(self, models: Mapping[str, nn.Module], fixed: frozenset[str], ratio: float) -> dict[str, Tensor]:
        """Return masks that broadcast against the network's tensors, by tensor name."""
        masks: dict[str, Tensor] = {}
        model = models["model"]
        tensors = {f"model/{name}": value.detach() for name, value in model.named_parameters()}
        recurrent = find_prunable_layers({"model": model}, fixed, ("recurrent",))
        unit_masks = {layer.name: make_mask(layer.magnitudes(tensors), ratio) for layer in recurrent}
        masks.update(spread_masks(recurrent, unit_masks, tensors))
        first = True
        for path, layer in model.named_modules():
            weight, bias = f"model/{path}.weight", f"model/{path}.bias"
            if weight not in tensors or weight in fixed or not layer.get_parameter("weight").requires_grad:
                continue
            values = tensors[weight].cpu().double()
            if isinstance(layer, _CONVOLUTIONS):
                mask = torch.ones(values.shape[:2])
                if self.inputs and not first:
                    mask = mask * make_mask(_compute_norms(values, 1, 1), ratio)
                shape = (*values.shape[:2], *[1] * (values.ndim - 2))
                units = make_mask(_compute_norms(values * mask.view(shape), 0, 1), ratio)
                masks[weight], first = (mask * units[:, None]).view(shape), False
                if bias in tensors:
                    masks[bias] = units
            elif isinstance(layer, nn.Linear) and self.inputs:
                masks[weight] = make_mask(_compute_norms(values, 1, 2), ratio)[None]
            elif isinstance(layer, _NORMS) and self.norms:
                masks[weight] = make_mask(values.abs().flatten().numpy(), ratio).view(values.shape)
        return masks


def _compute_norms(values: Tensor, dim: int, order: int) -> np.ndarray:
    """Return the norms of a tensor's slices along a dimension: float64 [slices]."""
    norms: np.ndarray = torch.linalg.vector_norm(values.transpose(0, dim).flatten(1), ord=order, dim=1).numpy()
    return norms
