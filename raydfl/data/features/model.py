"""Features that a network of the user's makes of each wave, while features are prepared.

The network is a class, named as ``my_file.py:Class`` or ``my_module:Class``: a ``torch.nn.Module`` or anything else that can be
called with a wave (tensor float32 [samples] at ``sample_rate``) and returns its features (float [frames, bands]). It is built
once in each process, on the CPU, in evaluation mode and without gradients. What it draws from PyTorch's generator, when it is built
or called, is the same for every clip, process and machine; raydfl does not control other sources of randomness.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field

from raydfl.core.errors import ConfigError, DataError
from raydfl.core.files import file_digest
from raydfl.core.registry import load_object
from raydfl.core.seeds import seed_for
from raydfl.core.settings import Settings
from raydfl.data.features.wave import Channel, Dtype, Frames, GivenNormalise, SampleRate


class ModelFeatures(Settings):
    """Features by a network of your own: a wave becomes a matrix of frames x bands."""

    model_config = ConfigDict(protected_namespaces=())

    kind: Annotated[Literal["model"], Field(description="model: a network of your own makes the features.")]
    model: Annotated[
        str,
        Field(
            pattern=r".+:\w+$",
            description="Its class, my_file.py:Class or my_module:Class: called with a tensor float32 [samples], it returns float "
            "[frames, bands].",
        ),
    ]
    bands: Annotated[int, Field(ge=1, le=65_536, description="Numbers of a frame that it returns. 1 to 65536.")]
    weights: Annotated[
        Path | None,
        Field(
            description="A file that the class gets as its argument weights (a path). null: it gets no such argument."
        ),
    ] = None
    options: Annotated[
        dict[str, Any], Field(default_factory=dict, description="Further arguments of the class, by name.")
    ]
    sample_rate: SampleRate = 16_000
    channel: Channel = "first"
    seconds: Annotated[
        float | None,
        Field(
            gt=0,
            le=3_600,
            description="Longer clips are cut at this length before. null: nothing is cut. Above 0, to 3600.",
        ),
    ] = None
    frames: Frames = None
    normalise: GivenNormalise = "none"
    dtype: Dtype = "float32"

    @property
    def title(self) -> str:
        """The class and its weights by name: ``apc.py:Apc (apc.pt)``."""
        place, _, name = self.model.rpartition(":")
        weights = "" if self.weights is None else f" ({self.weights.name})"
        return f"{Path(place).name}:{name}{weights}"

    @property
    def samples(self) -> int | None:
        """Samples to which waves are cut; ``None`` when clips keep their length."""
        return None if self.seconds is None else max(1, round(self.seconds * self.sample_rate))

    def frames_of(self, seconds: np.ndarray) -> np.ndarray:
        """Return how many frames clips take in the cache, 0 where only the model knows: int64, of the shape of ``seconds``."""
        return np.full(seconds.shape, self.frames or 0, np.int64)

    def key(self) -> dict[str, Any]:
        """Return all that decides the numbers, for the key of the cache: of class and weights the files' content.

        Raises:
            ConfigError: the class or the weights are not there, or the class's file has changed since this process loaded it.
        """
        place, _, name = self.model.rpartition(":")
        found = self.load()
        if place.endswith(".py"):
            file = place
        else:
            try:
                file = inspect.getfile(found)
            except TypeError as error:
                raise ConfigError(
                    f"data.features.model: {self.model!r} has no file that could tell whether it changed"
                ) from error
        return self.model_dump(mode="json", exclude={"model", "weights"}) | {
            "class": name,
            "code": _unchanged(Path(file).expanduser().resolve()),
            "weights": None if self.weights is None else _digest(self.weights, "weights"),
        }

    def load(self) -> type:
        """Load the class.

        Raises:
            ConfigError: there is none of that name.
        """
        try:
            found = load_object(self.model)
        except ConfigError as error:
            raise ConfigError(f"data.features.model: {error}") from error
        if not isinstance(found, type):
            raise ConfigError(f"data.features.model: {self.model!r} is not a class")
        return found


_loaded: dict[Path, str] = {}
"""The digests of the classes' files as this process has loaded them."""


def _unchanged(path: Path) -> str:
    """Return the digest of a file of code, which Python loads once in a process."""
    now = _digest(path, "model")
    if _loaded.setdefault(path, now) != now:
        raise ConfigError(f"data.features.model: {path} has changed since this process loaded it; start a new one")
    return now


def _digest(path: Path, setting: str) -> str:
    try:
        return file_digest(path)
    except OSError as error:
        raise ConfigError(f"data.features.{setting}: {path} cannot be read: {error.strerror}") from error


class NamedModel:
    """A user's class, built as the settings say.

    Raises:
        ConfigError: it is not there, does not take the arguments, fails, or what it builds cannot be called.
    """

    def __init__(self, settings: ModelFeatures) -> None:
        from torch import nn  # takes seconds: only who computes features pays for it

        self._settings = settings
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
                self._model = cls(**arguments)
        except Exception as error:  # whatever a user's class raises
            raise ConfigError(f"{where} cannot be built: {type(error).__name__}: {error}") from error
        if not callable(self._model):
            raise ConfigError(f"{where} cannot be called; give it forward(wave) or __call__(wave)")
        if isinstance(self._model, nn.Module):
            self._model.cpu().eval()

    def __call__(self, wave: np.ndarray) -> np.ndarray:
        """Compute float32 [frames, bands] of a wave (float32 [samples]), not more than the settings' frames.

        Raises:
            DataError: what the model returns is something else.
        """
        import torch

        with torch.no_grad(), _same_draws():
            returned = self._model(torch.from_numpy(np.array(wave, np.float32)))
        settings, what = self._settings, "it returns"
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
        matrix: np.ndarray = tensor.numpy()
        return matrix


@contextlib.contextmanager
def _same_draws() -> Iterator[None]:
    """Inside, PyTorch's generator starts from the same state each time; after, it is as it was."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(0, 0, "", "feature model"))
        yield
