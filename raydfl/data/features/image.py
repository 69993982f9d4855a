"""Images: rows of bytes in the cache, float32 [channels, rows, columns] in a batch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from raydfl.core.errors import DataError
from raydfl.core.settings import Settings

Side = Annotated[int, Field(ge=1, le=4_096)]


class ImageFeatures(Settings):
    """Images as numbers: bytes in the cache, divided by 255 in a batch, and scaled."""

    kind: Annotated[Literal["image"], Field(description="image: pictures and not recordings.")]
    size: Annotated[tuple[Side, Side], Field(description="Rows and columns; one number: both. 1 to 4096.")]
    channels: Annotated[Literal[1, 3], Field(description="1: grey. 3: red, green and blue.")] = 1
    resize: Annotated[
        bool, Field(description="true: images of another size are resized. false: they are an error.")
    ] = False
    mean: Annotated[
        tuple[float, ...], Field(description="Of each channel, in 0 to 1; one number: of all. It is subtracted.")
    ] = (0.0,)
    deviation: Annotated[
        tuple[Annotated[float, Field(gt=0)], ...],
        Field(description="Of each channel, in 0 to 1; one number: of all. What is left is divided by it."),
    ] = (1.0,)

    dtype: ClassVar[str] = "uint8"
    normalise: ClassVar[Literal["none"]] = "none"

    @field_validator("size", mode="before")
    @classmethod
    def _both(cls, value: Any) -> Any:
        return (value, value) if isinstance(value, int) else value

    @field_validator("mean", "deviation", mode="before")
    @classmethod
    def _of_all(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int | float) else value

    @model_validator(mode="after")
    def _one_of_each_channel(self) -> ImageFeatures:
        for name in ("mean", "deviation"):
            count = len(getattr(self, name))
            if count not in (1, self.channels):
                raise ValueError(f"{name} has {count} numbers for {self.channels} channels; give one, or one of each")
        return self

    @property
    def frames(self) -> int:
        """Stored rows of every image."""
        return self.size[0]

    @property
    def bands(self) -> int:
        """Stored numbers of a row: columns by channels."""
        return self.size[1] * self.channels

    def frames_of(self, seconds: np.ndarray) -> np.ndarray:
        """Rows that images occupy in the cache: int64, of the shape of ``seconds``."""
        return np.full(seconds.shape, self.frames, np.int64)

    def key(self) -> dict[str, Any]:
        """Return all that decides the stored bytes, for the key of the cache."""
        return self.model_dump(mode="json", exclude={"mean", "deviation"})

    def stored(self, image: np.ndarray) -> np.ndarray:
        """Return the rows of an image as they are kept: float32 [rows, columns * channels], 0 to 255.

        Args:
            image: uint8 [rows, columns] or [rows, columns, channels].

        Raises:
            DataError: it is no image, or of another size and not to be resized.
        """
        from PIL import Image

        if image.dtype != np.uint8 or image.ndim not in (2, 3) or 0 in image.shape:
            raise DataError(f"the image is {image.dtype} {list(image.shape)}, not uint8 [rows, columns(, channels)]")
        if image.shape[:2] != self.size and not self.resize:
            raise DataError(
                f"the image has {image.shape[0]} rows and {image.shape[1]} columns, not {self.size[0]} and {self.size[1]}; images "
                f"of several sizes need resize: true, beside size"
            )
        channels = 1 if image.ndim == 2 else image.shape[2]
        if image.shape[:2] != self.size or channels != self.channels:
            picture = Image.fromarray(image[..., 0] if channels == 1 and image.ndim == 3 else image)
            picture = picture.convert("L" if self.channels == 1 else "RGB")
            if image.shape[:2] != self.size:
                picture = picture.resize(self.size[::-1], Image.Resampling.BILINEAR)
            image = np.asarray(picture)
        return image.reshape(self.frames, self.bands).astype(np.float32)
