"""Google's speech embedding: a small pretrained encoder of speech, from a package.

J. Lin, K. Kilgour, D. Roblek, M. Sharifi, Training Keyword Spotters with Limited and Synthesized Speech Data, ICASSP 2020. The
network (330,000 weights) was trained on 5,000 words and phrases in 200 million clips of 2 s. It maps 760 ms of sound to 96 values.
A small head on the values learns words from few clips, and recognises words of new speakers.

The package openwakeword (versions 0.1 to 0.4) contains the network and its mel spectrogram as ONNX files of 1.3 and 1.1 MB. Only
the two files are used, and their content is checked. The package and both networks have the Apache-2.0 licence. The package's
models of wake words (CC BY-NC-SA 4.0) are not used.

A clip gets 400 ms of silence on both sides, and a frame every 80 ms:

    mel     log-mel, 32 bands every 10 ms, / 10 + 2
    frame   (network(76 frames of mel) - 7.5) / 16

7.5 and 16 are mean and deviation of the network's values on the Free Spoken Digit Dataset, rounded. Heads then train with common
learning rates.
"""

from __future__ import annotations

import hashlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from raydfl.core.errors import ConfigError
from raydfl.data.features.wave import Channel, Dtype, Seconds, WaveSettings

_CONTENT = {
    "melspectrogram": "ba2b0e0f8b7b875369a2c89cb13360ff53bac436f2895cced9f479fa65eb176f",
    "embedding_model": "ba754db3cd768a524c655ea90655ee5e6055a43b8dfd29366a11e93716ae9e51",
}
"""SHA-256 of each file."""
_INSTALL = "Install it: pip install 'raydfl[embedding]'"


class SpeechEmbeddingFeatures(WaveSettings):
    """Google's speech embedding, 96 values every 80 ms."""

    kind: Annotated[
        Literal["speech_embedding"],
        Field(description="speech_embedding: Google's pretrained encoder of speech, in the package openwakeword."),
    ]
    seconds: Seconds = None
    channel: Channel = "first"
    dtype: Dtype = "float32"

    sample_rate: ClassVar[int] = 16_000
    bands: ClassVar[int] = 96
    frames: ClassVar[int | None] = None
    normalise: ClassVar[Literal["none"]] = "none"
    title: ClassVar[str] = "Google's speech embedding"
    padding: ClassVar[int] = 6_400
    """Samples of silence before and after a clip."""
    step: ClassVar[int] = 8
    """Frames of mel between two windows."""
    window: ClassVar[int] = 76
    """Frames of mel in a window."""
    hop: ClassVar[int] = 160
    """Samples between frames of mel."""
    mean: ClassVar[float] = 7.5
    deviation: ClassVar[float] = 16.0

    @property
    def frame_seconds(self) -> float:
        """Time between frames."""
        return self.step * self.hop / self.sample_rate

    def describe(self) -> dict[str, Any]:
        """Describe the computation for programs that use an exported model."""
        files = {f"openwakeword/resources/models/{name}.onnx": f"sha256 {digest}" for name, digest in _CONTENT.items()}
        mel = {"window": self.window, "step": self.step, "formula": "x / 10 + 2"}
        return {
            "files": files,
            "padding_samples": self.padding,
            "mel": mel,
            "mean": self.mean,
            "deviation": self.deviation,
        }


def cut_windows(mel: np.ndarray) -> np.ndarray:
    """Cut windows of 76 frames every 8 frames: float32 [windows, 76, 32, 1] from float32 [frames, 32]."""
    window, step = SpeechEmbeddingFeatures.window, SpeechEmbeddingFeatures.step
    windows = np.lib.stride_tricks.sliding_window_view(mel, window, axis=0)[::step]
    return np.ascontiguousarray(windows.transpose(0, 2, 1)[..., None], np.float32)


@cache
def find_networks() -> dict[str, Path]:
    """Find the files of the mel spectrogram and of the network in the package openwakeword, by name.

    Raises:
        ConfigError: The package is not installed, or it has other files.
    """
    package = importlib.util.find_spec("openwakeword")
    if package is None or not package.submodule_search_locations or importlib.util.find_spec("onnxruntime") is None:
        raise ConfigError(f"data.features: the kind speech_embedding needs the package openwakeword. {_INSTALL}")
    folder = Path(package.submodule_search_locations[0]) / "resources" / "models"
    files = {name: folder / f"{name}.onnx" for name in _CONTENT}
    for name, path in files.items():
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != _CONTENT[name]:
            raise ConfigError(
                f"data.features: {path} is missing or differs from the file of openwakeword 0.1 to 0.4. All runs use it. "
                f"{_INSTALL}"
            )
    return files
