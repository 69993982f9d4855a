"""Poison: the attackers' altered training clips, and the test clips with a backdoor's trigger."""

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
    """Interface of an attack on the training data. Attacks (raydfl/attacks) implement it, so that data needs no import of them."""

    @property
    def poisons(self) -> bool:
        """True if attackers train on altered recordings or labels."""

    def check(self, classes: Sequence[str], features: AnyFeatures) -> None:
        """Reject options that do not fit the data."""

    def candidates(self, ids: Sequence[str], seed: int) -> np.ndarray:
        """Choose the attackers of any round: bool [clients]."""

    def altered(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draw the clips to alter among an attacker's ``count`` training clips: bool [count]."""

    def labels(
        self, labels: np.ndarray, altered: np.ndarray, classes: Sequence[str], rng: np.random.Generator
    ) -> np.ndarray:
        """Return the attacker's training labels: int64 [clips]."""

    def target_class(self, classes: Sequence[str]) -> int | None:
        """Return the class that a backdoor makes models predict; ``None`` without a backdoor to measure."""

    def alteration(self) -> Alteration | None:
        """Return the alteration of chosen recordings; ``None`` for an attack on labels only."""


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
    # Attacks get the labels of examples, with NO_LABEL in place of -1.
    altered, labels = np.zeros(len(train), bool), np.where(label < 0, NO_LABEL, label)[train].astype(np.int64)
    for number in np.flatnonzero(attackers).tolist():
        clips = slice(bounds[number], bounds[number + 1])
        rng = generator(seed, 0, ids[number], "attack data")
        with naming_failures(attack, "altered", kind="attack"):
            altered[clips] = attack.altered(clips.stop - clips.start, rng)
        with naming_failures(attack, "labels", kind="attack"):
            labels[clips] = attack.labels(labels[clips], altered[clips], classes, rng)
    with naming_failures(attack, "target_class", kind="attack"):
        target = attack.target_class(classes)
    with naming_failures(attack, "alteration", kind="attack"):
        changes = attack.alteration() is not None
    # Clips of the target class would count as successes without any backdoor.
    triggered = test[label[test] != target] if changes and target is not None else test[:0]
    # All training clips of an attacker share a store, so that a batch may mix altered and unaltered clips.
    store = np.where(attackers[client] & changes, ALTERED, tables.codes("store")[train])
    rows = np.concatenate([np.arange(len(label)), train, triggered])
    additions = {
        "role": [np.full(len(train), ROLES.index("attack")), np.full(len(triggered), ROLES.index("triggered"))],
        "label": [labels, label[triggered]],
        "store": [store, np.full(len(triggered), ALTERED)],
    }
    values = {"role": ROLES, "label": classes, "store": STORES}
    columns = {
        name: encode(np.concatenate([tables.codes(name), *codes]).astype(np.int32), values[name])
        for name, codes in additions.items()
    }
    altered = np.concatenate([np.zeros(len(label), bool), altered, np.ones(len(triggered), bool)])
    return tables.select(rows).set_clips(altered=pa.array(altered), **columns)
