"""Law 1 for tensors that do not train, files to begin from, teachers, rates, moments and profiles: equal bits with any actors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
from helpers import known

from raydfl.engine.config import Config
from raydfl.runs._run import run
from raydfl.testing import assert_same_bits, read_tensors

Tiny = Callable[..., Config]
TESTS = Path(__file__).parent.parent
CASES: dict[str, tuple[str, list[str]]] = {
    "fixed": ("scaffold", [f"models.model={TESTS}/networks.py:FrozenStem", "train.together=2"]),
    "moments": ("fedavg", ["train.optimiser={name: adam, lr: 0.01, keep: true}", "train.together=2"]),
    "teacher": (f"{TESTS}/extra_methods.py:NearTheReceived", []),
    "rates": (f"{TESTS}/extra_methods.py:OwnRates", ["train.together=3", "train.optimiser.momentum=0.5"]),
    "profile": (
        "fedmlac",
        [
            "data.profile={capability: {values: [low, high], deal: draw}}",
            "models.local={by: capability, choices: {low: {name: crnn_tiny, hidden: 4, filters: [4]}, high: mlp}}",
        ],
    ),
}
pytestmark = [pytest.mark.usefixtures("ray_session", "free_cpus"), pytest.mark.slow]


@pytest.mark.parametrize("case", CASES)
def test_serial_and_1_and_2_actors_give_the_same_bits(tiny: Tiny, case: str) -> None:
    method, settings = CASES[case]
    reference = known(tiny(*settings, method=method))
    for actors in (1, 2):
        outcome = run(tiny(f"run.name=actors{actors}", f"ray.actors={actors}", *settings, method=method))
        assert_same_bits(reference, read_tensors(outcome.run_dir))


def test_a_frozen_stem_from_a_file_is_read_by_every_actor(tiny: Tiny) -> None:
    stem = f"{TESTS}/networks.py:FrozenStem"
    other = run(tiny(f"models.model={stem}", "run.name=other", "run.seed=5", "train.rounds=1")).run_dir
    file = other / "model.safetensors"
    settings = [f"models.model={{name: {stem}, init_from: {file}}}"]
    reference = known(tiny(*settings))
    outcome = run(tiny("run.name=actors", "ray.actors=2", *settings))
    assert_same_bits(reference, read_tensors(outcome.run_dir))
    ended = safetensors.torch.load_file(outcome.run_dir / "model.safetensors")
    began = safetensors.torch.load_file(file)
    assert all(ended[name].equal(began[name]) for name in began if "stem" in name)
    assert not any(ended[name].equal(began[name]) for name in began if "output" in name)
