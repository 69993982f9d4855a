"""Settings of ``data``: recordings, features, the split, and the partition among clients."""

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
from raydfl.data.features.file import FileFeatures
from raydfl.data.features.kinds import AnyFeatures, make_features
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.label_sets import LabelSetSettings
from raydfl.data.remote import local_copy
from raydfl.data.segment import SegmentSettings
from raydfl.data.source import Source
from raydfl.data.steps.corrupt import CorruptSettings
from raydfl.data.steps.dealing import PartitionSettings
from raydfl.data.steps.events import EventSettings
from raydfl.data.steps.label_sequences import LabelSequenceSettings
from raydfl.data.steps.listing import LABELLED, UNLABELLED
from raydfl.data.steps.pools import PoolSettings, UnlabelledSettings, check_pool_names
from raydfl.data.steps.profile import KNOWN, ProfileSettings
from raydfl.data.steps.split import SplitSettings
from raydfl.data.steps.user_tables import TableSettings
from raydfl.data.views import Transforms, View, ViewSettings


class SiteSettings(Settings):
    """A node with local data. It may override ``data.partition``, ``data.tables`` and the options of the data set."""

    model_config = ConfigDict(extra="allow")

    folder: Path = Field(
        description="Absolute path of a folder on the site's node. It stores features, client tables and private models."
    )

    parts: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Parts with data at the site, each with its options at the site. Empty: all parts.",
    )

    def select_part(self, name: str) -> dict[str, Any]:
        """Return the site's settings for a part."""
        return {"folder": self.folder, **(self.model_extra or {}), **self.parts.get(name, {})}

    @field_validator("folder")
    @classmethod
    def _check_absolute(cls, value: Path) -> Path:
        if not value.is_absolute():
            raise ValueError(
                "a relative path would depend on the working directory of a Ray process. Give an absolute path"
            )
        return value


