"""Features of a wave."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from raydfl.core.errors import DataError
from raydfl.data.features.kaldi import FilterBank, KaldiFeatures
from raydfl.data.features.log_mel import LARGEST_DENOMINATOR, FeatureSettings
from raydfl.data.features.model import ModelFeatures
from raydfl.data.features.pretrained import EncodedWave, PretrainedFeatures
from raydfl.data.features.wave import z_scored

if TYPE_CHECKING:
    from torch import nn

WaveFeatures = FeatureSettings | ModelFeatures | KaldiFeatures | PretrainedFeatures
"""The kinds that are computed of waves."""

LEAST_SQUARES = 1e-9
"""The least sum of squares by whose root a wave is divided (``wave: unit_norm``)."""


class FeatureExtractor:
    """Computes the features of one clip at a time; keeps the transforms that it built.

    Runs on one thread per call only if the caller has set torch to one: the cache does, for speed and for equal bits everywhere.

    Raises:
        ConfigError: the model or encoder that the settings name cannot be built.
    """

    def __init__(self, settings: WaveFeatures) -> None:
        self.settings = settings
        self._matrix: Callable[[np.ndarray], np.ndarray]
        if isinstance(settings, FeatureSettings):
            self._matrix = _LogMel(settings)
        elif isinstance(settings, KaldiFeatures):
            self._matrix = FilterBank(settings)
        elif isinstance(settings, PretrainedFeatures):
            self._matrix = EncodedWave(settings)
        else:
            from raydfl.data.features.model import NamedModel  # it imports this module

            self._matrix = NamedModel(settings)
        self._resamplers: dict[int, nn.Module] = {}

    def wave(self, samples: np.ndarray, rate: int) -> np.ndarray:
        """Return one channel at the settings' rate: float32 [samples].

        Args:
            samples: float32 [samples, channels] or [samples], usually -1..1.
            rate: Hz.

        Raises:
            DataError: no samples, samples that are not finite, a channel that is not there, or a rate that is not positive.
        """
        import torch

        wave = np.asarray(samples, dtype=np.float32)
        if wave.size == 0:
            raise DataError("the clip has no samples")
        if rate <= 0:
            raise DataError(f"the clip's sample rate is {rate} Hz")
        if wave.ndim == 2:
            wave = self._channel(wave)
        if wave.ndim != 1:
            raise DataError(f"the clip's samples have shape {samples.shape}, not [samples, channels]")
        if not np.isfinite(wave).all():
            raise DataError(f"{int((~np.isfinite(wave)).sum())} of the clip's {wave.size} samples are NaN or infinite")
        if rate == self.settings.sample_rate:
            return np.ascontiguousarray(wave)
        with torch.no_grad():
            resampled = self._resampler(rate)(torch.from_numpy(np.array(wave)))
        result: np.ndarray = resampled.numpy()
        return result

    def _channel(self, samples: np.ndarray) -> np.ndarray:
        """Return the settings' channel of float32 [samples, channels]."""
        if self.settings.channel == "mean":
            mean: np.ndarray = samples.mean(axis=1)
            return mean
        number = 0 if self.settings.channel == "first" else self.settings.channel
        if number >= samples.shape[1]:
            raise DataError(
                f"the clip has {samples.shape[1]} channels, and data.features.channel is {number}, where 0 is the first; set "
                f"a lower number, or mean"
            )
        return samples[:, number]

    def features(self, wave: np.ndarray) -> np.ndarray:
        """Compute float32 [frames, bands] of a wave of the settings' rate, cut but not padded to the settings' length.

        Normalised when ``normalise`` is ``clip``.

        Raises:
            DataError: a model of one's own gives something else than features.
        """
        wave = wave[: self.settings.samples]
        if isinstance(self.settings, FeatureSettings) and len(wave) < self.settings.least_samples:
            missing = self.settings.least_samples - len(wave)
            wave = np.pad(wave, (missing // 2, missing - missing // 2))
        if isinstance(self.settings, FeatureSettings) and self.settings.wave == "unit_norm":
            wave = wave / np.sqrt(np.maximum(np.square(wave, dtype=np.float64).sum(), LEAST_SQUARES)).astype(np.float32)
        matrix = self._matrix(wave)
        if self.settings.normalise == "clip":
            matrix = z_scored(matrix)
        return np.ascontiguousarray(matrix, dtype=np.float32)

    def __call__(self, samples: np.ndarray, rate: int) -> np.ndarray:
        """Compute float32 [frames, bands] of float32 [samples, channels] at ``rate`` Hz: :meth:`wave`, then :meth:`features`."""
        return self.features(self.wave(samples, rate))

    def _resampler(self, rate: int) -> nn.Module:
        from torchaudio.transforms import Resample

        if rate not in self._resamplers:
            # Resample keeps a filter for every phase of the ratio: gigabytes for two rates with no common divisor. Such odd
            # rates (11127 Hz, say) get the nearest small ratio, less than one millionth away.
            ratio = Fraction(self.settings.sample_rate, rate).limit_denominator(LARGEST_DENOMINATOR)
            if not ratio:
                raise DataError(
                    f"the clip's rate of {rate} Hz is too far above sample_rate {self.settings.sample_rate} Hz"
                )
            self._resamplers[rate] = Resample(ratio.denominator, ratio.numerator)
        return self._resamplers[rate]


class _LogMel:
    """float32 [frames, bands], decibels or logarithms, of a wave that is cut already: float32 [samples] at the settings' rate."""

    def __init__(self, settings: FeatureSettings) -> None:
        # Importing torch takes seconds: only who computes features pays for it.
        from torchaudio.transforms import AmplitudeToDB, MelSpectrogram

        self._settings = settings
        # The reflection at both ends needs more samples than half a window.
        self._shortest = settings.points // 2 + 1 if settings.centred else settings.window
        # The window stands in the middle of the transform's points: after so many zeros it begins at the first sample.
        before = (settings.points - settings.window) // 2
        self._around = (0, 0) if settings.centred else (before, settings.points - settings.window - before)
        self._bands = MelSpectrogram(
            sample_rate=settings.sample_rate,
            n_fft=settings.points,
            win_length=settings.window,
            hop_length=settings.hop,
            f_min=settings.low_hz,
            f_max=settings.highest_hz,
            n_mels=settings.bands,
            power=2.0 if settings.spectrum == "power" else 1.0,
            center=settings.centred,
            pad_mode="reflect",
            norm=None,
            mel_scale=settings.mel,
        )
        self._decibels = AmplitudeToDB(settings.spectrum, top_db=None)
        self._decibels.amin = settings.least

    def __call__(self, wave: np.ndarray) -> np.ndarray:
        import torch

        frames = self._settings.frames_within(len(wave))  # frames of the padding alone are not kept
        if len(wave) < self._shortest:
            wave = np.pad(wave, (0, self._shortest - len(wave)))
        if any(self._around):
            wave = np.pad(wave, self._around)
        with torch.no_grad():
            sums = self._bands(torch.from_numpy(np.ascontiguousarray(wave)))
            in_db = self._settings.scale == "db"
            logarithms = self._decibels(sums) if in_db else sums.clamp_min(self._settings.least).log()
        matrix: np.ndarray = logarithms.numpy()[:, :frames].T
        return matrix
