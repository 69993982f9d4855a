"""Features for, or by, a pretrained encoder: what its folder's front end makes of a wave, or tokens after some of its layers.

The front end is the folder's feature extractor of transformers (raydfl/core/pretrained). With ``after`` the layers before are
computed while features are prepared, once for each clip, and kept as all features are: a network that begins with these tokens
trains without them.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from raydfl.core.errors import ConfigError
from raydfl.core.settings import Settings
from raydfl.data.features.wave import Channel, Dtype

_WHERE = "data.features"


class PretrainedFeatures(Settings):
    """The front end of a pretrained encoder, or that and some of its layers."""

    kind: Annotated[
        Literal["pretrained"],
        Field(description="pretrained: the front end of a pretrained encoder, or tokens that it makes."),
    ]
    folder: Annotated[
        Path,
        Field(
            description="The folder of a model of transformers: config.json, preprocessor_config.json, model.safetensors."
        ),
    ]
    after: Annotated[
        int | None,
        Field(
            ge=0,
            description="The tokens after so many layers of the encoder; 0: after its stem. null: what its front end makes.",
        ),
    ] = None
    pooling: Annotated[
        Literal["none", "own", "mean"],
        Field(
            description="After all layers: one frame, the mean of the tokens, or what transformers' classifier of this family "
            "takes (own). none: every token is a frame."
        ),
    ] = "none"
    seconds: Annotated[
        float | None,
        Field(
            gt=0,
            le=3_600,
            description="Longer clips are cut at this length before. Shorter ones are filled with zeros if the folder's extractor "
            "gives no mask. null: every clip keeps its length. Above 0, to 3600.",
        ),
    ] = None
    bands: Annotated[int, Field(ge=1, le=65_536, description="Numbers of a frame. null: as the folder says.")]
    sample_rate: Annotated[
        int, Field(ge=1_000, le=192_000, description="Hz: every clip is resampled to it. null: the folder's.")
    ]
    channel: Channel = "first"
    dtype: Dtype = "float32"

    normalise: ClassVar[Literal["none"]] = "none"

    @model_validator(mode="before")
    @classmethod
    def _as_the_folder_says(cls, values: Any) -> Any:
        """Look into the folder: the configuration that a run keeps has the numbers."""
        if not isinstance(values, Mapping) or not isinstance(values.get("folder"), str | Path):
            return values
        about = read_folder(Path(values["folder"]))
        after, found = values.get("after"), dict(values)
        expected = {"bands": about.bands if after is None else about.width, "sample_rate": about.sample_rate}
        for name, value in expected.items():
            if found.get(name) not in (None, value):
                raise ConfigError(
                    f"{_WHERE}.{name} is {found[name]!r}, and the encoder in {about.path} needs {value}; leave it out"
                )
            found[name] = value
        return found

    @model_validator(mode="after")
    def _consistent(self) -> PretrainedFeatures:
        about = read_folder(self.folder)
        try:
            about.check_layers(self.after)
        except ConfigError as error:
            raise ConfigError(f"{_WHERE}.{error}") from error
        if self.pooling != "none" and self.after != about.layers:
            raise ConfigError(
                f"{_WHERE}.pooling is {self.pooling!r}, which needs the tokens after all layers: set after: {about.layers}, or "
                f"pooling: none"
            )
        return self

    @property
    def title(self) -> str:
        """The folder's name, and where the features come from: ``wav2vec2-base after 12 layers``."""
        end = "front end" if self.after is None else f"after {self.after} layers"
        return f"{self.folder.name} {end}"

    @property
    def samples(self) -> int | None:
        """Samples to which waves are cut; ``None`` when clips keep their length."""
        return None if self.seconds is None else max(1, round(self.seconds * self.sample_rate))

    @property
    def frames(self) -> int | None:
        """Frames that every clip has, if they do not depend on the clip."""
        return 1 if self.pooling != "none" else None

    def frames_of(self, seconds: np.ndarray) -> np.ndarray:
        """Return how many frames clips take in the cache, 0 where only the encoder knows: int64, of the shape of ``seconds``."""
        if self.after is not None:
            return np.full(seconds.shape, self.frames or 0, np.int64)
        from raydfl.core.pretrained import EncoderFrontEnd  # PyTorch takes seconds to import

        front_end = EncoderFrontEnd(read_folder(self.folder), self.samples)
        samples = np.ceil(seconds * self.sample_rate).astype(np.int64)
        if self.samples is not None:
            samples = np.minimum(samples, self.samples)
        return np.array([front_end.frames(count) for count in samples.tolist()], np.int64)

    def key(self) -> dict[str, Any]:
        """Return all that decides the numbers, for the key of the cache: of the folder its content.

        Raises:
            ConfigError: a file of the folder cannot be read.
        """
        return {**self.model_dump(mode="json", exclude={"folder"}), "content": self.content()}

    def content(self) -> str:
        """Return the digest of what the folder holds.

        Raises:
            ConfigError: a file of the folder cannot be read.
        """
        from raydfl.core.pretrained import encoder_digest  # PyTorch takes seconds to import

        try:
            return encoder_digest(self.folder)
        except OSError as error:
            raise ConfigError(f"{_WHERE}.folder: {self.folder} cannot be read: {error.strerror}") from error

    def check_content(self, expected: str) -> None:
        """Refuse a folder that holds something else, as it may on another node.

        Args:
            expected: the digest of its content.

        Raises:
            ConfigError: it does.
        """
        if self.content() != expected:
            raise ConfigError(
                f"{_WHERE}.folder: {self.folder} on {platform.node()} holds something else than where the preparation of features "
                f"began; put the same content under that path on every node"
            )


def read_folder(folder: Path) -> Any:
    """Return what a folder holds.

    Raises:
        ConfigError: it cannot be used.
    """
    from raydfl.core.pretrained import read_encoder_folder  # as above

    try:
        return read_encoder_folder(folder)
    except ConfigError as error:
        raise ConfigError(f"{_WHERE}.folder: {error}") from error
