"""Front end: from samples to what a pretrained encoder takes, by the feature extractor of its folder."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from raydfl.core.pretrained.folder import EncoderFolder


class EncoderFrontEnd:
    """Makes what an encoder takes of one recording at a time.

    That is what the folder's feature extractor of transformers makes; but of spectra the frames that sound alone: the encoder's
    stem fills them up as the extractor does.
    """

    def __init__(self, folder: EncoderFolder, samples: int | None) -> None:
        """Take a folder's.

        Args:
            folder: of the encoder.
            samples: to which longer recordings are cut, and shorter ones filled where ``folder.fills``; ``None``: neither.
        """
        self._folder, self._samples = folder, samples

    def __call__(self, wave: np.ndarray) -> np.ndarray:
        """Compute float32 [frames, bands] of a wave (float32 [samples]) at the folder's rate; of samples [samples, 1]."""
        wave, folder = wave[: self._samples], self._folder
        if folder.takes_waves:
            found = self._samples_of(wave)
        else:
            made = folder.extractor(_at_least(wave, self._window), sampling_rate=folder.sample_rate)
            found = made["input_features"][0].T if folder.kind == "whisper" else made["input_values"][0]
            found = found[: self.frames(len(wave))]
        return np.ascontiguousarray(found, np.float32)

    def _samples_of(self, wave: np.ndarray) -> np.ndarray:
        """Return the samples, normalised if the folder says so: float32 [samples, 1]."""
        extractor, rate = self._folder.extractor, self._folder.sample_rate
        if self._folder.fills and self._samples is not None:
            made = extractor(wave, sampling_rate=rate, padding="max_length", max_length=self._samples, truncation=True)
        else:
            made = extractor(wave, sampling_rate=rate)
        return _at_least(np.asarray(made["input_values"][0]), self._window)[:, None]

    @property
    def _window(self) -> int:
        """The least samples of which something can be made."""
        settings = self._folder.settings
        if self._folder.kind == "whisper":
            return 1
        if not self._folder.takes_waves:
            return self._folder.sample_rate * 25 // 1000
        return least_samples(settings.conv_kernel, settings.conv_stride)

    def frames(self, samples: int) -> int:
        """Return how many frames are made of so many samples, which are cut already."""
        extractor, rate = self._folder.extractor, self._folder.sample_rate
        if self._folder.takes_waves:
            filled = self._samples if self._folder.fills and self._samples is not None else samples
            return max(self._window, filled)
        if self._folder.kind == "whisper":  # frame t is made of the samples around t * hop
            around = math.ceil((samples + extractor.n_fft // 2) / extractor.hop_length)
            return int(min(around, extractor.nb_max_frames))
        return min(1 + max(0, samples - self._window) // (rate // 100), int(extractor.max_length))


def least_samples(kernels: Sequence[int], strides: Sequence[int]) -> int:
    """Return the samples that convolutions one after another need for one frame."""
    found = 1
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        found = (found - 1) * stride + kernel
    return found


def _at_least(wave: np.ndarray, samples: int) -> np.ndarray:
    return np.pad(wave, (0, max(0, samples - len(wave))))