class DataSettings(Settings):
    """Recordings, features, split and partition. Every other key is an option of the data set (``root`` ...)."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(
        description="Data set: a name from `raydfl data list`, or your own class as my_file.py:Class or my_module:Class. "
        "Optional if each of parts has a name."
    )
    features: Annotated[
        AnyFeatures,
        BeforeValidator(make_features),
        Field(
            description="Features of a recording, [frames, bands]: the front end, or a file of precomputed features."
        ),
    ] = FeatureSettings()
    segment: SegmentSettings | None = Field(
        None, description="Cut long clips into segments. null: each clip is an example."
    )
    transforms: Transforms = Field(
        (),
        description="Augmentations of training examples, applied in order and redrawn for every batch: a list of {name, "
        "options ...}. `raydfl methods` lists them.",
    )
    views: dict[str, ViewSettings] = Field(
        default_factory=dict,
        description="Additional views of the examples, by name. models.NAME.view selects the view of a model.",
    )
    missing: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        default_factory=dict,
        description="Fraction of the clients without a view, 0 to 1, by name of the view. The run's seed draws these clients. "
        "The server's data keep all views.",
    )
    leave_out: tuple[str, ...] = Field((), description="Labels to exclude. Their clips are never read.")
    label_from: str | None = Field(
        None,
        description="Column with the label of each clip: group (the speaker), or another column of the manifest. leave_out names "
        "labels of the data set. null: the labels of the data set.",
    )
    label_sets: LabelSetSettings | None = Field(
        None, description="Labels with several classes each. null: each label is a single class."
    )
    label_sequences: LabelSequenceSettings | None = Field(
        None,
        description="Transcripts as labels. Their units are the classes. Partitions and splits by label count a clip under "
        "its rarest unit, and data.corrupt.labels replaces single units. null: labels are not transcripts.",
    )
    events: EventSettings | None = Field(
        None,
        description="Labels with the times of events. Partitions and splits by label count a clip under its rarest class. null: "
        "labels have no times.",
    )
    trials: Path | None = Field(
        None,
        description="File with pairs of clips for the objective verify, in VoxCeleb's format: lines `1 CLIP CLIP` (same speaker) "
        "or `0 CLIP CLIP`, with the names of the manifest. A test uses the pairs with both clips in it. null: all pairs.",
    )
    ungrouped: Literal["keep", "deal"] = Field(
        "keep",
        description="Clips without a group. keep: they have no owner. deal: distribute them evenly over the groups, drawn by "
        "the run's seed, before the split.",
    )
    unseen: Literal["stop", "keep"] = Field(
        "stop",
        description="Labels without a training clip at any client. stop: raise an error. keep: use them in tests only.",
    )
    columns: tuple[str, ...] = Field(
        (),
        description="Columns of the manifest to include in batches, as integer codes: condition, section, domain, device ... "
        "Every clip needs a value.",
    )
    split: SplitSettings = Field(SplitSettings(), description="Held-out data for tests and validation.")
    partition: PartitionSettings = Field(PartitionSettings(), description="Assignment of clips to clients.")
    tables: TableSettings = Field(
        TableSettings(), description="Tables of clips and clients, which replace steps of the preparation."
    )
    profile: dict[str, ProfileSettings] = Field(
        default_factory=dict,
        description="Profile columns of clients, by name: randomly assigned values, or a column of the manifest.",
    )
    device: str | None = Field(
        None,
        description="Profile column with each client's recording channel (its microphone), 0 for the first. The server reads "
        "features.channel. null: so do all clients.",
    )
    unlabelled: UnlabelledSettings | None = Field(
        None,
        description="Hide the labels of most training clips, in pools labelled and unlabelled. null: all labels are visible.",
    )
    pools: dict[str, PoolSettings] = Field(
        default_factory=dict,
        description="Named pools of training clips, by the values of a column. Clients train on the first by default.",
    )
    corrupt: CorruptSettings = Field(CorruptSettings(), description="Noise and wrong labels in training data.")
    unreadable: Literal["stop", "skip"] = Field(
        "stop", description="Unreadable clips. stop: raise an error. skip: leave them out, and report them."
    )
    cache: Path | None = Field(
        None,
        description="Folder of the feature cache. null: $RAYDFL_CACHE, $XDG_CACHE_HOME/raydfl or ~/.cache/raydfl.",
    )

    sites: dict[str, SiteSettings] = Field(
        default_factory=dict,
        description="Nodes with local data, by name. Each has its own clients, and their data never leave it. Its node offers "
        "the Ray resource site:NAME. Empty: the run's machine or cluster holds all data.",
    )

    parts: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Data sets of a federation, by name, each with its own clients, classes and test set. A part accepts the "
        "keys of data, and inherits their values from data. Empty: a single data set.",
    )

    heads: Literal["part", "common"] = Field(
        "part",
        description="Output layers with data.parts. part: the server keeps a head for each part. common: all parts share a head "
        "as wide as the largest part, so that updates do not reveal a client's part.",
    )

    @field_validator("leave_out", mode="before")
    @classmethod
    def _sort_labels(cls, value: Any) -> Any:
        """Convert labels to text. Their order must not affect the digest of a configuration."""
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError("write a list of labels, like [_silence_]")
        return sorted({str(label) for label in value})

    @field_validator("columns")
    @classmethod
    def _check_distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if value.count(name) > 1:
                raise ValueError(f"{name!r} is listed more than once. List each column once")
        return value

    @field_validator("profile", "sites", "parts")
    @classmethod
    def _check_names(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        pattern, rule = _NAMES[str(info.field_name)]
        for name in value:
            if not re.fullmatch(pattern, name) or (info.field_name == "profile" and name in KNOWN):
                raise ValueError(f"the name {name!r} is invalid. {rule}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        if isinstance(values, str):  # the short form `data: tones`
            values = {"name": values}
        if isinstance(values, Mapping) and values.get("parts"):
            values = {"name": "", **values}
        if not isinstance(values, Mapping) or not isinstance(values.get("name"), str):
            return values  # pydantic reports the error
        if is_uri(values.get("cache")):
            raise ConfigError(
                f"data.cache: {values['cache']} is a URI, but features are memory-mapped. Give a folder that all nodes share"
            )
        fields, options = list(cls.model_fields), _list_options(values["name"]) if values["name"] else []
        about = f" for data set {values['name']!r}"
        for key in values:
            if key not in fields and key not in options:
                raise unknown_key(str(key), [*fields, *options], "data", about)
        views = values.get("views")
        if isinstance(views, Mapping):
            values = {**values, "views": {view: _validate_view(view, settings) for view, settings in views.items()}}
        sites = values.get("sites")
        for name, site in (sites if isinstance(sites, Mapping) and not values.get("parts") else {}).items():
            for key in site if isinstance(site, Mapping) else ():
                if key not in (*_SITE_KEYS, *options):
                    raise unknown_key(str(key), [*_SITE_KEYS, *options], f"data.sites.{name}", about)
        return values

    @model_validator(mode="after")
    def _check_consistency(self) -> DataSettings:
        if self.segment is not None and self.features.frames is not None:
            length = "seconds" if isinstance(self.features, FeatureSettings) else "frames"
            raise ConfigError(
                f"data.segment needs clips of full length, but data.features.{length} limits it. Set either of them to null"
            )
        crop = self.first_view.pipeline.crop if self.transforms else None
        if self.segment is not None and crop is not None:
            raise ConfigError("data.segment and the transform random_crop both cut clips. Remove either of them")
        if isinstance(self.features, FileFeatures) and self.corrupt.noise is not None:
            self.features.noisy_file()
        if self.label_sets is not None and self.corrupt.labels is not None:
            raise ConfigError(
                "data.corrupt.labels replaces the class of a clip, but with data.label_sets a clip has several classes. Set "
                "either of them to null"
            )
        self._check_transcripts()
        self._check_events()
        self._check_pools()
        self._check_table()
        self._check_parts()
        if self.parts:
            return self
        if self.label_from is not None and self.leave_out and self.sites:
            raise ConfigError(
                "data.leave_out names labels of the data set, but with data.label_from the sites report values of a column. Remove "
                "either of them"
            )
        if self.trials is not None and self.sites:
            raise ConfigError(
                "data.trials names clips, but with data.sites the clips are at the sites. Remove either of them"
            )
        if self.heads != "part":
            raise ConfigError("data.heads has no effect without data.parts. Remove data.heads, or define data.parts")
        if not self.name:
            raise ConfigError("data.name is missing. Choose a data set from `raydfl data list`")
        for key, uri in self.uris.items():
            check_uri(uri, f"data.{key}")
        self._check_views()
        self._check_device()
        self._check_images()
        if not self.sites:
            self.source.open()  # the constructor of the data set validates its options
        for name in self.sites:
            self.select_site(name)
        return self

    def _check_transcripts(self) -> None:
        """Reject settings for single classes or cut clips if labels are transcripts."""
        if self.label_sequences is None:
            return
        conflicting = {
            "data.label_sets": self.label_sets,
            "data.unlabelled": self.unlabelled,
            "data.segment": self.segment,
            "the transform random_crop": self.first_view.pipeline.crop if self.transforms else None,
            "data.sites": self.sites or None,
        }
        for place, value in conflicting.items():
            if value is not None:
                raise ConfigError(
                    f"data.label_sequences: a label is the transcript of a whole clip, so {place} is not supported. Remove either "
                    f"of them"
                )

    def _check_events(self) -> None:
        """Reject settings for single classes, and features without known times, if labels have the times of events."""
        if self.events is None:
            return
        conflicting = {
            "data.label_sets": self.label_sets,
            "data.label_sequences": self.label_sequences,
            "data.unlabelled": self.unlabelled,
            "data.corrupt.labels": self.corrupt.labels,
            "data.sites": self.sites or None,
            "the transform shift": next((t for t in self.transforms if t.get("name") == "shift"), None),
        }
        for place, value in conflicting.items():
            if value is not None:
                raise ConfigError(
                    f"data.events: a label lists events with their times, so {place} is not supported. Remove either of them"
                )
        if self.features.frame_seconds is None:
            raise ConfigError(
                f"data.events needs frames at known times, but data.features.kind {self.features.kind} with these options does "
                f"not give them. Choose the kind logmel (without trim_db), kaldi, speech_embedding or pretrained (without pooling)"
            )

    def _check_parts(self) -> None:
        """Validate the settings of each part, and the parts of each site."""
        for site, settings in self.sites.items():
            for name in settings.parts:
                if name not in self.parts:
                    hint = nearest(name, self.parts) if self.parts else "Remove it."
                    raise ConfigError(f"data.sites.{site}.parts: unknown part {name!r}, not in data.parts. {hint}")
        if self.sites and self.tables != TableSettings():
            raise ConfigError(
                "data.tables is not supported with data.sites, because the clips are at the sites. Give the tables in "
                "data.sites.NAME.tables"
            )
        for name in self.parts:
            if self.sites and not self.part(name).sites:
                raise ConfigError(f"data.parts.{name}: no site has this part. Add it to data.sites.SITE.parts")
            self.part(name)

    def _check_views(self) -> None:
        """Reject invalid names of views, and unknown views in ``missing``."""
        for name in self.views:
            if not name.isidentifier():
                raise ConfigError(
                    f"data.views: the name {name!r} is invalid. Use letters, digits and _, and start with a letter or _"
                )
        for name in self.missing:
            if name not in self.views:
                raise ConfigError(
                    f"data.missing: unknown view {name!r}, not in data.views. {nearest(name, self.views)}"
                )

    def _check_device(self) -> None:
        """Reject a device without a profile column, or with features that mix channels."""
        if self.device is None:
            return
        where = f"data.device: {self.device!r}"
        if self.device not in self.profile:
            raise ConfigError(f"{where} is not in data.profile. {nearest(self.device, self.profile)}")
        if self.sites and self.profile[self.device].column is None:
            raise ConfigError(
                f"{where} has randomly assigned values, which data.sites do not support. Give a column of the manifest in "
                f"data.profile.{self.device}.column"
            )
        if not hasattr(self.features, "channel"):
            raise ConfigError(
                f"{where} needs recordings, but data.features.kind is {self.features.kind}. Remove data.device, or choose "
                f"features of recordings"
            )
        if self.features.normalise not in ("clip", "none"):
            raise ConfigError(
                f"{where} is not supported with data.features.normalise: {self.features.normalise}, because its statistics would "
                f"mix channels. Set data.features.normalise to clip or none"
            )

    def _check_images(self) -> None:
        """Reject options for recordings if the data set contains images."""
        holds_images = find_dataset(self.name).images
        if self.features.kind == "image" and self.corrupt.noise is not None:
            raise ConfigError(
                "data.corrupt.noise needs recordings, but data.features.kind is image. Set data.corrupt.noise to null"
            )
        if holds_images and self.features.kind in ("logmel", "model", "kaldi", "pretrained"):
            raise ConfigError(
                f"data set {self.name!r} contains images, but data.features.kind is {self.features.kind}. Set "
                f"data.features='{{kind: image, size: 28}}', with the height and width of the images"
            )

    def _check_pools(self) -> None:
        """Reject contradictory settings of pools."""
        if self.pools and self.unlabelled is not None:
            raise ConfigError("data.pools and data.unlabelled both define pools. Remove either of them")
        if self.label_sets is not None and self.unlabelled is not None:
            raise ConfigError(
                "data.unlabelled hides the class of a clip, but with data.label_sets a clip has several classes. Set either of "
                "them to null"
            )
        names = self.pools if self.unlabelled is None else (LABELLED, UNLABELLED)
        check_pool_names(names, self.views, "data.pools")

    def _check_table(self) -> None:
        """Reject options that need a single owner of each clip, if a table of clients may share clips."""
        pools = [pool.partition for pool in self.pools.values()]
        if self.unlabelled is not None:
            pools.append(self.unlabelled.partition)
        if self.partition.by != "table":
            if any(pool is not None and pool.by == "table" for pool in pools):
                raise ConfigError(
                    "data.pools: partition.by: table is not supported for a pool. Choose another partition"
                )
            return
        if not self.sites and (self.partition.file is None) == (self.tables.clients is None):
            raise ConfigError(
                "data.partition.by: table needs exactly one table of clients. Set data.partition.file or data.tables.clients"
            )
        single_owner = {
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
        unsupported = [name for name, value in single_owner.items() if value]
        if unsupported:
            raise ConfigError(
                f"{unsupported[0]} needs a single owner of each clip, but clients may share clips with data.partition.by: table. "
                f"Remove it, or choose another partition"
            )

    @property
    def all_views(self) -> dict[str, View]:
        """The settings of all views by name, starting with ``features``."""
        views = {FIRST_VIEW: View("data", "path", self.features, self.transforms, self.segment)}
        for name, view in self.views.items():
            views[name] = View(f"data.views.{name}", view.column, view.features, view.transforms)
        return views

    @property
    def first_view(self) -> View:
        """The settings of the first view."""
        return self.all_views[FIRST_VIEW]

    def part(self, name: str) -> DataSettings:
        """Return the settings of a part: those of ``data`` with the part's overrides.

        Raises:
            ConfigError: a setting is invalid. The message names the part.
        """
        options, where = self.parts[name], f"data.parts.{name}"
        for key in ("parts", "sites", "cache", "heads"):
            if key in options:
                raise ConfigError(f"{where}.{key} is not supported, because all parts share it. Set data.{key}")
        if not options.get("name", self.name):
            raise ConfigError(f"{where}.name is missing. Choose a data set from `raydfl data list`")
        common = self.model_dump(exclude={"parts", "sites", "heads"}, exclude_unset=True)
        sites = {
            key: site.select_part(name) for key, site in self.sites.items() if name in site.parts or not site.parts
        }
        if options.get("name", self.name) != self.name:  # options of a different data set do not apply
            common = {key: value for key, value in common.items() if key in type(self).model_fields}
        try:
            return DataSettings.model_validate({**common, "cache": self.cache, "sites": sites, **options})
        except ValidationError as error:
            raise ConfigError(explain(error, where, options, DataSettings)) from error
        except ConfigError as error:
            raise relocate_error(error, where) from error

    @property
    def each(self) -> dict[str, DataSettings]:
        """The settings of each part by name. Without parts, these settings with an empty name."""
        return {name: self.part(name) for name in self.parts} or {"": self}

    @property
    def title(self) -> str:
        """The name of the data set, or the names of the parts."""
        return "+".join(self.parts) or self.name

    def select_site(self, site: str) -> DataSettings:
        """Return the settings of a site, with its options and a cache in its folder.

        Raises:
            ConfigError: an option of the site is invalid.
        """
        options = dict(self.sites[site].model_extra or {})
        paths = {key: options.get(key) for key in path_options(find_dataset(self.name))}
        for group, keys in (("partition", ["file"]), ("tables", [*TableSettings.model_fields])):
            if isinstance(options.get(group), Mapping):
                paths |= {f"{group}.{key}": options[group].get(key) for key in keys}
        for key, value in paths.items():
            if isinstance(value, str | Path) and not is_uri(value) and not Path(value).is_absolute():
                raise ConfigError(
                    f"data.sites.{site}.{key}: {str(value)!r} would depend on the working directory of a Ray process on the "
                    f"site's node. Give an absolute path"
                )
        values = self.model_dump(exclude={"sites", "cache", "parts"})
        try:
            return DataSettings.model_validate({**values, **options, "cache": self.sites[site].folder / "cache"})
        except ValidationError as error:
            raise ConfigError(explain(error, f"data.sites.{site}", options, DataSettings)) from error

    @property
    def source(self) -> Source:
        """The data set's name and options. Local copies replace URIs."""
        copies = {key: str(local_copy(uri, self.cache)) for key, uri in self.uris.items()}
        return Source(self.name, {**(self.model_extra or {}), **copies})

    @property
    def uris(self) -> dict[str, str]:
        """The options with a URI of a file or folder, by name."""
        options = self.model_extra or {}
        return {key: options[key] for key in path_options(find_dataset(self.name)) if is_uri(options.get(key))}


