"""Encoder: the stem, the layers and the norm of a pretrained encoder, or some of them, as one network on a batch.

It computes what the class of transformers does in evaluation mode (tests/core/test_encoders.py). While it trains, what belongs to
pre-training is left out: no layer is skipped (layerdrop), no time or channel is masked (SpecAugment). Dropout is the folder's, in
layers that train.

Of recordings of several lengths that are heard as samples, each one's tokens are what they are alone: the group norm of the first
convolution counts its own frames only, which transformers does not do, and attention leaves out what is padding.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydfl.core.errors import DataError
from raydfl.core.ops import mean_over_time
from raydfl.core.pretrained.folder import EncoderFolder
from raydfl.core.pretrained.front_end import least_samples

Tokens = tuple[Tensor, Tensor | None]
"""Tokens float32 [batch, tokens, width], and how many count: int64 [batch], or ``None``: all."""

_OWN_TOKENS = 2
"""Tokens of AST before those of the patches: the class's and that of distillation."""


class Encoder(nn.Module):
    """Some of an encoder, from what it takes or from the tokens after some layer, to the tokens after a later one."""

    def __init__(self, folder: EncoderFolder, begin: int | None, end: int) -> None:
        """Build it with the folder's weights.

        Args:
            folder: of the encoder.
            begin: after how many layers; ``None``: with the stem.
            end: after how many layers; after all of them comes the norm, if the encoder has one there.

        Raises:
            ConfigError: the weights cannot be used.
        """
        super().__init__()
        network: Any = folder.load()
        if folder.takes_waves:
            transformer, stem = network.encoder, cast(nn.Module, _WaveStem(network))
            norm = transformer.layer_norm if folder.settings.do_stable_layer_norm else None
        elif folder.kind == "whisper":
            transformer, stem = network.encoder, _WhisperStem(network.encoder)
            norm = transformer.layer_norm
        else:
            transformer, stem = network, _PatchStem(network.embeddings, folder)
            norm = network.layernorm
        self.stem = stem if begin is None else None
        first = begin or 0
        self.layers = nn.ModuleDict({str(n): layer for n, layer in enumerate(transformer.layers) if first <= n < end})
        self.norm = norm if end == folder.layers and begin != end else None
        self._told = folder.takes_waves
        for part in self.modules():
            if "config" in vars(
                part
            ):  # one for all networks of a folder, which are then seen to be alike, and trained together
                part.config = folder.settings

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tokens:
        """Return tokens, and how many of each example count.

        Args:
            x: float32 [batch, frames, bands], or tokens.
            lengths: int64 [batch]: frames, or tokens, that count; ``None``: all.
        """
        tokens, count = (x, lengths if self._told else None) if self.stem is None else self.stem(x, lengths)
        mask = None if count is None else inside(count, tokens.shape[1])[:, None, None]
        for layer in self.layers.values():
            tokens = layer(tokens, attention_mask=mask)
        return (tokens if self.norm is None else self.norm(tokens)), count


def pooled(tokens: Tensor, count: Tensor | None, how: str, kind: str) -> Tensor:
    """Return one vector for each example, float32 [batch, width].

    Args:
        tokens: float32 [batch, tokens, width].
        count: int64 [batch]: tokens that count; ``None``: all.
        how: ``mean``: of all tokens that count; ``own``: as the classifier of transformers does it: of AST the mean of the
            first two tokens, else that of all.
        kind: of the encoder.
    """
    if how == "own" and kind == "audio-spectrogram-transformer":
        return tokens[:, :_OWN_TOKENS].mean(dim=1)
    return mean_over_time(tokens, count)


def inside(count: Tensor, size: int) -> Tensor:
    """Return what is no padding: bool [batch, size]."""
    return torch.arange(size, device=count.device) < count.unsqueeze(1)


