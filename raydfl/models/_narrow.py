"""Narrower networks for clients that train a part of a network, and the cuts between both."""

from __future__ import annotations

import bisect
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
    """Make the specification of a narrower network that is a part of the whole network.

    Args:
        spec: specification of the whole network.
        width: fraction of its channels, above 0. 1 returns ``spec``.
        options: additional options of the narrower network.

    Raises:
        ConfigError: the architecture does not support narrower networks.
    """
    if width == 1:
        return spec
    narrow_options = {**dict(spec.options), **options}
    narrow_options["width"] = float(narrow_options.get("width", 1.0)) * width
    narrower = dataclasses.replace(spec, options=tuple(sorted(narrow_options.items())), init_from=(), whole=spec)
    _count_channels(narrower)
    return narrower


@functools.lru_cache(256)
def fit_width(spec: ModelSpec, share: float) -> float:
    """Find the width of the narrower network with a fraction of the whole network's trainable weights.

    Args:
        spec: specification of the whole network.
        share: fraction of its weights, above 0. 1 returns 1 for any architecture.

    Returns:
        The width, in (0, 1], with the nearest number of trainable weights.

    Raises:
        ConfigError: the architecture does not support narrower networks.
    """
    if share == 1:
        return 1.0
    whole = _inspect(spec)
    # A group of n channels changes at the widths 1 / n, 2 / n ...
    widths = sorted({channels / size for size in whole.sizes.values() for channels in range(1, size + 1)})

    def excess(width: float) -> float:
        return _inspect(narrow(spec, width)).weights - share * whole.weights

    at = bisect.bisect_left(widths, 0.0, key=excess)  # The number of weights rises with the width.
    return min(widths[max(0, at - 1) : at + 1], key=lambda width: abs(excess(width)))


def make_cuts(spec: ModelSpec, choose: Callable[[str, int, int], np.ndarray]) -> dict[str, Cut]:
    """Make the cuts from a whole network to a narrower network, by the tensors' flat names.

    Args:
        spec: specification of the narrower network. Whole networks have no cuts.
        choose: function of a group's name, its channels in the whole network and its channels in the narrower network. It
            returns the kept channels: int [channels of the narrower network].
    """
    if spec.whole is None:
        return {}
    chosen = {group: choose(group, whole, kept) for group, (whole, kept) in _count_channels(spec).items()}
    return {f"{spec.name}/{name}": cut for name, cut in _make_cuts(_inspect(spec.whole), chosen).items()}


