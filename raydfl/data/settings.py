"""The ``data`` part of a configuration: which recordings, and what is made of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from raydfl.core.errors import ConfigError, InputError, nearest
from raydfl.core.options import explain, path_options, unknown_key
from raydfl.core.remote import check_uri, is_uri
from raydfl.core.settings import FIRST_VIEW, Settings
from raydfl.data.dataset import find_dataset
from raydfl.data.features.extraction import Source
from raydfl.data.features.file import FileFeatures
from raydfl.data.features.kinds import AnyFeatures, make_features
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.label_sets import LabelSetSettings
from raydfl.data.remote import local_copy
from raydfl.data.segment import SegmentSettings
from raydfl.data.steps.corrupt import CorruptSettings
from raydfl.data.steps.dealing import PartitionSettings
from raydfl.data.steps.listing import LABELLED, UNLABELLED
from raydfl.data.steps.pools import PoolSettings, UnlabelledSettings, check_pool_names
from raydfl.data.steps.profile import KNOWN, ProfileSettings
from raydfl.data.steps.split import SplitSettings
from raydfl.data.steps.user_tables import TableSettings
from raydfl.data.views import Transforms, View, ViewSettings


class SiteSettings(Settings):
    """A node that holds data of its own. Other keys, in place of data's: ``partition``, ``tables``, options of the data set."""

    model_config = ConfigDict(extra="allow")

    folder: Path = Field(
        description="Folder on the site's node, an absolute path: features, who has which clips, and private models stay in it."
    )

    parts: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Parts that the site has, by name, each with options of the part's data set there. Empty: all parts.",
    )

    def of_part(self, name: str) -> dict[str, Any]:
        """Return the site's settings for one part."""
        return {"folder": self.folder, **(self.model_extra or {}), **self.parts.get(name, {})}

    @field_validator("folder")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        if not value.is_absolute():
            raise ValueError(
                "a relative folder would lie in the working directory of a process of Ray; give an absolute path"
            )
        return value


