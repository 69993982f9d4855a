"""A pretrained encoder of a folder, of which the last layers, all or nothing but a head trains.

The encoder is one of transformers: wav2vec2, HuBERT, AST or Whisper's (raydfl/core/pretrained). What does not train is neither sent
nor kept (raydfl/training/fates.py): each process builds it from the folder. What lies before the layers that train may as well be
computed once for each clip: with ``after`` the features are the tokens after so many layers, which features of the kind
``pretrained`` make, and the network has the rest alone.

The head is one linear layer on the pooled tokens, or two with ReLU between them (``hidden``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.pretrained import Encoder, EncoderFolder, pooled, read_encoder_folder


class Pretrained(nn.Module):
    """A pretrained encoder and a head."""

    def __init__(
        self,
        inputs: int,
        classes: int,
        folder: Path | None = None,
        train: Literal["head", "all"] | Annotated[int, Field(ge=1)] = "head",
        after: Annotated[int, Field(ge=0)] | None = None,
        pooling: Literal["own", "mean"] = "own",
        hidden: Annotated[int, Field(ge=1)] | None = None,
    ) -> None:
        """Build it with the folder's weights; the head is drawn.

        Args:
            inputs: numbers of a frame: what the folder's front end gives, or with ``after`` those of a token.
            classes: outputs.
            folder: of the encoder.
            train: what trains beside the head: the last so many layers with the norm after them, ``all``, or with ``head`` nothing.
            after: the features are the tokens after so many layers; ``None``: they come from the front end.
            pooling: ``mean``: of all tokens that count; ``own``: as transformers' classifier of this family does it.
            hidden: units of a layer before the last; ``None``: there is none.

        Raises:
            ConfigError: the folder cannot be used, has fewer layers, or the features are not what it takes.
        """
        super().__init__()
        if folder is None:
            raise ConfigError(
                "pretrained needs a folder: that of a model of transformers, with model.safetensors in it"
            )
        about = read_encoder_folder(folder)
        _check(about, inputs, train, after)
        self.kind, self.pooling = about.kind, pooling
        self.encoder = Encoder(about, after, about.layers)
        self._fix(train, about.layers)
        self.hidden = None if hidden is None else nn.Linear(about.width, hidden)
        self.output = nn.Linear(hidden or about.width, classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return logits float32 [batch, classes] for x float32 [batch, frames, inputs] of which ``lengths`` int64 [batch] count."""
        logits: Tensor = self.output(self.embed(x, lengths))
        return logits

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return what the last layer sees, float32 [batch, width]: the pooled tokens, or the hidden layer's output."""
        tokens, count = self.encoder(x, lengths)
        found = pooled(tokens, count, self.pooling, self.kind)
        return found if self.hidden is None else self.hidden(found).relu()

    def _fix(self, train: str | int, layers: int) -> None:
        """Fix the parameters that do not train."""
        if train == "all":
            return
        first = layers - int(train) if isinstance(train, int) else layers
        for name, parameter in self.encoder.named_parameters():
            part, _, rest = name.partition(".")
            trains = first < layers and (part == "norm" or (part == "layers" and int(rest.partition(".")[0]) >= first))
            if not trains:
                parameter.requires_grad_(False)


def _check(about: EncoderFolder, inputs: int, train: str | int, after: int | None) -> None:
    """Refuse layers that there are not, and features that the encoder does not take."""
    about.check_layers(after)
    rest = about.layers - (after or 0)
    if isinstance(train, int) and train > rest:
        what = "are left after the features" if after else "are in it"
        raise ConfigError(
            f"train: {train}, and {rest} layers of the encoder in {about.path} {what}; take at most {rest}"
        )
    if train == "all" and after is not None:
        raise ConfigError(
            "train: all, but what lies before the features is computed once for each clip and cannot train; leave after out, or "
            "take train: head or a number of layers"
        )
    expected = about.bands if after is None else about.width
    if inputs != expected:
        where = "its front end makes" if after is None else "its tokens have"
        raise ConfigError(
            f"the features have {inputs} numbers a frame, and of the encoder in {about.path} {where} {expected}; take features of "
            f"the kind pretrained, with the same folder and after"
        )


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {"pretrained": (Pretrained, {})}
