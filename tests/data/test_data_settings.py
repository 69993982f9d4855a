from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from raydfl.core.errors import ConfigError
from raydfl.data.settings import DataSettings

SETS = Path(__file__).parent / "tiny_sets.py"
FULL = """
root: some/folder
features: {kind: logmel, sample_rate: 16000, bands: 128, window_ms: 64, fft: 1024, hop_ms: 10, normalise: clip}
segment: {frames: 300, stride: 50, test_stride: 100, keep_last: false}
split: {test: {by: fold, values: [1]}, official_validation: drop, validation: 0.2}
partition: {by: dirichlet, column: recording, clients: 50, alpha: 0.5, minimum: 5}
corrupt: {noise: {snr_db: 10, clients: 0.2}, labels: {rate: 0.5, clients: 3}}
unreadable: skip
"""


def test_settings_survive_a_round_trip() -> None:
    settings = DataSettings(name=f"{SETS}:Folder", **yaml.safe_load(FULL))
    assert settings.source.options == {"root": "some/folder"}
    assert settings.source.open().root == Path("some/folder")  # type: ignore[attr-defined]
    again = DataSettings(**settings.model_dump(mode="json"))
    assert again == settings
    assert again.source == settings.source


def test_a_name_is_enough() -> None:
    settings = DataSettings.model_validate(f"{SETS}:Made")
    assert settings.partition.by == "group"
    assert settings.source.open().groups == 6  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 3, "grops": 3}, r"data: unknown key 'grops' for data set '.*:Made'. Did you mean 'groups'\?"),
        ({"partitoin": {}}, r"unknown key 'partitoin' .*Did you mean 'partition'\?"),
        ({"features": {"band": 3}}, r"data.features: unknown key 'band'. Did you mean 'bands'\?"),
        ({"features": {"bands": "x"}}, r"data.features.bands: Input should be a valid integer"),
        ({"groups": "many"}, r"data.groups: Input should be a valid integer"),
        (
            {"segment": {"frames": 3, "stride": 1}, "features": {"seconds": 1.0}},
            "data.features.seconds limits it. Set either",
        ),
    ],
)
def test_wrong_keys_and_values_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataSettings(name=f"{SETS}:Made", **options)


def test_wrong_types_are_rejected() -> None:
    for options, message in (
        ({"unreadable": "no"}, "'stop' or 'skip'"),
        ({"split": 3}, "split"),
    ):
        with pytest.raises(ValidationError, match=message):
            DataSettings(name=f"{SETS}:Made", **options)
    with pytest.raises(ValidationError, match="name"):
        DataSettings.model_validate({})
    with pytest.raises(ConfigError, match="unknown data set 'nothing'"):
        DataSettings(name="nothing")


def test_options_of_a_data_set_must_not_shadow_settings(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from pydantic.dataclasses import dataclass\nfrom raydfl.data.dataset import Dataset\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(Dataset):\n    split: int = 3\n"
    )
    with pytest.raises(ConfigError, match="has an option 'split', but this name is a setting of data"):
        DataSettings(name=f"{file}:Mine")


def test_every_field_has_a_description() -> None:
    fields = 0

    def count_described(schema: dict[str, Any]) -> None:
        nonlocal fields
        for name, field in schema.get("properties", {}).items():
            assert field.get("description"), name
            fields += 1

    schema = DataSettings.model_json_schema()
    count_described(schema)
    for part in schema["$defs"].values():
        count_described(part)
    assert fields > 100


def test_reading_a_configuration_does_not_import_torch() -> None:
    code = "import sys, raydfl.data.settings, raydfl.data.steps.partition; print('torch' in sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert process.stdout == "False\n"
