"""Audit of differential privacy by example: does the trained model reveal which canary clips it was trained on?

T. Steinke, M. Nasr, M. Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS 2023, theorem 5.2 and appendix D. A fair coin
has included or left out each of m canary clips (``data.corrupt.canaries``). The auditor scores every canary by the negative loss of
the final model on its wrong label, guesses "included" for the highest scores and "left out" for the lowest, and abstains otherwise.
For every (epsilon, delta)-private training, v or more of r guesses are correct with probability at most

    P[B >= v] + 2 m delta max over i of P[v > B >= v - i] / i,      B ~ Binomial(r, 1 / (1 + exp(-epsilon)))

The 95 % lower bound is the smallest epsilon with a probability of at least 5 %.

Choice of r: the auditor tries three numbers of guesses, which depend on m alone. The largest of three bounds, each with an error
probability of 5 % / 3, is a valid bound by the union bound, so the choice among them may depend on the coins.

The number of a client's clips is outside its guarantee. A canary changes it too, but the scores do not use it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raydfl.core import seeds
from raydfl.core.errors import InputError
from raydfl.data import Population
from raydfl.engine import choose_delta
from raydfl.engine.storage import local_run, read_about
from raydfl.runs.inference.membership import compute_losses
from raydfl.runs.inference.model import _Run

_SHARES = (0.75, 0.5, 0.25)
"""Fractions of the canaries with a guess."""
_ERROR = 0.05
"""Probability that the bound exceeds the true epsilon."""


@dataclass(frozen=True, slots=True)
class Guesses:
    """Guesses of the coins of canary clips, and the resulting bound."""

    guesses: int
    correct: int
    lower_bound: float
    """95 % lower bound of epsilon."""


@dataclass(frozen=True, slots=True)
class ClipAudit:
    """Result of an audit with canary clips. It contains counts only, because the coins are secret."""

    clips: int
    """Number of canary clips."""
    included: int
    """Number of canary clips in the training data."""
    delta: float
    found: Guesses
    control: Guesses
    """Guesses of fresh coins, which have decided nothing."""
    largest: float
    """Largest possible lower bound with this number of canaries and this delta."""
    clients: tuple[str, ...]
    """Ids of the clients with canary clips."""

    def to_dict(self) -> dict[str, Any]:
        """Return all values for JSON."""
        return dataclasses.asdict(self)


def audit_clips(run_dir: str | Path, trust: bool = False) -> ClipAudit:
    """Guess the coins of a run's canary clips from its final global model.

    Args:
        run_dir: Run folder.
        trust: Approve the code named by the run's configuration.

    Raises:
        RunDirectoryError: ``run_dir`` is not a run directory, or has no completed round.
        InputError: The run has no canary clips, or no global model.
        DataError: Features are missing.
    """
    folder = local_run(run_dir)
    run = _Run(folder, trust)
    if run.config.data.parts or run.config.data.corrupt.canaries is None:
        raise InputError(
            "the run has no canary clips. Train it with data.corrupt.canaries='{clips: 100}', then audit it"
        )
    try:
        model = run.load_shared(None)
    except InputError as error:
        raise InputError(
            "canary clips need one global model, but this run has none. Train a new run with a method that has one, "
            "such as fedavg, and without train.groups"
        ) from error
    population = Population.load(folder / "population").use(run.config.data)
    scores, included, owners = [], [], []
    for client in range(len(population)):
        canaries = population.read_canaries(client)
        if len(canaries):
            scores.append(-compute_losses(model, [canaries]))
            included.append(np.isin(np.unique(canaries.clips), population.data(client).train.clips))
            owners.append(population.ids[client])
    stored = read_about(folder).get("privacy")
    delta = choose_delta(run.config.privacy.delta, population.sizes()) if stored is None else float(stored["delta"])
    coins = np.concatenate(included)
    fresh = seeds.generator(run.config.run.seed, 0, "", "audit canary coins").integers(2, size=len(coins)).astype(bool)
    found, control = (guess_coins(np.concatenate(scores), of_canaries, delta) for of_canaries in (coins, fresh))
    largest = max(_compute_bound(len(coins), guesses, guesses, delta) for guesses in count_guesses(len(coins)))
    return ClipAudit(len(coins), int(coins.sum()), delta, found, control, largest, tuple(owners))


def guess_coins(scores: np.ndarray, included: np.ndarray, delta: float) -> Guesses:
    """Guess coins from scores, with the number of guesses that gives the largest bound.

    Args:
        scores: Score of each canary, float64 [canaries]. Higher scores indicate that the canary was included.
        included: Coin of each canary, bool [canaries].
        delta: Failure probability of the guarantee.
    """
    order = np.argsort(scores, kind="stable")
    results = []
    for guesses in count_guesses(len(scores)):
        low, high = order[: guesses // 2], order[len(order) - guesses // 2 :]
        correct = int((~included[low]).sum() + included[high].sum())
        results.append(Guesses(guesses, correct, _compute_bound(len(scores), guesses, correct, delta)))
    return max(results, key=lambda result: result.lower_bound)


def count_guesses(canaries: int) -> Sequence[int]:
    """Return the tried numbers of guesses, half of them for "included"."""
    return [2 * int(share * canaries / 2) for share in _SHARES]


def _compute_bound(canaries: int, guesses: int, correct: int, delta: float) -> float:
    return compute_lower_bound(canaries, guesses, correct, delta, _ERROR / len(_SHARES))


def compute_lower_bound(canaries: int, guesses: int, correct: int, delta: float, error: float = _ERROR) -> float:
    """Compute a lower bound of epsilon from correct guesses.

    Args:
        canaries: Number of canaries, each included by a fair coin.
        guesses: Number of guesses, fixed before the coins are compared.
        correct: Number of correct guesses.
        delta: Failure probability of the guarantee, from 0 to 1.
        error: Probability that the bound exceeds the true epsilon, between 0 and 1.
    """
    from scipy.optimize import brentq  # only audits need it

    def compute_excess(epsilon: float) -> float:
        return compute_p_value(canaries, guesses, correct, epsilon, delta) - error

    if compute_excess(0.0) >= 0:
        return 0.0
    high = 1.0
    while compute_excess(high) < 0:
        high *= 2
    return float(brentq(compute_excess, 0.0, high, xtol=1e-9))


def compute_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Compute the largest probability of at least ``correct`` correct guesses for an (epsilon, delta)-private training.

    Args:
        canaries: Number of canaries.
        guesses: Number of guesses.
        correct: Number of correct guesses.
        epsilon: At least 0.
        delta: From 0 to 1.
    """
    from scipy.stats import binom  # only audits need it

    accuracy = 1 / (1 + np.exp(-epsilon))
    steps = np.arange(1, correct + 1)
    below = np.cumsum(binom.pmf(correct - steps, guesses, accuracy))
    worst = float((below / steps).max(initial=0.0))
    return min(1.0, float(binom.sf(correct - 1, guesses, accuracy)) + 2 * canaries * delta * worst)
