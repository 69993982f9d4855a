"""Features of a wave."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from raydfl.core.errors import DataError
from raydfl.data.features.kaldi import KaldiFeatures
from raydfl.data.features.log_mel import LARGEST_DENOMINATOR, FeatureSettings
from raydfl.data.features.model import ModelFeatures
from raydfl.data.features.pretrained import PretrainedFeatures
from raydfl.data.features.wave import z_scored

if TYPE_CHECKING:
    from torch import nn

WaveFeatures = FeatureSettings | ModelFeatures | KaldiFeatures | PretrainedFeatures
"""The kinds that are computed of waves."""


class FeatureExtractor:
    """Computes the features of one clip at a time; keeps the transforms that it built.

    Runs on one thread per call only if the caller has set torch to one: the cache does, for speed and for equal bits everywhere.

    Raises:
        ConfigError: the model or encoder that the settings name cannot be built.
    """

    def __init__(self, settings: WaveFeatures) -> None:
        from raydfl.data.features.front_ends import FRONT_ENDS  # PyTorch takes seconds to import

        self.settings = settings
        self.front_end = FRONT_ENDS[type(settings)](settings)
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
        import torch

        samples = np.array(wave[: self.settings.samples], np.float32)[None]
        with torch.no_grad():
            matrix: np.ndarray = self.front_end(torch.from_numpy(samples))[0].numpy()
        return np.ascontiguousarray(z_scored(matrix) if self.settings.normalise == "clip" else matrix)

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
