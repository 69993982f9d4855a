"""Log-mel features: a wave becomes a matrix of frames x bands.

The steps: select the channel, resample, trim silence and add noise if configured, cut to ``seconds``, compute a power spectrogram
with a periodic Hann window and centred frames, HTK mel bands without area normalisation, 10 log10 without a floor relative to the
maximum, and z-scores.

These settings are the front end of the FedAudio protocol (Zhang et al., "FedAudio: A Federated Learning Benchmark for Audio
Tasks", ICASSP 2023) and of FedMLAC's log-mel tables: ``sample_rate: 16000, window_ms: 64, fft: 1024, hop_ms: 10, bands: 128,
normalise: clip``.

Deviations from the protocol: a band's standard deviation divides by the number of frames. Clips shorter than half a window are
zero-padded instead of rejected.
"""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from raydfl.data.features.wave import Channel, Dtype, Normalise, SampleRate, WaveSettings

_LARGEST_FFT = 16_384
LARGEST_DENOMINATOR = 1_000
_TRIM_S = 0.02
"""Length of a block for trimming in seconds."""
LEAST_SQUARES = 1e-9
"""Lower limit of a wave's sum of squares in ``wave: unit_norm``, against division by 0."""


class FeatureSettings(WaveSettings):
    """Log-mel features, a matrix of frames x bands for each wave."""

    kind: Annotated[
        Literal["logmel"],
        Field(
            description="Kind of features. logmel: logarithm of mel bands. file: precomputed features. model: your own network. "
            "image: images. kaldi: Kaldi's filter bank. pretrained: a pretrained encoder. speech_embedding: a small pretrained "
            "encoder of words."
        ),
    ] = "logmel"
    sample_rate: SampleRate = 16_000
    bands: Annotated[int, Field(ge=1, le=512, description="Mel bands, 1 to 512.")] = 64
    window_ms: Annotated[float, Field(gt=0, le=500, description="Length of the Hann window in ms.")] = 25.0
    hop_ms: Annotated[float, Field(gt=0, le=500, description="Time between frames in ms.")] = 10.0
    fft: Annotated[
        int | None,
        Field(
            ge=2,
            le=_LARGEST_FFT,
            description="Points of the Fourier transform, at least the window's samples. null: the smallest power of two without "
            "empty mel bands.",
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
            description="Length of all clips in seconds, 1 + seconds / hop frames. Longer clips are cut, and shorter clips get "
            "zero frames after the normalisation. null: clips keep their lengths.",
        ),
    ] = None
    least_seconds: Annotated[
        float | None,
        Field(
            gt=0,
            le=3_600,
            description="Minimum length of clips in seconds. Shorter clips are padded with silence on both sides before unit_norm. "
            "The silent frames belong to the clip. null: no minimum.",
        ),
    ] = None
    trim_db: Annotated[
        float | None,
        Field(
            gt=0,
            le=200,
            description="Removal of silence at both ends: of blocks of 20 ms with a power more than this many dB below the loudest "
            "block's. Pauses inside stay. Noise of data.corrupt is added afterwards. null: no trimming.",
        ),
    ] = None
    channel: Channel = "first"
    wave: Annotated[
        Literal["as_is", "unit_norm"],
        Field(
            description="Scale of the wave. unit_norm: divide the cut wave by the root of its sum of squares, at least 1e-9. "
            "as_is: no scaling."
        ),
    ] = "as_is"
    centred: Annotated[
        bool,
        Field(
            description="Centre frame t at t * hop, with reflection at both ends of a clip. false: frames start at t * hop and "
            "stay within the clip, 1 + (samples - window) / hop frames."
        ),
    ] = True
    spectrum: Annotated[
        Literal["power", "magnitude"],
        Field(description="Spectrum in the mel bands. power: squared magnitude. magnitude: its root."),
    ] = "power"
    mel: Annotated[
        Literal["htk", "slaney"],
        Field(
            description="Formula of the mel scale. slaney: linear up to 1000 Hz. Triangles have height 1 in both formulas."
        ),
    ] = "htk"
    scale: Annotated[
        Literal["db", "log"],
        Field(
            description="Logarithm. db: decibels, 10 log10 of power or 20 log10 of magnitude. log: natural logarithm."
        ),
    ] = "db"
    floor: Annotated[
        float | None,
        Field(
            gt=0,
            description="Lower limit of a band's sum before the logarithm. null: 1e-10 for power, 1e-5 for magnitude.",
        ),
    ] = None
    normalise: Annotated[
        Normalise,
        Field(
            description="Frames for the z-scores of each band. clip: the clip's. group, client, part: those of all training clips "
            "of the group (speaker), client or part (data set). none: no z-scores."
        ),
    ] = "clip"
    dtype: Dtype = "float32"

    @model_validator(mode="after")
    def _consistent(self) -> FeatureSettings:
        if self.window < 2 or self.hop < 1:
            raise ValueError(
                f"window_ms {self.window_ms} and hop_ms {self.hop_ms} are {self.window} and {self.hop} samples at "
                f"{self.sample_rate} Hz. At least 2 and 1 are necessary"
            )
        if not self.low_hz < self.highest_hz <= self.sample_rate / 2:
            raise ValueError(
                f"low_hz {self.low_hz} must be below high_hz {self.highest_hz}, and high_hz at most half the sample rate, "
                f"{self.sample_rate / 2}"
            )
        if self.least_seconds is not None and self.seconds is not None and self.least_seconds > self.seconds:
            raise ValueError(
                f"least_seconds {self.least_seconds} is longer than seconds {self.seconds}, the length of cut clips. Lower it"
            )
        if self.fft is not None and self.fft < self.window:
            raise ValueError(
                f"fft {self.fft} is shorter than the window of {self.window} samples ({self.window_ms} ms). Raise it, or set null"
            )
        empty = _count_empty_bands(self, self.points)
        if empty:
            raise ValueError(
                f"{empty} of {self.bands} mel bands are empty with fft {self.points} at {self.sample_rate} Hz. "
                "Lower the number of bands, raise fft, or set fft to null"
            )
        return self

    @property
    def window(self) -> int:
        """Number of samples of the window."""
        return round(self.sample_rate * self.window_ms / 1000)

    @property
    def hop(self) -> int:
        """Number of samples between frames."""
        return round(self.sample_rate * self.hop_ms / 1000)

    @property
    def frame_seconds(self) -> float | None:
        """Time between frames, or None if frames are removed (``trim_db``)."""
        return self.hop / self.sample_rate if self.trim_db is None else None

    @property
    def highest_hz(self) -> float:
        """Upper edge of the highest band in Hz."""
        return self.sample_rate / 2 if self.high_hz is None else self.high_hz

    @property
    def points(self) -> int:
        """Number of points of the Fourier transform."""
        if self.fft is not None:
            return self.fft
        points = 1 << (self.window - 1).bit_length()
        while points < _LARGEST_FFT and _count_empty_bands(self, points):
            points *= 2
        return points

    @property
    def zeros_before(self) -> int:
        """Number of padding zeros before the window, which is centred in the Fourier transform."""
        return (self.points - self.window) // 2

    @property
    def least_samples(self) -> int:
        """Minimum number of samples of a wave, 0 for no minimum."""
        return 0 if self.least_seconds is None else max(1, round(self.least_seconds * self.sample_rate))

    @property
    def trim_block(self) -> int:
        """Number of samples of a block for trimming."""
        return max(1, round(_TRIM_S * self.sample_rate))

    @property
    def frames(self) -> int | None:
        """Number of frames of every clip, or None if clips keep their lengths."""
        return None if self.samples is None else self.frames_within(self.samples)

    def frames_within(self, samples: int) -> int:
        """Return the number of frames of a wave, at least 1."""
        return 1 + samples // self.hop if self.centred else max(1, 1 + (samples - self.window) // self.hop)

    @property
    def least(self) -> float:
        """Lower limit of a band's sum."""
        if self.floor is not None:
            return self.floor
        return 1e-10 if self.spectrum == "power" else 1e-5

    @property
    def log_power_factor(self) -> float:
        """Factor from the natural logarithm of a band's power (for magnitudes, of the squared sum) to the feature."""
        if self.scale == "db":
            return 10.0 / math.log(10.0)
        return 1.0 if self.spectrum == "power" else 0.5

    def key(self) -> dict[str, Any]:
        """Return all settings that affect the values, for the cache key."""
        values = self.model_dump() | {"fft": self.points, "high_hz": self.highest_hz, "floor": self.least}
        neutral = {**NEUTRAL, "floor": 1e-10}
        return {name: value for name, value in values.items() if name not in neutral or value != neutral[name]}


