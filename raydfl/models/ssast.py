"""SSAST: a transformer on patches of the spectrogram, in the sizes tiny, small and base, as it is fine-tuned.

Y. Gong, C.-I. Lai, Y.-A. Chung, J. Glass, SSAST: Self-Supervised Audio Spectrogram Transformer, AAAI 2022.

The trunk is that of DeiT with distillation: 12 blocks, two tokens before the patches, a learnt position embedding.
``patches: patch`` are 16 x 16 with stride 10 in time and bands; ``frame`` are two frames of all bands with stride 1. An example's
embedding is the mean of the patch tokens after the last normalisation, without the two others; the head is a normalisation and a
linear layer.

A network may begin from the released files of pre-training (SSAST-{Tiny,Small,Base}-{Patch,Frame}-400.pth). Of these, the layers
of the pretext tasks, the mask and DeiT's heads are left out; the head keeps its initial values. The position embedding is fitted to
the clips as the release does it, first in time and then in bands: its middle is cut out where the clips have fewer patches, else it
is stretched (bilinear). Deviation: where bands are cut, as many are kept as the clips have; the release slices by the number in
time there. The names are those of the release's code; the files themselves were not at hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
        self.grid = (count[0], count[1])
        self.tokens = nn.Parameter(torch.zeros(1, TOKENS, embedding))
        self.pos_embed = nn.Parameter(torch.zeros(1, count[0] * count[1] + TOKENS, embedding))
        self.blocks = nn.Sequential(*(Block(embedding, heads) for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(embedding, eps=1e-6)
        self.head_norm = nn.LayerNorm(embedding)
        self.output = nn.Linear(embedding, classes)
        for table in (self.tokens, self.pos_embed):
            _draw_weights(table)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                _draw_weights(layer.weight)
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
        x = F.pad(x, (0, 0, 0, self.frames))[:, : self.frames]  # without a branch on the length, for torch.export
        patches = self.patch_embed(x.unsqueeze(1)).flatten(2).transpose(1, 2)
        sequence = torch.cat([self.tokens.expand(len(x), -1, -1), patches], dim=1) + self.pos_embed
        found: Tensor = self.head_norm(self.norm(self.blocks(sequence))[:, TOKENS:].mean(dim=1))
        return found

    def read_published(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Return the tensors of a file by this network's names, and patterns of those that the file never has.

        Args:
            tensors: of a file of the release, or of any other, which is returned as it is.

        Raises:
            ConfigError: it is a file of the release, of another variant or incomplete.
        """
        named = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
        if _PATCHES not in named:
            return dict(tensors), ()
        lacking = [name for name in _NEEDED if name not in named]
        if lacking:
            raise ConfigError(f"it lacks {lacking[0]!r}, which the files of SSAST's release have; fetch it again")
        patches, heads = named.pop(_PATCHES), [named.pop(name) for name in ("v.cls_token", "v.dist_token")]
        self._check_variant(patches)
        found = {
            "patch_embed.weight": patches.transpose(2, 3),
            "tokens": torch.cat(heads, dim=1),
            "pos_embed": self._fitted(named.pop("v.pos_embed"), patches, [int(named.pop(name)) for name in _SIZES]),
        }
        for name, tensor in named.items():
            if not name.startswith(_LEFT_OUT):
                own = name.removeprefix("v.").replace("patch_embed.proj.", "patch_embed.")
                found[own.replace(".attn.", ".").replace(".mlp.", ".")] = tensor
        return found, ("head_norm.*", "output.*")

    def _check_variant(self, patches: Tensor) -> None:
        """Refuse the weights of another size, or for patches of another shape.

        Args:
            patches: of the file, float32 [embedding, 1, bands, frames].
        """
        width, _, bands, frames = patches.shape
        own_width, _, own_frames, own_bands = self.patch_embed.weight.shape
        if width != own_width:
            raise ConfigError(
                f"its tokens have {width} numbers ({_named(width)}), the network's {own_width} ({_named(own_width)})"
            )
        if (bands, frames) != (own_bands, own_frames):
            raise ConfigError(
                f"its patches have {bands} bands and {frames} frames, the network's {own_bands} and {own_frames}; set patches="
                f"{'patch' if frames == PATCH else 'frame'}, and features of {max(bands, 128)} bands"
            )

    def _fitted(self, table: Tensor, patches: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the position embedding for this network's patches: float32 [1, tokens, embedding].

        Args:
            table: of the file, float32 [1, tokens, embedding], its patches by bands and then by frames.
            patches: of the file, float32 [embedding, 1, bands, frames].
            sizes: bands and frames of the clips that it was trained on; their patches do not overlap.
        """
        rows, columns = (size // side for size, side in zip(sizes, patches.shape[2:], strict=True))
        if table.shape[1] != TOKENS + rows * columns:
            raise ConfigError(
                f"its position embedding is for {table.shape[1] - TOKENS} patches, and clips of {sizes[0]} bands and {sizes[1]} "
                f"frames have {rows} x {columns}"
            )
        grid = table[:, TOKENS:].transpose(1, 2).reshape(1, -1, rows, columns)
        grid = _cut_or_stretched(_cut_or_stretched(grid, 3, self.grid[0]), 2, self.grid[1])
        return torch.cat([table[:, :TOKENS], grid.transpose(2, 3).flatten(2).transpose(1, 2)], dim=1)


_PATCHES = "v.patch_embed.proj.weight"
_SIZES = ("p_input_fdim", "p_input_tdim")
_NEEDED = ("v.cls_token", "v.dist_token", "v.pos_embed", *_SIZES)
_LEFT_OUT = ("mask_embed", "cpredlayer.", "gpredlayer.", "v.head.", "v.head_dist.")
"""Tensors of a file of the release that pre-training alone needs, and DeiT's heads for images."""


@torch.no_grad()
def _draw_weights(tensor: Tensor) -> None:
    """Draw initial weights from a normal distribution by its inverse."""
    # Not nn.init.trunc_normal_: it draws other numbers in PyTorch 2.14 than in 2.11, and one seed decides a run.
    tensor.uniform_(-1.0, 1.0).erfinv_().mul_(_SPREAD * math.sqrt(2.0)).clamp_(-2.0, 2.0)


def _named(width: int) -> str:
    return {192: "tiny", 384: "small", 768: "base"}.get(width, "no published size")


def _cut_or_stretched(grid: Tensor, axis: int, size: int) -> Tensor:
    """Return a grid float32 [1, embedding, rows, columns] with ``size`` rows or columns (the axis): its middle, or stretched."""
    there = grid.shape[axis]
    if size < there:
        return grid.narrow(axis, there // 2 - size // 2, size)
    shape = [size, grid.shape[3]] if axis == 2 else [grid.shape[2], size]
    return F.interpolate(grid, size=shape, mode="bilinear", align_corners=False)


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
