"""Networks as front ends: pretrained encoders, and a user's class. All process a single recording at a time."""

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
from raydfl.data.features.speech_embedding import SpeechEmbeddingFeatures, cut_windows, find_networks


class EncoderTokens(nn.Module):
    """Front end for pretrained features: a folder's feature extractor, and the first layers of its encoder.

    Raises:
        ConfigError: The folder is not usable.
    """

    def __init__(self, settings: PretrainedFeatures) -> None:
        super().__init__()
        folder = read_folder(settings.folder)
        self.settings, self.kind = settings, folder.kind
        self.front_end = EncoderFrontEnd(folder, settings.samples)
        self.encoder = None if settings.after is None else Encoder(folder, None, settings.after).eval()

    def forward(self, samples: Tensor) -> Tensor:
        """Return the frames or tokens of a recording.

        Raises:
            DataError: The encoder's outputs are not finite.
        """
        frames = torch.from_numpy(self.front_end(samples[0].numpy())).unsqueeze(0)
        if self.encoder is None:
            return frames
        tokens: Tensor
        tokens, count = self.encoder(frames)
        if self.settings.pooling != "none":
            tokens = pool_tokens(tokens, count, self.settings.pooling, self.kind).unsqueeze(1)
        if not bool(tokens.isfinite().all()):
            raise DataError(f"outputs of the encoder in {self.settings.folder} are NaN or infinite")
        return tokens


class SpeechEmbedding(nn.Module):
    """Front end for Google's speech embedding, by ONNX Runtime on one thread.

    Raises:
        ConfigError: The package openwakeword is not installed, or it has other files.
    """

    def __init__(self, settings: SpeechEmbeddingFeatures) -> None:
        super().__init__()
        self.settings = settings
        files = find_networks()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1  # For equal bits, and one process for each CPU.
        self.mel, self.network = (
            onnxruntime.InferenceSession(files[name], options, providers=["CPUExecutionProvider"])
            for name in ("melspectrogram", "embedding_model")
        )

    def forward(self, samples: Tensor) -> Tensor:
        """Return the frames of a recording."""
        settings, scale = self.settings, np.float32(32_767)  # the scale of 16-bit samples
        wave = np.pad(samples.numpy(), ((0, 0), (settings.padding, settings.padding))) * scale
        mel = self.mel.run(None, {"input": wave})[0].reshape(-1, 32) / 10 + 2
        frames = self.network.run(None, {"input_1": cut_windows(mel)})[0].reshape(1, -1, 96)
        return torch.from_numpy((frames - np.float32(settings.mean)) / np.float32(settings.deviation))


class NamedModel(nn.Module):
    """Front end for features computed by a user's class.

    Raises:
        ConfigError: The class is missing, does not accept the arguments or fails, or its instance is not callable.
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
            names = ", ".join(arguments) or "none"
            raise ConfigError(
                f"{where} does not accept the arguments from options and weights ({names}): {error}. Correct them."
            ) from error
        try:
            with _seed_equally():
                self.model = cls(**arguments)
        except Exception as error:  # A user's class may raise anything.
            raise ConfigError(f"{where} cannot be built: {type(error).__name__}: {error}") from error
        if not callable(self.model):
            raise ConfigError(f"{where} cannot be called. Add a method forward(wave) or __call__(wave).")
        if isinstance(self.model, nn.Module):
            self.model.cpu().eval()

    def forward(self, samples: Tensor) -> Tensor:
        """Return the features of a recording, at most the configured number of frames.

        Raises:
            DataError: The model returns anything else.
        """
        with _seed_equally():
            returned = self.model(samples[0].clone())
        settings, what = self.settings, "it returns"
        if not isinstance(returned, torch.Tensor | np.ndarray):
            raise DataError(f"{what} {type(returned).__name__} instead of a tensor or array [frames, bands]")
        tensor = torch.as_tensor(returned).detach()
        if tensor.ndim != 2 or not len(tensor):
            raise DataError(f"{what} the shape {list(tensor.shape)} instead of [frames, bands] with at least one frame")
        if tensor.shape[1] != settings.bands:
            raise DataError(f"{what} frames of {tensor.shape[1]} features, but data.features.bands is {settings.bands}")
        if not tensor.is_floating_point():
            raise DataError(f"{what} {tensor.dtype} instead of a floating type")
        tensor = tensor[: settings.frames].float()
        if not bool(tensor.isfinite().all()):
            raise DataError(f"{what} values that are NaN or infinite")
        return tensor.unsqueeze(0)


@contextlib.contextmanager
def _seed_equally() -> Iterator[None]:
    """Seed PyTorch's generator equally each time inside a ``with`` block, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(0, 0, "", "feature model"))
        yield
