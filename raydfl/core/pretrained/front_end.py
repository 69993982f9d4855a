"""Front end of a pretrained encoder: computes its inputs from samples with the folder's feature extractor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from raydfl.core.pretrained.folder import EncoderFolder


class EncoderFrontEnd:
    """Computes an encoder's inputs from a recording, with the feature extractor of transformers.

    Spectrograms have no padding: the encoder's stem pads them like the extractor.
    """

    def __init__(self, folder: EncoderFolder, samples: int | None) -> None:
        """Create the front end.

        Args:
            folder: the encoder's folder.
            samples: maximum length. Longer recordings are cut, and if ``folder.fills``, shorter recordings are padded. ``None``:
                neither.
        """
        self._folder, self._samples = folder, samples

    def __call__(self, wave: np.ndarray) -> np.ndarray:
        """Compute the encoder's input.

        Args:
            wave: float32 [samples] at the folder's sample rate.

        Returns:
            float32 [frames, bands], or [samples, 1] for encoders of samples.
        """
        wave, folder = wave[: self._samples], self._folder
        if folder.takes_waves:
            features = self._extract_samples(wave)
        else:
            outputs = folder.extractor(_pad(wave, self._window), sampling_rate=folder.sample_rate)
            features = outputs["input_features"][0].T if folder.kind == "whisper" else outputs["input_values"][0]
            features = features[: self.frames(len(wave))]
        return np.ascontiguousarray(features, np.float32)

    def _extract_samples(self, wave: np.ndarray) -> np.ndarray:
        """Return the samples, normalised if the folder's settings require it: float32 [samples, 1]."""
        extractor, rate = self._folder.extractor, self._folder.sample_rate
        if self._folder.fills and self._samples is not None:
            outputs = extractor(
                wave, sampling_rate=rate, padding="max_length", max_length=self._samples, truncation=True
            )
        else:
            outputs = extractor(wave, sampling_rate=rate)
        return _pad(np.asarray(outputs["input_values"][0]), self._window)[:, None]

    @property
    def _window(self) -> int:
        """Minimum number of samples in a recording."""
        settings = self._folder.settings
        if self._folder.kind == "whisper":
            return 1
        if not self._folder.takes_waves:
            return self._folder.sample_rate * 25 // 1000
        return least_samples(settings.conv_kernel, settings.conv_stride)

    def frames(self, samples: int) -> int:
        """Return the number of frames for a number of samples, after cutting to the maximum length."""
        extractor, rate = self._folder.extractor, self._folder.sample_rate
        if self._folder.takes_waves:
            size = self._samples if self._folder.fills and self._samples is not None else samples
            return max(self._window, size)
        if self._folder.kind == "whisper":  # the window of frame t is centred at sample t * hop
            frames = math.ceil((samples + extractor.n_fft // 2) / extractor.hop_length)
            return int(min(frames, extractor.nb_max_frames))
        return min(1 + max(0, samples - self._window) // (rate // 100), int(extractor.max_length))


def least_samples(kernels: Sequence[int], strides: Sequence[int]) -> int:
    """Return the receptive field of consecutive convolutions, in samples."""
    size = 1
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        size = (size - 1) * stride + kernel
    return size


def _pad(wave: np.ndarray, samples: int) -> np.ndarray:
    return np.pad(wave, (0, max(0, samples - len(wave))))
