"""The audit with canary clips. Oracles: exact fractions, exact coverage for known mechanisms, and runs with and without noise."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from commands import Raydfl
from helpers import finish_in, stop_after
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from raydfl.core.errors import ConfigError
from raydfl.data import Population
from raydfl.engine.accounting import ExampleMechanism
from raydfl.engine.config import Config
from raydfl.runs import Progress, run
from raydfl.runs.inference import audit_clips, canary_clips
from raydfl.runs.inference.canary_clips import compute_lower_bound, compute_p_value, guess_coins
from raydfl.testing import assert_same_bits, read_tensors, train_federation

Tiny = Callable[..., Config]


def compute_exactly(canaries: int, guesses: int, correct: int, odds: Fraction, delta: Fraction) -> Fraction:
    """Evaluate the theorem with fractions, for epsilon = log(odds). The sum over correct guesses is a plain loop."""
    accuracy = odds / (1 + odds)
    share = [math.comb(guesses, k) * accuracy**k * (1 - accuracy) ** (guesses - k) for k in range(guesses + 1)]
    below = [sum(share[max(0, correct - i) : correct], Fraction(0)) / i for i in range(1, canaries + 1)]
    return min(Fraction(1), sum(share[correct:]) + 2 * canaries * delta * max(below))


@pytest.mark.parametrize("delta", [Fraction(0), Fraction(1, 1000), Fraction(1, 20)])
@pytest.mark.parametrize("odds", [Fraction(1), Fraction(3, 2), Fraction(20)])
def test_the_probability_equals_exact_fractions(odds: Fraction, delta: Fraction) -> None:
    for canaries, guesses in ((1, 1), (6, 4), (12, 12), (30, 14)):
        for correct in range(guesses + 1):
            exact = compute_exactly(canaries, guesses, correct, odds, delta)
            found = compute_p_value(canaries, guesses, correct, math.log(odds), float(delta))
            assert found == pytest.approx(float(exact), rel=1e-9)


@given(st.integers(1, 40), st.data())
def test_the_bound_separates_rejected_from_possible_epsilons(canaries: int, data: st.DataObject) -> None:
    """Below the bound the observation has a probability under 5 %, above it at least 5 %."""
    guesses = data.draw(st.integers(0, canaries))
    correct = data.draw(st.integers(0, guesses))
    delta = data.draw(st.sampled_from([0.0, 1e-5, 1e-3, 1e-2, 0.1]))
    bound = compute_lower_bound(canaries, guesses, correct, delta)
    for factor in (0.0, 0.3, 0.7, 0.999, 1.001, 1.2, 2.0, 5.0):
        exact = compute_exactly(
            canaries, guesses, correct, Fraction(math.exp(factor * bound)), Fraction(delta).limit_denominator(10**6)
        )
        assert (exact < 0.05) is (factor < 1 and bound > 0) or bound == 0 <= exact - Fraction(1, 20)


def test_three_bounds_in_closed_form() -> None:
    """With r of r correct guesses and delta 0, the probability is accuracy^r. No correct guess is no evidence."""
    for guesses in (5, 20, 200):
        accuracy = 0.05 ** (1 / guesses)
        expected = math.log(accuracy / (1 - accuracy))
        assert compute_lower_bound(guesses, guesses, guesses, 0.0) == pytest.approx(expected, abs=1e-6)
    assert compute_lower_bound(4, 4, 4, 0.0) == 0.0  # 1/16 is above 5 %
    assert compute_lower_bound(100, 50, 0, 1e-3) == 0.0
    assert compute_lower_bound(100, 50, 50, 1.0) == 0.0  # every training is (0, 1)-private


def test_more_correct_guesses_never_lower_the_bound_and_a_larger_delta_never_raises_it() -> None:
    bounds = [[compute_lower_bound(60, 40, v, delta) for v in range(41)] for delta in (0.0, 1e-4, 1e-3, 1e-2)]
    assert (np.diff(bounds, axis=1) >= 0).all()
    assert (np.diff(bounds, axis=0) <= 0).all()
    assert bounds[0][-1] > 2.5


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("delta", [0.0, 0.002, 0.02])
def test_the_bound_holds_in_95_per_cent_of_the_audits_of_known_mechanisms(epsilon: float, delta: float) -> None:
    """Randomised response with exact probabilities: it reveals every coin with probability delta, or all coins at once."""
    guesses, accuracy = 24, 1 / (1 + math.exp(-epsilon))
    bounds = np.array([compute_lower_bound(30, guesses, v, delta) for v in range(guesses + 1)])
    exceeds, numbers = bounds > epsilon + 1e-6, np.arange(guesses + 1)
    apart = binom.pmf(numbers, guesses, delta + (1 - delta) * accuracy)
    together = (1 - delta) * binom.pmf(numbers, guesses, accuracy) + delta * (numbers == guesses)
    assert apart[exceeds].sum() <= 0.05
    assert together[exceeds].sum() <= 0.05
    assert exceeds.any() or delta  # it can fail


def simulate(epsilon: float, canaries: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return scores by randomised response with random ties, and the coins."""
    coins = rng.integers(2, size=canaries).astype(bool)
    kept = rng.random(canaries) < 1 / (1 + math.exp(-epsilon))
    return np.where(kept, coins, ~coins) + 0.5 * rng.random(canaries), coins


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_four_hundred_simulated_audits(epsilon: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Epsilon 0 is the control: coins that have decided nothing. 33 is 5 % plus three standard deviations."""
    monkeypatch.setattr(canary_clips, "compute_lower_bound", functools.cache(compute_lower_bound))
    rng = np.random.default_rng(0)
    bounds = [guess_coins(*simulate(epsilon, 100, rng), 0.0).lower_bound for _ in range(400)]
    assert sum(bound > epsilon for bound in bounds) <= 33
    assert np.median(bounds) > 0.4 * epsilon or not epsilon


def test_scores_that_equal_the_coins_give_the_largest_bound_of_their_guesses() -> None:
    coins = np.arange(40) % 2 == 0
    scores = coins + 0.1 * np.random.default_rng(1).random(40)
    found = guess_coins(scores, coins, 0.0)
    assert (found.guesses, found.correct) == (30, 30)
    assert found.lower_bound == compute_lower_bound(40, 30, 30, 0.0, 0.05 / 3)
    wrong = guess_coins(-scores, coins, 0.0)
    assert (wrong.correct, wrong.lower_bound) == (0, 0.0)


# -- runs ------------------------------------------------------------------------------------------------------------

CANARIES = (
    *(
        "data.takes=6",
        "data.partition={by: iid, clients: 1}",
        "data.corrupt.canaries={clips: 90}",
        "privacy.delta=1e-4",
    ),
    *("models.model={name: crnn_tiny, hidden: 32, filters: [16]}", "train.cohort=1.0", "train.rounds=1"),
    "evaluate={every: 99, clients: none}",
)
MEMORISE = ("train.local_epochs=80", "train.optimiser={name: adam, lr: 0.01}")


def test_a_run_that_memorises_its_clips_has_a_large_bound(tiny: Tiny, raydfl: Raydfl) -> None:
    result = run(tiny(*CANARIES, *MEMORISE), Progress("quiet"))
    printed = raydfl("audit", str(result.run_dir))
    assert printed.code == 0, printed.err
    assert printed.out.startswith("promised: nothing, because the run has no differential privacy")
    values = json.loads(raydfl("audit", str(result.run_dir), "--json").out)
    assert values["promised"] is None
    assert not values["violated"]
    found = values["canary_clips"]
    assert 1 < found["found"]["lower_bound"] <= found["largest"]
    assert found["control"]["lower_bound"] == 0
    assert found["clips"] == 90
    assert found["delta"] == 1e-4


def test_an_untrained_model_reveals_nothing(tiny: Tiny) -> None:
    result = run(tiny(*CANARIES, "train.optimiser.lr=1e-9"), Progress("quiet"))
    assert audit_clips(result.run_dir).found.lower_bound == 0


def test_the_coins_are_in_no_report(tiny: Tiny) -> None:
    run_dir = run(tiny(*CANARIES), Progress("quiet")).run_dir
    trained = audit_clips(run_dir).included
    assert trained not in (0, 90)
    about = json.loads((run_dir / "run.json").read_text())
    assert about["config"]["data"]["corrupt"]["canaries"] == {"clips": 90, "clients": 1.0}
    for name in ("run.json", "config.yaml", "report.html"):
        text = (run_dir / name).read_text()
        assert "s0/c0/t" not in text  # names of clips
        assert f"{trained} of 90" not in text


def test_a_private_run_keeps_its_promise(tiny: Tiny, raydfl: Raydfl) -> None:
    pytest.importorskip("dp_accounting")
    run_dir = run(tiny(*CANARIES, "train.optimiser.private={noise: 2.0}"), Progress("quiet")).run_dir
    result = raydfl("audit", str(run_dir))
    assert result.code == 0, result.err
    assert "not violated: the lower bound" in result.out
    assert "the largest epsilon of the clients with canary clips" in result.out
    values = json.loads(raydfl("audit", str(run_dir), "--json").out)
    assert values["canary_clips"]["found"]["lower_bound"] <= values["promised"]
    assert values["promised"] == json.loads((run_dir / "run.json").read_text())["privacy"]["epsilon"]


@pytest.mark.slow
def test_a_run_without_its_promised_noise_ends_with_exit_code_1(tiny: Tiny, raydfl: Raydfl) -> None:
    pytest.importorskip("dp_accounting")
    without = "train.optimiser.private={noise: 0.0, clip: 1000.0}"
    run_dir = run(tiny(*CANARIES, *MEMORISE, without), Progress("quiet")).run_dir
    about = json.loads((run_dir / "run.json").read_text())
    about["privacy"]["noise"] = 100.0
    (run_dir / "run.json").write_text(json.dumps(about))
    result = raydfl("audit", str(run_dir))
    assert result.code == 1
    assert "violated: the lower bound" in result.out


def test_the_promise_is_that_of_the_clients_with_canaries(tiny: Tiny, raydfl: Raydfl) -> None:
    """The oracle is the accounting of each client by its number of clips. Fewer clips have a larger epsilon."""
    pytest.importorskip("dp_accounting")
    few = ("data.takes=12", "data.corrupt.canaries={clips: 10, clients: [s2]}", "train.optimiser.private={noise: 2.0}")
    rest = ("train.cohort=1.0", "train.rounds=1", "evaluate={every: 9, clients: none}", "train.batch_size=4")
    run_dir = run(tiny(*few, *rest), Progress("quiet")).run_dir
    sizes = Population.load(run_dir / "population", features=False).sizes().tolist()
    mechanism = ExampleMechanism(4, 2.0, max(sizes) ** -1.1)
    own, *others = (mechanism.compute_epsilon(n, math.ceil(n / 4)) for n in (sizes[2], *sizes[:2], *sizes[3:]))
    assert own != max(own, *others)
    values = json.loads(raydfl("audit", str(run_dir), "--json").out)
    assert values["promised"] == pytest.approx(own, rel=1e-12)
    assert values["canary_clips"]["clients"] == ["s2"]


def test_a_resumed_run_draws_the_same_coins(tiny: Tiny) -> None:
    config = tiny(*CANARIES, "train.rounds=2")
    stop_after(config, 1)
    run_dir = Path(config.run.dir) / str(config.run.name)
    whole = tiny(*CANARIES, "train.rounds=2", "run.name=whole")
    assert_same_bits(finish_in(run_dir, config), train_federation(whole))
    assert audit_clips(run_dir) == audit_clips(Path(whole.run.dir) / "whole")


@pytest.mark.slow
def test_two_actors_give_the_same_bits_and_the_same_audit(tiny: Tiny, ray_session: None) -> None:
    serial = train_federation(tiny(*CANARIES, "run.name=serial"))
    parallel = run(tiny(*CANARIES, "ray.actors=2", "ray.cpus=0.5", "run.name=parallel"), Progress("quiet")).run_dir
    assert_same_bits(serial, read_tensors(parallel))
    assert audit_clips(parallel) == audit_clips(parallel.with_name("serial"))


@pytest.mark.slow
def test_ten_seeds_with_and_without_noise(tiny: Tiny) -> None:
    """The control has a bound of 0 in 95 % of the audits: 4 of 20 or more have a probability of 1.6 %."""
    pytest.importorskip("dp_accounting")
    noisy = ("train.local_epochs=10", "train.optimiser={name: adam, lr: 0.01, private: {clip: 1.0, noise: 2.0}}")
    controls = []
    for seed in range(10):
        plain, private = (
            run(tiny(*CANARIES, *rest, f"run.seed={seed}", f"run.name={kind}{seed}"), Progress("quiet")).run_dir
            for kind, rest in (("plain", MEMORISE), ("private", noisy))
        )
        of_plain, of_private = audit_clips(plain), audit_clips(private)
        assert of_plain.found.lower_bound > 1
        promised = json.loads((private / "run.json").read_text())["privacy"]["epsilon"]
        assert of_private.found.lower_bound <= promised
        controls += [of_plain.control.lower_bound, of_private.control.lower_bound]
    assert sum(bound > 0 for bound in controls) <= 3


@pytest.mark.slow
def test_spoken_words_with_and_without_noise(tiny: Tiny) -> None:
    """The federation of docs/attacks.md: memorised clips are revealed, and noise hides them."""
    pytest.importorskip("dp_accounting")
    spoken = (
        "data={name: spoken_words, speakers: 4, takes: 30, words: [yes, no, stop], test_speakers: 0.25}",
        "data.features={sample_rate: 8000, bands: 32, window_ms: 25, hop_ms: 20, seconds: 1.0}",
        *("data.corrupt.canaries={clips: 100}", "privacy.delta=1e-4", "models.model=crnn_lite"),
        *("train.cohort=1.0", "train.batch_size=4", "train.optimiser={name: adam, lr: 0.003}"),
        *("train.rounds=6", "evaluate={every: 99, clients: none}"),
    )
    plain = run(tiny(*spoken, "train.local_epochs=10", "run.name=plain"), Progress("quiet")).run_dir
    assert audit_clips(plain).found.lower_bound > 1
    noisy = ("train.optimiser.private={clip: 1.0, noise: 1.1}", "train.local_epochs=2", "run.name=noisy")
    result = run(tiny(*spoken, *noisy), Progress("quiet")).run_dir
    promised = json.loads((result / "run.json").read_text())["privacy"]["epsilon"]
    assert audit_clips(result).found.lower_bound <= promised


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["objective={name: compact, size: 4, normal: [tone0]}"],
            "objective: .* the wrong label of a canary is another",
        ),
        (["data.label_sets={}", "objective=multi_label"], "objective: data.corrupt.canaries audits"),
        (["data.label_sequences={}", "objective=transcribe"], "objective: data.corrupt.canaries audits"),
        (["data.events={}", "objective=events"], "objective: data.corrupt.canaries audits"),
        (["data.unlabelled={keep: 0.5}"], "data.unlabelled: .* several pools have no common audit"),
        (["data.parts={low: {speakers: 4}, high: {classes: 5}}"], "data.parts: .* have no common audit"),
        (["method.rule={name: gaussian, noise: 1.0}"], "method.rule: .* gaussian protects clients"),
        (["attack=sign_flip"], "attack: .* attackers do not train on their clips as others do"),
        (["data.corrupt.canaries.clips=9"], "data.corrupt.canaries.clips: .*10"),
        (["privacy.metrics=outside"], "privacy: rule WeightedMean gives no differential privacy"),
    ],
)
def test_settings_without_a_meaning_for_canaries_are_rejected(tiny: Tiny, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny("data.corrupt.canaries={clips: 10}", *settings)


def test_a_run_without_one_global_model_is_rejected(tiny: Tiny, raydfl: Raydfl) -> None:
    config = tiny("data.corrupt.canaries={clips: 10}", "train.rounds=1", method="fedper")
    run_dir = run(config, Progress("quiet")).run_dir
    raydfl("audit", str(run_dir)).refuses("canary clips need one global model")
