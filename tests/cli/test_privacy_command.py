"""The commands ``raydfl privacy`` and ``raydfl audit``. Oracles: the accounting, and a run without its promised noise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Raydfl, write_config

from raydfl.data import Population, build_population
from raydfl.engine.accounting import ExampleMechanism, Mechanism
from raydfl.engine.config import Config
from raydfl.runs import Progress, run

Tiny = Callable[..., Config]


@pytest.mark.slow
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


def test_stated_clients_and_turns_are_marked(tiny: Tiny, tmp_path: Path, raydfl: Raydfl) -> None:
    pytest.importorskip("dp_accounting")
    stated = ("privacy.as_if={clients: 9000, cohort: 70}", "train.clients={rest: 2}", "evaluate.clients=none")
    config = tiny("method.rule={name: gaussian, noise: 1.25}", *stated)
    result = raydfl("privacy", write_config(config, tmp_path))
    lines = result.out.splitlines()
    assert lines[0].startswith("9,000 clients, 70 a round of fixed number, 3 rounds, ")
    assert lines[1:3] == [
        "a client takes part in one of 2 rounds",
        "as if 70 of 9,000 clients took part in a round, in a run with 3",
    ]
    mechanism = Mechanism(9000, 70, "fixed", 1.25, 9000**-1.1, rest=2)
    configured = next(line for line in lines if line.endswith("this configuration"))
    assert configured.split()[:2] == ["1.25", f"{mechanism.compute_epsilon(3):.3g}"]
    assert configured.split()[3] == f"{1.25 * 3**0.5 / 70:.3g}"  # three rounds of independent noise
    run_dir = run(config, Progress("quiet")).run_dir
    raydfl("audit", str(run_dir)).refuses("privacy.as_if: the run has less noise than the larger federation")


def test_a_configuration_without_noise_is_rejected(tiny: Tiny, tmp_path: Path, raydfl: Raydfl) -> None:
    raydfl("privacy", write_config(tiny(), tmp_path)).refuses("method.rule: WeightedMean gives no differential privacy")


CANARIES = (
    "data.speakers=14",
    "data.takes=1",
    "train.cohort=6",
    "train.clients={draw: poisson}",
    "attack={name: canary, clients: 10, length: 0.5}",
    "evaluate={every: 9, clients: none}",
)


def _rule(noise: float) -> str:
    return f"method.rule={{name: gaussian, clip: 0.5, noise: {noise}}}"


@pytest.mark.slow
def test_a_run_with_its_promised_noise_passes_the_audit(tiny: Tiny, raydfl: Raydfl) -> None:
    pytest.importorskip("dp_accounting")
    run_dir = run(tiny(*CANARIES, _rule(2.0)), Progress("quiet")).run_dir
    result = raydfl("audit", str(run_dir))
    assert result.code == 0, result.err
    assert result.out.startswith("promised: epsilon ")
    assert "not violated: the lower bound" in result.out
    values = json.loads(raydfl("audit", str(run_dir), "--json").out)
    assert values["canaries"]["lower_bound"] <= values["promised"]
    assert len(values["canaries"]["cosines"]) == len(values["control"]["cosines"]) == 10


def test_a_run_without_its_promised_noise_fails_the_audit_with_exit_code_1(tiny: Tiny, raydfl: Raydfl) -> None:
    pytest.importorskip("dp_accounting")
    run_dir = run(tiny(*CANARIES, _rule(0)), Progress("quiet")).run_dir
    about = json.loads((run_dir / "run.json").read_text())
    about["privacy"]["noise"] = 2.0
    (run_dir / "run.json").write_text(json.dumps(about))
    result = raydfl("audit", str(run_dir))
    assert result.code == 1
    assert "violated: the lower bound" in result.out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((), "has no differential privacy to audit"),
        ((_rule(2.0), *CANARIES, "attack=null"), "the run has no canaries. Train it with attack='{name: canary"),
        ((_rule(2.0), *CANARIES, "attack.clients=9"), "9 canaries are too few"),
        ((_rule(2.0), *CANARIES, "attack.draw=round"), "the canaries must be the same clients in all rounds"),
    ],
)
def test_a_run_that_cannot_be_audited_is_rejected(
    tiny: Tiny, raydfl: Raydfl, settings: tuple[str, ...], message: str
) -> None:
    pytest.importorskip("dp_accounting")
    run_dir = run(tiny(*settings, "train.rounds=1"), Progress("quiet")).run_dir
    raydfl("audit", str(run_dir)).refuses(message)


EXAMPLES = ("train.optimiser.private={noise: 2.0}", "evaluate.clients=none")


@pytest.mark.slow
def test_the_epsilon_of_single_clips_is_printed_before_any_training(tiny: Tiny, tmp_path: Path, raydfl: Raydfl) -> None:
    """The oracle is the accounting of each client, in half of the three rounds, rounded up."""
    pytest.importorskip("dp_accounting")
    config = tiny(*EXAMPLES)
    result = raydfl("privacy", write_config(config, tmp_path))
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    sizes = [int(clips) for clips in build_population(config.data, config.run.seed).sizes()]
    fewest, most = min(sizes), max(sizes)
    assert lines[0].startswith(f"6 clients with {fewest} to {most} clips, 8 a step by Poisson sampling, ")
    mechanism = ExampleMechanism(8, 2.0, most**-1.1)
    largest = max(mechanism.compute_epsilon(clips, 2 * math.ceil(clips / 8)) for clips in sizes)
    configured = next(line for line in lines if line.endswith("this configuration"))
    assert configured.split()[0] == "2"
    assert float(configured.split()[1]) == pytest.approx(largest, rel=1e-2)
    assert lines[1] == f"delta {most**-1.1:.3g}, neighbours: {mechanism.neighbours}"
    assert not Path(config.run.dir).exists()


def test_the_audit_of_single_clips_measures_the_losses(tiny: Tiny, raydfl: Raydfl) -> None:
    """The oracles are the numbers of clips of the population, and the epsilon of run.json."""
    pytest.importorskip("dp_accounting")
    run_dir = run(tiny(*EXAMPLES, "train.rounds=1"), Progress("quiet")).run_dir
    result = raydfl("audit", str(run_dir))
    assert result.code == 0, result.err
    assert result.out.startswith("promised: epsilon ")
    assert "membership: AUC 0." in result.out
    values = json.loads(raydfl("audit", str(run_dir), "--json").out)
    assert values["promised"] == json.loads((run_dir / "run.json").read_text())["privacy"]["epsilon"]
    population = Population.load(run_dir / "population", features=False)
    assert values["membership"]["members"] == int(population.sizes().sum())
    assert values["membership"]["low"] <= values["membership"]["auc"] <= values["membership"]["high"]
