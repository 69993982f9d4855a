"""The command ``raydfl privacy``. Oracle: the accounting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Raydfl, write_config

from raydfl.engine.accounting import Mechanism
from raydfl.engine.config import Config

Tiny = Callable[..., Config]


def test_the_epsilon_of_each_noise_is_printed_before_any_training(tiny: Tiny, tmp_path: Path, raydfl: Raydfl) -> None:
    pytest.importorskip("dp_accounting")
    config = tiny("method.rule={name: gaussian, noise: 1.25}", "evaluate.clients=none")
    result = raydfl("privacy", write_config(config, tmp_path))
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].startswith("6 clients, 3 a round of fixed number, 3 rounds, ")
    assert lines[1] == "delta 0.139, neighbours: replacing the data of one client"
    configured = next(line for line in lines if line.endswith("this configuration"))
    mechanism = Mechanism(6, 3, "fixed", 1.25, 6**-1.1)
    assert configured.split()[:2] == ["1.25", f"{mechanism.compute_epsilon(3):.3g}"]
    assert "warning: this federation is too small" in lines[-1]
    assert not Path(config.run.dir).exists()


def test_a_configuration_without_noise_is_rejected(tiny: Tiny, tmp_path: Path, raydfl: Raydfl) -> None:
    raydfl("privacy", write_config(tiny(), tmp_path)).refuses("method.rule: WeightedMean gives no differential privacy")