class DataSettings(Settings):
    """Recordings, features, who gets which, and what is held out. Every other key is an option of the data set (``root`` ...)."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(
        description="Data set: one of `raydfl data list`, or your own as my_file.py:Class or my_module:Class. Left out where "
        "each of parts names its own."
    )
    features: Annotated[
        AnyFeatures,
        BeforeValidator(make_features),
        Field(description="How a wave becomes frames x bands, or where such features lie."),
    ] = FeatureSettings()
    segment: SegmentSettings | None = Field(
        None, description="Cut long clips into segments. null: a clip is one example."
    )
    transforms: Transforms = Field(
        (),
        description="What is done to training examples, anew in every batch, in that order: a list of {name, options ...}. "
        "`raydfl methods` lists them.",
    )
    views: dict[str, ViewSettings] = Field(
        default_factory=dict,
        description="Views of the examples beside features, by name: models.NAME.view says which model reads one.",
    )
    missing: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        default_factory=dict,
        description="Views that some clients lack, by name the share of the clients, 0 to 1, drawn by the run's seed. "
        "The server's data keep them.",
    )
    leave_out: tuple[str, ...] = Field((), description="Labels whose clips are left out: they are not read at all.")
    label_sets: LabelSetSettings | None = Field(
        None, description="Labels that are sets of classes. null: a label is one class."
    )
    ungrouped: Literal["keep", "deal"] = Field(
        "keep",
        description="Clips without a group. keep: nobody owns them. deal: they are dealt out evenly to the groups, drawn by "
        "the run's seed, before anything is divided.",
    )
    unseen: Literal["stop", "keep"] = Field(
        "stop",
        description="At labels of which no client has a clip to train on: stop, or keep them: they are tested on only.",
    )
    columns: tuple[str, ...] = Field(
        (),
        description="Columns of the manifest that batches carry besides the label, as numbers: condition, section, domain, "
        "device ... Every clip must have a value in them.",
    )
    split: SplitSettings = Field(SplitSettings(), description="What is held out for tests and validation.")
    partition: PartitionSettings = Field(PartitionSettings(), description="Which client has which clips.")
    tables: TableSettings = Field(TableSettings(), description="Tables of clips and clients, in place of steps.")
    profile: dict[str, ProfileSettings] = Field(
        default_factory=dict,
        description="What else is said of clients, by name: dealt values, or a column of the manifest.",
    )
    device: str | None = Field(
        None,
        description="Name of a profile with the channel of the recordings that each client reads, 0 for the first: its microphone. "
        "The server's data keep features.channel. null: all clients do.",
    )
    unlabelled: UnlabelledSettings | None = Field(
        None,
        description="Hide the labels of most training clips: pools labelled and unlabelled. null: all have theirs.",
    )
    pools: dict[str, PoolSettings] = Field(
        default_factory=dict,
        description="Named sets of training clips, by the values of a column; the first is what is trained on by default.",
    )
    corrupt: CorruptSettings = Field(CorruptSettings(), description="Noise and wrong labels in training data.")
    unreadable: Literal["stop", "skip"] = Field(
        "stop", description="At clips that cannot be read: stop, or leave them out, count and list them."
    )
    cache: Path | None = Field(
        None, description="Folder of the feature cache. null: $RAYDFL_CACHE, $XDG_CACHE_HOME/raydfl or ~/.cache/raydfl."
    )

    sites: dict[str, SiteSettings] = Field(
        default_factory=dict,
        description="Nodes that hold data of their own, by name: each has clients of its own, and their data never leave it. "
        "A site's node offers the Ray resource site:NAME. Empty: the run's own machine or cluster holds all.",
    )

    parts: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Data sets in one federation, by name: each has clients, classes and a test set of its own. A part takes "
        "all keys of data; what it does not give is as in data. Empty: one data set.",
    )

    heads: Literal["part", "common"] = Field(
        "part",
        description="Last layers of parts. part: each has its own at the server. common: one for all, as wide as the part with "
        "the most classes needs it, so that no update says of which part its client is.",
    )

    @field_validator("leave_out", mode="before")
    @classmethod
    def _labels(cls, value: Any) -> Any:
        """Accept numbers as labels; the order does not matter."""
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError("write a list of labels, like [_silence_]")
        return sorted({str(label) for label in value})

    @field_validator("columns")
    @classmethod
    def _distinct_columns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if value.count(name) > 1:
                raise ValueError(f"{name!r} is named more than once; name each column once")
        return value

    @field_validator("profile", "sites", "parts")
    @classmethod
    def _names(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        pattern, rule = _NAMES[str(info.field_name)]
        for name in value:
            if not re.fullmatch(pattern, name) or (info.field_name == "profile" and name in KNOWN):
                raise ValueError(f"the name {name!r} cannot be used: {rule}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        if isinstance(values, str):
            values = {"name": values}
        if isinstance(values, Mapping) and values.get("parts"):
            values = {"name": "", **values}
        if not isinstance(values, Mapping) or not isinstance(values.get("name"), str):
            return values  # pydantic says what is wrong with it
        if is_uri(values.get("cache")):
            raise ConfigError(
                f"data.cache: {values['cache']} is a URI, but features are mapped into memory: give a folder, which all nodes see"
            )
        own, options = list(cls.model_fields), _options_of(values["name"]) if values["name"] else []
        for key in values:
            if key not in own and key not in options:
                known, of = [*own, *options], f" for data set {values['name']!r}"
                raise unknown_key(str(key), known, "data", of)
        views = values.get("views")
        if isinstance(views, Mapping):
            values = {**values, "views": {view: _checked_view(view, settings) for view, settings in views.items()}}
        sites = values.get("sites")
        for name, site in (sites if isinstance(sites, Mapping) and not values.get("parts") else {}).items():
            for key in site if isinstance(site, Mapping) else ():
                if key not in (*_OF_SITES, *options):
                    known, of = [*_OF_SITES, *options], f" for data set {values['name']!r}"
                    raise unknown_key(str(key), known, f"data.sites.{name}", of)
        return values

    @model_validator(mode="after")
    def _consistent(self) -> DataSettings:
        if self.segment is not None and self.features.frames is not None:
            length = "seconds" if isinstance(self.features, FeatureSettings) else "frames"
            raise ConfigError(
                f"data.segment cuts clips of their own lengths: set data.features.{length} to null, or data.segment to null"
            )
        crop = self.first_view.pipeline.crop if self.transforms else None
        if self.segment is not None and crop is not None:
            raise ConfigError("data.segment and the transform random_crop both cut clips: leave one of them out")
        if isinstance(self.features, FileFeatures) and self.corrupt.noise is not None:
            self.features.noisy_file()
        if self.label_sets is not None and self.corrupt.labels is not None:
            raise ConfigError(
                "data.corrupt.labels puts one class in another's place, but with data.label_sets a clip has a set of them; set one "
                "of them to null"
            )
        self._check_pools()
        self._check_table()
        self._check_parts()
        if self.parts:
            return self
        if self.heads != "part":
            raise ConfigError(
                "data.heads says what several parts have in common, and there are no data.parts; leave it out"
            )
        if not self.name:
            raise ConfigError("data.name is missing: name a data set, one of `raydfl data list`")
        for key, uri in self.uris.items():
            check_uri(uri, f"data.{key}")
        self._check_views()
        self._check_device()
        self._check_images()
        if not self.sites:
            self.source.open()  # the data set checks its own options
        for name in self.sites:
            self.at(name)
        return self

    def _check_parts(self) -> None:
        """Check the settings of each part, and that sites name parts that exist."""
        for site, own in self.sites.items():
            for name in own.parts:
                if name not in self.parts:
                    hint = nearest(name, self.parts) if self.parts else "leave it out"
                    raise ConfigError(f"data.sites.{site}.parts: there is no part {name!r} in data.parts; {hint}")
        if self.sites and self.tables != TableSettings():
            raise ConfigError(
                "data.tables: the lists of clips are at the sites; name the tables in data.sites.NAME.tables"
            )
        for name in self.parts:
            if self.sites and not self.part(name).sites:
                raise ConfigError(f"data.parts.{name}: no site has the part; name it in data.sites.SITE.parts")
            self.part(name)

    def _check_views(self) -> None:
        """Reject views without a usable name."""
        for name in self.views:
            if not name.isidentifier():
                raise ConfigError(f"data.views: the name {name!r} must be a word of letters, digits and _")
        for name in self.missing:
            if name not in self.views:
                raise ConfigError(f"data.missing: there is no view {name!r} in data.views; {nearest(name, self.views)}")

    def _check_device(self) -> None:
        """Refuse a device that no profile names, or that the features cannot follow."""
        if self.device is None:
            return
        where = f"data.device: {self.device!r}"
        if self.device not in self.profile:
            raise ConfigError(f"{where} is not in data.profile; {nearest(self.device, self.profile)}")
        if self.sites and self.profile[self.device].column is None:
            raise ConfigError(f"{where} is dealt, but the clips are at the sites (data.sites); read it from a column")
        if not hasattr(self.features, "channel"):
            raise ConfigError(f"{where} needs recordings, but data.features.kind is {self.features.kind}")
        if self.features.normalise not in ("clip", "none"):
            raise ConfigError(
                f"{where} needs data.features.normalise: clip or none, because statistics of several clips would mix channels"
            )

    def _check_images(self) -> None:
        """Refuse what is for recordings only, where the data are images."""
        holds_images = find_dataset(self.name).images
        if self.features.kind == "image" and self.corrupt.noise is not None:
            raise ConfigError(
                "data.corrupt.noise is noise in recordings, and data.features of the kind image come without any"
            )
        if holds_images and self.features.kind in ("logmel", "model", "kaldi", "pretrained"):
            raise ConfigError(
                f"data set {self.name!r} holds images, and data.features.kind is {self.features.kind}; set "
                f"data.features='{{kind: image, size: 28}}', with their rows and columns"
            )

    def _check_pools(self) -> None:
        """Refuse pools that cannot be made."""
        if self.pools and self.unlabelled is not None:
            raise ConfigError("data.pools and data.unlabelled both make pools: give one of them")
        if self.label_sets is not None and self.unlabelled is not None:
            raise ConfigError(
                "data.unlabelled hides one class of a clip, but with data.label_sets a clip has a set of them; set one of them to "
                "null"
            )
        names = self.pools if self.unlabelled is None else (LABELLED, UNLABELLED)
        check_pool_names(names, self.views, "data.pools")

    def _check_table(self) -> None:
        """Refuse what needs clips to be one client's, where a table of clients says who has which."""
        pools = [pool.partition for pool in self.pools.values()]
        if self.unlabelled is not None:
            pools.append(self.unlabelled.partition)
        if self.partition.by != "table":
            if any(pool is not None and pool.by == "table" for pool in pools):
                raise ConfigError("data.pools: a pool's partition cannot be by: table; deal the pool in another way")
            return
        if not self.sites and (self.partition.file is None) == (self.tables.clients is None):
            raise ConfigError(
                "data.partition.by: table needs one table of clients: set data.partition.file or data.tables.clients"
            )
        wanted = {
            "data.pools": self.pools,
            "data.unlabelled": self.unlabelled,
            "data.corrupt.noise": self.corrupt.noise,
            "data.corrupt.labels": self.corrupt.labels,
            "data.missing": self.missing,
            "data.split.client_test": self.split.client_test,
            "data.split.validation": self.split.validation,
            "data.split.as_published": self.split.as_published,
            "data.device": self.device,
            "data.features.normalise: client": self.features.normalise == "client",
        }
        unfit = [name for name, value in wanted.items() if value]
        if unfit:
            raise ConfigError(
                f"{unfit[0]} needs clips that are one client's, but by data.partition.by: table clients may share clips; leave it "
                f"out, or take another partition"
            )

    @property
    def all_views(self) -> dict[str, View]:
        """The settings of every view by name, those of ``features`` first."""
        found = {FIRST_VIEW: View("data", "path", self.features, self.transforms, self.segment)}
        for name, view in self.views.items():
            found[name] = View(f"data.views.{name}", view.column, view.features, view.transforms)
        return found

    @property
    def first_view(self) -> View:
        """The settings of the first view."""
        return self.all_views[FIRST_VIEW]

    def part(self, name: str) -> DataSettings:
        """Return the settings of one part: data's, with the part's own in their place.

        Raises:
            ConfigError: one of them is not as it should be; the part is named.
        """
        own, where = self.parts[name], f"data.parts.{name}"
        for key in ("parts", "sites", "cache", "heads"):
            if key in own:
                raise ConfigError(f"{where}.{key}: a part has no {key} of its own; give it in data")
        if not own.get("name", self.name):
            raise ConfigError(f"{where}.name is missing: name a data set, one of `raydfl data list`")
        common = self.model_dump(exclude={"parts", "sites", "heads"}, exclude_unset=True)
        sites = {site: own.of_part(name) for site, own in self.sites.items() if name in own.parts or not own.parts}
        if "name" in own and own["name"] != self.name:
            common = {key: value for key, value in common.items() if key in type(self).model_fields}
        try:
            return DataSettings.model_validate({**common, "cache": self.cache, "sites": sites, **own})
        except ValidationError as error:
            raise ConfigError(explain(error, where, own, DataSettings)) from error
        except ConfigError as error:
            raise with_place(error, where) from error

    @property
    def each(self) -> dict[str, DataSettings]:
        """The settings of each part by its name; these themselves, under no name, where there are no parts."""
        return {name: self.part(name) for name in self.parts} or {"": self}

    @property
    def title(self) -> str:
        """The name of the data: the data set's name, or those of the parts."""
        return "+".join(self.parts) or self.name

    def at(self, site: str) -> DataSettings:
        """Return the settings with which one site prepares its data, in its own folder.

        Raises:
            ConfigError: the data set does not take the site's options.
        """
        own = self.sites[site]
        given = dict(own.model_extra or {})
        paths = {key: given.get(key) for key in path_options(find_dataset(self.name))}
        for group, keys in (("partition", ["file"]), ("tables", [*TableSettings.model_fields])):
            if isinstance(given.get(group), Mapping):
                paths |= {f"{group}.{key}": given[group].get(key) for key in keys}
        for key, value in paths.items():
            if isinstance(value, str | Path) and not is_uri(value) and not Path(value).is_absolute():
                raise ConfigError(
                    f"data.sites.{site}.{key}: {str(value)!r} would be looked for in the working directory of a process of Ray on "
                    f"the site's node; give an absolute path"
                )
        values = self.model_dump(exclude={"sites", "cache", "parts"})
        try:
            return DataSettings.model_validate({**values, **given, "cache": own.folder / "cache"})
        except ValidationError as error:
            raise ConfigError(explain(error, f"data.sites.{site}", given, DataSettings)) from error

    @property
    def source(self) -> Source:
        """The data set by name and options; for recordings behind a URI with the place of their local copy."""
        copies = {key: str(local_copy(uri, self.cache)) for key, uri in self.uris.items()}
        return Source(self.name, {**(self.model_extra or {}), **copies})

    @property
    def uris(self) -> dict[str, str]:
        """The options that are files or folders behind a URI, by name."""
        options = self.model_extra or {}
        return {key: options[key] for key in path_options(find_dataset(self.name)) if is_uri(options.get(key))}


