"""The digest: every setting that decides numbers is in it, and no other. The test goes through all fields, those to come too."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from raydfl.cli.explain import explain_config
from raydfl.core.errors import ConfigError
from raydfl.core.options import plain
from raydfl.core.settings import Settings
from raydfl.core.yaml import parse_yaml
from raydfl.engine.config import Config, make_config
from raydfl.engine.settings import FineTuneSettings

Tiny = Callable[..., Config]

DECIDES_NOTHING = r"evaluate\..*|ray\.(?!threads).*|run\.(?!seed).*|track\..*|train\.rounds"
DECIDES_NOTHING += r"|data\.(cache|sites\.(folder|parts))"
"""Where and on what a run is computed, how far it goes, and what is measured and tracked."""
NAMED = r"(method|models|objective|attack|data\.(name|parts|sites|views|profile|pools))"
"""Names with options of their own, and groups that are empty here: other tests change them."""

PLUGINS = r"data\.(views\.)?(features\.kind|transforms)|train\.groups"
"""Names that must be known (of groups: test_groups.py); the kind of features is in the digest as all of their settings are."""

COMMON = ["data.corrupt.labels={rate: 0.1}", "data.profile={size: {values: [a, b]}}"]
CONFIGURATIONS = {
    "pools and views": [
        *COMMON,
        "data.pools={a: {column: label, values: [tone0], partition: {by: iid, clients: 6}}}",
        "data.views={seen: {column: frame, features: {sample_rate: 8000, bands: 16, seconds: 0.25}}}",
        "models.model.view=seen",
        "data.split={test: {by: split}, client_test: {by: clip, fraction: 0.1}, validation: {by: clip, fraction: 0.1}, "
        "server_validation: {by: clip, fraction: 0.1}}",
        "data.transforms=[shift]",
    ],
    "segments": [
        *COMMON,
        "data.segment={frames: 10, stride: 5}",
        "data.features.seconds=null",
        "data.unlabelled={keep: 0.5, partition: {by: iid, clients: 6}}",
        "data.corrupt.noise={snr_db: 5}",
    ],
    "best, stop and clients": ["run.best={}", "run.stop={}", "train.clients={}", "evaluate.fine_tune={epochs: 1}"],
    "sets of classes": ["data.label_sets={}", "objective=multi_label"],
    "as published": ["data.split={test: null, as_published: true}"],
    "phases": [
        "method=modality_mirror",
        "models={audio: crnn_tiny, video: crnn_tiny}",
        "train.phases={multimodal: {rounds: 1}}",
    ],
    "sites": ["data.sites={here: {folder: /here}}"],
}


def settings_in(annotation: Any) -> list[type[Settings]]:
    """The groups of settings that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [found for inner in typing.get_args(annotation) for found in settings_in(inner)]


def fields(group: type[Settings], at: str = "") -> Iterator[str]:
    """The names of all fields, without the keys of groups by name; of features those of the default kind."""
    for name, field in group.model_fields.items():
        inner = settings_in(field.annotation)
        if name == "features" and inner:
            inner = [type(field.default)]
        if not inner:
            yield at + name
        for each in inner:
            yield from fields(each, f"{at}{name}.")


VALUES = ((int, 7), (float, 0.7), (Path, Path("/x")), (str, "x"))


def another(value: Any, annotation: Any) -> Any:
    """Another value of a field, which need not be one that is accepted."""
    kinds = [annotation, *typing.get_args(annotation)]
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            others = [choice for choice in typing.get_args(kind) if choice != value]
            return others[0] if others else None
    if value is None:
        return next((made for kind, made in VALUES if kind in kinds), ("x",))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, Path):
        return value / "x"
    return {**value, "x": 0.5} if isinstance(value, dict) else (*value, "x")


def changed(settings: Settings, at: str = "") -> Iterator[tuple[str, Any]]:
    """Copies of which each has one field changed, unchecked, and the field's place."""
    for name, field in type(settings).model_fields.items():
        value, place = getattr(settings, name), at + name
        if isinstance(value, Settings):
            copies = ((of, copy) for of, copy in changed(value, f"{place}."))
        elif isinstance(value, dict) and any(isinstance(each, Settings) for each in value.values()):
            copies = (
                (of, {**value, key: copy})
                for key, each in value.items()
                for of, copy in changed(each, f"{place}.{key}.")
            )
        elif re.fullmatch(NAMED, place) or settings_in(field.annotation):
            continue
        else:
            copies = iter([(place, another(value, field.annotation))])
        for of, copy in copies:
            yield of, settings.model_copy(update={name: copy})


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_every_setting_that_decides_numbers_is_in_the_digest_and_no_other(tiny: Tiny) -> None:
    seen = set[str]()
    for what, overrides in CONFIGURATIONS.items():
        config = tiny(*overrides, "train.deadline=10")
        before = config.digest()
        for place, other in changed(config):
            name = re.sub(r"\.(size|a|seen|here|multimodal)\.", ".", place)
            if name not in seen and not re.fullmatch(PLUGINS, name):
                decides = re.fullmatch(DECIDES_NOTHING, name) is None
                assert (other.digest() != before) is decides, f"{what}: {place}"
            seen.add(name)
    groups = {place[:end] for place in seen for end, sign in enumerate(f"{place}.") if sign == "."}
    unseen = {name for name in fields(Config) if name not in groups and not re.fullmatch(NAMED, name)}
    assert unseen == set()


