"""Encoder: stem, layers and norm of a pretrained encoder, or a range of them, as a network on batches.

It matches the class of transformers in evaluation mode (tests/core/test_encoders.py). Training omits parts of pre-training:
layerdrop and SpecAugment. Dropout in training layers follows the folder's configuration.

Encoders of samples give each recording the same tokens in any batch: the first convolution's group norm covers a recording's own
frames only (unlike in transformers), and attention ignores padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydfl.core.errors import DataError
from raydfl.core.ops import mean_over_time
from raydfl.core.pretrained.folder import EncoderFolder
from raydfl.core.pretrained.front_end import least_samples

Tokens = tuple[Tensor, Tensor | None]
"""Tokens float32 [batch, tokens, width], and their valid number int64 [batch]. ``None``: all are valid."""

_OWN_TOKENS = 2
"""Class token and distillation token of AST, before the patches."""


class Encoder(nn.Module):
    """A range of a pretrained encoder's layers, with the stem before the first layer and the norm after the last."""

    def __init__(self, folder: EncoderFolder, begin: int | None, end: int, network: Any = None) -> None:
        """Build the network with the folder's weights.

        Args:
            folder: the encoder's folder.
            begin: number of layers before the range. ``None``: start with the stem.
            end: number of layers up to the end of the range. The last layer is followed by the encoder's norm, if it has one.
            network: network of transformers with the layers. ``None``: load it from the folder.

        Raises:
            ConfigError: the weights are invalid.
        """
        super().__init__()
        network = folder.load() if network is None else network
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
        # If begin equals end, the inputs are tokens after all layers, and the cached features include the norm.
        self.norm = norm if end == folder.layers and begin != end else None
        self._uses_lengths = folder.takes_waves
        for part in self.modules():
            # All networks of a folder share a configuration object, so that clients are recognised as equal and train batched.
            if "config" in vars(part):
                part.config = folder.settings

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tokens:
        """Compute tokens, and their valid number for each example.

        Args:
            x: float32 [batch, frames, bands], or tokens [batch, tokens, width] without a stem.
            lengths: int64 [batch]: valid frames or tokens. ``None``: all.
        """
        tokens, count = (x, lengths if self._uses_lengths else None) if self.stem is None else self.stem(x, lengths)
        mask = None if count is None else lengths_to_mask(count, tokens.shape[1])[:, None, None]
        for layer in self.layers.values():
            tokens = layer(tokens, attention_mask=mask)
        return (tokens if self.norm is None else self.norm(tokens)), count


def write_encoder(source: EncoderFolder, begin: int | None, state: Mapping[str, Tensor], target: Path) -> None:
    """Write a folder like an existing folder, with new weights in a range of the encoder's layers.

    Args:
        source: the existing folder. Its heads and decoders are copied, too.
        begin: number of layers before the range. ``None``: the stem is part of it.
        state: state dict of the range, an :class:`Encoder` up to the last layer.
        target: folder to write.

    Raises:
        ConfigError: the weights in the existing folder cannot be read.
    """
    network: Any = source.load_whole()
    Encoder(source, begin, source.layers, network.base_model).load_state_dict(state)
    network.save_pretrained(target)
    source.extractor.save_pretrained(target)


def pool_tokens(tokens: Tensor, count: Tensor | None, how: str, kind: str) -> Tensor:
    """Pool each example's tokens to a vector.

    Args:
        tokens: float32 [batch, tokens, width].
        count: int64 [batch]: valid tokens. ``None``: all.
        how: ``mean``: average valid tokens. ``own``: pool like the classifier in transformers, for AST with the mean of the first
            two tokens, else with ``mean``.
        kind: the encoder's kind.

    Returns:
        float32 [batch, width].
    """
    if how == "own" and kind == "audio-spectrogram-transformer":
        return tokens[:, :_OWN_TOKENS].mean(dim=1)
    return mean_over_time(tokens, count)


def average_bands(tokens: Tensor, bands: int) -> Tensor:
    """Average the patches of AST over the bands, without its first two tokens.

    Args:
        tokens: float32 [batch, 2 + bands * times, width], the patches first in bands and then in time.
        bands: patches of a time.

    Returns:
        float32 [batch, times, width].
    """
    patches = tokens[:, _OWN_TOKENS:]
    mean: Tensor = patches.reshape(patches.shape[0], bands, -1, patches.shape[-1]).mean(dim=1)
    return mean


