"""Poison: the clips on which attackers train in place of their own, and the test clips with a backdoor's trigger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from raydfl.core.seeds import generator
from raydfl.core.users_code import naming_failures
from raydfl.data.features.alteration import Alteration
from raydfl.data.features.kinds import AnyFeatures
from raydfl.data.steps.corrupt import ALTERED, STORES
from raydfl.data.steps.listing import NO_LABEL, Assignment
from raydfl.data.tables import ROLES, encode


class Poisoner(Protocol):
    """Whoever alters training data: as much of an attack as data need to know (raydfl/attacks)."""

    @property
    def poisons(self) -> bool:
        """Return whether attackers train on other recordings or labels than honest clients."""

    def check(self, classes: Sequence[str], features: AnyFeatures) -> None:
        """Refuse options that do not fit the data."""

    def candidates(self, ids: Sequence[str], seed: int) -> np.ndarray:
        """Return who attacks in some round: bool [clients]."""

    def altered(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return which of an attacker's ``count`` training clips are altered: bool [count]."""

    def labels(
        self, labels: np.ndarray, altered: np.ndarray, classes: Sequence[str], rng: np.random.Generator
    ) -> np.ndarray:
        """Return the labels that an attacker trains on: int64 [clips]."""

    def target_class(self, classes: Sequence[str]) -> int | None:
        """Return the class that altered clips are to be taken for; ``None``: nothing to measure."""

    def alteration(self) -> Alteration | None:
        """Return what is done to chosen recordings; ``None``: nothing."""


def poison(tables: Assignment, attack: Poisoner, seed: int) -> Assignment:
    """Mark the altered clips, and add rows of the roles ``attack`` and ``triggered``.

    Raises:
        DataError: more attackers than clients, or an unknown id.
    """
    train, bounds = tables.train_bounds()
    test, client, label = np.flatnonzero(tables.has_role("test")), tables.codes("client")[train], tables.codes("label")
    ids, classes = tables.ids, tables.classes
    with naming_failures(attack, "candidates", kind="attack"):
        attackers = attack.candidates(ids, seed)
    altered, labels = np.zeros(len(train), bool), np.where(label < 0, NO_LABEL, label)[train].astype(np.int64)
    for number in np.flatnonzero(attackers).tolist():
        mine = slice(bounds[number], bounds[number + 1])
        rng = generator(seed, 0, ids[number], "attack data")
        with naming_failures(attack, "altered", kind="attack"):
            altered[mine] = attack.altered(mine.stop - mine.start, rng)
        with naming_failures(attack, "labels", kind="attack"):
            labels[mine] = attack.labels(labels[mine], altered[mine], classes, rng)
    with naming_failures(attack, "target_class", kind="attack"):
        target = attack.target_class(classes)
    with naming_failures(attack, "alteration", kind="attack"):
        changes = attack.alteration() is not None
    triggered = test[label[test] != target] if changes and target is not None else test[:0]
    # All training clips of an attacker are in one store, so that a batch may have altered and unaltered ones.
    store = np.where(attackers[client] & changes, ALTERED, tables.codes("store")[train])
    rows = np.concatenate([np.arange(len(label)), train, triggered])
    ends = {
        "role": [np.full(len(train), ROLES.index("attack")), np.full(len(triggered), ROLES.index("triggered"))],
        "label": [labels, label[triggered]],
        "store": [store, np.full(len(triggered), ALTERED)],
    }
    values = {"role": ROLES, "label": classes, "store": STORES}
    columns = {
        name: encode(np.concatenate([tables.codes(name), *end]).astype(np.int32), values[name])
        for name, end in ends.items()
    }
    changed = np.concatenate([np.zeros(len(label), bool), altered, np.ones(len(triggered), bool)])
    return tables.select(rows).set_clips(altered=pa.array(changed), **columns)