_NAMES = {  # they are in names of tensors, clients, files, folders and scores
    "profile": (r"[A-Za-z_]\w*", f"letters, digits and _ make one; taken: {', '.join(KNOWN)}"),
    "sites": (r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]*", "it may hold letters, digits, _, . and -, and not begin with a ."),
    "parts": (r"[A-Za-z0-9_\-]+", "it may hold letters, digits, _ and -"),
}
"""Patterns of names, with their rules in words."""
_OF_SITES = ("folder", "parts", "partition", "tables")
"""Keys of a site that are no options of a data set."""


_E = TypeVar("_E", bound=InputError)


def place_of(part: str) -> str:
    """Return the place of a part's settings in the configuration."""
    return f"data.parts.{part}" if part else "data"


def with_part(error: _E, part: str) -> _E:
    """Return an error with the settings of ``data`` in its message replaced by those of a part (:func:`with_place`)."""
    return with_place(error, place_of(part)) if part else error


def with_place(error: _E, where: str) -> _E:
    """Return an error with the settings of ``data`` in its message replaced by those of a part or a view.

    Args:
        error: an error from code for any data, such as ``data.features.kind is 3``.
        where: the place of the part or the view: ``data.parts.NAME`` or ``data.views.NAME``.
    """
    settings = ViewSettings if where.startswith("data.views.") else DataSettings
    own = "|".join(settings.model_fields.keys() - {"parts", "sites", "cache", "heads"})
    text = re.sub(rf"(?<![\w./-])data\.(?=(?:{own})\b)", f"{where}.", str(error))
    return type(error)(text if text.startswith(where) else f"{where}: {text}")


def _checked_view(name: str, settings: Any) -> Any:
    """Validate the settings of a view. A value of another type than a group is left to pydantic.

    Raises:
        ConfigError: a setting is wrong. The message names the view.
    """
    where = f"data.views.{name}"
    if not isinstance(settings, Mapping):
        return settings
    try:
        return ViewSettings.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(explain(error, where, settings, ViewSettings)) from error
    except InputError as error:
        raise with_place(error, where) from error


def _options_of(name: str) -> list[str]:
    cls = find_dataset(name)
    options = [field.name for field in dataclasses.fields(cls) if field.init]
    taken = sorted(set(options) & set(DataSettings.model_fields))
    if taken:
        raise ConfigError(
            f"data set {name!r} has an option {taken[0]!r}, which is a key of data itself; rename it in the class"
        )
    return options
