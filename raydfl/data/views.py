"""Views: how a file of each example becomes the input of a network."""

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

if TYPE_CHECKING:  # a configuration is read without waiting for PyTorch where nothing is transformed
    from raydfl.data.transforms import Pipeline


def _list_transforms(value: Any) -> list[Any]:
    """Accept names alone."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError("write a list of transforms, like [{name: spec_augment}]")
    return [{"name": each} if isinstance(each, str) else each for each in value]


Transforms = Annotated[tuple[dict[str, Any], ...], BeforeValidator(_list_transforms)]


class ViewSettings(Settings):
    """A view of the examples beside data.features: another file of each, named in a column of the manifest."""

    column: Annotated[
        str,
        Field(
            min_length=1, description="Column of the manifest that names its files; null there: an example has none."
        ),
    ]
    features: Annotated[
        Any,
        BeforeValidator(make_features),
        Field(description="How a file becomes numbers: settings as in data.features, of any kind but file."),
    ]
    transforms: Annotated[Transforms, Field(description="What is done to it in training: as data.transforms.")] = ()

    @model_validator(mode="after")
    def _consistent(self) -> ViewSettings:
        view = View("data", self.column, self.features, self.transforms)
        crop = view.pipeline.crop if self.transforms else None
        if (
            self.features.kind == "file"
            or self.features.normalise in BY_TRAINING_CLIPS
            or (crop and crop.test == "segments")
        ):
            raise ConfigError(
                "a view has features of the kind logmel, kaldi, pretrained, model or image, is not normalised "
                "by group, client or part, and is not cut into segments, which data.segment alone decides; change its "
                "features or transforms"
            )
        return self


@dataclass(frozen=True)
class View:
    """The settings of one view: those of ``data`` itself, or of an entry of ``data.views``."""

    where: str
    """Place of the settings, for messages: ``data`` or ``data.views.NAME``."""
    column: str
    """Column of the manifest that names the files."""
    features: AnyFeatures
    transforms: Sequence[Mapping[str, Any]]
    segment: SegmentSettings | None = None
    """Segments of training clips; ``None``: a clip is one example."""

    @functools.cached_property
    def pipeline(self) -> Pipeline:
        """The way of stored features into a batch.

        Raises:
            ConfigError: transforms that are not known, or do not fit the features.
        """
        from raydfl.data.transforms import make_transforms  # it imports PyTorch, which takes seconds

        return make_transforms(self.transforms, self.features, f"{self.where}.transforms")

    @property
    def stored_features(self) -> AnyFeatures:
        """The features as the cache has them: not normalised where a transform comes before that."""
        late = self.pipeline.late
        return self.features if late is None else self.features.model_copy(update={"normalise": "none"})

    @property
    def test_segments(self) -> SegmentSettings | None:
        """The segments into which clips that are measured on are cut; ``None``: none."""
        crop = self.pipeline.crop
        if crop is None or crop.test != "segments":
            return self.segment
        return SegmentSettings(frames=crop.size, stride=crop.stride or crop.size)
