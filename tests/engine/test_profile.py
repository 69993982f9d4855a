"""Client profiles: dealt values, manifest columns, and architectures selected by profile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers import differ, stop_after
from pydantic.dataclasses import dataclass
from tones import Tones

from raydfl.cli.explain import explain_config
from raydfl.core.errors import ConfigError, DataError
from raydfl.core.yaml import parse_yaml
from raydfl.data.build import build_population
from raydfl.data.population import Population
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config, make_config
from raydfl.runs._run import resume
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, read_tensors, start_server, train_federation

Tiny = Callable[..., Config]
HERE = Path(__file__)
BY_TURN = "data.profile={capability: {values: [low, low, high]}}"
CHOICES = (
    "models.local={by: capability, choices: {low: {name: crnn_tiny, hidden: 4, filters: [4]}, "
    "high: {name: crnn_tiny, hidden: 8, filters: [4]}}}"
)


@dataclass(frozen=True, kw_only=True)
class Rooms(Tones):
    """Tones with more columns: constant within a speaker, varying within a speaker, and with nulls."""

    def manifest(self) -> pa.Table:
        table = super().manifest()
        speaker = [int(group[1:]) for group in table.column("group").to_pylist()]
        table = table.append_column("room", pa.array([("kitchen", "hall")[number % 2] for number in speaker]))
        table = table.append_column("floor", pa.array([number // 2 for number in speaker]))
        table = table.append_column("mood", pa.array([str(row % 2) for row in range(len(speaker))]))
        return table.append_column("holes", pa.array([None if row == 3 else "x" for row in range(len(speaker))]))


def load_clients(config: Config) -> Clients:
    return Clients(Population.load(create(config, Progress("quiet")) / "population"), config)


def test_values_are_dealt_in_turn_or_drawn(tiny: Tiny) -> None:
    dealt = [client.profile["capability"] for client in load_clients(tiny(BY_TURN))]
    assert dealt == ["low", "low", "high", "low", "low", "high"]
    draw_setting = "data.profile={size: {values: [1, 2, 3], deal: draw}}"
    first = [client.profile["size"] for client in load_clients(tiny(draw_setting, "run.name=one"))]
    assert set(first) <= {1, 2, 3}
    assert first == [client.profile["size"] for client in load_clients(tiny(draw_setting, "run.name=two"))]
    seeds = [tiny(draw_setting, f"run.name=seed{i}", f"run.seed={i}") for i in range(2, 6)]
    assert any([client.profile["size"] for client in load_clients(config)] != first for config in seeds)
    config = tiny(BY_TURN)
    assert config.digest() != tiny().digest()
    assert tiny("data.profile={}").digest() == tiny().digest()


def test_a_profile_may_read_a_manifest_column(tiny: Tiny) -> None:
    config = tiny(f"data.name={HERE}:Rooms", "data.profile={room: {column: room}, storey: {column: floor}}")
    profiles = [
        (client.profile["group"], client.profile["room"], client.profile["storey"]) for client in load_clients(config)
    ]
    expected = [(f"s{number}", ("kitchen", "hall")[number % 2], number // 2) for number in range(6)]
    assert profiles == expected


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("rom", r"data.profile.room: the recordings have no column 'rom'. Did you mean 'room'"),
        (
            "mood",
            r"data.profile.room: column 'mood' has the values '[01]', '[01]' for clips of client 's0', but a profile",
        ),
        ("holes", r"data.profile.room: column 'holes' has no value for a clip of client 's0'"),
    ],
)
def test_unusable_columns_are_rejected(tiny: Tiny, column: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        create(tiny(f"data.name={HERE}:Rooms", f"data.profile={{room: {{column: {column}}}}}"), Progress("quiet"))


def test_parts_may_deal_different_values(tiny: Tiny) -> None:
    parts = "data.parts={a: {profile: {capability: {values: [low]}}}, b: {first: 20, profile: {capability: {values: [high]}}}}"
    tiny(parts, CHOICES, method="fedmlac")
    with pytest.raises(ConfigError, match="no client has capability 'high'"):
        tiny(parts.replace("[high]", "[low]"), CHOICES, method="fedmlac")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.profile={capability: {}}"], r"data.profile.capability: .*either values to deal, or a column"),
        (["data.profile={capability: {values: [a], column: b}}"], r"either values to deal, or a column"),
        (["data.profile={group: {values: [a]}}"], r"the name 'group' is invalid. .*Reserved names: group"),
        (["data.profile={capability: {values: [a], deal: trun}}"], r"data.profile.capability.deal"),
        ([CHOICES], r"models.local.by: the clients' profiles have no column 'capability'"),
        (
            [BY_TURN, CHOICES.replace("high:", "hihg:")],
            r"models.local.choices: no architecture for capability 'high'. Did you mean 'hihg'",
        ),
        ([BY_TURN.replace("high", "low"), CHOICES], r"models.local.choices: no client has capability 'high'"),
        ([BY_TURN, "models.local={by: capability}"], r"models.local: .*by profile. Write {by: COLUMN, choices"),
        ([BY_TURN, CHOICES.replace("crnn_tiny", "crnn_tyni")], r"unknown architecture 'crnn_tyni'"),
    ],
)
def test_invalid_settings_are_rejected(tiny: Tiny, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(*settings, method="fedmlac")


@pytest.mark.slow
def test_a_profile_selects_the_architecture(tiny: Tiny) -> None:
    config = tiny(BY_TURN, CHOICES, method="fedmlac")
    for client in load_clients(config):
        spec = next(spec for spec in client.models if spec.name == "local")
        assert dict(spec.options)["hidden"] == {"low": 4, "high": 8}[client.profile["capability"]]
    reference = train_federation(config)
    half = tiny(BY_TURN, CHOICES, "run.name=half", method="fedmlac")
    stop_after(half, 1)
    assert_same_bits(reference, read_tensors(resume(Path(half.run.dir) / "half").run_dir))
    other_choices = CHOICES.replace("hidden: 4", "hidden: 6")
    assert differ(reference, train_federation(tiny(BY_TURN, other_choices, "run.name=other", method="fedmlac")))
    shown = parse_yaml(explain_config(config), "shown")
    reloaded: Any = make_config(shown)
    assert reloaded.digest() == config.digest()


def test_manifest_columns_and_noise_may_select_the_architecture(tiny: Tiny) -> None:
    choices = "models.local={by: room, choices: {kitchen: crnn_tiny, hall: crnn_lite}}"
    config = tiny(f"data.name={HERE}:Rooms", "data.profile={room: {column: room}}", choices, method="fedmlac")
    architectures = [
        next(spec.architecture for spec in client.models if spec.name == "local") for client in load_clients(config)
    ]
    assert architectures == ["crnn_tiny", "crnn_lite"] * 3
    missing = tiny(
        f"data.name={HERE}:Rooms",
        "run.name=missing",
        "data.profile={room: {column: room}}",
        "models.local={by: room, choices: {kitchen: crnn_tiny, hal: crnn_lite}}",
        method="fedmlac",
    )
    with pytest.raises(ConfigError, match=r"no architecture for client 's1', whose room is 'hall'. Did you mean 'hal'"):
        create(missing, Progress("quiet"))
    noisy = tiny("models.local={by: noisy, choices: {false: crnn_tiny, true: crnn_lite}}", method="fedmlac")
    assert {spec.architecture for client in load_clients(noisy) for spec in client.models[1:]} == {"crnn_tiny"}


def test_a_shared_model_must_have_one_architecture(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"models.model is shared between the clients"):
        start_server(tiny(BY_TURN, CHOICES.replace("local", "model")))


def test_architectures_are_selected_from_columns_without_profiles(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns agree with the clients' profiles. No profile is built, so that a million clients cost only arrays."""
    manifest = f"name: '{HERE}:Rooms', speakers: 4, profile: {{room: {{column: room}}}}"
    parts = f"data.parts={{read: {{{manifest}}}, dealt: {{profile: {{room: {{values: [kitchen, hall]}}}}}}}}"
    rooms = {"kitchen": 4, "hall": 5}
    choices = ", ".join(f"{room}: {{name: crnn_tiny, hidden: {size}, filters: [4]}}" for room, size in rooms.items())
    plugin = "models.plugin={name: crnn_tiny, hidden: 4, filters: [4]}"
    noise = "data.corrupt={noise: {clients: 0.5, snr_db: 10}}"
    config = tiny(parts, f"models.local={{by: room, choices: {{{choices}}}}}", plugin, noise, method="fedmlac")
    population = build_population(config.data, 1)
    profiles = [population.profile(index) for index in range(len(population))]
    assert {profile["noisy"] for profile in profiles} == {False, True}
    for name in ("part", "group", "noisy", "label_errors", "room", "nothing"):
        values, codes = population.column(name)
        column = [values[place] if place >= 0 else None for place in codes.tolist()]
        assert column == [profile.get(name) for profile in profiles]
    with monkeypatch.context() as patched:
        patched.delattr(Population, "profile")
        built = Clients(population, config)
    for client in built:
        spec = next(spec for spec in client.models if spec.name == "local")
        assert dict(spec.options)["hidden"] == rooms[client.profile["room"]]
