"""The kinds of features, and the choice of a kind by a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.options import explain
from raydfl.data.features.file import FileFeatures
from raydfl.data.features.image import ImageFeatures
from raydfl.data.features.kaldi import KaldiFeatures
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.features.model import ModelFeatures
from raydfl.data.features.pretrained import PretrainedFeatures
from raydfl.data.features.speech_embedding import SpeechEmbeddingFeatures

AnyFeatures = (
    FileFeatures
    | ModelFeatures
    | ImageFeatures
    | KaldiFeatures
    | PretrainedFeatures
    | SpeechEmbeddingFeatures
    | FeatureSettings
)
_KINDS: dict[str, type[AnyFeatures]] = {
    "logmel": FeatureSettings,
    "file": FileFeatures,
    "model": ModelFeatures,
    "image": ImageFeatures,
    "kaldi": KaldiFeatures,
    "pretrained": PretrainedFeatures,
    "speech_embedding": SpeechEmbeddingFeatures,
}


def kind_of(values: Mapping[str, Any], where: str = "data.features") -> type[AnyFeatures]:
    """Return the settings class of the kind in ``values``. The default is log-mel.

    Args:
        values: The group of settings.
        where: The group's place in the configuration.

    Raises:
        ConfigError: The kind is unknown, or a value is a setting of another kind.
    """
    kind = values.get("kind", "logmel")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(f"{where}.kind is {kind!r}. {nearest(str(kind), _KINDS)}")
    cls = _KINDS[kind]
    for key in values:
        owners = [name for name, settings in _KINDS.items() if key in settings.model_fields]
        if key not in cls.model_fields and owners:
            raise ConfigError(
                f"{where}: {key!r} is a setting of the kind {' and '.join(owners)}, not of {kind} with the settings "
                f"{', '.join(cls.model_fields)}. Set the whole group: {where}='{{kind: {kind}, ...}}'."
            )
    return cls


def make_features(values: Any) -> AnyFeatures:
    """Return the settings for a group of values. Existing settings are returned unchanged.

    Raises:
        ConfigError: The kind is unknown, or a value has a wrong type or is out of range.
        DataError: A features file cannot be opened.
    """
    if isinstance(values, AnyFeatures):
        return values
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"data.features is {values!r}. It must be a group of settings, such as {{kind: logmel, bands: 64}}."
        )
    cls = kind_of(values)
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, "data.features", values, cls)) from error
