"""Features by a user's network, computed once per clip during the preparation.

The network is a class, ``my_file.py:Class`` or ``my_module:Class``. Its instances, ``torch.nn.Module`` or any callable, map a wave
(tensor float32 [samples] at ``sample_rate``) to features (float [frames, bands]). Each process builds it once, on the CPU, in
evaluation mode and without gradients. PyTorch's generator has the same state for every clip, process and machine. raydfl does not
control further sources of randomness.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from raydfl.core.errors import ConfigError
from raydfl.core.files import file_digest
from raydfl.core.registry import load_object
from raydfl.data.features.wave import Channel, Dtype, Frames, GivenNormalise, SampleRate, Seconds, WaveSettings


class ModelFeatures(WaveSettings):
    """Features by your own network, a matrix of frames x bands for each wave."""

    model_config = ConfigDict(protected_namespaces=())

    kind: Annotated[Literal["model"], Field(description="model: features by your own network.")]
    model: Annotated[
        str,
        Field(
            pattern=r".+:\w+$",
            description="Class of the network, my_file.py:Class or my_module:Class. It maps a tensor float32 [samples] to float "
            "[frames, bands].",
        ),
    ]
    bands: Annotated[int, Field(ge=1, le=65_536, description="Features of a frame, 1 to 65536.")]
    weights: Annotated[
        Path | None,
        Field(description="Path for the class's argument `weights`. null: no such argument."),
    ] = None
    options: Annotated[
        dict[str, Any], Field(default_factory=dict, description="Further arguments of the class by name.")
    ]
    sample_rate: SampleRate = 16_000
    channel: Channel = "first"
    seconds: Seconds = None
    frames: Frames = None
    normalise: GivenNormalise = "none"
    dtype: Dtype = "float32"

    frame_seconds: ClassVar[None] = None
    """The time between frames is unknown."""

    @property
    def title(self) -> str:
        """Names of the class and its weights, such as ``apc.py:Apc (apc.pt)``."""
        place, _, name = self.model.rpartition(":")
        weights = "" if self.weights is None else f" ({self.weights.name})"
        return f"{Path(place).name}:{name}{weights}"

    def key(self) -> dict[str, Any]:
        """Return all settings that affect the values, with the content of code and weights, for the cache key.

        Raises:
            ConfigError: The class or the weights are missing, or the class's file has changed since this process loaded it.
        """
        place, _, name = self.model.rpartition(":")
        cls = self.load()
        if place.endswith(".py"):
            file = place
        else:
            try:
                file = inspect.getfile(cls)
            except TypeError as error:
                raise ConfigError(
                    f"data.features.model: {self.model!r} has no file, so changes cannot be detected. Define it in a file."
                ) from error
        return self.model_dump(mode="json", exclude={"model", "weights"}) | {
            "class": name,
            "code": _digest_code(Path(file).expanduser().resolve()),
            "weights": None if self.weights is None else _digest(self.weights, "weights"),
        }

    def load(self) -> type:
        """Load the class.

        Raises:
            ConfigError: The class does not exist.
        """
        try:
            cls = load_object(self.model)
        except ConfigError as error:
            raise ConfigError(f"data.features.model: {error}") from error
        if not isinstance(cls, type):
            raise ConfigError(f"data.features.model: {self.model!r} is not a class. Name a class.")
        return cls


_loaded: dict[Path, str] = {}
"""Digests of code files at the time when this process loaded them."""


def _digest_code(path: Path) -> str:
    """Return the digest of a code file, and reject a change, because Python loads a file once per process."""
    digest = _digest(path, "model")
    if _loaded.setdefault(path, digest) != digest:
        raise ConfigError(f"data.features.model: {path} has changed since this process loaded it. Start a new process.")
    return digest


def _digest(path: Path, setting: str) -> str:
    try:
        return file_digest(path)
    except OSError as error:
        raise ConfigError(f"data.features.{setting}: {path} cannot be read: {error.strerror}") from error