def lengths_to_mask(count: Tensor, size: int) -> Tensor:
    """Return a mask of the positions without padding: bool [batch, size]."""
    return torch.arange(size, device=count.device) < count.unsqueeze(1)


class _WaveStem(nn.Module):
    """Stem of wav2vec2 and HuBERT: convolutions over samples, a projection, and convolutional position embeddings."""

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
            raise DataError(
                f"clips have {x.shape[1]} samples, but the encoder needs at least {self._least}. Use longer clips."
            )
        frames, count = x.transpose(1, 2), lengths
        for layer, (kernel, stride) in zip(self.feature_extractor.conv_layers, self._sizes, strict=True):
            if count is not None:
                # At least a frame: attention over no tokens would be NaN.
                count = (torch.div(count - kernel, stride, rounding_mode="floor") + 1).clamp_min(1)
            norm = getattr(layer, "layer_norm", None)
            if count is None or not isinstance(norm, nn.GroupNorm):
                frames = layer(frames)
            else:
                frames = layer.conv(frames)
                frames = layer.activation(_normalise(frames, norm, lengths_to_mask(count, frames.shape[2])))
        projected = self.feature_projection(frames.transpose(1, 2))
        tokens = projected[0] if isinstance(projected, tuple) else projected
        if count is not None:  # the position embeddings are a convolution, so padding must be 0
            tokens = tokens.masked_fill(~lengths_to_mask(count, tokens.shape[1]).unsqueeze(2), 0.0)
        tokens = tokens + self.pos_conv_embed(tokens)
        return self.dropout(tokens if self.layer_norm is None else self.layer_norm(tokens)), count


def _normalise(frames: Tensor, norm: nn.GroupNorm, valid: Tensor) -> Tensor:
    """Normalise each channel of frames [batch, channels, frames] over the valid frames, bool [batch, frames]."""
    valid = valid.unsqueeze(1)
    number = valid.sum(dim=2, keepdim=True)
    mean = frames.masked_fill(~valid, 0.0).sum(dim=2, keepdim=True) / number
    centred = (frames - mean).masked_fill(~valid, 0.0)
    variance = centred.square().sum(dim=2, keepdim=True) / number
    return centred * (variance + norm.eps).rsqrt() * norm.weight[:, None] + norm.bias[:, None]


class _PatchStem(nn.Module):
    """Stem of AST: two tokens, then patches of a spectrogram of fixed length."""

    def __init__(self, embeddings: nn.Module, folder: EncoderFolder) -> None:
        super().__init__()
        self.embeddings = embeddings
        extractor = folder.extractor
        self._frames = int(folder.settings.max_length)
        self._silence = -extractor.mean / (2 * extractor.std) if extractor.do_normalize else 0.0

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tokens:
        return self.embeddings(_fill(x, lengths, self._frames, self._silence)), None


class _WhisperStem(nn.Module):
    """Stem of Whisper: two convolutions over a spectrogram of fixed length, and frozen position embeddings."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.conv1, self.conv2, self.embed_positions = encoder.conv1, encoder.conv2, encoder.embed_positions
        self.embed_positions.requires_grad_(False)
        self._dropout = float(encoder.dropout)
        self._frames = 2 * int(encoder.max_source_positions)

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tokens:
        # Silence after the extractor: it clips logarithms at 8 below the clip's maximum and at -10, adds 4 and divides by 4.
        sounding = (
            x if lengths is None else x.masked_fill(~lengths_to_mask(lengths, x.shape[1]).unsqueeze(2), -torch.inf)
        )
        silence = (sounding.amax(dim=(1, 2), keepdim=True) - 2.0).clamp_min(-1.5)
        x = _fill(x, lengths, self._frames, silence)
        tokens = F.gelu(self.conv2(F.gelu(self.conv1(x.transpose(1, 2))))).transpose(1, 2)
        return F.dropout(tokens + self.embed_positions.weight, self._dropout, self.training), None


def _fill(x: Tensor, lengths: Tensor | None, frames: int, value: Tensor | float) -> Tensor:
    """Pad or cut x [batch, frames, bands] to ``frames`` frames, and fill padding with a value (a number, or [batch, 1, 1])."""
    size = x.shape[1]
    count = x.new_full((len(x),), size, dtype=torch.int64) if lengths is None else lengths
    whole = F.pad(x, (0, 0, 0, frames))[:, :frames]  # torch.export allows no branch on the length
    return torch.where(lengths_to_mask(count, frames).unsqueeze(2), whole, value)