NEUTRAL: dict[str, Any] = {
    "least_seconds": None,
    "trim_db": None,
    "wave": "as_is",
    "centred": True,
    "spectrum": "power",
    "mel": "htk",
    "scale": "db",
    "floor": None,
}
"""Settings missing in earlier versions, with the values of these versions. Keys and digests omit them, to remain valid."""


@functools.lru_cache(maxsize=256)
def _count_empty(sample_rate: int, low_hz: float, high_hz: float, mel: str, bands: int, points: int) -> int:
    low, high = (_to_mel(hz, mel) for hz in (low_hz, high_hz))
    edges = _to_hz(np.linspace(low, high, bands + 2), mel)
    bins = np.linspace(0.0, sample_rate / 2, points // 2 + 1)
    first = np.searchsorted(bins, edges[:-2], side="right")  # The first bin inside the band.
    stop = np.searchsorted(bins, edges[2:], side="left")
    return int((stop <= first).sum())


def _count_empty_bands(settings: FeatureSettings, points: int) -> int:
    """Count the mel bands without a Fourier bin. Their features would be constant."""
    edges = settings.low_hz, settings.highest_hz, settings.mel
    return _count_empty(settings.sample_rate, *edges, settings.bands, points)


# Slaney's scale: 3 mel per 200 Hz up to 1000 Hz, and 27 mel per factor of 6.4 above.
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