def test_the_first_pool_is_what_is_trained_on(tiny: Tiny) -> None:
    pools = [f"{name}: {{column: label, values: [{label}]}}" for name, label in (("a", "tone0"), ("b", "tone1"))]
    one, other = (tiny(f"data.pools={{{', '.join(order)}}}").digest() for order in (pools, pools[::-1]))
    assert one != other


def test_defaults_of_a_views_transforms_may_be_written_down(tiny: Tiny) -> None:
    features = "features: {sample_rate: 8000, bands: 16, seconds: 0.25}"
    given = ("[shift]", "[{name: shift}]", "[{name: shift, frames: 10}]", "[{name: shift, frames: 9}]")
    views = [f"data.views={{seen: {{column: frame, {features}, transforms: {transforms}}}}}" for transforms in given]
    digests = [tiny(view, "models.model.view=seen").digest() for view in views]
    assert digests[:3] == [digests[0]] * 3
    assert digests[3] != digests[0]


POOLED = "data.pools={normal: {column: label, values: [tone0]}, anomalous: {column: label, values: [tone1, tone2]}}"


@pytest.mark.parametrize(
    ("method", "options", "digest"),
    [
        ("profila", [], "fb7bfa433ecd2e3d"),
        ("profila", ["method.schedule=rising"], "fb7bfa433ecd2e3d"),
        ("profila", ["method.schedule=literal"], "869c35ddf663c467"),
        ("profila", ["method.anomalous_share=0.5"], "09fd7daa4fda0c9c"),
        ("profila", [POOLED, "method.mode=as_run"], "a2c7cc8a947ec752"),
        ("fedmlac", ["method.form=literal"], "9eb43e646c090bcb"),
        ("fedmlac", ["method.form=supervised"], "744c786b2e4a3058"),
        ("fedmlac", ["method.plug_ce_weight=null"], "9eb43e646c090bcb"),
        ("fedmlac", ["method.plug_ce_weight=1"], "86d1adac2958eb16"),
        ("fedmlac", ["method.form=supervised", "method.plug_ce_weight=0.5"], "5643f2dc2c941bf3"),
    ],
)
def test_options_of_earlier_versions_keep_their_digests(
    tiny: Tiny, method: str, options: list[str], digest: str
) -> None:
    """The digests are those of the last version that had these options."""
    assert tiny(*options, method=method).digest() == digest


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("profila", ["method.mode=normal"]),
        ("profila", ["method.schedule=literal"]),
        ("profila", ["method.anomalous_share=0.5"]),
        ("profila", [POOLED, "method.mode=as_run"]),
        ("fedmlac", ["method.form=0.5"]),
        ("fedmlac", ["method.form=supervised", "method.plug_ce_weight=0.5"]),
        ("fedbabu", ["method.fine_tune_epochs=3"]),
        ("fedbabu", ["method.tasks=hdbscan"]),
        ("fedapta", []),
    ],
)
def test_a_printed_configuration_with_options_of_earlier_versions_means_the_same(
    tiny: Tiny, method: str, options: list[str]
) -> None:
    config = tiny(*options, method=method)
    printed = make_config(parse_yaml(explain_config(config), "printed"))
    assert printed.digest() == config.digest()
    assert plain(printed.components.method) == plain(config.components.method)
    assert (
        printed.components.fine_tune
        == config.components.fine_tune
        == (printed.evaluate.fine_tune or FineTuneSettings(epochs=0))
    )
    assert printed.train.groups == config.components.former.get("tasks", "none")


@pytest.mark.parametrize(
    "options",
    [
        ["method.form=bogus", "method.plug_ce_weight=0.3"],
        ["method.form=1", "method.plug_ce_weight=0.3"],
        ["method.plug_ce_weight=supervised"],
        ["method.plug_ce_weight=-1"],
        ["method.plug_ce_weight=true"],
    ],
)
def test_a_former_weight_that_was_never_allowed_is_refused(tiny: Tiny, options: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"method.plug_ce_weight: .*. Set method.form=NUMBER instead"):
        tiny(*options, method="fedmlac")
