"""Pruning by masks: prunable layers, each layer's fraction, and its masks.

A layer's units are the filters of a convolution, the hidden units of a recurrent layer (separately for each direction) or the
units of a hidden linear layer. A mask has one value per unit: 1, or 0 for a pruned unit. It multiplies all incoming weights and
biases of the unit, so that a pruned unit outputs 0. Outgoing weights are neither masked nor counted. Frozen layers, normalisation
layers and a network's last layer are never pruned.

Masks do not make a network smaller. After a normalisation over several channels, a masked network is not even equivalent to the
network without these filters, because their zeros are normalised like any other value.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.part_names import plain_name
from raydfl.core.types import BuiltModels, Ratio, Tensors, Update
from raydfl.training import Step, find_fixed_tensors, substitute_tensors

Kind = Literal["convolution", "recurrent", "linear"]
Solver = Literal["ramp", "uniform", "trust-constr"]
Importance = Literal["mean", "sum"]

MASK = "mask/"
"""Name prefix of masks, such as ``mask/model/convolutions.0``, float32 [units]."""

MOST = 0.95
"""Largest fraction of a layer that ``ramp`` and ``trust-constr`` prune, unless the overall ratio is larger."""

_TYPES: Mapping[str, tuple[type[nn.Module], ...]] = {
    "convolution": (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "recurrent": (nn.RNNBase,),
    "linear": (nn.Linear,),
}


@dataclass(frozen=True)
class PrunableLayer:
    """A prunable layer, or one direction of a recurrent layer."""

    name: str
    """Flat name, such as ``model/convolutions.0`` or, for a recurrent layer's direction, ``model/gru_l0_reverse``."""
    units: int
    tensors: Mapping[str, int]
    """Rows per unit of the layer's weights and biases, by flat name: three in a GRU, otherwise one."""

    def weights(self, tensors: Mapping[str, Tensor]) -> int:
        """Return the layer's number of weights, without biases."""
        return sum(tensors[name].numel() for name in self.tensors if tensors[name].ndim > 1)

    def magnitudes(self, tensors: Mapping[str, Tensor]) -> np.ndarray:
        """Return the L1 norm of each unit's weights, without biases: float64 [units]."""
        total = np.zeros(self.units)
        for name, rows in self.tensors.items():
            if tensors[name].ndim > 1:
                values = tensors[name].detach().cpu().double().abs().flatten(1).sum(dim=1)
                total += values.view(rows, self.units).sum(dim=0).numpy()
        return total

    def spread(self, mask: Tensor, name: str, tensor: Tensor) -> Tensor:
        """Expand a mask [units] so that it broadcasts against one of the layer's tensors."""
        return mask.repeat(self.tensors[name]).view(-1, *[1] * (tensor.ndim - 1))


def find_prunable_layers(
    models: Mapping[str, nn.Module], fixed: Collection[str], kinds: Sequence[Kind]
) -> list[PrunableLayer]:
    """Return the prunable layers of some networks, in the networks' order.

    Args:
        models: Networks by name.
        fixed: Flat names of fixed tensors.
        kinds: Types of layers to prune.
    """
    types = tuple(module_type for kind in kinds for module_type in _TYPES[kind])
    prunable: list[PrunableLayer] = []
    for model_name, model in models.items():
        modules = [(path, layer) for path, layer in model.named_modules() if path.partition(".")[0] != "objective"]
        last = next((layer for _, layer in reversed(modules) if layer._parameters), None)
        for path, layer in modules:
            if layer is last or not isinstance(layer, types):
                continue
            for name, units, tensors in _iter_units(layer):
                flat = {f"{model_name}/{path}.{key}": rows for key, rows in tensors.items()}
                trains = all(layer.get_parameter(key).requires_grad for key in tensors)
                if trains and not any(key in fixed for key in flat):
                    prunable.append(PrunableLayer(f"{model_name}/{path}{name}", units, flat))
    return prunable


