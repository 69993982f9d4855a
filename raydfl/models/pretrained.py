"""Pretrained: an encoder of Hugging Face transformers from a folder, fine-tuned fully, partly or not at all, with a new head.

Supported encoders are wav2vec2, HuBERT, AST and Whisper's (raydfl/core/pretrained). Frozen tensors are neither sent nor stored
(raydfl.training): each process reads them from the folder. The layers below the trained layers can be computed
once for each clip. With ``after``, the network's inputs are the tokens after this number of layers, computed by features of
the kind ``pretrained``, and the network contains only the remaining layers. With ``lora``, the remaining layers are frozen and
train low-rank adapters instead.

The head is a linear layer on the pooled tokens, or two layers with ReLU (``hidden``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.pretrained import Encoder, EncoderFolder, average_bands, pool_tokens, read_encoder_folder
from raydfl.models._lora import Lora, adapter_channels, add_adapters
from raydfl.models._width import Channels, Width


class Pretrained(nn.Module):
    """Pretrained encoder with a classification head."""

    def __init__(
        self,
        inputs: int,
        classes: int,
        folder: Path | None = None,
        train: Literal["head", "all"] | Annotated[int, Field(ge=1)] = "head",
        after: Annotated[int, Field(ge=0)] | None = None,
        pooling: Literal["own", "mean"] = "own",
        hidden: Annotated[int, Field(ge=1)] | None = None,
        lora: Lora | None = None,
        width: Width = 1.0,
    ) -> None:
        """Load the encoder's weights from the folder, and initialise the head.

        Args:
            inputs: features of a frame from the folder's front end, or dimension of a token with ``after``.
            classes: number of outputs.
            folder: folder of the encoder.
            train: trained layers in addition to the head: a number of last layers with the final norm, ``all``, or ``head``
                for none.
            after: the inputs are tokens after this number of layers. ``None``: they come from the front end.
            pooling: ``mean``: average all valid tokens. ``own``: as the transformers classifier of this family.
            hidden: units of a hidden layer in the head. ``None``: no hidden layer.
            lora: adapters on the layers after the features, trained in addition to the head. ``None``: no adapters.
            width: fraction of the adapters' rank, rounded up. Only with ``lora``.

        Raises:
            ConfigError: the folder cannot be used, has too few layers, or does not fit the features or the adapters.
        """
        super().__init__()
        if folder is None:
            raise ConfigError(
                "pretrained needs a folder. Set folder to a model of transformers that contains model.safetensors."
            )
        about = read_encoder_folder(folder)
        _check(about, inputs, train, after)
        self.kind, self.pooling, self.bands = about.kind, pooling, about.patch_bands
        self.frames_per_token = about.frames_per_token if after is None else 1
        """Number of frames from a token to the next."""
        self.encoder = Encoder(about, after, about.layers)
        self._freeze(train, about.layers)
        self.hidden = None if hidden is None else nn.Linear(about.width, hidden)
        self.output = nn.Linear(hidden or about.width, classes)
        if lora is not None:
            _check_lora(about, train, after)
            add_adapters(self.encoder.layers, lora, width)  # after the head, whose draws must not depend on adapters

    def channels(self) -> Channels:
        """Return the rank of each adapter as a group of channels."""
        return adapter_channels(self.encoder, "encoder.")

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute logits float32 [batch, classes] from x float32 [batch, frames, inputs] with ``lengths`` int64 [batch]."""
        logits: Tensor = self.output(self.embed(x, lengths))
        return logits

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute the pooled tokens or the hidden layer's output: float32 [batch, width]."""
        tokens, count = self.encoder(x, lengths)
        embedding = pool_tokens(tokens, count, self.pooling, self.kind)
        return embedding if self.hidden is None else self.hidden(embedding).relu()

    def frames(self, x: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute tokens in the order of time.

        Args:
            x: float32 [batch, frames, inputs].
            lengths: int64 [batch], number of valid frames. ``None``: all.

        Returns:
            float32 [batch, tokens, width], and the number of valid tokens, int64 [batch]. ``None``: all, as for AST and Whisper,
            which pad or cut clips to a fixed length. The tokens of AST are averaged over the bands.
        """
        tokens, count = self.encoder(x, lengths)
        return (tokens if self.bands is None else average_bands(tokens, self.bands)), count

    def head(self, frames: Tensor) -> Tensor:
        """Compute logits float32 [..., classes] from frames float32 [..., width]."""
        logits: Tensor = self.output(frames if self.hidden is None else self.hidden(frames).relu())
        return logits

    def _freeze(self, train: str | int, layers: int) -> None:
        """Freeze all layers of the encoder except the trained layers."""
        if train == "all":
            return
        first = layers - int(train) if isinstance(train, int) else layers
        for name, parameter in self.encoder.named_parameters():
            part, _, rest = name.partition(".")
            trains = first < layers and (part == "norm" or (part == "layers" and int(rest.partition(".")[0]) >= first))
            if not trains:
                parameter.requires_grad_(False)


def _check(about: EncoderFolder, inputs: int, train: str | int, after: int | None) -> None:
    """Check the number of layers and the features against the encoder."""
    about.check_layers(after)
    remaining = about.layers - (after or 0)
    if isinstance(train, int) and train > remaining:
        scope = f"{remaining} layers after the features" if after else f"{remaining} layers"
        raise ConfigError(
            f"train: {train}, but the encoder in {about.path} has only {scope}. Set train to at most {remaining}."
        )
    if train == "all" and after is not None:
        raise ConfigError(
            "train: all, but the layers before the features are computed once for each clip and cannot be trained. Remove after, "
            "or set train to head or to a number of layers."
        )
    expected = about.bands if after is None else about.width
    if inputs != expected:
        source = "front end computes" if after is None else "tokens have"
        raise ConfigError(
            f"the features have {inputs} values in a frame, but the {source} {expected} for the encoder in {about.path}. Set "
            f"data.features to the kind pretrained, with the same folder and after."
        )


def _check_lora(about: EncoderFolder, train: str | int, after: int | None) -> None:
    """Reject adapters on layers that train themselves, and adapters without a layer."""
    if train != "head":
        raise ConfigError(f"train: {train}, but with lora the layers are frozen. Remove train, or remove lora.")
    if after == about.layers:
        raise ConfigError(
            f"lora: no layer of the encoder in {about.path} comes after the features. Set after to less than {about.layers}."
        )


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {"pretrained": (Pretrained, {})}
