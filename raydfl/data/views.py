"""Views: the files of each example, their features and their transforms."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from raydfl.core.errors import ConfigError
from raydfl.core.settings import Settings
from raydfl.data.features.kinds import AnyFeatures, make_features
from raydfl.data.features.wave import BY_TRAINING_CLIPS
from raydfl.data.segment import SegmentSettings

if TYPE_CHECKING:  # importing PyTorch takes seconds, and configurations without transforms do not need it
    from raydfl.data.transforms import Pipeline


def _list_transforms(value: Any) -> list[Any]:
    """Expand bare names to ``{name: ...}``."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError("write a list of transforms, like [{name: spec_augment}]")
    return [{"name": transform} if isinstance(transform, str) else transform for transform in value]


Transforms = Annotated[tuple[dict[str, Any], ...], BeforeValidator(_list_transforms)]


class ViewSettings(Settings):
    """An additional view of the examples, with a file for each in a column of the manifest."""

    column: Annotated[
        str,
        Field(min_length=1, description="Column of the manifest with the files. Examples with a null lack the view."),
    ]
    features: Annotated[
        Any,
        BeforeValidator(make_features),
        Field(description="Features of the files: settings as in data.features, of any kind except file."),
    ]
    transforms: Annotated[Transforms, Field(description="Augmentations in training, as in data.transforms.")] = ()

    @model_validator(mode="after")
    def _check_consistency(self) -> ViewSettings:
        view = View("data", self.column, self.features, self.transforms)
        crop = view.pipeline.crop if self.transforms else None
        if (
            self.features.kind == "file"
            or self.features.normalise in BY_TRAINING_CLIPS
            or (crop and crop.test == "segments")
        ):
            raise ConfigError(
                "a view needs features of the kind logmel, kaldi, pretrained, model or image, without normalise: group, client or "
                "part, and without random_crop's test: segments. Change its features or transforms"
            )
        return self


@dataclass(frozen=True)
class View:
    """The settings of a view: the first (``data.features``), or an entry of ``data.views``."""

    where: str
    """Key of the settings in messages: ``data`` or ``data.views.NAME``."""
    column: str
    """Column of the manifest with the files."""
    features: AnyFeatures
    transforms: Sequence[Mapping[str, Any]]
    segment: SegmentSettings | None = None
    """Segments of training clips; ``None``: each clip is an example."""

    @functools.cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline from stored features to a batch.

        Raises:
            ConfigError: a transform is unknown, or does not support the features.
        """
        from raydfl.data.transforms import make_transforms  # imports PyTorch, which takes seconds

        return make_transforms(self.transforms, self.features, f"{self.where}.transforms")

    @property
    def stored_features(self) -> AnyFeatures:
        """The features in the cache. They are not normalised if a transform precedes the normalisation."""
        late = self.pipeline.late
        return self.features if late is None else self.features.model_copy(update={"normalise": "none"})

    @property
    def test_segments(self) -> SegmentSettings | None:
        """Segments of validation and test clips; ``None``: each clip is an example."""
        crop = self.pipeline.crop
        if crop is None or crop.test != "segments":
            return self.segment
        return SegmentSettings(frames=crop.size, stride=crop.stride or crop.size)
