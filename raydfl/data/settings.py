"""The ``data`` part of a configuration: which recordings, and what is made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, model_validator

from raydfl.data.chunks import Source
from raydfl.data.corrupt import CorruptSettings
from raydfl.data.dataset import find_dataset
from raydfl.data.features import FeatureSettings
from raydfl.data.partition import PartitionSettings
from raydfl.data.segment import SegmentSettings
from raydfl.data.split import SplitSettings
from raydfl.errors import ConfigError
from raydfl.options import unknown_key
from raydfl.settings import Settings


class DataSettings(Settings):
    """Recordings, features, who gets which, and what is held out. Every other key is an option of the data set (``root`` ...)."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[
        str,
        Field(description="Data set: one of `raydfl data list`, or your own as my_file.py:Class or my_module:Class."),
    ]
    features: Annotated[FeatureSettings, Field(description="How a wave becomes frames x bands.")] = FeatureSettings()
    segment: Annotated[
        SegmentSettings | None, Field(description="Cut long clips into segments. null: a clip is one example.")
    ] = None
    split: Annotated[SplitSettings, Field(description="What is held out for tests and validation.")] = SplitSettings()
    partition: Annotated[PartitionSettings, Field(description="Which client has which clips.")] = PartitionSettings()
    corrupt: Annotated[CorruptSettings, Field(description="Noise and wrong labels in training data.")] = (
        CorruptSettings()
    )
    unreadable: Annotated[
        Literal["stop", "skip"],
        Field(description="At clips that cannot be read: stop, or leave them out, count and list them."),
    ] = "stop"
    cache: Annotated[
        Path | None,
        Field(
            description="Folder of the feature cache. null: $RAYDFL_CACHE, $XDG_CACHE_HOME/raydfl or ~/.cache/raydfl."
        ),
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        if isinstance(values, str):
            values = {"name": values}
        if not isinstance(values, Mapping) or not isinstance(values.get("name"), str):
            return values  # pydantic says what is wrong with it
        own, options = list(cls.model_fields), _options_of(values["name"])
        for key in values:
            if key not in own and key not in options:
                known, of = [*own, *options], f" for data set {values['name']!r}"
                raise unknown_key(str(key), known, "data", DataSettings, "data", of)
        for name, field in cls.model_fields.items():
            _check_keys(values.get(name), field.annotation, f"data.{name}")
        return values

    @model_validator(mode="after")
    def _consistent(self) -> DataSettings:
        if self.segment is not None and self.features.seconds is not None:
            raise ConfigError(
                "data.segment cuts clips of their own lengths: set data.features.seconds to null, or data.segment to null"
            )
        self.source.open()  # the data set checks its own options
        return self

    @property
    def source(self) -> Source:
        """The data set by name and options."""
        return Source(self.name, dict(self.model_extra or {}))


def _options_of(name: str) -> list[str]:
    cls = find_dataset(name)
    options = [field.name for field in dataclasses.fields(cls) if field.init]
    taken = sorted(set(options) & set(DataSettings.model_fields))
    if taken:
        raise ConfigError(
            f"data set {name!r} has an option {taken[0]!r}, which is a key of data itself; rename it in the class"
        )
    return options


def _check_keys(values: Any, annotation: Any, where: str) -> None:
    """Names the nearest known key for each unknown one, in groups within groups."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(values, Mapping) and isinstance(kind, type) and issubclass(kind, Settings):
            for key, value in values.items():
                if key not in kind.model_fields:
                    raise unknown_key(str(key), kind.model_fields, where, DataSettings, "data")
                _check_keys(value, kind.model_fields[key].annotation, f"{where}.{key}")
