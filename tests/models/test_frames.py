"""Frames of networks: their pooling is the embedding, and they depend only on their example without its padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoders import WIDTH, needs_transformers, write_encoder
from torch import Tensor

from raydfl.core.ops import mean_over_time
from raydfl.core.types import ModelSpec
from raydfl.data.features import FeatureExtractor
from raydfl.data.features.kinds import make_features
from raydfl.models import build_model

BANDS = 16


def build(architecture: str, inputs: int = BANDS, **options: Any) -> Any:
    torch.manual_seed(0)
    return build_model(ModelSpec("model", architecture, inputs, 4, tuple(options.items()))).eval()


def make_batch(lengths: Tensor, inputs: int = BANDS) -> Tensor:
    x = torch.randn(len(lengths), int(lengths.max()), inputs, generator=torch.Generator().manual_seed(1))
    return x * (torch.arange(x.shape[1]) < lengths[:, None]).unsqueeze(2)


CRNNS = [("crnn_tiny", {}), ("crnn_base", {"hidden": 6, "filters": [4, 4]}), ("crnn", {"pool": 1, "hidden": 5})]


@pytest.mark.parametrize(("architecture", "options"), CRNNS)
@torch.no_grad()
def test_a_crnn_averages_its_frames(architecture: str, options: dict[str, Any]) -> None:
    network, lengths = build(architecture, **options), torch.tensor([40, 23, 9])
    x = make_batch(lengths)
    frames, count = network.frames(x, lengths)
    assert count.tolist() == [length // network.pool ** len(network.convolutions) for length in lengths.tolist()]
    assert torch.equal(mean_over_time(frames, count), network.embed(x, lengths))
    assert torch.equal(network.head(network.embed(x, lengths)), network(x, lengths))
    for row, length in enumerate(lengths.tolist()):
        alone, _ = network.frames(x[row : row + 1, :length])
        torch.testing.assert_close(frames[row, : count[row]], alone[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("patches", ["patch", "frame"])
@torch.no_grad()
def test_ssast_averages_its_frames_before_the_last_norm(patches: str) -> None:
    network = build("ssast_tiny", embedding=12, heads=2, patches=patches, frames=48)
    lengths = torch.tensor([48, 30, 3])
    x = make_batch(lengths)
    frames, count = network.frames(x, lengths)
    stride, kernel = (10, 16) if patches == "patch" else (1, 2)
    assert frames.shape == (3, (48 - kernel) // stride + 1, 12)
    assert count.tolist() == [max(1, (length - kernel) // stride + 1) for length in lengths.tolist()]
    torch.testing.assert_close(network.head_norm(frames.mean(dim=1)), network.embed(x), atol=1e-6, rtol=0)
    longer, _ = network.frames(torch.nn.functional.pad(x[1:2, :30], (0, 0, 0, 7)), lengths[1:2])
    torch.testing.assert_close(longer, frames[1:2], atol=1e-6, rtol=0)


@needs_transformers
@pytest.mark.parametrize("kind", ["wav2vec2", "hubert", "ast", "whisper"])
@torch.no_grad()
def test_encoders_have_frames(kind: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / kind, kind)
    waves = kind in ("wav2vec2", "hubert")
    inputs = 1 if waves else BANDS
    network = build("pretrained", inputs, folder=folder, pooling="mean")
    lengths = torch.tensor([400, 260] if waves else [40, 25])
    x = make_batch(lengths, inputs)
    frames, count = network.frames(x, lengths)
    tokens, expected = network.encoder(x, lengths)
    assert frames.shape[2] == WIDTH
    assert network.head(frames).shape == (*frames.shape[:2], 4)
    if kind == "ast":  # 2 bands of patches at (40 - 8) // 6 + 1 times, after two tokens
        assert frames.shape[1] == 6
        torch.testing.assert_close(frames[:, 2], (tokens[:, 2 + 2] + tokens[:, 2 + 6 + 2]) / 2)
    else:
        assert torch.equal(frames, tokens)
    if waves:
        assert count.tolist() == expected.tolist()
        torch.testing.assert_close(mean_over_time(frames, count), network.embed(x, lengths))
        alone, _ = network.frames(x[1:, :260])
        torch.testing.assert_close(frames[1, : count[1]], alone[0], atol=1e-5, rtol=0)
    else:
        assert count is None


@pytest.mark.parametrize(
    ("architecture", "options"), [*CRNNS, ("ssast_tiny", {"embedding": 12, "heads": 2, "frames": 400})]
)
@torch.no_grad()
def test_tokens_are_frames_per_token_apart(architecture: str, options: dict[str, Any]) -> None:
    network = build(architecture, **options)
    tokens = network.frames(torch.randn(1, 400, BANDS))[0].shape[1]
    assert 400 / network.frames_per_token - 2 < tokens <= 400 / network.frames_per_token


@needs_transformers
@pytest.mark.parametrize("after", [None, 1])
@pytest.mark.parametrize("kind", ["wav2vec2", "hubert", "ast", "whisper"])
@torch.no_grad()
def test_times_of_encoders_frames_and_tokens_are_known(kind: str, after: int | None, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / kind, kind)
    features: Any = make_features({"kind": "pretrained", "folder": str(folder), "after": after})
    if after is not None and kind in ("ast", "whisper"):
        assert features.frame_seconds is None  # all clips have the tokens of the encoder's length
        return
    x = FeatureExtractor(features)(np.random.default_rng(0).standard_normal(5600).astype(np.float32), 16_000)  # 0.35 s
    assert len(x) * features.frame_seconds == pytest.approx(0.35, abs=0.04)
    network = build("pretrained", x.shape[1], folder=folder, after=after, pooling="mean")
    tokens = network.frames(torch.from_numpy(x)[None], torch.tensor([len(x)]))[0].shape[1]
    padded = {"ast": 40, "whisper": 100}.get(kind, len(x))
    assert padded / network.frames_per_token - 3 < tokens <= padded / network.frames_per_token


@pytest.mark.parametrize("kind", ["logmel", "kaldi"])
def test_times_of_spectrograms_are_known(kind: str) -> None:
    features: Any = make_features({"kind": kind, "sample_rate": 16_000})
    x = FeatureExtractor(features)(np.random.default_rng(0).standard_normal(16_000).astype(np.float32), 16_000)
    assert len(x) * features.frame_seconds == pytest.approx(1.0, abs=0.03)
