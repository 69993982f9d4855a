"""Features that a network of the user's makes of each wave, while features are prepared.

The network is a class, named as ``my_file.py:Class`` or ``my_module:Class``: a ``torch.nn.Module`` or anything else that can be
called with a wave (tensor float32 [samples] at ``sample_rate``) and returns its features (float [frames, bands]). It is built
once in each process, on the CPU, in evaluation mode and without gradients. What it draws from PyTorch's generator, when it is built
or called, is the same for every clip, process and machine; raydfl does not control other sources of randomness.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field

from raydfl.core.errors import ConfigError
from raydfl.core.files import file_digest
from raydfl.core.registry import load_object
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
