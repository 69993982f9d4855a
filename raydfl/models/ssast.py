"""SSAST: a transformer on spectrogram patches for fine-tuning, in the sizes tiny, small and base.

Y. Gong, C.-I. Lai, Y.-A. Chung, J. Glass, SSAST: Self-Supervised Audio Spectrogram Transformer, AAAI 2022.

The backbone is DeiT with distillation: 12 blocks, two tokens before the patches, and a learnt position embedding. With
``patches: patch`` a patch is 16 x 16 with stride 10 in time and frequency. With ``frame`` it is two frames of all bands with
stride 1. The embedding of an example is the mean of its patch tokens after the last normalisation. The head is a normalisation
and a linear layer.

A network can start from the released pre-trained files (SSAST-{Tiny,Small,Base}-{Patch,Frame}-400.pth). The layers of the
pretext tasks, the mask and DeiT's heads are ignored, and the head keeps its initial values. The position embedding is adapted
to the clips as in the release, first in time and then in bands. Its centre is cropped if the clips have fewer patches, or it
is interpolated (bilinear) if they have more. Deviation: cropping bands keeps the number of bands of the clips, where the
release uses the number in time. Names follow the code of the release. The files themselves were not available for tests.
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
"""Size and stride of a square patch, in frames and bands."""
FRAMES_OF_A_FRAME = 2
DEPTH = 12
TOKENS = 2
"""Tokens before the patches: DeiT's class and distillation tokens."""
_SPREAD = 0.02


