"""Pruning by masks: which layers can lose filters, how many each loses, and which.

A layer's units are the filters of a convolution, the hidden units of a recurrent layer (each direction by itself) or the units of
a hidden linear layer. A mask has one number for each unit: 1, or 0 where it is pruned; all weights and biases that make the unit
are multiplied by it, so that a pruned unit gives 0. What other layers make of a unit is neither masked nor counted. Frozen layers,
normalisation layers and a network's last layer are never pruned.

Masks do not make a network smaller. Behind a normalisation over several channels a masked network is not even the same function as
the network without these filters: there their 0 is normalised like any other value.
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
from raydfl.core.types import BuiltModels, Tensors, Update
from raydfl.training import Step, computing_with, fixed_tensors

Kind = Literal["convolution", "recurrent", "linear"]
Solver = Literal["ramp", "uniform", "trust-constr"]
Importance = Literal["mean", "sum"]

MASK = "mask/"
"""Beginning of the names of masks: ``mask/model/convolutions.0``, float32 [units]."""

MOST = 0.95
"""The largest share that ``ramp`` and ``trust-constr`` take of a layer, unless the share asked for on the whole is larger."""

_TYPES: Mapping[str, tuple[type[nn.Module], ...]] = {
    "convolution": (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "recurrent": (nn.RNNBase,),
    "linear": (nn.Linear,),
}


@dataclass(frozen=True)
class PrunableLayer:
    """A layer, or one direction of a recurrent one, whose units can be pruned."""

    name: str
    """Flat: ``model/convolutions.0``; of a recurrent layer's direction ``model/gru_l0_reverse``."""
    units: int
    tensors: Mapping[str, int]
    """Flat names of what makes its units, and how many rows of it each unit has: three in a GRU, else one."""

    def weights(self, tensors: Mapping[str, Tensor]) -> int:
        """Return how many weights the layer has; biases do not count."""
        return sum(tensors[name].numel() for name in self.tensors if tensors[name].ndim > 1)

    def magnitudes(self, tensors: Mapping[str, Tensor]) -> np.ndarray:
        """Return the L1 norm of each unit's weights, biases left out: float64 [units]."""
        total = np.zeros(self.units)
        for name, rows in self.tensors.items():
            if tensors[name].ndim > 1:
                values = tensors[name].detach().cpu().double().abs().flatten(1).sum(dim=1)
                total += values.view(rows, self.units).sum(dim=0).numpy()
        return total

    def spread(self, mask: Tensor, name: str, tensor: Tensor) -> Tensor:
        """Return a mask [units] in a form that broadcasts against one of the layer's tensors."""
        return mask.repeat(self.tensors[name]).view(-1, *[1] * (tensor.ndim - 1))


def prunable_layers(
    models: Mapping[str, nn.Module], fixed: Collection[str], kinds: Sequence[Kind]
) -> list[PrunableLayer]:
    """Return the layers of some networks that can be pruned, in the networks' order.

    Args:
        models: by name.
        fixed: flat names of tensors that never change.
        kinds: of layers that are wanted.
    """
    types = tuple(each for kind in kinds for each in _TYPES[kind])
    found: list[PrunableLayer] = []
    for model_name, model in models.items():
        own = [(path, layer) for path, layer in model.named_modules() if path.partition(".")[0] != "objective"]
        last = next((layer for _, layer in reversed(own) if layer._parameters), None)
        for path, layer in own:
            if layer is last or not isinstance(layer, types):
                continue
            for name, units, tensors in _units(layer):
                flat = {f"{model_name}/{path}.{key}": rows for key, rows in tensors.items()}
                trains = all(layer.get_parameter(key).requires_grad for key in tensors)
                if trains and not any(each in fixed for each in flat):
                    found.append(PrunableLayer(f"{model_name}/{path}{name}", units, flat))
    return found


