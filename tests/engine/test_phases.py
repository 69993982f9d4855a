"""Phases of a method: their rounds, their settings, and resuming a run in any of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import differ, known
from seen_and_heard import federation, write

from raydfl.core.errors import ConfigError
from raydfl.engine.config import Config
from raydfl.engine.phases import Phases
from raydfl.engine.storage import record
from raydfl.testing import assert_same_bits, read_tensors, start_server, train_federation
from raydfl.training import TrainSettings

Tiny = Callable[..., Config]
TWO = ["train.rounds=4", "train.phases.multimodal.rounds=2", "evaluate.every=9"]
LR = "train.phases.distil.optimiser.lr=0.01"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("views"), takes=2)


def test_the_last_phase_has_the_remaining_rounds() -> None:
    def find_starts(rounds: int, **phases: int) -> tuple[int, ...]:
        train = TrainSettings.model_validate(
            {"rounds": rounds, "phases": {name: {"rounds": phase_rounds} for name, phase_rounds in phases.items()}}
        )
        return Phases.from_settings(("a", "b", "c"), train, "some").first

    assert find_starts(9) == (0, 3, 6)
    assert find_starts(1) == (0, 1, 2)
    assert find_starts(9, a=1) == (0, 1, 4)
    assert find_starts(9, a=5, b=4) == (0, 5, 9)
    two_phases = Phases.from_settings(("a", "b"), TrainSettings(rounds=4), "some")
    assert [two_phases.find(done) for done in range(5)] == ["a", "a", "b", "b", "b"]
    assert Phases().find(7) == ""
    with pytest.raises(ConfigError, match="'c' would begin after round 10, but train.rounds is 9"):
        find_starts(9, a=5, b=5)
    with pytest.raises(ConfigError, match=r"train.phases.c.rounds is 2, but the last phase always has the rest"):
        find_starts(9, c=2)
    with pytest.raises(ConfigError, match="no phase 'd'"):
        find_starts(9, d=2)


@pytest.mark.slow
def test_settings_of_a_phase_affect_only_that_phase(tiny: Tiny, folder: Path) -> None:
    base = known(federation(tiny, folder, "modality_mirror", *TWO))
    for number, setting in enumerate((LR, "train.phases.distil.local_epochs=2", "train.phases.distil.cohort=2")):
        other = train_federation(federation(tiny, folder, "modality_mirror", *TWO, setting, f"run.name=p{number}"))
        assert differ(base, other)
        assert {n for n in base if base[n] != other[n]} <= {
            n for n in base if n.startswith("server global audio/") or n == "extra"
        }


@pytest.mark.slow
def test_a_run_resumed_in_any_phase_has_the_same_bits(tiny: Tiny, folder: Path) -> None:
    undisturbed = known(federation(tiny, folder, "modality_mirror", *TWO, LR))
    config = federation(tiny, folder, "modality_mirror", *TWO, LR, "run.name=stopped")
    for done in (1, 2, 3):  # in the first phase, between the phases, in the second phase
        server = start_server(config)
        while server.round_index < done:
            server.round()
        server.finish()
        server.close()
    assert_same_bits(undisturbed, train_federation(config))
    rows = record.read_rows(Path(config.run.dir) / "stopped").to_pylist()
    assert [row["value"] for row in rows if row["metric"] == "phase"] == [1.0, 1.0, 2.0, 2.0]


def test_the_start_of_a_phase_is_in_the_digest(tiny: Tiny, folder: Path) -> None:
    """The start of the second phase affects results, the end of the last one does not."""

    def compute_digest(*overrides: str, method: str = "modality_mirror") -> str:
        return federation(tiny, folder, method, *overrides).digest()

    two_rounds = ["train.phases.multimodal.rounds=2"]
    assert (
        compute_digest(*two_rounds, "train.rounds=4")
        == compute_digest(*two_rounds, "train.rounds=9")
        == compute_digest("train.rounds=4")
    )
    assert compute_digest("train.rounds=9") != compute_digest("train.rounds=4")
    assert compute_digest(*two_rounds, "train.rounds=4", LR) != compute_digest(*two_rounds, "train.rounds=4")
    assert tiny("train.phases={}").digest() == tiny().digest()
    with pytest.raises(ConfigError, match="'distil' would be the only phase of method 'fedavg'. Name two or more"):
        tiny(LR, method="fedavg")
    with pytest.raises(ConfigError, match=r"phases.distil.optimiser.models: modality_mirror has no model 'sound'"):
        compute_digest("train.phases.distil.optimiser.models={sound: 0.1}")


WARM = "train.phases={warm: {rounds: 2, local_epochs: 2, optimiser: {lr: 0.05}}, rest: {}}"


def select_models(tensors: dict[str, bytes]) -> dict[str, bytes]:
    return {name: value for name, value in tensors.items() if name.startswith("server global")}


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_phases_of_the_user_have_the_bits_of_their_settings(tiny: Tiny, method: str) -> None:
    """Phases with equal settings change nothing, and the first phase equals a run with its settings."""
    four = ("train.rounds=4", "evaluate.every=9")
    plain = tiny(*four, method=method)
    equal = tiny(*four, "train.phases={a: {rounds: 2}, b: {}}", method=method)
    assert select_models(known(equal)) == select_models(known(plain))
    warm = tiny("train.rounds=2", "evaluate.every=9", "train.local_epochs=2", "train.optimiser.lr=0.05", method=method)
    config = tiny(*four, WARM, "run.name=phases", method=method)
    server = start_server(config)
    server.round()
    server.round()
    server.finish()
    server.close()
    assert select_models(read_tensors(Path(config.run.dir) / "phases")) == select_models(known(warm))
    resumed = select_models(train_federation(config))
    assert resumed == select_models(known(tiny(*four, WARM, method=method)))
    assert differ(resumed, select_models(known(plain)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.groups=ifca"], r"train\.phases: with train\.groups a run has the phases of its method only"),
        (["method.rule={name: gaussian, clip: 1, noise: 1}", "privacy.delta=1e-5"], "the training has several phases"),
        (["train.phases.rest.rounds=3"], r"train\.phases\.rest\.rounds is 3, but the last phase always has the rest"),
    ],
)
def test_phases_of_the_user_that_do_not_fit_are_rejected(tiny: Tiny, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny("train.rounds=4", WARM, *overrides, method="fedavg")
