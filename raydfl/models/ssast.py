"""SSAST: a transformer on patches of the spectrogram, in the sizes tiny, small and base, as it is fine-tuned.

Y. Gong, C.-I. Lai, Y.-A. Chung, J. Glass, SSAST: Self-Supervised Audio Spectrogram Transformer, AAAI 2022.

The trunk is that of DeiT with distillation: 12 blocks, two tokens before the patches, a learnt position embedding.
``patches: patch`` are 16 x 16 with stride 10 in time and bands; ``frame`` are two frames of all bands with stride 1. An example's
embedding is the mean of the patch tokens after the last normalisation, without the two others; the head is a normalisation and a
linear layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from raydfl.core.errors import ConfigError

PATCH, STRIDE = 16, 10
"""Frames and bands of a patch, and between the beginnings of two."""
FRAMES_OF_A_FRAME = 2
DEPTH = 12
TOKENS = 2
"""Before the patches: DeiT's class token, and the one of distillation."""
_SPREAD = 0.02


class SSAST(nn.Module):
    """A transformer on patches of the spectrogram."""

    def __init__(
        self,
        inputs: int,
        classes: int,
        embedding: Annotated[int, Field(ge=1)] = 192,
        heads: Annotated[int, Field(ge=1)] = 3,
        patches: Literal["patch", "frame"] = "patch",
        frames: Annotated[int, Field(ge=PATCH)] = 512,
    ) -> None:
        """Build it.

        Args:
            inputs: bands of a frame; the published models have 128.
            classes: outputs.
            embedding: numbers of a token.
            heads: of the attention; they divide the embedding.
            patches: squares of 16 frames and bands, or two whole frames.
            frames: that are looked at; shorter clips are padded with zeros, longer ones cut.

        Raises:
            ConfigError: bands that hold no patch, or heads that do not divide the embedding.
        """
        super().__init__()
        if patches == "patch" and inputs < PATCH:
            raise ConfigError(
                f"features of {inputs} bands hold no patch of {PATCH} x {PATCH}; take 128, or patches=frame"
            )
        if embedding % heads:
            raise ConfigError(f"{heads} heads do not divide the embedding {embedding}; take 1, or a divisor")
        kernel, stride = (
            ((PATCH, PATCH), (STRIDE, STRIDE)) if patches == "patch" else ((FRAMES_OF_A_FRAME, inputs), (1, inputs))
        )
        self.frames = frames
        self.patch_embed = nn.Conv2d(1, embedding, kernel, stride)
        count = [(size - k) // s + 1 for size, k, s in zip((frames, inputs), kernel, stride, strict=True)]
        self.tokens = nn.Parameter(torch.zeros(1, TOKENS, embedding))
        self.pos_embed = nn.Parameter(torch.zeros(1, count[0] * count[1] + TOKENS, embedding))
        self.blocks = nn.Sequential(*(Block(embedding, heads) for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(embedding, eps=1e-6)
        self.head_norm = nn.LayerNorm(embedding)
        self.output = nn.Linear(embedding, classes)
        for table in (self.tokens, self.pos_embed):
            nn.init.trunc_normal_(table, std=_SPREAD)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=_SPREAD)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return logits float32 [batch, classes]; see :meth:`embed` for the arguments."""
        logits: Tensor = self.output(self.embed(x, lengths))
        return logits

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the normalised mean of the patch tokens: float32 [batch, embedding].

        Args:
            x: float32 [batch, frames, inputs].
            lengths: not needed: what is padding is 0 already, and is looked at as the zeros after a short clip are.
        """
        x = F.pad(x, (0, 0, 0, max(0, self.frames - x.shape[1])))[:, : self.frames]
        patches = self.patch_embed(x.unsqueeze(1)).flatten(2).transpose(1, 2)
        sequence = torch.cat([self.tokens.expand(len(x), -1, -1), patches], dim=1) + self.pos_embed
        found: Tensor = self.head_norm(self.norm(self.blocks(sequence))[:, TOKENS:].mean(dim=1))
        return found


class Block(nn.Module):
    """A block of the transformer: attention, then a hidden layer of four times the width, each beside a way past it."""

    def __init__(self, width: int, heads: int) -> None:
        """Build it for tokens of ``width`` numbers."""
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return new tokens for x float32 [batch, tokens, width]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.proj(seen)
        found: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return found


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {
    "ssast_tiny": (SSAST, {"embedding": 192, "heads": 3}),
    "ssast_small": (SSAST, {"embedding": 384, "heads": 6}),
    "ssast_base": (SSAST, {"embedding": 768, "heads": 12}),
}
