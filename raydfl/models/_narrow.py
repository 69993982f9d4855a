"""The networks that clients with a part of a network have, and the cuts that make the one the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from raydfl.core.cuts import Cut
from raydfl.core.errors import ConfigError
from raydfl.core.types import ModelSpec
from raydfl.models._build import build_model
from raydfl.models._width import Channels


def narrow(spec: ModelSpec, width: float, **options: object) -> ModelSpec:
    """Return the specification of a narrower network, which is a part of another.

    Args:
        spec: the whole network.
        width: the share of its channels; above 0 and at most 1, which is the whole network itself.
        options: further options of the narrower one.

    Raises:
        ConfigError: it cannot be made narrower.
    """
    if width == 1:
        return spec
    own = {**dict(spec.options), **options}
    own["width"] = float(own.get("width", 1.0)) * width
    narrower = dataclasses.replace(spec, options=tuple(sorted(own.items())), init_from=(), whole=spec)
    _kept(narrower)
    return narrower


def cuts_of(spec: ModelSpec, choose: Callable[[str, int, int], np.ndarray]) -> dict[str, Cut]:
    """Return the cuts that make a network a narrower one, by the tensors' flat names.

    Args:
        spec: the narrower network's; one that is whole is not cut.
        choose: of a group's name, the channels of the whole network and of the narrower one, which of the former to keep: int
            [channels of the narrower one].
    """
    if spec.whole is None:
        return {}
    chosen = {group: choose(group, whole, kept) for group, (whole, kept) in _kept(spec).items()}
    return {f"{spec.name}/{name}": cut for name, cut in _cuts(_looked_at(spec.whole), chosen).items()}


@dataclass(frozen=True)
class _Seen:
    """A network's tensors."""

    groups: Channels
    shapes: Mapping[str, tuple[int, ...]]
    """Of all floating tensors."""
    sizes: Mapping[str, int]
    """Channels of each group."""


@functools.lru_cache(256)
def _looked_at(spec: ModelSpec) -> _Seen:
    """Build a network and look at it.

    Raises:
        ConfigError: it has no ``channels()``, or they do not fit its tensors.
    """
    with torch.random.fork_rng(devices=[]):
        network = build_model(dataclasses.replace(spec, whole=None, init_from=()))
    where = f"models.{spec.name}: {spec.architecture}"
    groups = _groups(network, where)
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items() if value.is_floating_point()}
    sizes: dict[str, int] = {}
    for name, dimensions in groups.items():
        if name not in shapes or len(dimensions) != len(shapes[name]):
            raise ConfigError(
                f"{where}: channels() says {dimensions} of {name!r}, which is {shapes.get(name, 'no tensor')}"
            )
        for of_dimension, size in zip(dimensions, shapes[name], strict=True):
            # A group by itself is once as long as its channels: in the bias of its layer.
            if len(set(of_dimension)) == 1:
                group, length = of_dimension[0], size // len(of_dimension)
                sizes[group] = min(length, sizes.get(group, length))
    seen = _Seen(groups, shapes, sizes)
    for name, dimensions in groups.items():
        for of_dimension, size in zip(dimensions, shapes[name], strict=True):
            if of_dimension and (not sizes.keys() >= set(of_dimension) or size % sum(sizes[g] for g in of_dimension)):
                raise ConfigError(f"{where}: channels() says {dimensions} of {name!r}, which is {shapes[name]}")
    return seen


def _groups(network: nn.Module, where: str) -> Channels:
    channels = getattr(network, "channels", None)
    found: Channels = channels() if callable(channels) else {}
    if not any(any(dimensions) for dimensions in found.values()):
        raise ConfigError(
            f"{where} has no channels that could be left out, so it cannot be cut; take cnn, crnn, mlp, split_cnn or resnet18, or "
            f"give your network the option width and the method channels()"
        )
    return found


@functools.lru_cache(256)
def _kept(spec: ModelSpec) -> Mapping[str, tuple[int, int]]:
    """Return for each group its channels in the whole network and in the narrower one.

    Raises:
        ConfigError: the narrower network has not the whole one's groups, or is not a part of it.
    """
    if spec.whole is None:
        raise AssertionError(f"{spec.name} is whole")
    whole, own = _looked_at(spec.whole), _looked_at(spec)
    where = f"models.{spec.name}: {spec.architecture}"
    if whole.groups != own.groups or whole.shapes.keys() != own.shapes.keys():
        raise ConfigError(
            f"{where} has other layers or channels() with another width, so the one is no part of the other"
        )
    kept = {group: (size, own.sizes[group]) for group, size in whole.sizes.items()}
    for group, (size, fewer) in kept.items():
        if fewer > size:
            raise ConfigError(
                f"{where} has {fewer} channels of {group!r} with a smaller width, and {size} with a larger one"
            )
    cuts = _cuts(whole, {group: np.arange(fewer) for group, (_, fewer) in kept.items()})
    for name, shape in whole.shapes.items():
        expected = cuts[name].shape(shape) if name in cuts else shape
        if expected != own.shapes[name]:
            raise ConfigError(
                f"{where}: by channels(), {name!r} of the narrower network should be {expected}, and it is {own.shapes[name]}"
            )
    return kept


def _cuts(whole: _Seen, chosen: Mapping[str, np.ndarray]) -> dict[str, Cut]:
    """Return the cuts of a network's tensors that leave the chosen channels of each group."""
    places: dict[tuple[tuple[str, ...], int], np.ndarray | None] = {}

    def indices(groups: tuple[str, ...], size: int) -> np.ndarray | None:
        if (groups, size) not in places:
            places[groups, size] = _places([(whole.sizes[group], chosen[group]) for group in groups], size)
        return places[groups, size]

    return {
        name: Cut([indices(groups, size) for groups, size in zip(dimensions, whole.shapes[name], strict=True)])
        for name, dimensions in whole.groups.items()
        if any(dimensions)
    }


def _places(blocks: Sequence[tuple[int, np.ndarray]], size: int) -> np.ndarray | None:
    """Return the indices of a dimension in which groups lie one after another; ``None`` where it is of no group.

    Args:
        blocks: of each group its channels, and which of them are kept.
        size: of the dimension; each channel has as many places as it is larger than the channels.
    """
    if not blocks:
        return None
    each, begin, found = size // sum(channels for channels, _ in blocks), 0, []
    for channels, kept in blocks:
        found.append((begin + np.asarray(kept)[:, None] * each + np.arange(each)).ravel())
        begin += channels * each
    return np.concatenate(found)
