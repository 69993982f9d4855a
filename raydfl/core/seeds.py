"""Seeds of all random draws: functions of run seed, round, client and purpose alone.

No generator outlives its round, so checkpoints hold no random state. A repeated round draws the same values in any process.
"""

from __future__ import annotations

import hashlib

import numpy as np


def seed_for(run_seed: int, round_index: int, client_id: str, purpose: str) -> int:
    """Return a 63-bit seed that depends on all four arguments.

    Args:
        run_seed: the run's seed.
        round_index: the round.
        client_id: the client. Empty: the server.
        purpose: separates independent draws of a client in a round.

    >>> seed_for(1, 0, "anna", "fit") == seed_for(1, 0, "anna", "fit")
    True
    >>> len({seed_for(1, r, c, p) for r in (0, 1) for c in ("a", "b") for p in ("fit", "evaluate")})
    8
    """
    text = f"{run_seed}\x1f{round_index}\x1f{client_id}\x1f{purpose}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1  # fits torch's signed seeds


def generator(run_seed: int, round_index: int, client_id: str, purpose: str) -> np.random.Generator:
    """Return a fresh NumPy generator seeded with :func:`seed_for`."""
    return np.random.default_rng(seed_for(run_seed, round_index, client_id, purpose))
