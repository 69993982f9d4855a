"""Features of a pretrained encoder: the outputs of its front end, or its tokens after some layers.

The front end is the feature extractor of transformers in the encoder's folder (raydfl/core/pretrained). With ``after``, the
preparation computes the first layers once per clip, and caches their tokens. A network on these tokens trains without the first
layers.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from raydfl.core.errors import ConfigError
from raydfl.data.features.wave import Channel, Dtype, WaveSettings

_WHERE = "data.features"


class PretrainedFeatures(WaveSettings):
    """Outputs of a pretrained encoder's front end, or of its first layers."""

    kind: Annotated[
        Literal["pretrained"],
        Field(description="pretrained: the front end or the tokens of a pretrained encoder."),
    ]
    folder: Annotated[
        Path,
        Field(
            description="Folder of a transformers model, with config.json, preprocessor_config.json and model.safetensors."
        ),
    ]
    after: Annotated[
        int | None,
        Field(
            ge=0,
            description="Number of encoder layers before the tokens. 0: the tokens after the stem. null: the front end's outputs.",
        ),
    ] = None
    pooling: Annotated[
        Literal["none", "own", "mean"],
        Field(
            description="Pooling of the tokens after all layers to a single frame. mean: their mean. own: the pooling of this "
            "family's classifier in transformers. none: every token is a frame."
        ),
    ] = "none"
    seconds: Annotated[
        float | None,
        Field(
            gt=0,
            le=3_600,
            description="Length of clips in seconds. Longer clips are cut. Shorter clips are padded with zeros if the folder's "
            "extractor returns no mask. null: clips keep their lengths.",
        ),
    ] = None
    bands: Annotated[int, Field(ge=1, le=65_536, description="Features of a frame. null: the folder's.")]
    sample_rate: Annotated[
        int,
        Field(ge=1_000, le=192_000, description="Sample rate in Hz. Clips are resampled to it. null: the folder's."),
    ]
    channel: Channel = "first"
    dtype: Dtype = "float32"

    normalise: ClassVar[Literal["none"]] = "none"

    @model_validator(mode="before")
    @classmethod
    def _read_sizes(cls, values: Any) -> Any:
        """Read sizes from the folder, to record them in the run's configuration."""
        if not isinstance(values, Mapping) or not isinstance(values.get("folder"), str | Path):
            return values
        about = read_folder(Path(values["folder"]))
        after, completed = values.get("after"), dict(values)
        expected = {"bands": about.bands if after is None else about.width, "sample_rate": about.sample_rate}
        for name, value in expected.items():
            if completed.get(name) not in (None, value):
                raise ConfigError(
                    f"{_WHERE}.{name} is {completed[name]!r}, but the encoder in {about.path} needs {value}. Omit it."
                )
            completed[name] = value
        return completed

    @model_validator(mode="after")
    def _consistent(self) -> PretrainedFeatures:
        about = read_folder(self.folder)
        try:
            about.check_layers(self.after)
        except ConfigError as error:
            raise ConfigError(f"{_WHERE}.{error}") from error
        if self.pooling != "none" and self.after != about.layers:
            raise ConfigError(
                f"{_WHERE}.pooling is {self.pooling!r}, which needs the tokens after all layers. Set after: {about.layers}, or "
                f"pooling: none."
            )
        return self

    @property
    def title(self) -> str:
        """The folder's name and the features' layer, such as ``wav2vec2-base after 12 layers``."""
        end = "front end" if self.after is None else f"after {self.after} layers"
        return f"{self.folder.name} {end}"

    @property
    def frame_seconds(self) -> float | None:
        """Time between frames, or None if frames are pooled, or padded to the encoder's fixed length."""
        about = read_folder(self.folder)
        if self.after is not None:
            known = about.takes_waves and self.pooling == "none"
            return float(about.frames_per_token / self.sample_rate) if known else None
        return float(about.hop / self.sample_rate)

    @property
    def frames(self) -> int | None:
        """Number of frames of every clip, or None if it depends on the clip."""
        return 1 if self.pooling != "none" else None

    def key(self) -> dict[str, Any]:
        """Return all settings that affect the values, with the folder's content, for the cache key.

        Raises:
            ConfigError: A file in the folder is unreadable.
        """
        return {**self.model_dump(mode="json", exclude={"folder"}), "content": self.content()}

    def content(self) -> str:
        """Return the digest of the folder's content.

        Raises:
            ConfigError: A file in the folder is unreadable.
        """
        from raydfl.core.pretrained import encoder_digest  # The import of PyTorch takes seconds.

        try:
            return encoder_digest(self.folder)
        except OSError as error:
            raise ConfigError(f"{_WHERE}.folder: {self.folder} cannot be read: {error.strerror}") from error

    def check_content(self, expected: str) -> None:
        """Reject a folder with other content, possible on another node.

        Args:
            expected: Digest of the content at the start of the preparation.

        Raises:
            ConfigError: The content differs.
        """
        if self.content() != expected:
            raise ConfigError(
                f"{_WHERE}.folder: {self.folder} on {platform.node()} differs from the folder at the start of the preparation. Put "
                f"the same content under this path on every node."
            )


def read_folder(folder: Path) -> Any:
    """Read the description of an encoder's folder.

    Raises:
        ConfigError: The folder is not usable.
    """
    from raydfl.core.pretrained import read_encoder_folder  # The import of PyTorch takes seconds.

    try:
        return read_encoder_folder(folder)
    except ConfigError as error:
        raise ConfigError(f"{_WHERE}.folder: {error}") from error