class _WaveStem(nn.Module):
    """wav2vec2's and HuBERT's: convolutions over samples, a projection, positions by a convolution."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.feature_extractor = network.feature_extractor
        self.feature_projection = network.feature_projection
        self.pos_conv_embed = network.encoder.pos_conv_embed
        self.layer_norm = None if network.config.do_stable_layer_norm else network.encoder.layer_norm
        self.dropout = network.encoder.dropout
        self._sizes = [*zip(network.config.conv_kernel, network.config.conv_stride, strict=True)]
        self._least = least_samples(network.config.conv_kernel, network.config.conv_stride)

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tokens:
        if not torch.compiler.is_exporting() and x.shape[1] < self._least:
            raise DataError(f"clips of {x.shape[1]} samples; the encoder needs {self._least}")
        frames, count = x.transpose(1, 2), lengths
        for layer, (kernel, stride) in zip(self.feature_extractor.conv_layers, self._sizes, strict=True):
            if count is not None:
                count = (torch.div(count - kernel, stride, rounding_mode="floor") + 1).clamp_min(1)
            norm = getattr(layer, "layer_norm", None)
            if count is None or not isinstance(norm, nn.GroupNorm):
                frames = layer(frames)
            else:
                frames = layer.activation(_normed(layer.conv(frames), norm, inside(count, self._length(x))))
        projected = self.feature_projection(frames.transpose(1, 2))
        tokens = projected[0] if isinstance(projected, tuple) else projected
        if count is not None:
            tokens = tokens.masked_fill(~inside(count, tokens.shape[1]).unsqueeze(2), 0.0)
        tokens = tokens + self.pos_conv_embed(tokens)
        return self.dropout(tokens if self.layer_norm is None else self.layer_norm(tokens)), count

    def _length(self, x: Tensor) -> int:
        """Return the frames of the first convolution, the one with the norm."""
        kernel, stride = self._sizes[0]
        return int((x.shape[1] - kernel) // stride + 1)


def _normed(frames: Tensor, norm: nn.GroupNorm, counts: Tensor) -> Tensor:
    """Return frames [batch, channels, frames] with each channel normalised over the frames that count, bool [batch, frames]."""
    counts = counts.unsqueeze(1)
    number = counts.sum(dim=2, keepdim=True)
    mean = frames.masked_fill(~counts, 0.0).sum(dim=2, keepdim=True) / number
    centred = (frames - mean).masked_fill(~counts, 0.0)
    variance = centred.square().sum(dim=2, keepdim=True) / number
    return centred * (variance + norm.eps).rsqrt() * norm.weight[:, None] + norm.bias[:, None]


class _PatchStem(nn.Module):
    """AST's: patches of a spectrogram of one length, and two tokens before them."""

    def __init__(self, embeddings: nn.Module, folder: EncoderFolder) -> None:
        super().__init__()
        self.embeddings = embeddings
        extractor = folder.extractor
        self._frames = int(folder.settings.max_length)
        self._silence = -extractor.mean / (2 * extractor.std) if extractor.do_normalize else 0.0

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tokens:
        return self.embeddings(_filled(x, lengths, self._frames, self._silence)), None


class _WhisperStem(nn.Module):
    """Whisper's: two convolutions over a spectrogram of one length, and a table of positions, which never trains."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.conv1, self.conv2, self.embed_positions = encoder.conv1, encoder.conv2, encoder.embed_positions
        self.embed_positions.requires_grad_(False)
        self._dropout = float(encoder.dropout)
        self._frames = 2 * int(encoder.max_source_positions)

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tokens:
        # The extractor cuts logarithms 8 below a clip's largest and at -10, then adds 4 and divides by 4: what silence becomes.
        sounding = x if lengths is None else x.masked_fill(~inside(lengths, x.shape[1]).unsqueeze(2), -torch.inf)
        silence = (sounding.amax(dim=(1, 2), keepdim=True) - 2.0).clamp_min(-1.5)
        x = _filled(x, lengths, self._frames, silence)
        tokens = F.gelu(self.conv2(F.gelu(self.conv1(x.transpose(1, 2))))).transpose(1, 2)
        return F.dropout(tokens + self.embed_positions.weight, self._dropout, self.training), None


def _filled(x: Tensor, lengths: Tensor | None, frames: int, value: Tensor | float) -> Tensor:
    """Return x float32 [batch, frames, bands] with so many frames, those that do not count being of a value (or [batch, 1, 1])."""
    size = x.shape[1]
    count = x.new_full((len(x),), size, dtype=torch.int64) if lengths is None else lengths
    whole = F.pad(x, (0, 0, 0, frames))[:, :frames]  # without a branch on the length, for torch.export
    return torch.where(inside(count, frames).unsqueeze(2), whole, value)
