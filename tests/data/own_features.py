"""User-defined feature extractors, which test configurations name as ``own_features.py:LogMel`` and so on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.features.log_mel import FeatureSettings


class LogMel:
    """The built-in log-mel features of raydfl."""

    def __init__(self, **settings: Any) -> None:
        self._extractor = FeatureExtractor(FeatureSettings(**settings))

    def __call__(self, wave: Tensor) -> np.ndarray:
        return self._extractor.features(wave.numpy())


class Frames(nn.Module):
    """A linear layer over frames of 80 samples, with random or loaded weights, followed by dropout."""

    def __init__(self, weights: Path | None = None, scale: float = 1.0) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(80, 5), nn.Dropout(0.5)
        self.scale = scale
        if weights is not None:
            self.load_state_dict(torch.load(weights))

    def forward(self, wave: Tensor) -> Tensor:
        assert wave.dtype == torch.float32
        features: Tensor = self.dropout(self.layer(wave[: len(wave) // 80 * 80].reshape(-1, 80))) * self.scale
        return features


class Dithered(Frames):
    """:class:`Frames` with random noise added to the wave."""

    def forward(self, wave: Tensor) -> Tensor:
        return super().forward(wave + 0.01 * torch.randn(len(wave)))


class Returns:
    """An extractor that returns a wrong kind of features, chosen by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, wave: Tensor) -> Any:
        return {
            "list": [[1.0]],
            "vector": torch.zeros(5),
            "empty": torch.zeros(0, 5),
            "wide": torch.zeros(3, 7),
            "whole": torch.zeros(3, 5, dtype=torch.int64),
            "nan": torch.full((3, 5), torch.nan),
        }[self.kind]


class Fails:
    def __init__(self) -> None:
        raise OSError("no such checkpoint")


class NoCall:
    pass


def function(wave: Tensor) -> Tensor:
    return wave
