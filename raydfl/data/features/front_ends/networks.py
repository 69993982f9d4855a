"""Front ends that are networks: a pretrained encoder, and a class of the user's. Both take one recording at a time."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from raydfl.core.errors import ConfigError, DataError
from raydfl.core.pretrained import Encoder, EncoderFrontEnd, pool_tokens
from raydfl.core.seeds import seed_for
from raydfl.data.features.model import ModelFeatures
from raydfl.data.features.pretrained import PretrainedFeatures, read_folder


class EncoderTokens(nn.Module):
    """The front end of the kind pretrained: a folder's feature extractor, and some of its encoder's layers.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(self, settings: PretrainedFeatures) -> None:
        super().__init__()
        folder = read_folder(settings.folder)
        self.settings, self.kind = settings, folder.kind
        self.front_end = EncoderFrontEnd(folder, settings.samples)
        self.encoder = None if settings.after is None else Encoder(folder, None, settings.after).eval()

    def forward(self, samples: Tensor) -> Tensor:
        """Return frames or tokens of one recording.

        Raises:
            DataError: the encoder gives numbers that are not finite.
        """
        found = torch.from_numpy(self.front_end(samples[0].numpy())).unsqueeze(0)
        if self.encoder is None:
            return found
        tokens: Tensor
        tokens, count = self.encoder(found)
        if self.settings.pooling != "none":
            tokens = pool_tokens(tokens, count, self.settings.pooling, self.kind).unsqueeze(1)
        if not bool(tokens.isfinite().all()):
            raise DataError(f"the encoder in {self.settings.folder} gives numbers that are NaN or infinite")
        return tokens


class NamedModel(nn.Module):
    """The front end of the kind model: a user's class.

    Raises:
        ConfigError: it is not there, does not take the arguments, fails, or what it builds cannot be called.
    """

    def __init__(self, settings: ModelFeatures) -> None:
        super().__init__()
        self.settings = settings
        arguments = dict(settings.options)
        if settings.weights is not None:
            arguments["weights"] = settings.weights
        cls, where = settings.load(), f"data.features: {settings.model}"
        try:
            inspect.signature(cls).bind(**arguments)
        except TypeError as error:
            given = ", ".join(arguments) or "none"
            raise ConfigError(
                f"{where} does not take the arguments that options and weights give it ({given}): {error}"
            ) from error
        try:
            with _same_draws():
                self.model = cls(**arguments)
        except Exception as error:  # whatever a user's class raises
            raise ConfigError(f"{where} cannot be built: {type(error).__name__}: {error}") from error
        if not callable(self.model):
            raise ConfigError(f"{where} cannot be called; give it forward(wave) or __call__(wave)")
        if isinstance(self.model, nn.Module):
            self.model.cpu().eval()

    def forward(self, samples: Tensor) -> Tensor:
        """Return features of one recording, not more than the settings' frames.

        Raises:
            DataError: what the model returns is something else.
        """
        with _same_draws():
            returned = self.model(samples[0].clone())
        settings, what = self.settings, "it returns"
        if not isinstance(returned, torch.Tensor | np.ndarray):
            raise DataError(f"{what} {type(returned).__name__}; it must be a tensor or array [frames, bands]")
        tensor = torch.as_tensor(returned).detach()
        if tensor.ndim != 2 or not len(tensor):
            raise DataError(
                f"{what} the shape {list(tensor.shape)}; it must be [frames, bands] with at least one frame"
            )
        if tensor.shape[1] != settings.bands:
            raise DataError(f"{what} frames of {tensor.shape[1]} numbers, data.features.bands says {settings.bands}")
        if not tensor.is_floating_point():
            raise DataError(f"{what} {tensor.dtype}; it must be a floating type")
        tensor = tensor[: settings.frames].float()
        if not bool(tensor.isfinite().all()):
            raise DataError(f"{what} numbers that are NaN or infinite")
        return tensor.unsqueeze(0)


@contextlib.contextmanager
def _same_draws() -> Iterator[None]:
    """Inside, PyTorch's generator starts from the same state each time; after, it is as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(0, 0, "", "feature model"))
        yield
