"""Images, stored as rows of bytes in the cache, and float32 [channels, rows, columns] in a batch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from raydfl.core.errors import DataError
from raydfl.core.settings import Settings

Side = Annotated[int, Field(ge=1, le=4_096)]


class ImageFeatures(Settings):
    """Images as bytes in the cache. A batch divides them by 255, and standardises them."""

    kind: Annotated[Literal["image"], Field(description="image: images instead of recordings.")]
    size: Annotated[tuple[Side, Side], Field(description="Rows and columns, 1 to 4096. A single number sets both.")]
    channels: Annotated[Literal[1, 3], Field(description="Colour channels. 1: grey. 3: red, green and blue.")] = 1
    resize: Annotated[bool, Field(description="Resize images of other sizes. false: they are an error.")] = False
    mean: Annotated[
        tuple[float, ...],
        Field(description="Mean to subtract from each channel, on the scale 0 to 1, or a common value."),
    ] = (0.0,)
    deviation: Annotated[
        tuple[Annotated[float, Field(gt=0)], ...],
        Field(description="Divisor of each channel after the subtraction, on the scale 0 to 1, or a common value."),
    ] = (1.0,)

    dtype: ClassVar[str] = "uint8"
    normalise: ClassVar[Literal["none"]] = "none"
    frame_seconds: ClassVar[None] = None
    """The time between frames is unknown."""

    @field_validator("size", mode="before")
    @classmethod
    def _repeat_size(cls, value: Any) -> Any:
        return (value, value) if isinstance(value, int) else value

    @field_validator("mean", "deviation", mode="before")
    @classmethod
    def _to_tuple(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int | float) else value

    @model_validator(mode="after")
    def _check_channels(self) -> ImageFeatures:
        for name in ("mean", "deviation"):
            count = len(getattr(self, name))
            if count not in (1, self.channels):
                raise ValueError(
                    f"{name} has {count} numbers for {self.channels} channels. Give a single number, or one per channel"
                )
        return self

    @property
    def frames(self) -> int:
        """Number of stored rows of every image."""
        return self.size[0]

    @property
    def bands(self) -> int:
        """Number of stored values of a row, columns times channels."""
        return self.size[1] * self.channels

    def key(self) -> dict[str, Any]:
        """Return all settings that affect the stored bytes, for the cache key."""
        return self.model_dump(mode="json", exclude={"mean", "deviation"})

    def to_rows(self, image: np.ndarray) -> np.ndarray:
        """Convert an image to stored rows, float32 [rows, columns * channels], 0 to 255.

        Args:
            image: uint8 [rows, columns] or [rows, columns, channels].

        Raises:
            DataError: The array is not an image, or has another size without ``resize``.
        """
        from PIL import Image

        if image.dtype != np.uint8 or image.ndim not in (2, 3) or 0 in image.shape:
            raise DataError(f"the image is {image.dtype} {list(image.shape)}, not uint8 [rows, columns(, channels)]")
        if image.shape[:2] != self.size and not self.resize:
            raise DataError(
                f"the image has {image.shape[0]} rows and {image.shape[1]} columns, not {self.size[0]} and {self.size[1]}. Set "
                f"resize: true for images of several sizes"
            )
        channels = 1 if image.ndim == 2 else image.shape[2]
        if image.shape[:2] != self.size or channels != self.channels:
            converted = Image.fromarray(image[..., 0] if channels == 1 and image.ndim == 3 else image)
            converted = converted.convert("L" if self.channels == 1 else "RGB")
            if image.shape[:2] != self.size:  # Pillow's sizes are columns before rows.
                converted = converted.resize(self.size[::-1], Image.Resampling.BILINEAR)
            image = np.asarray(converted)
        return image.reshape(self.frames, self.bands).astype(np.float32)
