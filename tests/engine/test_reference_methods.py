"""``method=local`` and ``method=centralised`` are names for settings."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raydfl.core.errors import ConfigError
from raydfl.engine.config import Config

Tiny = Callable[..., Config]


def test_the_names_stand_for_settings(tiny: Tiny) -> None:
    config = tiny(method="local")
    assert config.method == {"name": "fedper", "personal": ["model"]}
    assert config.digest() == tiny("method={name: fedper, personal: [model]}").digest()
    pooled = tiny(method="centralised")
    assert (pooled.method["name"], pooled.train.cohort) == ("fedavg", 1.0)
    assert (pooled.data.partition.by, pooled.data.partition.clients) == ("iid", 1)
    assert pooled.data.split == tiny(method="fedavg").data.split


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["method={personal: [model], name: local}"], "method: local has no options. Write method=local"),
        (
            ["method=centralised", "data.parts={low: {speakers: 4}, high: {classes: 5, first: 10}}"],
            "have parts or sites",
        ),
    ],
)
def test_unsuitable_settings_are_rejected(tiny: Tiny, settings: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        tiny(*settings)
