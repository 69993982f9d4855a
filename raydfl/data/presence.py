"""Presence: which clients have which further views of their examples.

A client has a view where one of its training examples has it. Some clips have no file of a view; ``data.missing`` takes a view from
whole clients besides: from their training clips, their hold-out and their own test. The server's data keep it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from raydfl.core.seeds import generator
from raydfl.data.corruption import draw_clients
from raydfl.data.names import Names

OF_CLIENTS = ("train", "validation", "client_test")
"""Parts of a population that are clients' own, pools of the first among them."""

_DIGITS = 9
"""Decimals of share times clients that count: 0.29 of 50 clients is 14.5, though not in floating point."""


def clients_without(missing: Mapping[str, float], ids: Names, seed: int) -> dict[str, np.ndarray]:
    """Draw the clients from which views are taken.

    Exactly ``share * clients`` of them, rounded half up, each view for itself. Those of a smaller share are among those of a larger
    one.

    Args:
        missing: by view the share of the clients, 0 to 1.

    Returns:
        By view bool [clients].
    """
    return {
        view: draw_clients(
            ids, _count(share, len(ids)), generator(seed, 0, "", f"missing {view}"), f"data.missing.{view}", "without"
        )
        for view, share in missing.items()
    }


def _count(share: float, clients: int) -> int:
    return math.floor(round(share * clients, _DIGITS) + 0.5)


def without_view(arrays: Mapping[str, np.ndarray], view: str, taken: np.ndarray) -> dict[str, np.ndarray]:
    """Return the columns of a population in which the examples of some clients lack a view.

    Args:
        arrays: of the population.
        taken: bool [clients].
    """
    found: dict[str, np.ndarray] = {}
    for name, offsets in arrays.items():
        part, _, column = name.partition("/")
        counts = f"{part}@{view}/counts"
        if column == "offsets" and part.partition("@")[0] in OF_CLIENTS and counts in arrays:
            found[counts] = np.where(np.repeat(taken, np.diff(offsets)), 0, arrays[counts])
    return found


def owners(arrays: Mapping[str, np.ndarray], view: str) -> np.ndarray:
    """Return which clients have a view, of any pool of their training examples: bool [clients].

    Args:
        arrays: of the population.
    """
    if "train/first" in arrays:
        present = np.r_[0, np.cumsum(arrays[f"train@{view}/counts"] > 0)]
        shared: np.ndarray = present[arrays["train/stop"]] > present[arrays["train/first"]]
        return shared
    found = np.zeros(len(arrays["train/offsets"]) - 1, bool)
    for part in [name.partition("/")[0] for name in arrays if name.endswith("/offsets")]:
        if part.partition("@")[0] != "train":
            continue
        counts, offsets = arrays[f"{part}@{view}/counts"], arrays[f"{part}/offsets"]
        present = np.r_[0, np.cumsum(counts > 0)]
        found |= present[offsets[1:]] > present[offsets[:-1]]
    return found