@dataclass(frozen=True)
class _NetworkTensors:
    """Shapes of a network's tensors, and its groups of channels."""

    groups: Channels
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all floating-point tensors."""
    sizes: Mapping[str, int]
    """Number of channels in each group."""
    weights: int
    """Number of trainable parameters."""


@functools.lru_cache(256)
def _inspect(spec: ModelSpec) -> _NetworkTensors:
    """Build a network and inspect its tensors.

    Raises:
        ConfigError: the network has no ``channels()``, or they do not fit its tensors.
    """
    with torch.random.fork_rng(devices=[]):  # do not advance the caller's random state
        network = build_model(dataclasses.replace(spec, whole=None, init_from=()))
    where = f"models.{spec.name}: {spec.architecture}"
    groups = _find_groups(network, where)
    shapes = {name: tuple(value.shape) for name, value in network.state_dict().items() if value.is_floating_point()}
    sizes: dict[str, int] = {}
    for name, dimensions in groups.items():
        if name not in shapes or len(dimensions) != len(shapes[name]):
            raise ConfigError(
                f"{where}: channels() returns {dimensions} for {name!r}, but the tensor is {shapes.get(name, 'unknown')}. Correct "
                f"channels()."
            )
        for members, size in zip(dimensions, shapes[name], strict=True):
            # The smallest dimension of a single group, as in the bias of its layer, has one entry for each channel.
            if len(set(members)) == 1:
                group, length = members[0], size // len(members)
                sizes[group] = min(length, sizes.get(group, length))
    for name, dimensions in groups.items():
        for members, size in zip(dimensions, shapes[name], strict=True):
            if members and (not sizes.keys() >= set(members) or size % sum(sizes[group] for group in members)):
                raise ConfigError(
                    f"{where}: channels() returns {dimensions} for {name!r}, but the tensor is {shapes[name]}. Correct channels()."
                )
    return _NetworkTensors(
        groups, shapes, sizes, sum(value.numel() for value in network.parameters() if value.requires_grad)
    )


def _find_groups(network: nn.Module, where: str) -> Channels:
    channels = getattr(network, "channels", None)
    groups: Channels = channels() if callable(channels) else {}
    if not any(any(dimensions) for dimensions in groups.values()):
        raise ConfigError(
            f"{where} has no removable channels, so it cannot be cut. Use cnn, crnn, mlp, split_cnn, resnet18 or "
            f"pretrained with lora, or add the option width and the method channels() to your network."
        )
    return groups


@functools.lru_cache(256)
def _count_channels(spec: ModelSpec) -> Mapping[str, tuple[int, int]]:
    """Count the channels of each group in the whole and in the narrower network.

    Raises:
        ConfigError: the narrower network is not a part of the whole network.
    """
    if spec.whole is None:
        raise AssertionError(f"{spec.name} is whole")
    whole, narrower = _inspect(spec.whole), _inspect(spec)
    where = f"models.{spec.name}: {spec.architecture}"
    if whole.groups != narrower.groups or whole.shapes.keys() != narrower.shapes.keys():
        raise ConfigError(
            f"{where}: layers or channels() change with the width, so the narrower network is not a part of the whole network. "
            f"Change only the number of channels."
        )
    counts = {group: (size, narrower.sizes[group]) for group, size in whole.sizes.items()}
    for group, (size, fewer) in counts.items():
        if fewer > size:
            raise ConfigError(
                f"{where}: the group {group!r} has {fewer} channels in the narrower network, but {size} in the whole network. "
                f"Decrease its channels with the width."
            )
    cuts = _make_cuts(whole, {group: np.arange(fewer) for group, (_, fewer) in counts.items()})
    for name, shape in whole.shapes.items():
        expected = cuts[name].shape(shape) if name in cuts else shape
        if expected != narrower.shapes[name]:
            raise ConfigError(
                f"{where}: according to channels(), {name!r} of the narrower network has the shape {expected}, but it is "
                f"{narrower.shapes[name]}. Correct channels() or the constructor."
            )
    return counts


def _make_cuts(whole: _NetworkTensors, chosen: Mapping[str, np.ndarray]) -> dict[str, Cut]:
    """Make the cuts of a network's tensors that keep the chosen channels of each group."""
    cache: dict[tuple[tuple[str, ...], int], np.ndarray | None] = {}

    def indices(groups: tuple[str, ...], size: int) -> np.ndarray | None:
        if (groups, size) not in cache:
            cache[groups, size] = _compute_block_indices(
                [(whole.sizes[group], chosen[group]) for group in groups], size
            )
        return cache[groups, size]

    return {
        name: Cut([indices(groups, size) for groups, size in zip(dimensions, whole.shapes[name], strict=True)])
        for name, dimensions in whole.groups.items()
        if any(dimensions)
    }


def _compute_block_indices(blocks: Sequence[tuple[int, np.ndarray]], size: int) -> np.ndarray | None:
    """Compute the kept indices of a dimension with concatenated groups.

    Args:
        blocks: for each group its number of channels and the kept channels.
        size: size of the dimension, a multiple of the number of channels. A channel occupies adjacent indices.

    Returns:
        int, or ``None`` for a dimension without groups.
    """
    if not blocks:
        return None
    repeat, begin, indices = size // sum(channels for channels, _ in blocks), 0, []
    for channels, kept in blocks:
        indices.append((begin + np.asarray(kept)[:, None] * repeat + np.arange(repeat)).ravel())
        begin += channels * repeat
    return np.concatenate(indices)