_NAMES = {  # these names occur in names of tensors, clients, files, folders and metrics
    "profile": (r"[A-Za-z_]\w*", f"Use letters, digits and _. Reserved names: {', '.join(KNOWN)}"),
    "sites": (r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]*", "Use letters, digits, _, . and -, and do not start with a ."),
    "parts": (r"[A-Za-z0-9_\-]+", "Use letters, digits, _ and -"),
}
"""Patterns of valid names, each with its description for error messages."""
_SITE_KEYS = ("folder", "parts", "partition", "tables")
"""Keys of a site besides the options of its data set."""


_E = TypeVar("_E", bound=InputError)


def place_of(part: str) -> str:
    """Return the configuration key of a part's settings: ``data.parts.NAME``, or ``data``."""
    return f"data.parts.{part}" if part else "data"


def qualify_error(error: _E, part: str) -> _E:
    """Replace ``data.KEY`` by ``data.parts.NAME.KEY`` in the message of an error. An empty name changes nothing."""
    return relocate_error(error, place_of(part)) if part else error


def relocate_error(error: _E, where: str) -> _E:
    """Replace ``data.KEY`` by the key of a part or a view in the message of an error.

    Args:
        error: an error about settings of ``data``, such as ``data.features.kind is 3``.
        where: key of the part or the view: ``data.parts.NAME`` or ``data.views.NAME``.
    """
    settings = ViewSettings if where.startswith("data.views.") else DataSettings
    keys = "|".join(settings.model_fields.keys() - {"parts", "sites", "cache", "heads"})
    text = re.sub(rf"(?<![\w./-])data\.(?=(?:{keys})\b)", f"{where}.", str(error))
    return type(error)(text if text.startswith(where) else f"{where}: {text}")


def _validate_view(name: str, settings: Any) -> Any:
    """Validate the settings of a view. pydantic reports values that are not mappings.

    Raises:
        ConfigError: a setting is invalid. The message names the view.
    """
    where = f"data.views.{name}"
    if not isinstance(settings, Mapping):
        return settings
    try:
        return ViewSettings.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(explain(error, where, settings, ViewSettings)) from error
    except InputError as error:
        raise relocate_error(error, where) from error


def _list_options(name: str) -> list[str]:
    cls = find_dataset(name)
    options = [field.name for field in dataclasses.fields(cls) if field.init]
    reserved = sorted(set(options) & set(DataSettings.model_fields))
    if reserved:
        raise ConfigError(
            f"data set {name!r} has an option {reserved[0]!r}, but this name is a setting of data. Rename it in the class"
        )
    return options
