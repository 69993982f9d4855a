"""Front ends of the kinds logmel and kaldi: frames of samples, their Fourier transform, mel bands and logarithms."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydfl.data.features.kaldi import KaldiFeatures
from raydfl.data.features.log_mel import LEAST_SQUARES, FeatureSettings

_LOWEST_HZ, _PRE_EMPHASIS = 20.0, 0.97
"""The defaults of torchaudio's Kaldi filter bank."""

larger: Callable[[int, int], int] = torch.sym_max
smaller: Callable[[int, int], int] = torch.sym_min
"""The larger and the smaller of two sizes, both free in an export."""


def take(x: Tensor, start: int, size: int) -> Tensor:
    """Return ``size`` entries of dimension 1 from ``start`` on, both free in an export."""
    return x.index_select(1, torch.arange(size) + start)


class Spectral(nn.Module):
    """Frames of samples, their Fourier transform, mel bands and logarithms."""

    window: Tensor
    bank: Tensor
    circle: Tensor
    portable = False
    """False: PyTorch's FFT, whose last digits feature caches have. True: a matrix product, which every ONNX runtime has."""

    def __init__(self, settings: FeatureSettings | KaldiFeatures, window: Tensor, bank: Tensor) -> None:
        """Store what differs between the kinds.

        Args:
            settings: of the features.
            window: float32 [window], the weight of each sample of a frame.
            bank: float32 [bins, bands], the weight of each bin in a band.
        """
        super().__init__()
        points, centred = settings.points, settings.centred
        self.points, self.hop, self.centred = points, settings.hop, centred
        self.around = settings.zeros_before
        self.width = points if centred or self.around else len(window)
        """Samples of a frame of the FFT, in which the window is."""
        self.before = points // 2 - self.around if centred else 0
        """Samples of frame t before sample ``t * hop``."""
        self.shortest = points // 2 + 1 if centred else len(window)
        """Samples that shorter recordings are filled up to with zeros."""
        angles = torch.arange(points, dtype=torch.float64) * (2 * torch.pi / points)
        circle = torch.stack([angles.cos(), angles.sin()]).float()
        for name, value in (("window", window), ("bank", bank), ("circle", circle)):
            self.register_buffer(name, value, persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        """Return logarithms of the bands of recordings."""
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
        # Frames of a short recording's zeros are computed too: the number of rows decides last digits of the product with the bank.
        return self.logarithms(filled.unfold(1, self.width, self.hop))[:, : self.count(size)]

    def count(self, samples: int) -> int:
        """Return how many frames a recording has, at least 1."""
        return (samples if self.centred else larger(samples - len(self.window), 0)) // self.hop + 1

    def positions(self, numbers: Tensor) -> Tensor:
        """Return the positions of the samples of some frames: int64 [frames, window]."""
        return numbers.unsqueeze(1) * self.hop + torch.arange(len(self.window))

    def places(self, positions: Tensor, last: int | Tensor) -> Tensor:
        """Return which samples of a recording are at some positions; centred frames are reflected at sample ``last``."""
        places = positions - self.before
        return last - (last - places.abs()).abs() if self.centred else places

    def sums(self, frames: Tensor, power: bool) -> Tensor:
        """Return sums of power, or of its root, in the bands of frames float32 [..., window]."""
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
        """Return logarithms float32 [..., bands] of frames float32 [..., window]."""
        raise NotImplementedError


class LogMel(Spectral):
    """The front end of the kind logmel."""

    def __init__(self, settings: FeatureSettings) -> None:
        from torchaudio.functional import melscale_fbanks

        bins, edges = settings.points // 2 + 1, (settings.low_hz, settings.highest_hz)
        bank = melscale_fbanks(bins, *edges, settings.bands, settings.sample_rate, mel_scale=settings.mel)
        super().__init__(settings, torch.hann_window(settings.window), bank)
        self.settings = settings

    def forward(self, samples: Tensor) -> Tensor:
        """Cut, fill with silence and scale recordings; return decibels or logarithms."""
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
    """The front end of the kind kaldi: ``torchaudio.compliance.kaldi.fbank``, scaled."""

    def __init__(self, settings: KaldiFeatures) -> None:
        from torchaudio.compliance.kaldi import get_mel_banks

        bank, _ = get_mel_banks(
            settings.bands, settings.points, settings.sample_rate, _LOWEST_HZ, 0.0, 100.0, -500.0, 1.0
        )
        super().__init__(settings, torch.hann_window(settings.window, periodic=False), F.pad(bank, (0, 1)).T)
        self.settings = settings

    def forward(self, samples: Tensor) -> Tensor:
        """Cut recordings, subtract their mean, fill or cut to the settings' frames and scale."""
        settings = self.settings
        if settings.samples is not None:
            samples = take(samples, 0, smaller(samples.shape[1], settings.samples))
        # NumPy's order of summation decided the last digits of features in caches.
        mean = samples.mean(1, True) if self.portable else torch.from_numpy(samples.numpy().mean(1, keepdims=True))
        features = super().forward(samples - mean)
        if settings.frames is None:
            return features
        silence = features.new_full((features.shape[0], settings.frames, settings.bands), settings.silence)
        return take(torch.cat([features, silence], 1), 0, settings.frames)

    def logarithms(self, frames: Tensor) -> Tensor:
        """Return natural logarithms, scaled, of frames without their mean and with pre-emphasis."""
        frames = frames - frames.mean(-1, keepdim=True)
        frames = frames - _PRE_EMPHASIS * torch.cat([frames[..., :1], frames[..., :-1]], -1)
        found = self.sums(frames, power=True).clamp_min(torch.finfo(torch.float32).eps).log()
        return (found - self.settings.mean) / (2 * self.settings.deviation)
