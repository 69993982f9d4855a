"""Pipeline: the steps from stored features to a batch.

The steps are a random crop, transforms of power, logarithm and normalisation, and all remaining transforms. Without a transform of
power, the cache already holds normalised features. Evaluation runs the same steps without randomness: the crop is the middle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raydfl.core import registry
from raydfl.core.errors import ConfigError
from raydfl.core.ops import spectra
from raydfl.data.features.image import ImageFeatures
from raydfl.data.features.kinds import AnyFeatures
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.features.wave import BY_TRAINING_CLIPS, EPSILON
from raydfl.data.transforms._transform import Drawn, Transform
from raydfl.data.transforms.random_crop import RandomCrop

_PACKAGE = "raydfl.data.transforms"
_CROP = "crop"


@dataclass(frozen=True)
class LateNormalisation:
    """The last steps from power to features, after the transforms: the logarithm, and the z-score of each band."""

    of_log_power: float
    """Factor of the natural logarithm of power, as in FeatureSettings."""
    least: float
    """Floor of the power; smaller values are raised to it."""
    z_score: bool

    def to_power(self, x: Tensor, frames: Tensor) -> Tensor:
        """Convert features to power in place of ``x``: float32, same shape, 0 in padding."""
        return spectra.to_power(x, frames, self.least, self.of_log_power).mul_(spectra.inside(x, frames))

    def to_features(self, power: Tensor, frames: Tensor) -> Tensor:
        """Convert power, float32 [..., frames, bands], to features and overwrite it."""
        return self.normalise(spectra.to_logarithm(power, frames, self.least, self.of_log_power), frames)

    def normalise(self, x: Tensor, frames: Tensor) -> Tensor:
        """Normalise features if the cache holds them unnormalised, and overwrite ``x``."""
        return spectra.to_z_scores(x, frames, EPSILON) if self.z_score else x


@dataclass(frozen=True)
class Pixels:
    """The conversion of stored rows of bytes to normalised images."""

    rows: int
    columns: int
    channels: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def images(self, x: Tensor) -> Tensor:
        """Convert bytes, float32 [..., rows, columns * channels], to images, float32 [..., channels, rows, columns]."""
        x = x.view(*x.shape[:-1], self.columns, self.channels).movedim(-1, -3) / 255.0
        return self._standardise(x).contiguous()

    def black(self, device: torch.device) -> Tensor:
        """Return the normalised value of a black pixel: float32 [channels, 1, 1]."""
        return self._standardise(torch.zeros(self.channels, 1, 1, device=device))

    def _standardise(self, x: Tensor) -> Tensor:
        mean, deviation = (
            torch.tensor(values, device=x.device)[:, None, None] for values in (self.mean, self.deviation)
        )
        return x.sub_(mean).div_(deviation)


@dataclass(frozen=True)
class Pipeline:
    """The steps of a view's examples from the cache to a batch."""

    crop: RandomCrop | None = None
    transforms: tuple[Transform, ...] = ()
    """All transforms except the crop. Transforms of power come first."""
    late: LateNormalisation | None = None
    """``None``: the cache holds normalised features."""
    pixels: Pixels | None = None
    """``None``: features, not images."""
    tables: Mapping[int, np.ndarray] = field(default_factory=dict, compare=False)
    """External data of transforms (for example recordings of noise), by position in ``transforms``."""

    @property
    def all(self) -> tuple[Transform, ...]:
        """The transforms in configuration order, including the crop."""
        return (*(() if self.crop is None else (self.crop,)), *self.transforms)

    @property
    def plain(self) -> bool:
        """True if a batch holds the stored features unchanged."""
        return self.crop is None and self.late is None and self.pixels is None and not self.transforms

    @property
    def cut(self) -> int | None:
        """Maximum number of frames after the crop; ``None``: unlimited."""
        return None if self.crop is None or self.pixels is not None else self.crop.size

    def shape(self, bands: int) -> int | tuple[int, int, int]:
        """Return the input shape of a network: bands of a frame, or an image's channels, rows and columns.

        Args:
            bands: stored bands of a frame.
        """
        if self.pixels is None:
            return bands
        rows, columns = self.pixels.rows, self.pixels.columns
        if self.crop is not None:
            rows = columns = self.crop.size
        return self.pixels.channels, rows, columns

    def check_size(self, frames: int, bands: int, where: str) -> None:
        """Reject transforms larger than the longest example.

        Args:
            frames: stored frames of the longest example.
            bands: stored bands of a frame.
            where: ``"data.transforms"``, for the message.

        Raises:
            ConfigError: a transform needs more frames or bands.
        """
        units = ("frames", "bands")
        if self.pixels is not None:
            frames, bands, units = self.pixels.rows, self.pixels.columns, ("rows", "columns")
        for transform in self.all:
            for least, size, unit in zip(transform.least(), (frames, bands), units, strict=True):
                if least > size:
                    raise ConfigError(
                        f"{where}: {_name(transform)} needs examples of at least {least} {unit}, but the longest example has "
                        f"{size}. Choose smaller values, or use longer clips."
                    )
            if transform is self.crop:
                frames = min(frames, self.crop.size) if self.pixels is None else self.crop.size
                bands = bands if self.pixels is None else self.crop.size

    def window(
        self, starts: np.ndarray, counts: np.ndarray, drawn: Drawn | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the first frame and the frame count of each example after the crop. Without ``drawn``, crop the middle."""
        if self.cut is None:
            return starts, counts
        free = np.maximum(counts - self.cut, 0)
        return starts + (free // 2 if drawn is None else drawn[_CROP]), np.minimum(counts, self.cut)

    def draw(
        self,
        key: Sequence[int],
        counts: np.ndarray,
        bands: int,
        sounding: Callable[[Drawn], np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """Draw the random numbers of one batch.

        Args:
            key: seed of the local training, index of the batch, index of the view.
            counts: stored frames of each example, int [examples].
            bands: stored bands of a frame.
            sounding: returns the frames without padding after the drawn crop; ``None``: no frame is padding.

        Returns:
            Arrays [examples, ...] by name. The name of a transform's array starts with its position.
        """
        if self.crop is None and not self.transforms:
            return {}
        rng = np.random.default_rng(tuple(key))
        numbers: dict[str, np.ndarray] = {}
        counts = np.asarray(counts, np.int64)
        if self.pixels is not None:
            counts, bands = np.full(len(counts), self.pixels.rows), self.pixels.columns
            if self.crop is not None:
                numbers = self.crop.corners(rng, len(counts), self.pixels.rows, self.pixels.columns)
                counts, bands = np.full(len(counts), self.crop.size), self.crop.size
        else:
            if self.cut is not None:
                numbers[_CROP] = rng.integers(0, np.maximum(counts - self.cut, 0) + 1)
                counts = np.minimum(counts, self.cut)
            if sounding is not None:
                counts = np.maximum(sounding(numbers), 1)
        for place, transform in enumerate(self.transforms):
            drawn = transform.draw(rng, counts, bands, self.tables.get(place))
            numbers |= {f"{place}/{name}": array for name, array in drawn.items()}
        return numbers

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor] | None) -> Tensor:
        """Turn cropped stored features into the examples of a batch, and overwrite ``x``.

        Args:
            x: cropped features, float32 [..., examples, frames, bands].
            frames: frames without padding, int64 [..., examples].
            drawn: random numbers from :meth:`draw`; ``None``: apply no random transform.
        """
        if self.pixels is not None:
            x = self.pixels.images(x)
            if self.crop is not None:
                black = self.pixels.black(x.device) if self.crop.pad_with == "black" else None
                x = self.crop.cut_images(x, drawn, black)
            return x if drawn is None else self._apply_all(x, frames, drawn, False)
        if self.late is not None:
            if drawn is not None:
                x = self.late.to_power(x, frames)
                x = self._apply_all(x, frames, drawn, True)
                x = self.late.to_features(x, frames)
            else:
                x = self.late.normalise(x, frames)
        if drawn is not None:
            x = self._apply_all(x, frames, drawn, False)
        return x.mul_(spectra.inside(x, frames))

    def _apply_all(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], power: bool) -> Tensor:
        for place, transform in enumerate(self.transforms):
            if transform.power is power:
                numbers = {name.partition("/")[2]: t for name, t in drawn.items() if name.startswith(f"{place}/")}
                x = transform.apply(x, frames, numbers, self._table(place, x.device))
        return x

    def _table(self, place: int, device: torch.device) -> Tensor | None:
        if place not in self.tables:
            return None
        # A table is copied to a device once, not for every batch.
        if (place, device) not in self._moved:
            self._moved[place, device] = torch.from_numpy(np.array(self.tables[place])).to(device)
        return self._moved[place, device]

    @functools.cached_property
    def _moved(self) -> dict[tuple[int, torch.device], Tensor]:
        return {}

    def with_tables(self, arrays: Mapping[str, np.ndarray], prefix: str) -> Pipeline:
        """Return a copy with the tables stored under ``prefix`` in a population."""
        tables = {int(name.removeprefix(prefix)): array for name, array in arrays.items() if name.startswith(prefix)}
        return Pipeline(self.crop, self.transforms, self.late, self.pixels, tables)

    def make_tables(self, features: AnyFeatures, seed: int, prefix: str) -> dict[str, np.ndarray]:
        """Read the external data of the transforms.

        Returns:
            float32 tables for the population, named by ``prefix`` and position.

        Raises:
            DataError: a recording cannot be read.
        """
        tables = {place: transform.table(features, seed) for place, transform in enumerate(self.transforms)}
        return {f"{prefix}{place}": table for place, table in tables.items() if table is not None}


PLAIN = Pipeline()
"""The empty pipeline: a batch holds the stored features."""


def find_transform(name: str) -> type[Transform]:
    """Find the transform called ``name``: a built-in, or the user's ``my_file.py:Class`` or ``my_module:Class``.

    Raises:
        ConfigError: no transform has this name. The message suggests the nearest name.
    """
    return registry.find(_PACKAGE, name, Transform, "transform")


def make_transforms(values: Sequence[Mapping[str, Any]], features: AnyFeatures, where: str) -> Pipeline:
    """Build and check the transforms of a view.

    Args:
        values: name and options of each transform.
        features: feature settings of the view.
        where: ``"data.transforms"``, for the messages.

    Raises:
        ConfigError: an unknown name or option, a value out of range, a wrong order, or unsupported features.
    """
    built: list[Transform] = []
    for number, value in enumerate(values):
        options = dict(value)
        name = options.pop("name", None)
        place = f"{where}.{number}"
        if not isinstance(name, str):
            raise ConfigError(f"{place}: a name is missing; known: {', '.join(registry.names(_PACKAGE))}")
        transform = registry.build(find_transform(name), options, f"{place}: {name}")
        if features.kind not in transform.kinds:
            raise ConfigError(
                f"{place}: {name} acts on features of the kind {' or '.join(transform.kinds)}, but the view has features of the "
                f"kind {features.kind}. Remove {name}."
            )
        try:
            transform.check(features)
        except ConfigError as error:
            raise ConfigError(f"{place}: {name}: {error}") from error
        built.append(transform)
    ranks = [0 if isinstance(transform, RandomCrop) else 1 if transform.power else 2 for transform in built]
    if ranks != sorted(ranks) or ranks.count(0) > 1:
        raise ConfigError(
            f"{where}: wrong order {', '.join(str(value['name']) for value in values)}. List at most one random_crop first, then "
            f"transforms of power (gain, noise, reverberation), then all remaining transforms."
        )
    crop = next((transform for transform in built if isinstance(transform, RandomCrop)), None)
    transforms = tuple(transform for transform in built if transform is not crop)
    late = None
    if any(transform.power for transform in transforms):
        late = _late(features, where)
    pipeline = Pipeline(crop, transforms, late, _pixels(features))
    if features.frames is not None:
        pipeline.check_size(features.frames, features.bands, where)
    return pipeline


def _name(transform: Transform) -> str:
    """Return the name of a built-in transform in configurations, or the class name of a user's transform."""
    package, _, name = type(transform).__module__.rpartition(".")
    return name if package == _PACKAGE else type(transform).__name__


def _pixels(features: AnyFeatures) -> Pixels | None:
    if not isinstance(features, ImageFeatures):
        return None
    return Pixels(*features.size, features.channels, features.mean, features.deviation)


def _late(features: AnyFeatures, where: str) -> LateNormalisation:
    assert isinstance(features, FeatureSettings)  # noqa: S101 - of the kinds that transforms of power act on
    if features.normalise in BY_TRAINING_CLIPS:
        raise ConfigError(
            f"{where}: gain, noise and reverberation act before normalisation, but normalise: {features.normalise} is applied "
            f"in the feature cache. Set data.features.normalise to clip or none, or remove these transforms."
        )
    least = features.least if features.spectrum == "power" else features.least**2
    return LateNormalisation(features.of_log_power, least, features.normalise == "clip")
