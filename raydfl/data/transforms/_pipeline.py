"""Pipeline from stored features to batches.

The order is: random crop, transforms of power, deferred logarithm and normalisation, all further transforms. Without
transforms of power, features come normalised from the cache. Evaluation examples pass through the same pipeline without random
steps, and with a centre crop.
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
    """Deferred conversion of power to features, after the transforms: the logarithm, and the z-score of each band."""

    log_power_factor: float
    """``FeatureSettings.log_power_factor``: the feature of a band is this factor times the logarithm of its power."""
    least: float
    """Lower limit of power before the logarithm."""
    z_score: bool
    """Whether to normalise each band of an example to mean 0 and variance 1."""

    def to_power(self, x: Tensor, frames: Tensor) -> Tensor:
        """Convert features to power, 0 in padding. Overwrites ``x``."""
        return spectra.to_power(x, frames, self.least, self.log_power_factor).mul_(spectra.make_frame_mask(x, frames))

    def to_features(self, power: Tensor, frames: Tensor) -> Tensor:
        """Convert power float32 [..., frames, bands] to features. Overwrites ``power``."""
        return self.normalise(spectra.to_logarithm(power, frames, self.least, self.log_power_factor), frames)

    def normalise(self, x: Tensor, frames: Tensor) -> Tensor:
        """Normalise features if the normalisation was deferred. Overwrites ``x``."""
        return spectra.to_z_scores(x, frames, EPSILON) if self.z_score else x


@dataclass(frozen=True)
class Pipeline:
    """Steps from a view's cached features to the examples of a batch."""

    crop: RandomCrop | None = None
    transforms: tuple[Transform, ...] = ()
    """Transforms without the crop, transforms of power first."""
    late: LateNormalisation | None = None
    """Deferred normalisation. ``None``: features come normalised from the cache."""
    pixels: ImageFeatures | None = None
    """Settings of images. ``None``: the view has features."""
    tables: Mapping[int, np.ndarray] = field(default_factory=dict, compare=False)
    """External data of transforms, such as recordings of noise, by position in ``transforms``."""

    @property
    def all(self) -> tuple[Transform, ...]:
        """All transforms in the configured order, including the crop."""
        return (*(() if self.crop is None else (self.crop,)), *self.transforms)

    @property
    def plain(self) -> bool:
        """True if batches hold the stored features unchanged."""
        return self.crop is None and self.late is None and self.pixels is None and not self.transforms

    @property
    def cut(self) -> int | None:
        """Largest number of frames after the crop. ``None``: no limit."""
        return None if self.crop is None or self.pixels is not None else self.crop.size

    def shape(self, bands: int) -> int | tuple[int, int, int]:
        """Return the input shape of a network: the bands of a frame, or the channels, rows and columns of an image.

        Args:
            bands: stored bands of a frame.
        """
        if self.pixels is None:
            return bands
        rows, columns = self.pixels.size
        if self.crop is not None:
            rows = columns = self.crop.size
        return self.pixels.channels, rows, columns

    def check_size(self, frames: int, bands: int, where: str) -> None:
        """Check that the examples are large enough for all transforms.

        Args:
            frames: stored frames of the longest example.
            bands: stored bands of a frame.
            where: place of the transforms for the message, ``"data.transforms"``.

        Raises:
            ConfigError: a transform needs larger examples.
        """
        units = ("frames", "bands")
        if self.pixels is not None:
            (frames, bands), units = self.pixels.size, ("rows", "columns")
        for transform in self.all:
            for required, available, unit in zip(transform.least(), (frames, bands), units, strict=True):
                if required > available:
                    raise ConfigError(
                        f"{where}: {_name(transform)} needs examples of at least {required} {unit}, but the longest has "
                        f"{available}. Lower its options, or use longer clips."
                    )
            if transform is self.crop:
                frames = min(frames, self.crop.size) if self.pixels is None else self.crop.size
                bands = bands if self.pixels is None else self.crop.size

    def window(
        self, starts: np.ndarray, counts: np.ndarray, drawn: Drawn | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the first frames and frame counts of examples after the crop.

        Args:
            starts: first stored frame of each example, int64 [examples].
            counts: stored frames of each example, int64 [examples].
            drawn: random values from :meth:`draw`. ``None``: crop the centre.
        """
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
        """Draw the random values of a batch.

        Args:
            key: seed of the fit, number of the batch in the fit, number of the view.
            counts: stored frames of each example, int [examples].
            bands: stored values of a frame.
            sounding: gives the frame counts without padding for a drawn crop. ``None``: there is no padding.

        Returns:
            Arrays [examples, ...] by name. The names start with the transform's position, or ``crop``.
        """
        if self.crop is None and not self.transforms:
            return {}
        rng = np.random.default_rng(
            tuple(key)
        )  # independent of the batches before, so that any executor draws the same
        values: dict[str, np.ndarray] = {}
        counts = np.asarray(counts, np.int64)
        if self.pixels is not None:
            rows, bands = self.pixels.size
            if self.crop is not None:
                values = self.crop.draw_corners(rng, len(counts), rows, bands)
                rows = bands = self.crop.size
            counts = np.full(len(counts), rows)
        else:
            if self.cut is not None:
                values[_CROP] = rng.integers(0, np.maximum(counts - self.cut, 0) + 1)
                counts = np.minimum(counts, self.cut)
            if sounding is not None:
                counts = np.maximum(sounding(values), 1)
        for position, transform in enumerate(self.transforms):
            drawn = transform.draw(rng, counts, bands, self.tables.get(position))
            values |= {f"{position}/{name}": array for name, array in drawn.items()}
        return values

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor] | None) -> Tensor:
        """Convert stored features to the examples of a batch. Overwrites ``x``.

        Args:
            x: stored features after the crop, float32 [..., examples, frames, bands].
            frames: frame counts without padding, int64 [..., examples].
            drawn: random values from :meth:`draw` on the device of ``x``. ``None``: skip the random transforms.
        """
        if self.pixels is not None:
            x = _to_images(x, self.pixels)
            if self.crop is not None:
                black = torch.zeros(self.pixels.channels, 1, 1, device=x.device)
                x = self.crop.cut_images(
                    x, drawn, _scale(black, self.pixels) if self.crop.pad_with == "black" else None
                )
            return x if drawn is None else self._transform(x, frames, drawn, False)
        if self.late is not None:
            if drawn is not None:
                x = self.late.to_power(x, frames)
                x = self._transform(x, frames, drawn, True)
                x = self.late.to_features(x, frames)
            else:
                x = self.late.normalise(x, frames)
        if drawn is not None:
            x = self._transform(x, frames, drawn, False)
        return x.mul_(spectra.make_frame_mask(x, frames))

    def _transform(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], power: bool) -> Tensor:
        """Apply either the transforms of power or all further transforms."""
        for position, transform in enumerate(self.transforms):
            if transform.power is power:
                values = {name.partition("/")[2]: t for name, t in drawn.items() if name.startswith(f"{position}/")}
                x = transform.apply(x, frames, values, self._load_table(position, x.device))
        return x

    def _load_table(self, position: int, device: torch.device) -> Tensor | None:
        """Return a transform's table on a device, copied there once."""
        if position not in self.tables:
            return None
        if (position, device) not in self._moved:
            self._moved[position, device] = torch.from_numpy(np.array(self.tables[position])).to(device)
        return self._moved[position, device]

    @functools.cached_property
    def _moved(self) -> dict[tuple[int, torch.device], Tensor]:
        return {}

    def add_tables(self, arrays: Mapping[str, np.ndarray], prefix: str) -> Pipeline:
        """Return a copy of the pipeline with the tables of a population.

        Args:
            arrays: arrays of the population by name.
            prefix: prefix of the names of this pipeline's tables.
        """
        tables = {int(name.removeprefix(prefix)): array for name, array in arrays.items() if name.startswith(prefix)}
        return Pipeline(self.crop, self.transforms, self.late, self.pixels, tables)

    def make_tables(self, features: AnyFeatures, seed: int, prefix: str) -> dict[str, np.ndarray]:
        """Create the tables of the transforms, for a population.

        Args:
            features: features of the view.
            seed: seed of the run.
            prefix: prefix of the tables' names.

        Raises:
            DataError: a recording cannot be read.
        """
        tables = {position: transform.table(features, seed) for position, transform in enumerate(self.transforms)}
        return {f"{prefix}{position}": table for position, table in tables.items() if table is not None}


PLAIN = Pipeline()
"""Identity pipeline: batches hold the stored features."""


def find_transform(name: str) -> type[Transform]:
    """Find a transform by name: a built-in, or a user's ``my_file.py:Class`` or ``my_module:Class``.

    Raises:
        ConfigError: the name is unknown. The message suggests the nearest name.
    """
    return registry.find(_PACKAGE, name, Transform, "transform")


def make_transforms(values: Sequence[Mapping[str, Any]], features: AnyFeatures, where: str) -> Pipeline:
    """Build and check the transforms of a view.

    Args:
        values: name and options of each transform.
        features: features of the view.
        where: place of the transforms for messages, ``"data.transforms"``.

    Raises:
        ConfigError: unknown name or option, value out of range, wrong order, or unsupported features.
    """
    built: list[Transform] = []
    for number, value in enumerate(values):
        options = dict(value)
        name = options.pop("name", None)
        place = f"{where}.{number}"
        if not isinstance(name, str):
            raise ConfigError(f"{place}: a name is missing. Known transforms: {', '.join(registry.names(_PACKAGE))}.")
        transform = registry.build(find_transform(name), options, f"{place}: {name}")
        if features.kind not in transform.kinds:
            raise ConfigError(
                f"{place}: {name} supports features of the kind {' or '.join(transform.kinds)}, not {features.kind}. "
                f"Remove this transform."
            )
        try:
            transform.check(features)
        except ConfigError as error:
            raise ConfigError(f"{place}: {name}: {error}") from error
        built.append(transform)
    ranks = [0 if isinstance(transform, RandomCrop) else 1 if transform.power else 2 for transform in built]
    if ranks != sorted(ranks) or ranks.count(0) > 1:
        raise ConfigError(
            f"{where}: {', '.join(str(value['name']) for value in values)} are in the wrong order. List at most one random_crop, "
            f"then transforms of power (gain, noise, reverberation), then the rest."
        )
    crop = next((transform for transform in built if isinstance(transform, RandomCrop)), None)
    further = tuple(transform for transform in built if transform is not crop)
    late = None
    if any(transform.power for transform in further):
        late = _make_late_normalisation(features, where)
    pipeline = Pipeline(crop, further, late, features if isinstance(features, ImageFeatures) else None)
    if features.frames is not None:
        pipeline.check_size(features.frames, features.bands, where)
    return pipeline


def _name(transform: Transform) -> str:
    """Return a transform's name in configurations, or the class name of a user's transform."""
    package, _, name = type(transform).__module__.rpartition(".")
    return name if package == _PACKAGE else type(transform).__name__


def _to_images(x: Tensor, features: ImageFeatures) -> Tensor:
    """Convert bytes, float32 [..., rows, columns * channels], to normalised images [..., channels, rows, columns]."""
    x = x.view(*x.shape[:-1], features.size[1], features.channels).movedim(-1, -3) / 255.0
    return _scale(x, features).contiguous()


def _scale(x: Tensor, features: ImageFeatures) -> Tensor:
    """Normalise pixels [..., channels, rows, columns] in 0..1. Overwrites ``x``."""
    mean, deviation = (
        torch.tensor(values, device=x.device)[:, None, None] for values in (features.mean, features.deviation)
    )
    return x.sub_(mean).div_(deviation)


def _make_late_normalisation(features: AnyFeatures, where: str) -> LateNormalisation:
    assert isinstance(features, FeatureSettings)  # noqa: S101 - the only features that transforms of power support
    if features.normalise in BY_TRAINING_CLIPS:
        raise ConfigError(
            f"{where}: transforms of power come before normalisation, but data.features.normalise: {features.normalise} "
            f"normalises the cached features. Set data.features.normalise to clip or none, or remove gain, noise and "
            f"reverberation."
        )
    least = features.least if features.spectrum == "power" else features.least**2
    return LateNormalisation(features.log_power_factor, least, features.normalise == "clip")
