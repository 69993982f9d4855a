"""Front ends of the kinds logmel and kaldi: frames, Fourier transform, mel bands and logarithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydfl.data.features.kaldi import KaldiFeatures
from raydfl.data.features.log_mel import LEAST_SQUARES, FeatureSettings

_LOWEST_HZ, _PRE_EMPHASIS = 20.0, 0.97
"""Defaults of torchaudio's Kaldi filter bank."""

larger = cast(Callable[[int, int], int], torch.sym_max)
smaller = cast(Callable[[int, int], int], torch.sym_min)
"""The maximum and the minimum of two sizes, both dynamic in an export."""


def take(x: Tensor, start: int, size: int) -> Tensor:
    """Return ``size`` entries of dimension 1, starting at ``start``, both dynamic in an export."""
    return x.index_select(1, torch.arange(size) + start)


class Spectral(nn.Module):
    """Base class of both kinds: frames, Fourier transform, mel bands and logarithm."""

    window: Tensor
    bank: Tensor
    circle: Tensor
    portable = False
    """Use a matrix product, available in every ONNX runtime. False: PyTorch's FFT, with the last digits of feature caches."""

    def __init__(self, settings: FeatureSettings | KaldiFeatures, window: Tensor, bank: Tensor) -> None:
        """Initialise the front end.

        Args:
            settings: The features' settings.
            window: Weight of each sample of a frame, float32 [window].
            bank: Weight of each bin in a band, float32 [bins, bands].
        """
        super().__init__()
        points, centred = settings.points, settings.centred
        self.points, self.hop, self.centred = points, settings.hop, centred
        self.around = settings.zeros_before
        self.width = points if centred or self.around else len(window)
        """Number of samples of an FFT frame, with the window inside."""
        self.before = points // 2 - self.around if centred else 0
        """Number of samples of frame t before sample ``t * hop``."""
        self.shortest = points // 2 + 1 if centred else len(window)
        """Minimum number of samples. Shorter recordings are padded with zeros."""
        angles = torch.arange(points, dtype=torch.float64) * (2 * torch.pi / points)
        circle = torch.stack([angles.cos(), angles.sin()]).float()
        for name, value in (("window", window), ("bank", bank), ("circle", circle)):
            self.register_buffer(name, value, persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        """Return the logarithms of recordings' mel bands."""
        size, window, middle = samples.shape[1], len(self.window), self.points // 2
        if self.portable:
            filled = torch.cat([samples, samples.new_zeros(samples.shape[0], self.shortest)], dim=1)
            count = self.count(size)
            places = self.places(self.positions(torch.arange(count)), larger(size, self.shortest) - 1)
            return self.logarithms(filled.index_select(1, places.flatten()).reshape(samples.shape[0], count, window))
        filled = F.pad(samples, (0, max(0, self.shortest - size)))
        if self.centred:
            filled = F.pad(filled, (middle, middle), mode="reflect")
        else:
            filled = F.pad(filled, (self.around, self.width - window - self.around))
        # Padded frames are computed too, because the number of rows affects the last digits of the product with the bank.
        return self.logarithms(filled.unfold(1, self.width, self.hop))[:, : self.count(size)]

    def count(self, samples: int) -> int:
        """Return the number of frames of a recording, at least 1."""
        return (samples if self.centred else larger(samples - len(self.window), 0)) // self.hop + 1

    def positions(self, numbers: Tensor) -> Tensor:
        """Return the positions of frames' samples, int64 [frames, window], for frame numbers int64 [frames]."""
        return numbers.unsqueeze(1) * self.hop + torch.arange(len(self.window))

    def places(self, positions: Tensor, last: int | Tensor) -> Tensor:
        """Return the recording's sample at each position. Centred frames are reflected at sample ``last``."""
        places = positions - self.before
        return last - (last - places.abs()).abs() if self.centred else places

    def sums(self, frames: Tensor, power: bool) -> Tensor:
        """Return sums of power, or of its root, in the mel bands of frames, float32 [..., window]."""
        if self.portable:
            frames = frames * self.window
            turns = torch.arange(len(self.window)).unsqueeze(1) * torch.arange(len(self.bank)) % self.points
            squares = (frames @ self.circle[0][turns]).square() + (frames @ self.circle[1][turns]).square()
            return (squares if power else squares.sqrt()) @ self.bank
        window = F.pad(self.window, (self.around, self.width - len(self.window) - self.around))
        bins = torch.fft.rfft(frames * window, self.points).abs()
        sums: Tensor = (bins.pow(2.0) if power else bins) @ self.bank
        return sums

    def logarithms(self, frames: Tensor) -> Tensor:
        """Return logarithms, float32 [..., bands], of frames, float32 [..., window]."""
        raise NotImplementedError


class LogMel(Spectral):
    """Front end for log-mel features."""

    def __init__(self, settings: FeatureSettings) -> None:
        from torchaudio.functional import melscale_fbanks

        bins, edges = settings.points // 2 + 1, (settings.low_hz, settings.highest_hz)
        bank = melscale_fbanks(bins, *edges, settings.bands, settings.sample_rate, mel_scale=settings.mel)
        super().__init__(settings, torch.hann_window(settings.window), bank)
        self.settings = settings

    def forward(self, samples: Tensor) -> Tensor:
        """Compute the log-mel features of recordings, after cutting, padding and scaling them."""
        settings, least = self.settings, self.settings.least_samples
        if settings.samples is not None:
            samples = take(samples, 0, smaller(samples.shape[1], settings.samples))
        if least:
            size, silence = samples.shape[1], samples.new_zeros(samples.shape[0], least)
            before = larger(least - size, 0) // 2
            samples = take(torch.cat([silence, samples, silence], 1), least - before, larger(size, least))
        if settings.wave == "unit_norm":
            samples = samples / samples.double().square().sum(1, keepdim=True).clamp_min(LEAST_SQUARES).sqrt().float()
        return super().forward(samples)

    def logarithms(self, frames: Tensor) -> Tensor:
        """Return decibels or natural logarithms."""
        settings, power = self.settings, self.settings.spectrum == "power"
        sums = self.sums(frames, power).clamp_min(settings.least)
        return sums.log10() * (10.0 if power else 20.0) if settings.scale == "db" else sums.log()


class FilterBank(Spectral):
    """Front end for Kaldi's filter bank, a scaled ``torchaudio.compliance.kaldi.fbank``."""

    def __init__(self, settings: KaldiFeatures) -> None:
        from torchaudio.compliance.kaldi import get_mel_banks

        bank, _ = get_mel_banks(
            settings.bands, settings.points, settings.sample_rate, _LOWEST_HZ, 0.0, 100.0, -500.0, 1.0
        )
        super().__init__(settings, torch.hann_window(settings.window, periodic=False), F.pad(bank, (0, 1)).T)
        self.settings = settings

    def forward(self, samples: Tensor) -> Tensor:
        """Compute scaled filter bank features of recordings without their mean, padded or cut to the configured frames."""
        settings = self.settings
        if settings.samples is not None:
            samples = take(samples, 0, smaller(samples.shape[1], settings.samples))
        # NumPy's order of summation determined the last digits of cached features.
        mean = samples.mean(1, True) if self.portable else torch.from_numpy(samples.numpy().mean(1, keepdims=True))
        features = super().forward(samples - mean)
        if settings.frames is None:
            return features
        silence = features.new_full((features.shape[0], settings.frames, settings.bands), settings.silence)
        return take(torch.cat([features, silence], 1), 0, settings.frames)

    def logarithms(self, frames: Tensor) -> Tensor:
        """Return scaled natural logarithms of frames, after mean subtraction and pre-emphasis."""
        frames = frames - frames.mean(-1, keepdim=True)
        frames = frames - _PRE_EMPHASIS * torch.cat([frames[..., :1], frames[..., :-1]], -1)
        logarithms = self.sums(frames, power=True).clamp_min(torch.finfo(torch.float32).eps).log()
        return (logarithms - self.settings.mean) / (2 * self.settings.deviation)
