"""The front end of the speech embedding in an exported graph: mel spectrogram in PyTorch, network from its ONNX file."""

from __future__ import annotations

from typing import Any

import onnx
import torch
import torch.nn.functional as F
from onnx import numpy_helper, version_converter
from torch import Tensor, nn

from raydfl.data.features import SpeechEmbeddingFeatures, find_networks
from raydfl.data.features.front_ends import smaller, take

NAME = "Embedding"
"""Name of the placeholder node for the network."""
_QUIET = 80.0
"""Range of a recording's mel spectrogram in dB. Lower values are raised."""


class TraceableEmbedding(nn.Module):
    """Traceable form of the front end, with a placeholder for the network.

    The package's graph of the mel spectrogram takes a single recording, because the maximum of all its inputs limits the range.

    Raises:
        ConfigError: The package openwakeword is not installed, or it has other files.
    """

    real: Tensor
    imaginary: Tensor
    bank: Tensor

    def __init__(self, settings: SpeechEmbeddingFeatures) -> None:
        super().__init__()
        self.settings = settings
        tensors = {entry.name: entry for entry in onnx.load(find_networks()["melspectrogram"]).graph.initializer}
        for name, key in (
            ("real", "0.stft.conv_real.weight"),
            ("imaginary", "0.stft.conv_imag.weight"),
            ("bank", "1.melW"),
        ):
            self.register_buffer(name, torch.from_numpy(numpy_helper.to_array(tensors[key]).copy()), persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        """Return the frames of recordings, float32 [batch, frames, 96]."""
        mel, window, step = self.compute_mel(samples) / 10 + 2, self.settings.window, self.settings.step
        count = (mel.shape[1] - window) // step + 1
        places = (torch.arange(count) * step).unsqueeze(1) + torch.arange(window)
        windows = mel.index_select(1, places.flatten()).reshape(-1, window, mel.shape[2], 1)
        shape = (windows.shape[0], 1, 1, 96)
        values = torch.onnx.ops.symbolic(f"raydfl::{NAME}", (windows,), dtype=mel.dtype, shape=shape, version=1)
        return (values.reshape(mel.shape[0], count, 96) - self.settings.mean) / self.settings.deviation

    def compute_mel(self, samples: Tensor) -> Tensor:
        """Compute mel spectrograms in dB, float32 [batch, frames, 32]."""
        if self.settings.samples is not None:
            samples = take(samples, 0, smaller(samples.shape[1], self.settings.samples))
        silence = samples.new_zeros(samples.shape[0], self.settings.padding)
        wave = torch.cat([silence, samples, silence], 1).unsqueeze(1) * 32_767.0
        hop = self.settings.hop
        power = F.conv1d(wave, self.real, stride=hop).square() + F.conv1d(wave, self.imaginary, stride=hop).square()
        decibels = (power.transpose(1, 2) @ self.bank).clamp_min(1e-10).log() * 10 / 2.3025851
        return torch.maximum(decibels, decibels.amax((1, 2), keepdim=True) - _QUIET)


def read_embedding(opset: int) -> Any:
    """Read the network as an ONNX model with the given version of the operators."""
    return version_converter.convert_version(onnx.load(find_networks()["embedding_model"]), opset)
