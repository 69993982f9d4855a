"""Canary clips: training clips with a wrong label, half of them left out, for the audit of differential privacy by example.

T. Steinke, M. Nasr, M. Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS 2023, algorithm 1. Fair coins decide which
canaries are in the training data. They come from the run's seed, with a purpose of their own. ``raydfl audit`` guesses the coins
from the trained model.
"""

from __future__ import annotations

import numpy as np

from raydfl.core.errors import DataError
from raydfl.core.seeds import generator
from raydfl.data.steps.corrupt import CanarySettings, draw_clients
from raydfl.data.steps.listing import Assignment
from raydfl.data.tables import ROLES, encode


def add_canaries(tables: Assignment, settings: CanarySettings | None, seed: int) -> Assignment:
    """Replace the labels of the drawn canaries, and remove the canaries whose coin leaves them out from the training clips.

    All canaries get a further row of the role ``canary``, for the audit. Every client keeps a training clip that is no canary.

    Args:
        tables: the assigned clips, each with a single owner.
        settings: number of canaries and their clients; ``None``: no canaries.
        seed: seed of the run.

    Raises:
        DataError: fewer than 2 classes, or too few training clips or clients.
    """
    if settings is None:
        return tables
    label, classes = tables.codes("label").copy(), len(tables.classes)
    if classes < 2:
        raise DataError(
            f"data.corrupt.canaries needs at least 2 classes, but the data have {classes}. Set data.corrupt.canaries to null"
        )
    clients = draw_clients(
        tables.ids, settings.clients, generator(seed, 0, "", "canary clients"), "data.corrupt.canaries", "with canaries"
    )
    rows, _ = tables.train_bounds()
    owner = tables.codes("client")[rows]
    rng = generator(seed, 0, "", "canary clips")
    shuffled = rng.permutation(np.flatnonzero(clients[owner] & (label[rows] >= 0)))
    kept = np.unique(owner[shuffled], return_index=True)[1]
    candidates = rows[np.delete(shuffled, kept)]
    if len(candidates) < settings.clips:
        raise DataError(
            f"data.corrupt.canaries: {settings.clips} canaries are too many. Each client keeps one labelled training clip, and "
            f"{len(candidates)} others remain. Lower clips, or raise clients"
        )
    chosen = np.sort(candidates[: settings.clips])
    label[chosen] = (label[chosen] + rng.integers(1, classes, len(chosen))) % classes
    included = generator(seed, 0, "", "canary coins").integers(2, size=len(chosen)).astype(bool)
    role, pool = tables.codes("role"), tables.codes("pool")
    taken = np.concatenate([np.delete(np.arange(len(label)), chosen[~included]), chosen])
    is_copy = np.arange(len(taken)) >= len(taken) - len(chosen)
    return tables.select(taken).set_clips(
        role=encode(np.where(is_copy, ROLES.index("canary"), role[taken]).astype(np.int8), ROLES),
        pool=encode(np.where(is_copy, -1, pool[taken]).astype(np.int32), tables.pools),
        label=encode(label[taken], tables.classes),
    )
