"""Kaldi's filter bank, the front end of AST and SSAST.

It follows Y. Gong et al., SSAST: Self-Supervised Audio Spectrogram Transformer, AAAI 2022, and its release, with torchaudio's
``compliance.kaldi.fbank``. The steps: subtract the wave's mean, cut Kaldi's Hann windows of 25 ms every 10 ms within the clip,
without dither, subtract each window's mean, apply pre-emphasis of 0.97, compute the power spectrum, mel bands from 20 Hz to half
the sample rate, and the natural logarithm. Zeros pad short clips to ``frames``. Finally all frames are scaled,

    (x - mean) / (2 deviation)

by default with AudioSet's mean and deviation. Thus padded frames are -mean / (2 deviation), not 0.

Deviation: the wave's mean is computed over the cut wave of the selected channel.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from raydfl.data.features.wave import Channel, Dtype, SampleRate, Seconds, WaveSettings

WINDOW_MS, HOP_MS = 25, 10


class KaldiFeatures(WaveSettings):
    """Kaldi's filter bank, scaled by a common mean and deviation."""

    kind: Annotated[Literal["kaldi"], Field(description="kaldi: Kaldi's filter bank, for SSAST's published weights.")]
    sample_rate: SampleRate = 16_000
    bands: Annotated[int, Field(ge=4, le=512, description="Mel bands, 4 to 512.")] = 128
    seconds: Seconds = None
    frames: Annotated[
        int | None,
        Field(
            ge=1,
            le=100_000,
            description="Frames of every clip. Longer clips are cut, and shorter clips padded with zeros before the scaling. null: "
            "clips keep their lengths. 1 to 100000.",
        ),
    ] = None
    mean: Annotated[float, Field(description="Mean to subtract. The default is AudioSet's.")] = -4.2677393
    deviation: Annotated[
        float, Field(gt=0, description="Half the divisor after the subtraction. The default is AudioSet's.")
    ] = 4.5689974
    channel: Channel = "first"
    dtype: Dtype = "float32"

    normalise: ClassVar[Literal["none"]] = "none"
    centred: ClassVar[bool] = False
    zeros_before: ClassVar[int] = 0

    @property
    def window(self) -> int:
        """Number of samples of a window."""
        return self.sample_rate * WINDOW_MS // 1000

    @property
    def hop(self) -> int:
        """Number of samples between frames."""
        return self.sample_rate * HOP_MS // 1000

    @property
    def frame_seconds(self) -> float:
        """Time between frames."""
        return self.hop / self.sample_rate

    @property
    def points(self) -> int:
        """Number of points of the Fourier transform."""
        return 1 << (self.window - 1).bit_length()  # Kaldi rounds the window up to a power of two.

    @property
    def silence(self) -> float:
        """The value of padded frames."""
        return -self.mean / (2 * self.deviation)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of torchaudio's function, without the wave."""
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
