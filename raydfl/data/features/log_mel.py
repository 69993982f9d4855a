"""Features of waves: a wave in, a matrix of frames x bands out, log-mel or what a network of one's own makes of it.

The log-mel front end of the FedAudio protocol (Zhang et al., "FedAudio: A Federated Learning Benchmark for Audio Tasks", ICASSP
2023), which FedMLAC's log-mel tables use, is expressible exactly: ``sample_rate: 16000, window_ms: 64, fft: 1024, hop_ms: 10,
bands: 128, normalise: clip``. Steps: choose the channel, resample, (add noise), cut to ``seconds``, power spectrogram with a
periodic Hann window and centred frames, HTK mel bands without area normalisation, 10 log10 without a floor relative to the
loudest, z-score.

Deviations from that protocol: a band's standard deviation is the population's (divides by the number of frames); clips shorter
than half a window are zero-padded for the transform instead of failing.
"""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from raydfl.core.settings import Settings
from raydfl.data.features.wave import Channel, Dtype, Normalise, SampleRate

_LARGEST_FFT = 16_384
LARGEST_DENOMINATOR = 1_000
LEAST_SQUARES = 1e-9
"""The least sum of squares by whose root a wave is divided (``wave: unit_norm``)."""


class FeatureSettings(Settings):
    """Log-mel features: a wave becomes a matrix of frames x bands."""

    kind: Annotated[
        Literal["logmel"],
        Field(
            description="logmel: log of the power in mel bands, in decibels. file: features that you made. model: a network of "
            "your own makes them. image: pictures."
        ),
    ] = "logmel"
    sample_rate: SampleRate = 16_000
    bands: Annotated[int, Field(ge=1, le=512, description="Mel bands of a frame. 1 to 512.")] = 64
    window_ms: Annotated[
        float, Field(gt=0, le=500, description="Length of the Hann window in ms. Above 0, to 500.")
    ] = 25.0
    hop_ms: Annotated[
        float, Field(gt=0, le=500, description="Time from one frame to the next in ms. Above 0, to 500.")
    ] = 10.0
    fft: Annotated[
        int | None,
        Field(
            ge=2,
            le=_LARGEST_FFT,
            description="Points of the Fourier transform, at least the window's samples. null: the least power of two with which "
            "no mel band is empty.",
        ),
    ] = None
    low_hz: Annotated[float, Field(ge=0, description="Lower edge of the lowest band in Hz.")] = 0.0
    high_hz: Annotated[
        float | None, Field(gt=0, description="Upper edge of the highest band in Hz. null: half the sample rate.")
    ] = None
    seconds: Annotated[
        float | None,
        Field(
            gt=0,
            le=3_600,
            description="Longer clips are cut at this length, shorter ones get frames of zeros at the end (after normalisation), "
            "so that all have 1 + seconds / hop frames. null: every clip keeps its length.",
        ),
    ] = None
    least_seconds: Annotated[
        float | None,
        Field(
            gt=0,
            le=3_600,
            description="Shorter clips get silence on both sides, equally much, up to this length, before unit_norm; its frames "
            "count. null: they stay short.",
        ),
    ] = None
    channel: Channel = "first"
    wave: Annotated[
        Literal["as_is", "unit_norm"],
        Field(
            description="unit_norm: a clip's samples, after seconds has cut it, are divided by the root of the sum of their "
            "squares (of at least 1e-9)."
        ),
    ] = "as_is"
    centred: Annotated[
        bool,
        Field(
            description="true: frame t is centred at t * hop, and clips are reflected at both ends. false: frame t begins there, "
            "1 + (samples - window) / hop frames, all within the clip."
        ),
    ] = True
    spectrum: Annotated[
        Literal["power", "magnitude"], Field(description="What mel bands add up: the power spectrum, or its root.")
    ] = "power"
    mel: Annotated[
        Literal["htk", "slaney"],
        Field(
            description="Formula of the mel scale. slaney: linear up to 1000 Hz. Triangles have the height 1 in both."
        ),
    ] = "htk"
    scale: Annotated[
        Literal["db", "log"],
        Field(description="db: decibels, 10 log10 of power and 20 log10 of magnitude. log: the natural logarithm."),
    ] = "db"
    floor: Annotated[
        float | None,
        Field(
            gt=0,
            description="Smaller sums of a band are taken for this before the logarithm. null: 1e-10 of power, 1e-5 of magnitude.",
        ),
    ] = None
    normalise: Annotated[
        Normalise,
        Field(
            description="z-score of each band over the frames of the clip, or over all frames of the training clips of its group "
            "(speaker), of its client, or of the whole part (data set), or none: decibels or logarithms."
        ),
    ] = "clip"
    dtype: Dtype = "float32"

    @model_validator(mode="after")
    def _consistent(self) -> FeatureSettings:
        if self.window < 2 or self.hop < 1:
            raise ValueError(
                f"window_ms {self.window_ms} and hop_ms {self.hop_ms} are {self.window} and {self.hop} samples at "
                f"{self.sample_rate} Hz; at least 2 and 1 are needed"
            )
        if not self.low_hz < self.highest_hz <= self.sample_rate / 2:
            raise ValueError(
                f"low_hz {self.low_hz} < high_hz {self.highest_hz} <= sample_rate / 2 = {self.sample_rate / 2} must hold"
            )
        if self.least_seconds is not None and self.seconds is not None and self.least_seconds > self.seconds:
            raise ValueError(
                f"least_seconds {self.least_seconds} is longer than seconds {self.seconds}, to which clips are cut before; take "
                f"at most that"
            )
        if self.fft is not None and self.fft < self.window:
            raise ValueError(
                f"fft {self.fft} is shorter than the window of {self.window} samples ({self.window_ms} ms)"
            )
        empty = _empty_bands(self, self.points)
        if empty:
            raise ValueError(
                f"{empty} of {self.bands} mel bands are empty with fft {self.points} at {self.sample_rate} Hz; "
                "take fewer bands, or a larger fft (null chooses it)"
            )
        return self

    @property
    def window(self) -> int:
        """Samples of the window."""
        return round(self.sample_rate * self.window_ms / 1000)

    @property
    def hop(self) -> int:
        """Samples from one frame to the next."""
        return round(self.sample_rate * self.hop_ms / 1000)

    @property
    def highest_hz(self) -> float:
        """Upper edge of the highest band in Hz."""
        return self.sample_rate / 2 if self.high_hz is None else self.high_hz

    @property
    def points(self) -> int:
        """Points of the Fourier transform."""
        if self.fft is not None:
            return self.fft
        points = 1 << (self.window - 1).bit_length()
        while points < _LARGEST_FFT and _empty_bands(self, points):
            points *= 2
        return points

    @property
    def zeros_before(self) -> int:
        """Zeros before the window, which is in the middle of the points of the Fourier transform."""
        return (self.points - self.window) // 2

    @property
    def samples(self) -> int | None:
        """Samples to which waves are cut; ``None`` when clips keep their length."""
        return None if self.seconds is None else max(1, round(self.seconds * self.sample_rate))

    @property
    def least_samples(self) -> int:
        """Samples that waves have at least, of silence where need be; 0 when clips stay short."""
        return 0 if self.least_seconds is None else max(1, round(self.least_seconds * self.sample_rate))

    @property
    def frames(self) -> int | None:
        """Frames that every clip has; ``None`` when clips keep their length."""
        return None if self.samples is None else self.frames_within(self.samples)

    def frames_within(self, samples: int) -> int:
        """Return how many frames a wave of so many samples has, at least 1."""
        return 1 + samples // self.hop if self.centred else max(1, 1 + (samples - self.window) // self.hop)

    @property
    def least(self) -> float:
        """The number that smaller sums of a band are taken for."""
        if self.floor is not None:
            return self.floor
        return 1e-10 if self.spectrum == "power" else 1e-5

    @property
    def of_log_power(self) -> float:
        """The factor from the natural logarithm of a band's power to the feature (of the squared sum, for magnitudes)."""
        if self.scale == "db":
            return 10.0 / math.log(10.0)
        return 1.0 if self.spectrum == "power" else 0.5

    def frames_of(self, seconds: np.ndarray) -> np.ndarray:
        """Return how many frames such clips take in the cache (to within the rounding of resampling): int64, as ``seconds``."""
        if self.frames is not None:
            return np.full(seconds.shape, self.frames, np.int64)
        samples = np.maximum(np.ceil(seconds * self.sample_rate).astype(np.int64), self.least_samples)
        frames: np.ndarray = np.maximum(1 + (samples if self.centred else samples - self.window) // self.hop, 1)
        return frames

    def key(self) -> dict[str, Any]:
        """Return all that decides the numbers, for the key of the cache."""
        values = self.model_dump() | {"fft": self.points, "high_hz": self.highest_hz, "floor": self.least}
        neutral = {**NEUTRAL, "floor": 1e-10}
        return {name: value for name, value in values.items() if name not in neutral or value != neutral[name]}


NEUTRAL: dict[str, Any] = {
    "least_seconds": None,
    "wave": "as_is",
    "centred": True,
    "spectrum": "power",
    "mel": "htk",
    "scale": "db",
    "floor": None,
}
"""Settings that earlier versions did not have, with the values at which features are theirs. Keys and digests leave those out."""


@functools.lru_cache(maxsize=256)
def _count_empty(sample_rate: int, low_hz: float, high_hz: float, mel: str, bands: int, points: int) -> int:
    low, high = (_to_mel(hz, mel) for hz in (low_hz, high_hz))
    edges = _to_hz(np.linspace(low, high, bands + 2), mel)
    bins = np.linspace(0.0, sample_rate / 2, points // 2 + 1)
    first = np.searchsorted(bins, edges[:-2], side="right")  # first bin inside the band
    stop = np.searchsorted(bins, edges[2:], side="left")
    return int((stop <= first).sum())


def _empty_bands(settings: FeatureSettings, points: int) -> int:
    """Count the mel bands without a Fourier bin: they would be constant, without information."""
    edges = settings.low_hz, settings.highest_hz, settings.mel
    return _count_empty(settings.sample_rate, *edges, settings.bands, points)


# Slaney's scale: 3 mel for each 200 Hz up to 1000 Hz, from there 27 for each factor of 6.4.
_LINEAR_TO_HZ, _HZ_OF_A_MEL, _MEL_OF_A_LOG = 1000.0, 200.0 / 3, 27.0 / math.log(6.4)


def _to_mel(hz: float, formula: str) -> float:
    if formula == "htk":
        return 2595.0 * math.log10(1.0 + hz / 700.0)
    if hz < _LINEAR_TO_HZ:
        return hz / _HZ_OF_A_MEL
    return _LINEAR_TO_HZ / _HZ_OF_A_MEL + math.log(hz / _LINEAR_TO_HZ) * _MEL_OF_A_LOG


def _to_hz(mel: np.ndarray, formula: str) -> np.ndarray:
    if formula == "htk":
        return np.asarray(700.0 * (10.0 ** (mel / 2595.0) - 1.0))
    beyond = np.maximum(mel - _LINEAR_TO_HZ / _HZ_OF_A_MEL, 0.0)
    return np.asarray(np.minimum(mel * _HZ_OF_A_MEL, _LINEAR_TO_HZ) * np.exp(beyond / _MEL_OF_A_LOG))