class SSAST(nn.Module):
    """Transformer on patches of the spectrogram."""

    def __init__(
        self,
        inputs: int,
        classes: int,
        embedding: Annotated[int, Field(ge=1)] = 192,
        heads: Annotated[int, Field(ge=1)] = 3,
        patches: Literal["patch", "frame"] = "patch",
        frames: Annotated[int, Field(ge=PATCH)] = 512,
    ) -> None:
        """Initialise the network.

        Args:
            inputs: bands of a frame. The published models have 128.
            classes: number of outputs.
            embedding: dimension of a token.
            heads: attention heads, a divisor of ``embedding``.
            patches: squares of 16 frames and bands, or two whole frames.
            frames: number of frames used. Shorter clips are padded with zeros, longer clips are cut.

        Raises:
            ConfigError: the bands are too few for a patch, or ``heads`` does not divide ``embedding``.
        """
        super().__init__()
        if patches == "patch" and inputs < PATCH:
            raise ConfigError(
                f"features of {inputs} bands are too small for a patch of {PATCH} x {PATCH}. Use 128 bands, or patches=frame."
            )
        if embedding % heads:
            raise ConfigError(f"heads is {heads}, which does not divide the embedding {embedding}. Use a divisor.")
        kernel, stride = (
            ((PATCH, PATCH), (STRIDE, STRIDE)) if patches == "patch" else ((FRAMES_OF_A_FRAME, inputs), (1, inputs))
        )
        self.length = frames
        self.frames_per_token = stride[0]
        """Number of frames from a token to the next."""
        self.patch_embed = nn.Conv2d(1, embedding, kernel, stride)
        count = [(size - k) // s + 1 for size, k, s in zip((frames, inputs), kernel, stride, strict=True)]
        self.grid = (count[0], count[1])
        self.tokens = nn.Parameter(torch.zeros(1, TOKENS, embedding))
        self.pos_embed = nn.Parameter(torch.zeros(1, count[0] * count[1] + TOKENS, embedding))
        self.blocks = nn.Sequential(*(TransformerBlock(embedding, heads) for _ in range(DEPTH)))
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
        """Compute logits float32 [batch, classes] from the arguments of :meth:`embed`."""
        logits: Tensor = self.output(self.embed(x, lengths))
        return logits

    def head(self, frames: Tensor) -> Tensor:
        """Compute logits float32 [..., classes] from frames float32 [..., embedding]."""
        logits: Tensor = self.output(self.head_norm(frames))
        return logits

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute the normalised mean of the patch tokens: float32 [batch, embedding].

        Args:
            x: float32 [batch, frames, inputs].
            lengths: ignored. Padding is 0, like the zeros after a short clip.
        """
        embedding: Tensor = self.head_norm(self._compute_patches(x).mean(dim=1))
        return embedding

    def frames(self, x: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Average the patch tokens over the bands.

        Args:
            x: float32 [batch, frames, inputs].
            lengths: int64 [batch], number of valid frames. ``None``: all.

        Returns:
            float32 [batch, tokens, embedding], and the number of tokens whose patch is within the valid frames, at least 1: int64
            [batch].
        """
        kernel, stride = self.patch_embed.kernel_size[0], self.patch_embed.stride[0]
        counts = torch.full_like(x[:, 0, 0], x.shape[1], dtype=torch.int64) if lengths is None else lengths
        valid = torch.div(counts - kernel, stride, rounding_mode="floor") + 1
        patches = self._compute_patches(x)
        return patches.reshape(x.shape[0], *self.grid, -1).mean(dim=2), valid.clamp(1, self.grid[0])

    def _compute_patches(self, x: Tensor) -> Tensor:
        """Compute the patch tokens after the last block, first in time and then in bands: float32 [batch, patches, embedding]."""
        x = F.pad(x, (0, 0, 0, self.length))[:, : self.length]  # no branch on the length, for torch.export
        patches = self.patch_embed(x.unsqueeze(1)).flatten(2).transpose(1, 2)
        sequence = torch.cat([self.tokens.expand(len(x), -1, -1), patches], dim=1) + self.pos_embed
        tokens: Tensor = self.norm(self.blocks(sequence))[:, TOKENS:]
        return tokens

    def read_published(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Translate the tensors of a released file to this network's names.

        Args:
            tensors: tensors of a file. Files that are not from the release are returned unchanged.

        Returns:
            The tensors, and patterns of names that released files never contain.

        Raises:
            ConfigError: the file is from the release, but incomplete or of another variant.
        """
        named = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
        if _PATCHES not in named:
            return dict(tensors), ()
        missing = [name for name in _NEEDED if name not in named]
        if missing:
            raise ConfigError(f"the released file lacks {missing[0]!r}. Download it again.")
        patches, heads = named.pop(_PATCHES), [named.pop(name) for name in ("v.cls_token", "v.dist_token")]
        self._check_variant(patches)
        translated = {
            "patch_embed.weight": patches.transpose(2, 3),
            "tokens": torch.cat(heads, dim=1),
            "pos_embed": self._fit_positions(
                named.pop("v.pos_embed"), patches, [int(named.pop(name)) for name in _SIZES]
            ),
        }
        for name, tensor in named.items():
            if not name.startswith(_IGNORED):
                renamed = name.removeprefix("v.").replace("patch_embed.proj.", "patch_embed.")
                translated[renamed.replace(".attn.", ".").replace(".mlp.", ".")] = tensor
        return translated, ("head_norm.*", "output.*")

    def _check_variant(self, patches: Tensor) -> None:
        """Check that the file and the network have the same size and patches.

        Args:
            patches: patch embedding of the file, float32 [embedding, 1, bands, frames].
        """
        width, _, bands, frames = patches.shape
        own_width, _, own_frames, own_bands = self.patch_embed.weight.shape
        if width != own_width:
            raise ConfigError(
                f"tokens have {width} dimensions in the file ({_size_name(width)}), but {own_width} in the network "
                f"({_size_name(own_width)}). Choose the architecture of the file."
            )
        if (bands, frames) != (own_bands, own_frames):
            raise ConfigError(
                f"patches have {bands} bands and {frames} frames in the file, but {own_bands} and {own_frames} in the network. Set "
                f"patches={'patch' if frames == PATCH else 'frame'}, and features of {max(bands, 128)} bands."
            )

    def _fit_positions(self, table: Tensor, patches: Tensor, sizes: Sequence[int]) -> Tensor:
        """Adapt the position embedding of a file to this network's patches: float32 [1, tokens, embedding].

        Args:
            table: position embedding of the file, float32 [1, tokens, embedding], ordered by bands and then by frames.
            patches: patch embedding of the file, float32 [embedding, 1, bands, frames].
            sizes: bands and frames of the pre-training clips. Their patches do not overlap.
        """
        rows, columns = (size // side for size, side in zip(sizes, patches.shape[2:], strict=True))
        if table.shape[1] != TOKENS + rows * columns:
            raise ConfigError(
                f"the file's position embedding has {table.shape[1] - TOKENS} patches, but clips of {sizes[0]} bands and "
                f"{sizes[1]} frames have {rows} x {columns}. Download the file again."
            )
        grid = table[:, TOKENS:].transpose(1, 2).reshape(1, -1, rows, columns)
        grid = _resize(_resize(grid, 3, self.grid[0]), 2, self.grid[1])
        return torch.cat([table[:, :TOKENS], grid.transpose(2, 3).flatten(2).transpose(1, 2)], dim=1)


_PATCHES = "v.patch_embed.proj.weight"
_SIZES = ("p_input_fdim", "p_input_tdim")
_NEEDED = ("v.cls_token", "v.dist_token", "v.pos_embed", *_SIZES)
_IGNORED = ("mask_embed", "cpredlayer.", "gpredlayer.", "v.head.", "v.head_dist.")
"""Prefixes of released tensors for pre-training only, and of DeiT's heads for images."""


def _size_name(width: int) -> str:
    return {192: "tiny", 384: "small", 768: "base"}.get(width, "not a published size")


@torch.no_grad()
def _draw_weights(tensor: Tensor) -> None:
    """Draw normal initial weights by the inverse of their distribution."""
    # nn.init.trunc_normal_ draws different numbers in PyTorch 2.11 and 2.14, which would change the results of a seed.
    tensor.uniform_(-1.0, 1.0).erfinv_().mul_(_SPREAD * math.sqrt(2.0)).clamp_(-2.0, 2.0)


def _resize(grid: Tensor, axis: int, size: int) -> Tensor:
    """Crop a grid float32 [1, embedding, rows, columns] to its centre along an axis, or interpolate it, to ``size``."""
    current = grid.shape[axis]
    if size < current:
        return grid.narrow(axis, current // 2 - size // 2, size)
    shape = [size, grid.shape[3]] if axis == 2 else [grid.shape[2], size]
    return F.interpolate(grid, size=shape, mode="bilinear", align_corners=False)


class TransformerBlock(nn.Module):
    """Transformer block: attention and a hidden layer of four times the width, both with residual connections."""

    def __init__(self, width: int, heads: int) -> None:
        """Initialise the block for tokens of dimension ``width``."""
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform tokens x float32 [batch, tokens, width]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.proj(attended)
        tokens: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return tokens


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {
    "ssast_tiny": (SSAST, {"embedding": 192, "heads": 3}),
    "ssast_small": (SSAST, {"embedding": 384, "heads": 6}),
    "ssast_base": (SSAST, {"embedding": 768, "heads": 12}),
}
