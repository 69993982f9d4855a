"""FiLM CNN: a convolutional adapter modulated by a prototype (FiLM), an encoder, and a projection.

The network of Fed-ProFiLA-AD, as in the authors' code. Its input is an image of one channel, frames by bands:

    film     prototype -> linear 256, ReLU, dropout -> linear 512, ReLU, dropout -> linear: gamma and beta, 32 each
    adapter  convolution 3 x 3 to 32 channels, layer norm over the channels at each position, ReLU, gamma u + beta,
             convolution 3 x 3 to 64 channels
    encoder  three convolutions 3 x 3 of stride 2 (128, 256, 512 channels), each with batch norm, ReLU and dropout of whole maps;
             the mean over frames and bands; linear 128, layer norm, ReLU, dropout
    output   the projection: linear 256, ReLU, linear, layer norm

With 128 outputs the modules have 197,440, 18,880, 1,616,896 and 66,176 weights. ``prototype`` is a buffer with a value for each
output. It is sent and stored like all tensors of the network. A method may update it (raydfl.methods.profila). Otherwise it
keeps its initial values, 0.1 times standard normal. Convolutions have Kaiming initialisation (fan out), linear layers Xavier
initialisation, and biases start at 0.01. The paper scales outputs to length 1; here the objective ``compact`` does.

Initially gamma is near 0, so the adapter's output is close to beta. ``plus_one`` scales by 1 + gamma (a deviation). Padding is
masked except in the statistics of batch norm during training. Use clips of equal length for exact statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from raydfl.core.ops import Conv2d, Dropout
from raydfl.models._norm import mask_frames

Count = Annotated[int, Field(ge=1)]


class FilmCNN(nn.Module):
    """Convolutional network for sequences of feature frames, conditioned on a prototype."""

    prototype: Tensor

    def __init__(
        self,
        inputs: int,
        classes: int,
        adapter: tuple[Count, Count] = (32, 64),
        filters: Annotated[tuple[Count, ...], Field(min_length=1)] = (128, 256, 512),
        film: Annotated[tuple[Count, ...], Field(min_length=1)] = (256, 512),
        embedding: Count = 128,
        projection: Count = 256,
        dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1,
        plus_one: bool = False,
    ) -> None:
        """Initialise the network.

        Args:
            inputs: features of a frame, ordered by frequency. Any number.
            classes: number of outputs, and dimension of the prototype.
            adapter: channels of the adapter's convolutions. The first convolution is modulated.
            filters: channels of the encoder's convolutions.
            film: hidden units of the network for gamma and beta.
            embedding: outputs of the encoder.
            projection: hidden units of the projection.
            dropout: dropout probability of units, and of whole maps in the encoder.
            plus_one: scale by 1 + gamma in place of gamma.
        """
        super().__init__()
        self.plus_one = plus_one
        self.register_buffer("prototype", 0.1 * torch.randn(classes))
        layers: list[nn.Module] = []
        for before, after in pairwise((classes, *film)):
            layers += [nn.Linear(before, after), nn.ReLU(), Dropout(dropout)]
        self.film = nn.Sequential(*layers, nn.Linear(film[-1], 2 * adapter[0]))
        self.adapter = _Adapter(*adapter)
        self.encoder = _Encoder(adapter[1], filters, embedding, dropout)
        self.output = nn.Sequential(
            nn.Linear(embedding, projection), nn.ReLU(), nn.Linear(projection, classes), nn.LayerNorm(classes)
        )
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
            if isinstance(layer, (nn.Conv2d, nn.Linear)) and layer.bias is not None:
                nn.init.constant_(layer.bias, 0.01)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute outputs float32 [batch, classes] from the arguments of :meth:`embed`."""
        outputs: Tensor = self.output(self.embed(x, lengths))
        return outputs

    def embed(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Compute the encoder's output: float32 [batch, embedding].

        Args:
            x: float32 [batch, frames, inputs].
            lengths: int64 [batch], number of valid frames. ``None``: all.
        """
        x = x.unsqueeze(1)
        gamma, beta = self.film(self.prototype.unsqueeze(0)).chunk(2, dim=1)
        inside = None if lengths is None else mask_frames(x.squeeze(1), lengths).movedim(-1, 1)
        embedded: Tensor = self.encoder(self.adapter(x, 1 + gamma if self.plus_one else gamma, beta, inside), inside)
        return embedded


class _Adapter(nn.Module):
    def __init__(self, hidden: int, channels: int) -> None:
        super().__init__()
        self.first = Conv2d(1, hidden, 3, padding=1)
        self.norm = nn.LayerNorm(hidden)
        self.second = Conv2d(hidden, channels, 3, padding=1)

    def forward(self, x: Tensor, gamma: Tensor, beta: Tensor, inside: Tensor | None) -> Tensor:
        """Map [batch, 1, frames, bands] to [batch, channels, frames, bands], modulated by gamma and beta [1, hidden]."""
        u = self.norm(self.first(_mask(x, inside)).movedim(1, -1)).relu()
        u = (gamma * u + beta).movedim(-1, 1)
        mapped: Tensor = self.second(_mask(u, inside))
        return mapped


class _Encoder(nn.Module):
    def __init__(self, before: int, filters: tuple[int, ...], embedding: int, dropout: float) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            Conv2d(fewer, more, 3, stride=2, padding=1) for fewer, more in pairwise((before, *filters))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for channels in filters)
        self.linear = nn.Linear(filters[-1], embedding)
        self.norm = nn.LayerNorm(embedding)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, inside: Tensor | None) -> Tensor:
        """Map [batch, channels, frames, bands] to [batch, embedding]."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(convolution(_mask(x, inside))).relu()
            x = x * self.dropout(torch.ones_like(x[:, :, 0, 0]))[:, :, None, None]  # drops whole maps
            inside = None if inside is None else inside[:, :, ::2]  # the convolution has stride 2
        if inside is None:
            mean = x.mean(dim=(2, 3))
        else:
            mean = (x * inside).mean(dim=3).sum(dim=2) / inside.sum(dim=2).squeeze(-1).clamp_min(1.0)
        embedded: Tensor = self.dropout(F.relu(self.norm(self.linear(mean))))
        return embedded


def _mask(x: Tensor, inside: Tensor | None) -> Tensor:
    """Set frames of padding to 0."""
    return x if inside is None else x * inside


ARCHITECTURES: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]] = {
    "film_cnn": (FilmCNN, {}),
    "film_cnn_small": (
        FilmCNN,
        {"adapter": (8, 16), "filters": (32, 64, 128), "film": (64, 128), "embedding": 64, "projection": 64},
    ),
    "film_cnn_tiny": (
        FilmCNN,
        {"adapter": (2, 4), "filters": (4, 8), "film": (8,), "embedding": 8, "projection": 8},
    ),
}
"""``film_cnn`` is the paper's network. ``film_cnn_small`` has a quarter of its width. ``film_cnn_tiny`` is for tests."""
