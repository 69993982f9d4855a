"""The front ends in ONNX nodes: frames of samples become frames of features, as :mod:`raydfl.data.features` computes them.

The Fourier transform is a product with a matrix, which holds the window too, and Kaldi's pre-emphasis; only bins that a mel band
counts are computed. So a frame costs ``2 * window * bins`` multiplications, and any ONNX runtime has what it takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from raydfl.core.errors import InputError
from raydfl.data.features import BY_TRAINING_CLIPS, EPSILON, FeatureSettings, KaldiFeatures
from raydfl.runs.inference.model import RunModel
from raydfl.runs.inference.nodes import Value

_PRE_EMPHASIS, _LOWEST_HZ = 0.97, 20.0
"""The default of torchaudio's filter bank."""


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The part of a front end that looks at one frame at a time."""

    window: int
    """Samples of a frame."""
    hop: int
    """Samples from one frame to the next."""
    before: int
    """Samples of frame t that lie before sample ``t * hop``."""
    shortest: int
    """Samples that shorter recordings are filled up to with zeros."""
    centred: bool
    """True where recordings are reflected at both ends."""
    without_mean: bool
    """True where each frame's mean is subtracted first."""
    transform: np.ndarray
    """float32 [window, 2 * bins]: cosines and then sines, windowed."""
    mel: np.ndarray
    """float32 [bins, bands]: what a bin counts in a band."""
    magnitude: bool
    """True where bands add up roots of power."""
    least: float
    """The least sum; smaller ones are taken for it."""
    factor: float
    """By which the natural logarithm is multiplied."""
    shift: np.ndarray | None
    """float32 [bands], subtracted in the end; ``None``: nothing is."""
    scale: np.ndarray | None
    """float32 [bands], by which is divided in the end."""
    fill: float
    """The number of which the frames consist that fill a short recording."""
    half: bool
    """True where features are rounded to float16."""

    def frames(self, samples: Value) -> Value:
        """Return how many frames so many samples have, int64 []; at least 1."""
        if self.centred:
            return samples // self.hop + 1
        return ((samples - self.window).at_least(0)) // self.hop + 1

    def places(self, frames: Value, samples: Value) -> Value:
        """Return where the samples of some frames stand in the recording: int64 [frames, window].

        Args:
            frames: int64 [frames]: their numbers.
            samples: int64 []: of the recording. There are zeros after them, up to :attr:`shortest`.
        """
        offsets = np.arange(self.window, dtype=np.int64) - self.before
        places = (frames * self.hop).with_axes(1) + offsets
        if not self.centred:
            return places
        last = samples.at_least(self.shortest) - 1
        return last - (last - places.absolute()).absolute()  # reflected at both ends

    def features(self, frames: Value) -> Value:
        """Return features float32 [..., frames, bands] of samples [..., frames, window], normalised if by training clips."""
        if self.without_mean:
            frames = frames - frames.mean(-1)
        parts = frames @ self.transform
        power = parts * parts
        if self.magnitude:
            real, imaginary = frames.nodes.several("Split", 2, power, axis=-1, num_outputs=2)
            sums = frames.nodes("Sqrt", real + imaginary) @ self.mel
        else:
            sums = power @ np.concatenate([self.mel, self.mel])
        found = frames.nodes("Log", sums.at_least(self.least))
        if self.factor != 1:
            found = found * self.factor
        return found if self.shift is None or self.scale is None else (found - self.shift) / self.scale

    def stored(self, features: Value) -> Value:
        """Return features as rounded as the run's cache has them."""
        return features.as_type(TensorProto.FLOAT16).as_type(TensorProto.FLOAT) if self.half else features


def settings_of(model: RunModel) -> FeatureSettings | KaldiFeatures:
    """Return the settings of the features that a model's view is stored with.

    Raises:
        InputError: they are not computed of samples here.
    """
    settings = model.view.stored_features
    if isinstance(settings, FeatureSettings | KaldiFeatures):
        return settings
    raise InputError(
        f"--input wave: the features of model {model.name!r} are of the kind {settings.kind}, which raydfl does not compute of "
        f"samples itself; leave --input out, and give the network such features"
    )


