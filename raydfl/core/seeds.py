"""All randomness comes from here: a seed is a function of (run seed, round, client, purpose) and of nothing else.

No generator outlives the round it was made for, so nothing about randomness has to be saved: a round that is done again,
by whichever process, draws the same numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np


def seed_for(run_seed: int, round_index: int, client_id: str, purpose: str) -> int:
    """Return a 63-bit seed that depends on all four arguments.

    ``client_id`` is empty for what the server draws; ``purpose`` keeps independent draws of one client and round apart.

    >>> seed_for(1, 0, "anna", "fit") == seed_for(1, 0, "anna", "fit")
    True
    >>> len({seed_for(1, r, c, p) for r in (0, 1) for c in ("a", "b") for p in ("fit", "evaluate")})
    8
    """
    text = f"{run_seed}\x1f{round_index}\x1f{client_id}\x1f{purpose}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def generator(run_seed: int, round_index: int, client_id: str, purpose: str) -> np.random.Generator:
    """Return a fresh NumPy generator seeded with :func:`seed_for`."""
    return np.random.default_rng(seed_for(run_seed, round_index, client_id, purpose))
