"""Presence: which clients have which of ``data.views``.

A client has a view where one of its training examples has it. Some clips have no file of a view; ``data.missing`` takes a view from
whole clients besides: from their training clips, their hold-out and their own test. The server's data keep it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from raydfl.core.seeds import generator
from raydfl.data.corruption import draw_clients

_DIGITS = 9
"""Decimals of share times clients that count: 0.29 of 50 clients is 14.5, though not in floating point."""


def clients_without(missing: Mapping[str, float], ids: Sequence[str], seed: int) -> dict[str, np.ndarray]:
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