def spectrum_of(model: RunModel) -> Spectrum:
    """Return the spectrum that a model's view asks for.

    Raises:
        InputError: features that are not computed of samples here, or statistics of training clips that are not known.
    """
    settings = settings_of(model)
    if isinstance(settings, KaldiFeatures):
        return _kaldi(settings)
    if settings.normalise not in BY_TRAINING_CLIPS:
        return _log_mel(settings, None)
    if model.statistics is None:
        raise InputError(
            f"--input wave: {model.run_dir} does not know the statistics of its training clips (data.features.normalise: "
            f"{settings.normalise}): its data lie at sites, or an earlier version made it; leave --input out"
        )
    return _log_mel(settings, model.statistics)


def _log_mel(settings: FeatureSettings, statistics: np.ndarray | None) -> Spectrum:
    """Return that of :mod:`raydfl.data.features.log_mel`."""
    from torchaudio.functional import melscale_fbanks

    window, points = settings.window, settings.points
    bank = melscale_fbanks(
        points // 2 + 1,
        settings.low_hz,
        settings.highest_hz,
        settings.bands,
        settings.sample_rate,
        mel_scale=settings.mel,
    ).numpy()
    counted = np.flatnonzero(bank.any(axis=1))
    shape = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    mean, deviation = (None, None) if statistics is None else statistics
    return Spectrum(
        window=window,
        hop=settings.hop,
        before=points // 2 - (points - window) // 2 if settings.centred else 0,
        shortest=points // 2 + 1 if settings.centred else window,
        centred=settings.centred,
        without_mean=False,
        transform=(shape[:, None] * _waves(window, points, counted)).astype(np.float32),
        mel=np.ascontiguousarray(bank[counted]),
        magnitude=settings.spectrum == "magnitude",
        least=settings.least,
        factor=settings.of_log_power * (1 if settings.spectrum == "power" else 2),
        shift=None if mean is None else mean.astype(np.float32),
        scale=None if deviation is None else (deviation + EPSILON).astype(np.float32),
        fill=0.0,
        half=settings.dtype == "float16",
    )


def _kaldi(settings: KaldiFeatures) -> Spectrum:
    """Return that of :mod:`raydfl.data.features.kaldi`."""
    from torchaudio.compliance.kaldi import get_mel_banks

    window = settings.window
    points = 1 << (window - 1).bit_length()
    bank = get_mel_banks(settings.bands, points, settings.sample_rate, _LOWEST_HZ, 0.0, 100.0, -500.0, 1.0)[0].numpy().T
    counted = np.flatnonzero(bank.any(axis=1))
    shape = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / (window - 1))
    waves = shape[:, None] * _waves(window, points, counted)
    # From each sample 0.97 of the one before it is subtracted, from the first of itself.
    later = np.concatenate([waves[1:], np.zeros_like(waves[:1])])
    later[0] += waves[0]
    return Spectrum(
        window=window,
        hop=settings.hop,
        before=0,
        shortest=window,
        centred=False,
        without_mean=True,
        transform=(waves - _PRE_EMPHASIS * later).astype(np.float32),
        mel=np.ascontiguousarray(bank[counted], np.float32),
        magnitude=False,
        least=float(np.finfo(np.float32).eps),
        factor=1.0,
        shift=np.full(settings.bands, settings.mean, np.float32),
        scale=np.full(settings.bands, 2 * settings.deviation, np.float32),
        fill=-settings.mean / (2 * settings.deviation),
        half=settings.dtype == "float16",
    )


def _waves(window: int, points: int, bins: np.ndarray) -> np.ndarray:
    """Return float64 [window, 2 * bins]: the cosines of some bins of a Fourier transform, then the sines."""
    turns = 2 * np.pi * (np.arange(window)[:, None] * bins % points) / points
    return np.concatenate([np.cos(turns), np.sin(turns)], axis=1)
