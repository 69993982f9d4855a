"""The kinds of features, and which one a configuration means."""

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

AnyFeatures = FileFeatures | ModelFeatures | ImageFeatures | KaldiFeatures | PretrainedFeatures | FeatureSettings
_KINDS: dict[str, type[AnyFeatures]] = {
    "logmel": FeatureSettings,
    "file": FileFeatures,
    "model": ModelFeatures,
    "image": ImageFeatures,
    "kaldi": KaldiFeatures,
    "pretrained": PretrainedFeatures,
}


def kind_of(values: Mapping[str, Any], where: str = "data.features") -> type[AnyFeatures]:
    """Return the settings of the kind that ``values`` name; log-mel where they name none.

    Args:
        values: the group of settings.
        where: its place in the configuration.

    Raises:
        ConfigError: there is no such kind, or a setting of another kind is among the values.
    """
    kind = values.get("kind", "logmel")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(f"{where}.kind is {kind!r}; {nearest(str(kind), _KINDS)}")
    cls = _KINDS[kind]
    for key in values:
        others = [name for name, other in _KINDS.items() if key in other.model_fields]
        if key not in cls.model_fields and others:
            raise ConfigError(
                f"{where}: {key!r} is a setting of the kind {' and '.join(others)}, not of {kind}, which has "
                f"{', '.join(cls.model_fields)}; give the whole group: {where}='{{kind: {kind}, ...}}'"
            )
    return cls


def make_features(values: Any) -> AnyFeatures:
    """Return the settings that ``values`` describe; they may be settings already.

    Raises:
        ConfigError: unknown kind, wrong type, or value out of range.
        DataError: a file of features that cannot be opened.
    """
    if isinstance(values, AnyFeatures):
        return values
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"data.features is {values!r}; it must be a group of settings, such as {{kind: logmel, bands: 64}}"
        )
    cls = kind_of(values)
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, "data.features", values, cls)) from error
