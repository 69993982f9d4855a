"""Kaldi's filter bank, the front end of AST and SSAST: a wave in, a matrix of frames x bands out.

As in Y. Gong et al., SSAST: Self-Supervised Audio Spectrogram Transformer, AAAI 2022, and its release: the wave without its mean;
windows of 25 ms (Hann, as Kaldi has it) every 10 ms, all within the clip, without dither; each without its mean, and with
pre-emphasis of 0.97; the power spectrum; mel bands from 20 Hz to half the sample rate; the natural logarithm. The filter bank is
torchaudio's ``compliance.kaldi.fbank``. Zeros fill short clips up to ``frames``, and then

    (x - mean) / (2 deviation)

with mean and deviation of AudioSet by default. So the frames that fill a clip are -mean / (2 deviation), and not 0.

Deviation: the mean of the wave is that of the ``seconds`` that are kept, of the channel that is taken.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from raydfl.core.settings import Settings
from raydfl.data.features.wave import Channel, Dtype, SampleRate

WINDOW_MS, HOP_MS = 25, 10


class KaldiFeatures(Settings):
    """Kaldi's filter bank, scaled by one mean and deviation."""

    kind: Annotated[
        Literal["kaldi"], Field(description="kaldi: Kaldi's filter bank, as SSAST's published weights need it.")
    ]
    sample_rate: SampleRate = 16_000
    bands: Annotated[int, Field(ge=4, le=512, description="Mel bands of a frame. 4 to 512.")] = 128
    seconds: Annotated[
        float | None,
        Field(
            gt=0,
            le=3_600,
            description="Longer clips are cut at this length before. null: none is. Above 0, to 3600.",
        ),
    ] = None
    frames: Annotated[
        int | None,
        Field(
            ge=1,
            le=100_000,
            description="Longer clips are cut to this number of frames, shorter ones are filled with zeros, scaled as all "
            "frames are. null: every clip keeps its length. 1 to 100000.",
        ),
    ] = None
    mean: Annotated[float, Field(description="It is subtracted; the default is AudioSet's.")] = -4.2677393
    deviation: Annotated[
        float, Field(gt=0, description="What is left is divided by twice this; the default is AudioSet's.")
    ] = 4.5689974
    channel: Channel = "first"
    dtype: Dtype = "float32"

    normalise: ClassVar[Literal["none"]] = "none"
    centred: ClassVar[bool] = False
    zeros_before: ClassVar[int] = 0

    @property
    def samples(self) -> int | None:
        """Samples to which waves are cut; ``None`` when clips keep their length."""
        return None if self.seconds is None else max(1, round(self.seconds * self.sample_rate))

    @property
    def window(self) -> int:
        """Samples of a window."""
        return self.sample_rate * WINDOW_MS // 1000

    @property
    def hop(self) -> int:
        """Samples from one frame to the next."""
        return self.sample_rate * HOP_MS // 1000

    @property
    def points(self) -> int:
        """Points of the Fourier transform."""
        return 1 << (self.window - 1).bit_length()

    @property
    def silence(self) -> float:
        """The number of which the frames consist that fill a short clip."""
        return -self.mean / (2 * self.deviation)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the function of torchaudio, beside the wave."""
        return {
            "htk_compat": True,
            "sample_frequency": self.sample_rate,
            "use_energy": False,
            "window_type": "hanning",
            "num_mel_bins": self.bands,
            "dither": 0.0,
            "frame_length": WINDOW_MS,
            "frame_shift": HOP_MS,
        }

    def frames_of(self, seconds: np.ndarray) -> np.ndarray:
        """Return how many frames clips take in the cache (to within the rounding of resampling): int64, as ``seconds``."""
        if self.frames is not None:
            return np.full(seconds.shape, self.frames, np.int64)
        samples = np.ceil(seconds * self.sample_rate).astype(np.int64)
        frames: np.ndarray = np.maximum(1 + (samples - self.window) // self.hop, 1)
        return frames

    def key(self) -> dict[str, Any]:
        """Return all that decides the numbers, for the key of the cache."""
        return self.model_dump(mode="json")