def _iter_units(layer: nn.Module) -> Iterator[tuple[str, int, dict[str, int]]]:
    """Yield the name suffix, the number of units and the rows per unit of a layer or of each recurrent direction."""
    if isinstance(layer, nn.RNNBase):
        if layer.proj_size:  # The projection mixes the hidden units, so a masked unit would not output 0.
            return
        for level in range(layer.num_layers):
            for end in ("", "_reverse") if layer.bidirectional else ("",):
                names = [f"{stem}_l{level}{end}" for stem in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
                names = [name for name in names if name in layer._parameters]
                rows = layer.get_parameter(names[0]).shape[0] // layer.hidden_size
                yield f"_l{level}{end}", layer.hidden_size, dict.fromkeys(names, rows)
        return
    names = [name for name, parameter in layer._parameters.items() if parameter is not None]
    yield "", layer.get_parameter("weight").shape[0], dict.fromkeys(names, 1)


def allocate_ratio(weights: Sequence[int], importances: Sequence[float], ratio: float, solver: Solver) -> np.ndarray:
    """Divide an overall pruning ratio among layers (FedAPTA, equation 1).

    The fractions satisfy sum(weights * fractions) = ratio * sum(weights), to 1e-9 of the sum. A more important layer never loses
    a larger fraction.

    - ``ramp``: the fraction rises linearly from the most to the least important layer, by min(ratio, 1 - ratio) in total, and is
      clipped to [0, 0.95].
    - ``uniform``: the same fraction of every layer.
    - ``trust-constr``: the solution of SciPy's solver for a constant objective, from uniform fractions. (SciPy's SLSQP would
      return the initial fractions.)

    Args:
        weights: Number of weights of each layer.
        importances: Importance of each layer. The first of equal layers counts as more important.
        ratio: Fraction of all weights, in [0, 1).
        solver: Method of dividing the ratio.

    Returns:
        The fraction of each layer, float64 [layers], in [0, 1].
    """
    sizes = np.asarray(weights, np.float64)
    if solver == "uniform" or len(sizes) < 2 or ratio == 0:
        return np.full(len(sizes), float(ratio))
    order = np.argsort(-np.asarray(importances, np.float64), kind="stable")
    ordered, top = sizes[order] / sizes.sum(), max(MOST, ratio)
    ramp = min(ratio, 1 - ratio) * np.arange(len(sizes)) / (len(sizes) - 1)
    rising = ramp if solver == "ramp" else _find_feasible(ordered, ratio)
    fractions = np.empty(len(sizes))
    fractions[order] = _shift_to_budget(rising, ordered, ratio, top)
    return fractions


def _shift_to_budget(rising: np.ndarray, weights: np.ndarray, ratio: float, top: float) -> np.ndarray:
    """Return clip(rising + a, 0, top), with a chosen so that the weighted sum equals the ratio.

    Args:
        rising: float64 [layers], non-decreasing.
        weights: float64 [layers], with sum 1.
        ratio: In [0, top].
        top: Upper limit of the fractions.
    """
    low, high = -float(rising.max()), top - float(rising.min())
    for _ in range(100):  # Bisection down to the last bit.
        middle = (low + high) / 2
        if float(weights @ np.clip(rising + middle, 0, top)) < ratio:
            low = middle
        else:
            high = middle
    shifted: np.ndarray = np.clip(rising + high, 0, top)
    return shifted


def _find_feasible(weights: np.ndarray, ratio: float) -> np.ndarray:
    """Return non-decreasing fractions that satisfy the budget, by SciPy's trust-constr."""
    from scipy import optimize  # The import takes half a second, and other solvers do not need it.

    layers = len(weights)
    budget = optimize.LinearConstraint(weights[None], ratio, ratio)
    rising = optimize.LinearConstraint(np.diff(np.eye(layers), axis=0), 0, np.inf)
    solution = optimize.minimize(
        lambda values: 0.0,
        np.full(layers, ratio),
        method="trust-constr",
        jac=lambda values: np.zeros(layers),
        hess=lambda values: np.zeros((layers, layers)),
        bounds=optimize.Bounds(0, 1),
        constraints=[budget, rising],
    )
    return np.asarray(np.maximum.accumulate(solution.x), np.float64)


def make_masks(
    layers: Sequence[PrunableLayer],
    tensors: Mapping[str, Tensor],
    ratio: float,
    solver: Solver = "ramp",
    importance: Importance = "mean",
) -> dict[str, Tensor]:
    """Compute masks that prune a fraction of the layers' weights.

    A layer with the fraction p loses the round(p * units) units with the smallest L1 norms. Halves are rounded up, the first of
    equal units is pruned first, and at least one unit remains. Whole units meet the ratio only approximately.

    Args:
        layers: The layers to prune.
        tensors: Their weights, by flat name.
        ratio: Fraction of the layers' weights, in [0, 1).
        solver: Method of dividing the ratio among the layers.
        importance: Importance of a layer: the mean or the sum of its weights' magnitudes.

    Returns:
        Masks by layer name, float32 [units], of ones and zeros.
    """
    magnitudes = [layer.magnitudes(tensors) for layer in layers]
    weights = [layer.weights(tensors) for layer in layers]
    scale = weights if importance == "mean" else [1] * len(layers)
    importances = [float(sizes.sum()) / by for sizes, by in zip(magnitudes, scale, strict=True)]
    fractions = allocate_ratio(weights, importances, ratio, solver)
    return {
        layer.name: make_mask(sizes, fraction)
        for layer, sizes, fraction in zip(layers, magnitudes, fractions, strict=True)
    }


def make_mask(magnitudes: np.ndarray, fraction: float) -> Tensor:
    """Return a mask, float32 [units], that prunes the units with the smallest magnitudes. At least one unit remains."""
    units = len(magnitudes)
    count = min(units - 1, int(np.floor(fraction * units + 0.5)))
    mask = torch.ones(units)
    mask[torch.from_numpy(np.argsort(magnitudes, kind="stable")[:count].copy())] = 0
    return mask


def spread_masks(
    layers: Sequence[PrunableLayer], masks: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Expand layers' masks so that they broadcast against the layers' tensors.

    Args:
        layers: Layers, with or without a mask.
        masks: Masks [units] by layer name.
        tensors: Tensors by flat name.

    Returns:
        Masks by tensor name.
    """
    return {
        name: layer.spread(masks[layer.name].to(tensors[name].device), name, tensors[name])
        for layer in layers
        if layer.name in masks
        for name in layer.tensors
        if name in tensors
    }


@contextlib.contextmanager
def apply_masks(step: Step, model: str) -> Iterator[dict[str, Tensor]]:
    """Compute with masked parameters inside a ``with`` block, and yield them by name. Pruned weights get no gradient."""
    tensors = {
        name: parameter * step.state[MASK + name]
        for name, parameter in step.parameters(model).items()
        if MASK + name in step.state
    }
    if not tensors:
        yield tensors
        return
    with substitute_tensors(model, step.models[model], tensors):
        yield tensors


def put_masks(step: Step, layers: Sequence[PrunableLayer], masks: Mapping[str, Tensor]) -> None:
    """Put masks into ``step.state`` by tensor name, for the loss."""
    for name, mask in spread_masks(layers, masks, step.parameters()).items():
        step.state[MASK + name] = mask


def take_masks(step: Step) -> dict[str, Tensor]:
    """Remove the masks from ``step.state``, and return them by tensor name."""
    names = [name for name in step.state if name.startswith(MASK)]
    return {name.removeprefix(MASK): step.state.pop(name) for name in names}


def count_kept(step: Step, masks: Tensors) -> dict[str, Ratio]:
    """Return the metric ``kept_weights``, and note the kept share of each masked tensor for the budget of multiply-adds.

    The metric is the number of the client's weights and biases, without masked elements.

    Args:
        step: The client's step.
        masks: Masks that broadcast against the tensors, by flat name.
    """
    parameters = {name: value for model in step.models for name, value in step.named_parameters(model).items()}
    masks = {name: mask for name, mask in masks.items() if name in parameters}
    step.execution.kept = {name: float((mask != 0).double().mean()) for name, mask in masks.items()}
    masked = sum(parameters[name].numel() // mask.numel() * int((mask == 0).sum()) for name, mask in masks.items())
    return {"kept_weights": Ratio(sum(value.numel() for value in parameters.values()) - masked, 1)}


def map_prunable_tensors(models: BuiltModels, fixed: tuple[str, ...] | None, kinds: Sequence[Kind]) -> dict[str, str]:
    """Map the flat names of prunable tensors to the names of their layers.

    Args:
        models: Networks by name, one set for each combination of architectures.
        fixed: The method's ``fixed``.
        kinds: Types of layers to prune.

    Raises:
        ConfigError: A set has no prunable layer.
    """
    layer_of: dict[str, str] = {}
    for built in models:
        layers = find_prunable_layers(built, find_fixed_tensors(built, fixed), kinds)
        if not layers:
            names = sorted({type(layer).__name__ for model in built.values() for layer in model.modules()})
            raise ConfigError(
                f"method.prune is {list(kinds)}, but the network ({', '.join(names)}) has no such layer to prune. Frozen layers "
                f"and the last layer are never pruned. Choose a different network, add a type of layer to method.prune, or set "
                f"method.ratio to 0."
            )
        layer_of.update({name: layer.name for layer in layers for name in layer.tensors})
    return layer_of


def find_kept(update: Update, layer_of: Mapping[str, str]) -> dict[str, Tensor]:
    """Return bool masks of the elements that a client has kept, by tensor name, for its masked tensors.

    Args:
        update: A client update with masked tensors and masks.
        layer_of: Layer names by plain tensor name.

    Returns:
        Bool tensors that broadcast against the update's tensors.
    """
    masks = {plain_name(name): mask > 0.5 for name, mask in update.tensors.items() if name.startswith(MASK)}
    kept: dict[str, Tensor] = {}
    for name, value in update.tensors.items():
        mask = masks.get(MASK + layer_of.get(plain_name(name), ""))
        if mask is not None and mask.numel() and value.shape[0] % mask.numel() == 0:
            kept[name] = mask.repeat(value.shape[0] // mask.numel()).view(-1, *[1] * (value.ndim - 1))
    return kept


def recover_pruned(update: Update, reference: Tensors, layer_of: Mapping[str, str]) -> Update:
    """Replace a client's pruned weights by the received ones, and remove the masks.

    Args:
        update: A client update with masked tensors and masks.
        reference: The tensors that the client received, by the server's names.
        layer_of: Layer names by plain tensor name.
    """
    kept = find_kept(update, layer_of)
    tensors = {
        name: torch.where(kept[name], value, reference[name]) if name in kept else value
        for name, value in update.tensors.items()
        if not name.startswith(MASK)
    }
    return dataclasses.replace(update, tensors=tensors)
