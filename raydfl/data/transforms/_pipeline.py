"""Pipeline: what becomes of stored features on their way into a batch.

In this order: a random crop, transforms of power, the logarithm and normalisation that had to wait for these, all other transforms.
Where no transform acts on power, features come normalised from the cache. Examples that are measured on take the same way without
anything random: the crop is the middle.
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

    log_power_factor: float
    """See FeatureSettings."""
    least: float
    """The power that smaller power is taken for."""
    z_score: bool

    def to_power(self, x: Tensor, frames: Tensor) -> Tensor:
        """Return the power of features: float32, of the shape of ``x``, which is overwritten; 0 in padding."""
        return spectra.to_power(x, frames, self.least, self.log_power_factor).mul_(spectra.inside(x, frames))

    def of_power(self, power: Tensor, frames: Tensor) -> Tensor:
        """Return the features of power float32 [..., frames, bands], which is overwritten."""
        return self.normalised(spectra.to_logarithm(power, frames, self.least, self.log_power_factor), frames)

    def normalised(self, x: Tensor, frames: Tensor) -> Tensor:
        """Return features normalised, where that had to wait; ``x`` is overwritten."""
        return spectra.to_z_scores(x, frames, EPSILON) if self.z_score else x


@dataclass(frozen=True)
class Pixels:
    """The way of stored rows of bytes to images."""

    rows: int
    columns: int
    channels: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def images(self, x: Tensor) -> Tensor:
        """Return float32 [..., channels, rows, columns] of bytes float32 [..., rows, columns * channels]."""
        x = x.view(*x.shape[:-1], self.columns, self.channels).movedim(-1, -3) / 255.0
        return self._scaled(x).contiguous()

    def black(self, device: torch.device) -> Tensor:
        """Return what a pixel of 0 becomes: float32 [channels, 1, 1]."""
        return self._scaled(torch.zeros(self.channels, 1, 1, device=device))

    def _scaled(self, x: Tensor) -> Tensor:
        mean, deviation = (
            torch.tensor(values, device=x.device)[:, None, None] for values in (self.mean, self.deviation)
        )
        return x.sub_(mean).div_(deviation)


@dataclass(frozen=True)
class Pipeline:
    """The way of a view's examples from the cache into a batch."""

    crop: RandomCrop | None = None
    transforms: tuple[Transform, ...] = ()
    """All but the crop, those of power first."""
    late: LateNormalisation | None = None
    """``None``: features come normalised from the cache."""
    pixels: Pixels | None = None
    """``None``: features, not images."""
    tables: Mapping[int, np.ndarray] = field(default_factory=dict, compare=False)
    """The data that transforms need from elsewhere (recordings of noise, say), by their position."""

    @property
    def all(self) -> tuple[Transform, ...]:
        """The transforms in the order in which they were given."""
        return (*(() if self.crop is None else (self.crop,)), *self.transforms)

    @property
    def plain(self) -> bool:
        """True where a batch holds what is stored, as it is."""
        return self.crop is None and self.late is None and self.pixels is None and not self.transforms

    @property
    def cut(self) -> int | None:
        """Frames that longer examples are cut to; ``None``: none are."""
        return None if self.crop is None or self.pixels is not None else self.crop.size

    def shape(self, bands: int) -> int | tuple[int, int, int]:
        """Return what a network gets: bands of a frame; of images channels, rows and columns.

        Args:
            bands: stored.
        """
        if self.pixels is None:
            return bands
        rows, columns = self.pixels.rows, self.pixels.columns
        if self.crop is not None:
            rows = columns = self.crop.size
        return self.pixels.channels, rows, columns

    def check_size(self, frames: int, bands: int, where: str) -> None:
        """Refuse transforms that are larger than the examples.

        Args:
            frames: stored, of the longest.
            bands: stored.
            where: ``"data.transforms"``, for the message.

        Raises:
            ConfigError: one is.
        """
        what = ("frames", "bands")
        if self.pixels is not None:
            frames, bands, what = self.pixels.rows, self.pixels.columns, ("rows", "columns")
        for transform in self.all:
            for wanted, there, name in zip(transform.least(), (frames, bands), what, strict=True):
                if wanted > there:
                    raise ConfigError(
                        f"{where}: {_name(transform)} needs examples of at least {wanted} {name}, and here the longest has "
                        f"{there}; give it smaller values, or take longer clips"
                    )
            if transform is self.crop:
                frames = min(frames, self.crop.size) if self.pixels is None else self.crop.size
                bands = bands if self.pixels is None else self.crop.size

    def window(
        self, starts: np.ndarray, counts: np.ndarray, drawn: Drawn | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return first frames and numbers of frames of some examples after the crop: in the middle where nothing is drawn."""
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
        """Draw what is random about one batch.

        Args:
            key: seed of the fit, number of the batch in it, number of the view.
            counts: int [examples]: stored frames of each example.
            bands: stored numbers of a frame.
            sounding: gives the frames that are no padding after the crop that was drawn; ``None``: all are not.
        """
        if self.crop is None and not self.transforms:
            return {}
        rng = np.random.default_rng(tuple(key))
        found: dict[str, np.ndarray] = {}
        counts = np.asarray(counts, np.int64)
        if self.pixels is not None:
            counts, bands = np.full(len(counts), self.pixels.rows), self.pixels.columns
            if self.crop is not None:
                found = self.crop.corners(rng, len(counts), self.pixels.rows, self.pixels.columns)
                counts, bands = np.full(len(counts), self.crop.size), self.crop.size
        else:
            if self.cut is not None:
                found[_CROP] = rng.integers(0, np.maximum(counts - self.cut, 0) + 1)
                counts = np.minimum(counts, self.cut)
            if sounding is not None:
                counts = np.maximum(sounding(found), 1)
        for place, transform in enumerate(self.transforms):
            drawn = transform.draw(rng, counts, bands, self.tables.get(place))
            found |= {f"{place}/{name}": array for name, array in drawn.items()}
        return found

    def apply(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor] | None) -> Tensor:
        """Make the examples of a batch of what is stored of them; ``x`` is overwritten.

        Args:
            x: float32 [..., examples, frames, bands], cropped already.
            frames: int64 [..., examples]: frames that are no padding.
            drawn: see :meth:`draw`; ``None``: nothing random is done.
        """
        if self.pixels is not None:
            x = self.pixels.images(x)
            if self.crop is not None:
                black = self.pixels.black(x.device) if self.crop.pad_with == "black" else None
                x = self.crop.cut_images(x, drawn, black)
            return x if drawn is None else self._transformed(x, frames, drawn, False)
        if self.late is not None:
            if drawn is not None:
                x = self.late.to_power(x, frames)
                x = self._transformed(x, frames, drawn, True)
                x = self.late.of_power(x, frames)
            else:
                x = self.late.normalised(x, frames)
        if drawn is not None:
            x = self._transformed(x, frames, drawn, False)
        return x.mul_(spectra.inside(x, frames))

    def _transformed(self, x: Tensor, frames: Tensor, drawn: Mapping[str, Tensor], power: bool) -> Tensor:
        for place, transform in enumerate(self.transforms):
            if transform.power is power:
                own = {name.partition("/")[2]: t for name, t in drawn.items() if name.startswith(f"{place}/")}
                x = transform.apply(x, frames, own, self._table(place, x.device))
        return x

    def _table(self, place: int, device: torch.device) -> Tensor | None:
        if place not in self.tables:
            return None
        if (place, device) not in self._moved:
            self._moved[place, device] = torch.from_numpy(np.array(self.tables[place])).to(device)
        return self._moved[place, device]

    @functools.cached_property
    def _moved(self) -> dict[tuple[int, torch.device], Tensor]:
        return {}

    def with_tables(self, arrays: Mapping[str, np.ndarray], prefix: str) -> Pipeline:
        """Return this pipeline with the tables that a population keeps under ``prefix``."""
        tables = {int(name.removeprefix(prefix)): array for name, array in arrays.items() if name.startswith(prefix)}
        return Pipeline(self.crop, self.transforms, self.late, self.pixels, tables)

    def make_tables(self, features: AnyFeatures, seed: int, prefix: str) -> dict[str, np.ndarray]:
        """Return what the transforms need of the outside world, as a population keeps it.

        Raises:
            DataError: that cannot be read.
        """
        found = {place: transform.table(features, seed) for place, transform in enumerate(self.transforms)}
        return {f"{prefix}{place}": table for place, table in found.items() if table is not None}


PLAIN = Pipeline()
"""The pipeline that changes nothing: a batch holds what is stored."""


def find_transform(name: str) -> type[Transform]:
    """Find the transform called ``name``: a built-in, or the user's ``my_file.py:Class`` or ``my_module:Class``.

    Raises:
        ConfigError: there is none; the nearest name is given.
    """
    return registry.find(_PACKAGE, name, Transform, "transform")


def make_transforms(values: Sequence[Mapping[str, Any]], features: AnyFeatures, where: str) -> Pipeline:
    """Build and check the transforms of a view.

    Args:
        values: name and options of each.
        features: of the view.
        where: ``"data.transforms"``, for the messages.

    Raises:
        ConfigError: an unknown name or option, a value out of range, a wrong order, or features that one cannot act on.
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
                f"{place}: {name} acts on features of the kind {' or '.join(transform.kinds)}, these are of the kind "
                f"{features.kind}; leave it out"
            )
        try:
            transform.check(features)
        except ConfigError as error:
            raise ConfigError(f"{place}: {name}: {error}") from error
        built.append(transform)
    ranks = [0 if isinstance(transform, RandomCrop) else 1 if transform.power else 2 for transform in built]
    if ranks != sorted(ranks) or ranks.count(0) > 1:
        raise ConfigError(
            f"{where}: the order is one random_crop, then what acts on power (gain, noise, reverberation), then the others; "
            f"here it is {', '.join(str(value['name']) for value in values)}"
        )
    crop = next((transform for transform in built if isinstance(transform, RandomCrop)), None)
    others = tuple(transform for transform in built if transform is not crop)
    late = None
    if any(transform.power for transform in others):
        late = _late(features, where)
    found = Pipeline(crop, others, late, _pixels(features))
    if features.frames is not None:
        found.check_size(features.frames, features.bands, where)
    return found


def _name(transform: Transform) -> str:
    """Return what a configuration calls it; of a user's own the class."""
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
            f"{where}: what acts on power comes before normalisation, and normalise: {features.normalise} is done once for all; "
            f"take data.features.normalise clip or none, or leave gain, noise and reverberation out"
        )
    least = features.least if features.spectrum == "power" else features.least**2
    return LateNormalisation(features.log_power_factor, least, features.normalise == "clip")
