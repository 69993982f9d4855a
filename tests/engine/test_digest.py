"""Digest: it depends exactly on the settings that affect results. The test visits all fields, including future ones."""

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

WITHOUT_EFFECT = r"evaluate\..*|ray\.(?!threads).*|run\.(?!seed).*|track\..*|train\.rounds"
WITHOUT_EFFECT += r"|data\.(cache|sites\.(folder|parts))"
"""Settings without effect on results: resources, the number of rounds, evaluation and tracking."""
NAMED = r"(method|models|objective|attack|data\.(name|parts|sites|views|profile|pools))"
"""Plug-ins with options, and groups that are empty here. Their own tests change them."""

PLUGINS = r"data\.(views\.)?(features\.kind|transforms)|train\.groups"
"""Names that must be registered. The settings of features bring their kind into the digest; test_groups.py covers groups."""

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
    "best, stop and clients": [
        *("run.best={}", "run.stop={}", "run.reference={}"),
        *("train.clients={}", "evaluate.fine_tune={epochs: 1}"),
    ],
    "sets of classes": ["data.label_sets={}", "objective=multi_label"],
    "transcripts": ["data.label_sequences={}", "objective=transcribe"],
    "events": ["data.events={}", "objective=events"],
    "as published": ["data.split={test: null, as_published: true}"],
    "phases": [
        "method=modality_mirror",
        "models={audio: crnn_tiny, video: crnn_tiny}",
        "train.phases={multimodal: {rounds: 1}}",
    ],
    "sites": ["data.sites={here: {folder: /here}}"],
    "fleet": [
        "train.fleet={seconds: {spread: 1}}",
        "evaluate.every={seconds: 9}",
        "data.profile={h: {values: [0-9]}}",
        "train.fleet.hours.column=h",
    ],
    "as if": [
        *("method.rule={name: gaussian, noise: 1}", "evaluate.clients=none", "privacy.as_if={clients: 9, cohort: 2}")
    ],
    "private": [
        *("train.optimiser.private={noise: 1.0}", "train.deadline=null", "evaluate.clients=none"),
        "data.corrupt.canaries={clips: 10}",
    ],
}


def list_settings_groups(annotation: Any) -> list[type[Settings]]:
    """List the settings groups that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [settings_group for inner in typing.get_args(annotation) for settings_group in list_settings_groups(inner)]


def iterate_fields(group: type[Settings], at: str = "") -> Iterator[str]:
    """Yield the names of all fields, without user-defined keys. Features have the fields of their default kind."""
    for name, field in group.model_fields.items():
        inner = list_settings_groups(field.annotation)
        if name == "features" and inner:
            inner = [type(field.default)]
        if not inner:
            yield at + name
        for inner_group in inner:
            yield from iterate_fields(inner_group, f"{at}{name}.")


VALUES = ((int, 7), (float, 0.7), (Path, Path("/x")), (str, "x"))


def change_value(value: Any, annotation: Any) -> Any:
    """Return a different value for a field, valid or not."""
    kinds = [annotation, *typing.get_args(annotation)]
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            others = [choice for choice in typing.get_args(kind) if choice != value]
            return others[0] if others else None
    if value is None:
        return next((example for kind, example in VALUES if kind in kinds), ("x",))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, Path):
        return value / "x"
    return {**value, "x": 0.5} if isinstance(value, dict) else (*value, "x")


def change_each_field(settings: Settings, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each field's place and a copy of the settings with this field changed, without validation."""
    for name, field in type(settings).model_fields.items():
        value, place = getattr(settings, name), at + name
        if isinstance(value, Settings):
            copies = ((inner_place, copy) for inner_place, copy in change_each_field(value, f"{place}."))
        elif isinstance(value, dict) and any(isinstance(item, Settings) for item in value.values()):
            copies = (
                (inner_place, {**value, key: copy})
                for key, item in value.items()
                for inner_place, copy in change_each_field(item, f"{place}.{key}.")
            )
        elif re.fullmatch(NAMED, place) or list_settings_groups(field.annotation):
            continue
        else:
            copies = iter([(place, change_value(value, field.annotation))])
        for inner_place, copy in copies:
            yield inner_place, settings.model_copy(update={name: copy})


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_the_digest_covers_exactly_the_settings_that_affect_results(tiny: Tiny) -> None:
    seen = set[str]()
    for case, overrides in CONFIGURATIONS.items():
        config = tiny("train.deadline=10", *overrides)
        before = config.digest()
        for place, copy in change_each_field(config):
            name = re.sub(r"\.(size|a|seen|here|multimodal)\.", ".", place)
            if name not in seen and not re.fullmatch(PLUGINS, name):
                has_effect = re.fullmatch(WITHOUT_EFFECT, name) is None
                assert (copy.digest() != before) is has_effect, f"{case}: {place}"
            seen.add(name)
    groups = {place[:end] for place in seen for end, sign in enumerate(f"{place}.") if sign == "."}
    unseen = {name for name in iterate_fields(Config) if name not in groups and not re.fullmatch(NAMED, name)}
    assert unseen == set()


def test_the_order_of_pools_is_in_the_digest(tiny: Tiny) -> None:
    pools = [f"{name}: {{column: label, values: [{label}]}}" for name, label in (("a", "tone0"), ("b", "tone1"))]
    digest, reversed_digest = (tiny(f"data.pools={{{', '.join(order)}}}").digest() for order in (pools, pools[::-1]))
    assert digest != reversed_digest


def test_explicit_default_transforms_keep_the_digest(tiny: Tiny) -> None:
    features = "features: {sample_rate: 8000, bands: 16, seconds: 0.25}"
    spellings = ("[shift]", "[{name: shift}]", "[{name: shift, frames: 10}]", "[{name: shift, frames: 9}]")
    views = [
        f"data.views={{seen: {{column: frame, {features}, transforms: {transforms}}}}}" for transforms in spellings
    ]
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
    """The digests come from the last version with these options."""
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
def test_printing_a_configuration_with_former_options_keeps_its_meaning(
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
def test_invalid_values_of_a_former_option_are_rejected(tiny: Tiny, options: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"method.plug_ce_weight: .*. Set method.form=NUMBER instead"):
        tiny(*options, method="fedmlac")
