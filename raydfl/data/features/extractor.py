"""Computation of a clip's features from its wave."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from raydfl.core.errors import DataError
from raydfl.data.features.kaldi import KaldiFeatures
from raydfl.data.features.log_mel import LARGEST_DENOMINATOR, FeatureSettings
from raydfl.data.features.model import ModelFeatures
from raydfl.data.features.pretrained import PretrainedFeatures
from raydfl.data.features.speech_embedding import SpeechEmbeddingFeatures
from raydfl.data.features.wave import standardise

if TYPE_CHECKING:
    from torch import nn

WaveFeatures = FeatureSettings | ModelFeatures | KaldiFeatures | PretrainedFeatures | SpeechEmbeddingFeatures
"""Settings of all features computed from waves."""


class FeatureExtractor:
    """Feature computation of one clip at a time, with reusable transforms.

    Torch's number of threads applies. The cache sets it to one, for speed and for equal bits on all machines.

    Raises:
        ConfigError: The settings' model or encoder cannot be built.
    """

    def __init__(self, settings: WaveFeatures) -> None:
        from raydfl.data.features.front_ends import FRONT_ENDS  # The import of PyTorch takes seconds.

        self.settings = settings
        self.front_end = FRONT_ENDS[type(settings)](settings)
        self._resamplers: dict[int, nn.Module] = {}

    def wave(self, samples: np.ndarray, rate: int) -> np.ndarray:
        """Select the configured channel and resample it, float32 [samples].

        Args:
            samples: float32 [samples, channels] or [samples], usually in -1..1.
            rate: Sample rate in Hz.

        Raises:
            DataError: There are no samples, values are not finite, the channel is missing, or the rate is not positive.
        """
        import torch

        wave = np.asarray(samples, dtype=np.float32)
        if wave.size == 0:
            raise DataError("the clip has no samples")
        if rate <= 0:
            raise DataError(f"the clip's sample rate is {rate} Hz")
        if wave.ndim == 2:
            wave = self._select_channel(wave)
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

    def _select_channel(self, samples: np.ndarray) -> np.ndarray:
        """Return the configured channel of float32 [samples, channels]."""
        if self.settings.channel == "mean":
            mean: np.ndarray = samples.mean(axis=1)
            return mean
        number = 0 if self.settings.channel == "first" else self.settings.channel
        if number >= samples.shape[1]:
            raise DataError(
                f"the clip has {samples.shape[1]} channels, but data.features.channel is {number}, counted from 0. Set a lower "
                f"number, or mean"
            )
        return samples[:, number]

    def trim(self, wave: np.ndarray) -> np.ndarray:
        """Remove the configured silence at both ends of a wave, float32 [samples]. A silent wave stays whole."""
        settings = self.settings
        if not isinstance(settings, FeatureSettings) or settings.trim_db is None:
            return wave
        starts = np.arange(0, len(wave), settings.trim_block)
        power = np.add.reduceat(np.square(wave, dtype=np.float64), starts) / np.diff(starts, append=len(wave))
        loud = np.flatnonzero(power >= power.max() * 10 ** (-settings.trim_db / 10))
        return wave[starts[loud[0]] : starts[loud[-1]] + settings.trim_block]

    def features(self, wave: np.ndarray) -> np.ndarray:
        """Compute the features of a wave, float32 [frames, bands], normalised if ``normalise`` is ``clip``.

        Args:
            wave: float32 [samples] at the configured rate. It is cut to the configured length, but not padded.

        Raises:
            DataError: A user's model returns invalid features.
        """
        import torch

        samples = np.array(wave[: self.settings.samples], np.float32)[None]
        with torch.no_grad():
            matrix: np.ndarray = self.front_end(torch.from_numpy(samples))[0].numpy()
        return np.ascontiguousarray(standardise(matrix) if self.settings.normalise == "clip" else matrix)

    def __call__(self, samples: np.ndarray, rate: int) -> np.ndarray:
        """Compute features, float32 [frames, bands], of samples, float32 [samples, channels], at ``rate`` Hz."""
        return self.features(self.trim(self.wave(samples, rate)))

    def _resampler(self, rate: int) -> nn.Module:
        from torchaudio.transforms import Resample

        if rate not in self._resamplers:
            # Resample stores a filter for every phase of the ratio, gigabytes for two rates without a common divisor. Such odd
            # rates (11127 Hz) get the nearest small ratio, with a difference below one millionth.
            ratio = Fraction(self.settings.sample_rate, rate).limit_denominator(LARGEST_DENOMINATOR)
            if not ratio:
                raise DataError(
                    f"the clip's rate of {rate} Hz is too high for sample_rate {self.settings.sample_rate} Hz"
                )
            self._resamplers[rate] = Resample(ratio.denominator, ratio.numerator)
        return self._resamplers[rate]
