"""The digest covers exactly the settings that affect results. The test visits all fields, including future fields."""

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
"""Settings of resources, length, evaluation and tracking."""
NAMED = r"(method|models|objective|attack|data\.(name|parts|sites|views|profile|pools))"
"""Names with options, and groups without entries here. Other tests change them."""

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


def find_settings(annotation: Any) -> list[type[Settings]]:
    """Return the settings classes that a field accepts."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [found for inner in typing.get_args(annotation) for found in find_settings(inner)]


def list_fields(group: type[Settings], at: str = "") -> Iterator[str]:
    """Return the names of all fields, without keys of named groups. Features have the default kind."""
    for name, field in group.model_fields.items():
        inner = find_settings(field.annotation)
        if name == "features" and inner:
            inner = [type(field.default)]
        if not inner:
            yield at + name
        for item in inner:
            yield from list_fields(item, f"{at}{name}.")


VALUES = ((int, 7), (float, 0.7), (Path, Path("/x")), (str, "x"))


def change_value(value: Any, annotation: Any) -> Any:
    """Return a different value of a field, which may be invalid."""
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


def change_fields(settings: Settings, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield copies with one changed field each, without validation, and the field's place."""
    for name, field in type(settings).model_fields.items():
        value, place = getattr(settings, name), at + name
        if isinstance(value, Settings):
            copies = ((of, copy) for of, copy in change_fields(value, f"{place}."))
        elif isinstance(value, dict) and any(isinstance(item, Settings) for item in value.values()):
            copies = (
                (of, {**value, key: copy})
                for key, item in value.items()
                for of, copy in change_fields(item, f"{place}.{key}.")
            )
        elif re.fullmatch(NAMED, place) or find_settings(field.annotation):
            continue
        else:
            copies = iter([(place, change_value(value, field.annotation))])
        for of, copy in copies:
            yield of, settings.model_copy(update={name: copy})


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_the_digest_covers_exactly_the_settings_with_effect_on_results(tiny: Tiny) -> None:
    seen = set[str]()
    for what, overrides in CONFIGURATIONS.items():
        config = tiny(*overrides, "train.deadline=10")
        before = config.digest()
        for place, other in change_fields(config):
            name = re.sub(r"\.(size|a|seen|here|multimodal)\.", ".", place)
            if name not in seen and not re.fullmatch(PLUGINS, name):
                decides = re.fullmatch(DECIDES_NOTHING, name) is None
                assert (other.digest() != before) is decides, f"{what}: {place}"
            seen.add(name)
    groups = {place[:end] for place in seen for end, sign in enumerate(f"{place}.") if sign == "."}
    unseen = {name for name in list_fields(Config) if name not in groups and not re.fullmatch(NAMED, name)}
    assert unseen == set()


def test_the_first_pool_is_the_training_pool(tiny: Tiny) -> None:
    pools = [f"{name}: {{column: label, values: [{label}]}}" for name, label in (("a", "tone0"), ("b", "tone1"))]
    one, other = (tiny(f"data.pools={{{', '.join(order)}}}").digest() for order in (pools, pools[::-1]))
    assert one != other


def test_explicit_defaults_of_a_views_transforms_keep_the_digest(tiny: Tiny) -> None:
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
    """The digests are from the last version with these options."""
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
def test_a_printed_configuration_with_former_options_is_equal(tiny: Tiny, method: str, options: list[str]) -> None:
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
def test_an_invalid_former_weight_is_rejected(tiny: Tiny, options: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"method.plug_ce_weight: .*. Set method.form=NUMBER instead"):
        tiny(*options, method="fedmlac")
