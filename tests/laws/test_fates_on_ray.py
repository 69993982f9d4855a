"""Law 1 for frozen tensors, initial model files, teachers, rates, moments and profiles: any number of actors gives equal bits."""

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


def test_every_actor_loads_a_frozen_stem_from_a_file(tiny: Tiny) -> None:
    stem = f"{TESTS}/networks.py:FrozenStem"
    source_dir = run(tiny(f"models.model={stem}", "run.name=other", "run.seed=5", "train.rounds=1")).run_dir
    file = source_dir / "model.safetensors"
    settings = [f"models.model={{name: {stem}, init_from: {file}}}"]
    reference = known(tiny(*settings))
    outcome = run(tiny("run.name=actors", "ray.actors=2", *settings))
    assert_same_bits(reference, read_tensors(outcome.run_dir))
    final = safetensors.torch.load_file(outcome.run_dir / "model.safetensors")
    initial = safetensors.torch.load_file(file)
    assert all(final[name].equal(initial[name]) for name in initial if "stem" in name)
    assert not any(final[name].equal(initial[name]) for name in initial if "output" in name)