def _units(layer: nn.Module) -> Iterator[tuple[str, int, dict[str, int]]]:
    """Yield of a layer, or of each direction of a recurrent one: the end of its name, its units, and its tensors' rows a unit."""
    if isinstance(layer, nn.RNNBase):
        if layer.proj_size:
            return
        for level in range(layer.num_layers):
            for end in ("", "_reverse") if layer.bidirectional else ("",):
                names = [f"{what}_l{level}{end}" for what in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
                held = [name for name in names if name in layer._parameters]
                rows = layer.get_parameter(held[0]).shape[0] // layer.hidden_size
                yield f"_l{level}{end}", layer.hidden_size, dict.fromkeys(held, rows)
        return
    names = [name for name, parameter in layer._parameters.items() if parameter is not None]
    yield "", layer.get_parameter("weight").shape[0], dict.fromkeys(names, 1)


def shares(weights: Sequence[int], importances: Sequence[float], ratio: float, solver: Solver) -> np.ndarray:
    """Return what share of each layer is to be pruned: sum(weights * shares) = ratio * sum(weights), to 1e-9 of the sum.

    No layer is to lose a larger share than a less important one.

    - ``ramp``: the share rises evenly from the most to the least important layer, by min(ratio, 1 - ratio) in all, as far as it
      stays between 0 and 0.95.
    - ``uniform``: the same share of every layer.
    - ``trust-constr``: what SciPy's solver of that name finds from the uniform shares, for an objective that is constant. (Its
      solver SLSQP returns the uniform shares, with which it starts.)

    Args:
        weights: of each layer.
        importances: of each layer; of equal ones the first counts as the more important.
        ratio: of all weights, 0 <= ratio < 1.
        solver: how the layers differ.

    Returns:
        float64 [layers], 0..1.
    """
    sizes = np.asarray(weights, np.float64)
    if solver == "uniform" or len(sizes) < 2 or ratio == 0:
        return np.full(len(sizes), float(ratio))
    order = np.argsort(-np.asarray(importances, np.float64), kind="stable")
    ordered, top = sizes[order] / sizes.sum(), max(MOST, ratio)
    ramp = min(ratio, 1 - ratio) * np.arange(len(sizes)) / (len(sizes) - 1)
    rising = ramp if solver == "ramp" else _feasible(ordered, ratio)
    found = np.empty(len(sizes))
    found[order] = _shifted(rising, ordered, ratio, top)
    return found


def _shifted(rising: np.ndarray, weights: np.ndarray, ratio: float, top: float) -> np.ndarray:
    """Return clip(rising + a, 0, top) with the number a for which the weighted sum is the ratio.

    Args:
        rising: float64 [layers], not falling.
        weights: float64 [layers], that add up to 1.
        ratio: 0..top.
        top: the largest share.
    """
    low, high = -float(rising.max()), top - float(rising.min())
    for _ in range(100):  # halving to the last bit
        middle = (low + high) / 2
        if float(weights @ np.clip(rising + middle, 0, top)) < ratio:
            low = middle
        else:
            high = middle
    shifted: np.ndarray = np.clip(rising + high, 0, top)
    return shifted


def _feasible(weights: np.ndarray, ratio: float) -> np.ndarray:
    """Return what SciPy's trust-constr makes of the uniform shares: see :func:`shares`."""
    from scipy import optimize  # half a second, which other solvers need not spend

    layers = len(weights)
    budget = optimize.LinearConstraint(weights[None], ratio, ratio)
    rising = optimize.LinearConstraint(np.diff(np.eye(layers), axis=0), 0, np.inf)
    found = optimize.minimize(
        lambda values: 0.0,
        np.full(layers, ratio),
        method="trust-constr",
        jac=lambda values: np.zeros(layers),
        hess=lambda values: np.zeros((layers, layers)),
        bounds=optimize.Bounds(0, 1),
        constraints=[budget, rising],
    )
    return np.asarray(np.maximum.accumulate(found.x), np.float64)


def pruned_masks(
    layers: Sequence[PrunableLayer],
    tensors: Mapping[str, Tensor],
    ratio: float,
    solver: Solver = "ramp",
    importance: Importance = "mean",
) -> dict[str, Tensor]:
    """Return masks that prune a share of the layers' weights, by the layers' names: float32 [units], 1 or 0.

    In a layer that is to lose the share p, the round(p * units) units of the smallest L1 norm are pruned (a half is rounded up, of
    equal norms the first goes first), but one is always kept. So the share of weights is met as nearly as whole units allow.

    Args:
        layers: that can be pruned.
        tensors: by flat name: what the importances and norms are of.
        ratio: share of the layers' weights, 0 <= ratio < 1.
        solver: how the share differs between layers.
        importance: of a layer: the mean or the sum of its weights' magnitudes.
    """
    magnitudes = [layer.magnitudes(tensors) for layer in layers]
    weights = [layer.weights(tensors) for layer in layers]
    scale = weights if importance == "mean" else [1] * len(layers)
    importances = [float(of_units.sum()) / by for of_units, by in zip(magnitudes, scale, strict=True)]
    return {
        layer.name: mask_of(of_units, share)
        for layer, of_units, share in zip(layers, magnitudes, shares(weights, importances, ratio, solver), strict=True)
    }


def mask_of(magnitudes: np.ndarray, share: float) -> Tensor:
    """Return the mask of one layer, float32 [units]: the units of the smallest magnitudes are pruned, but not the last one."""
    units = len(magnitudes)
    count = min(units - 1, int(np.floor(share * units + 0.5)))
    mask = torch.ones(units)
    mask[torch.from_numpy(np.argsort(magnitudes, kind="stable")[:count].copy())] = 0
    return mask


def spread_masks(
    layers: Sequence[PrunableLayer], masks: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return masks by the names of the tensors that they are for, in a form that broadcasts against these.

    Args:
        layers: of which the masks are; one without a mask is not pruned.
        masks: by layer, [units].
        tensors: by flat name.
    """
    return {
        name: layer.spread(masks[layer.name].to(tensors[name].device), name, tensors[name])
        for layer in layers
        if layer.name in masks
        for name in layer.tensors
        if name in tensors
    }


@contextlib.contextmanager
def masked(step: Step, model: str) -> Iterator[dict[str, Tensor]]:
    """Inside, a model computes with its masked parameters, which are given by name: what is pruned gets no gradient."""
    tensors = {
        name: parameter * step.state[MASK + name]
        for name, parameter in step.parameters(model).items()
        if MASK + name in step.state
    }
    if not tensors:
        yield tensors
        return
    with computing_with(model, step.models[model], tensors):
        yield tensors


def put_masks(step: Step, layers: Sequence[PrunableLayer], masks: Mapping[str, Tensor]) -> None:
    """Put masks into ``step.state``, where a loss finds them, by the names of the tensors that they are for."""
    for name, mask in spread_masks(layers, masks, step.parameters()).items():
        step.state[MASK + name] = mask


def take_masks(step: Step) -> dict[str, Tensor]:
    """Take them out of ``step.state``; they are returned by the names of the tensors."""
    names = [name for name in step.state if name.startswith(MASK)]
    return {name.removeprefix(MASK): step.state.pop(name) for name in names}


def layers_by_tensor(models: BuiltModels, fixed: tuple[str, ...] | None, kinds: Sequence[Kind]) -> dict[str, str]:
    """Return the names of the layers that can be pruned, by the flat names of their tensors.

    Args:
        models: networks by name, a set for each combination of architectures.
        fixed: Method.fixed.
        kinds: of layers that are wanted.

    Raises:
        ConfigError: a set has none.
    """
    found: dict[str, str] = {}
    for built in models:
        layers = prunable_layers(built, fixed_tensors(built, fixed), kinds)
        if not layers:
            made = sorted({type(layer).__name__ for model in built.values() for layer in model.modules()})
            raise ConfigError(
                f"method.prune is {list(kinds)}, and there is nothing of that to prune: the network is made of "
                f"{', '.join(made)}, and frozen layers and the last one are never pruned; take another network, add a kind of "
                f"layer to method.prune, or set method.ratio to 0"
            )
        found.update({name: layer.name for layer in layers for name in layer.tensors})
    return found


def kept_by(update: Update, layer_of: Mapping[str, str]) -> dict[str, Tensor]:
    """Return what a client has kept: by tensor name a bool tensor that broadcasts against it; not of those without a mask.

    Args:
        update: with the masks of its layers among its tensors.
        layer_of: layers by the plain names of their tensors.
    """
    masks = {plain_name(name): mask > 0.5 for name, mask in update.tensors.items() if name.startswith(MASK)}
    found: dict[str, Tensor] = {}
    for name, value in update.tensors.items():
        mask = masks.get(MASK + layer_of.get(plain_name(name), ""))
        if mask is not None and mask.numel() and value.shape[0] % mask.numel() == 0:
            found[name] = mask.repeat(value.shape[0] // mask.numel()).view(-1, *[1] * (value.ndim - 1))
    return found


def recovered(update: Update, reference: Tensors, layer_of: Mapping[str, str]) -> Update:
    """Return an update of whole models, without masks: what a client pruned is as it was sent to it.

    Args:
        update: masked tensors and masks.
        reference: what the client was sent, by the server's names.
        layer_of: layers by the plain names of their tensors.
    """
    kept = kept_by(update, layer_of)
    tensors = {
        name: torch.where(kept[name], value, reference[name]) if name in kept else value
        for name, value in update.tensors.items()
        if not name.startswith(MASK)
    }
    return dataclasses.replace(update, tensors=tensors)
