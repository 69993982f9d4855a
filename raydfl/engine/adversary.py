"""Simulation of attacks: selection of a round's attackers, and replacement of their updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from raydfl.attacks import Attack, Cohort, ColludingAttack, HonestUpdates, UpdateAttack
from raydfl.core import seeds
from raydfl.core.cuts import cut_tensors
from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Tensors, Update
from raydfl.core.users_code import naming_failures
from raydfl.rules import fill_cuts

_LARGEST = float(np.finfo(np.float32).max)


class Adversary:
    """Attackers of a federation.

    Args:
        attack: The attack; ``None``: no attackers.
        changes: Prefixes of the tensors that the method sends as changes instead of new values.
        ids: Ids of all clients.
        seed: Seed of the run.
    """

    def __init__(self, attack: Attack | None, changes: tuple[str, ...], ids: Sequence[str], seed: int) -> None:
        self.attack = attack
        self._changes = changes
        self._ids = ids
        self._seed = seed
        self._drawn: tuple[int, np.ndarray] | None = None

    def attacks(self, client: int, round_index: int) -> bool:
        """Return whether the client with an index attacks in the round after ``round_index`` completed rounds."""
        if self.attack is None:
            return False
        attack = self.attack
        now = round_index
        # Attackers of the whole run are drawn only once, because a population may have millions of clients. -1 and -2 stand for
        # the rounds of the attack and the rounds outside it.
        if attack.draw == "run" and type(attack).attackers is Attack.attackers:
            started, over = attack.start <= round_index + 1, attack.stop is not None and attack.stop < round_index + 1
            now = -1 if started and not over else -2
        if self._drawn is None or self._drawn[0] != now:
            with naming_failures(attack, "attackers", f"round {round_index + 1}", kind="attack"):
                self._drawn = now, attack.attackers(self._ids, self._seed, round_index)
        return bool(self._drawn[1][client])

    def replace_updates(
        self,
        updates: Iterable[Update],
        examples: Mapping[str, float],
        attacking: frozenset[str],
        current: Mapping[str, Tensors],
        round_index: int,
    ) -> Iterator[Update]:
        """Yield the round's updates in client order, with attackers' updates replaced.

        Without collusion, each update is yielded before the next is read. Colluding attackers see cut updates as complete updates,
        with unchanged values outside the cut.

        Args:
            updates: Honest updates of the whole cohort.
            examples: Number of training examples of each client of the round, by id.
            attacking: Ids of the attackers.
            current: Server's tensors by key.
            round_index: Number of completed rounds.
        """
        attack = self.attack
        if not attacking or not isinstance(attack, (UpdateAttack, ColludingAttack)):
            return iter(updates)
        own = sum(examples[client_id] for client_id in sorted(attacking))
        about = Cohort(len(examples), len(attacking), own / sum(examples.values()) if own else 1.0)
        references: dict[tuple[str, Layout], np.ndarray] = {}

        def reference(update: Update, layout: Layout) -> np.ndarray:
            if (update.key, layout) not in references:
                references[update.key, layout] = self._read_reference(layout, current.get(update.key, {}))
            return references[update.key, layout]

        if isinstance(attack, ColludingAttack):
            whole = (fill_cuts(update, current.get(update.key, {})) for update in updates)
            return _collude(attack, whole, attacking, about, reference, round_index)

        def replace(update: Update) -> Update:
            flat = FlatTensors.from_tensors(update.tensors)
            start = reference(update, flat.layout) if not update.cuts else self._read_cut_reference(update, current)
            honest = flat.vector - start.astype(np.float64)
            rng = seeds.generator(self._seed, 0 if attack.repeats else round_index, update.client_id, "attack")
            with naming_failures(attack, "change", f"round {round_index + 1}", kind="attack"):
                change = attack.change(honest, about, rng)
            return update if change is honest else _replace_values(update, flat.layout, start, change)

        return (replace(update) if update.client_id in attacking else update for update in updates)

    def _read_reference(self, layout: Layout, current: Tensors) -> np.ndarray:
        """Return the server's values, float32 [layout.size]. 0 for unknown tensors, and for tensors sent as changes."""
        vector = np.zeros(layout.size, np.float32)
        for name in layout.names:
            if name in current and not name.startswith(self._changes):
                vector[layout.columns(name)] = current[name].detach().cpu().numpy().ravel()
        return vector

    def _read_cut_reference(self, update: Update, current: Mapping[str, Tensors]) -> np.ndarray:
        """Return the server's values at the elements of a cut update, float32 [elements of the update]."""
        known = current.get(update.key, {})
        whole = FlatTensors.from_tensors({name: known[name] for name in update.cuts})
        parts = cut_tensors(whole, update.cuts, f"client {update.client_id!r}")
        rest = {name: value for name, value in known.items() if name not in update.cuts}
        return self._read_reference(Layout.from_tensors(update.tensors), {**rest, **parts})


def _collude(
    attack: ColludingAttack,
    updates: Iterable[Update],
    attacking: frozenset[str],
    cohort: Cohort,
    reference: Callable[[Update, Layout], np.ndarray],
    round_index: int,
) -> Iterator[Update]:
    """Yield the updates with attackers' updates replaced. Attackers with the same key and layout send the same change."""
    updates = list(updates)
    flat = [FlatTensors.from_tensors(update.tensors) for update in updates]
    kinds = [(update.key, tensors.layout) for update, tensors in zip(updates, flat, strict=True)]
    changes: dict[tuple[str, Layout], np.ndarray] = {}
    for update, tensors, kind in zip(updates, flat, kinds, strict=True):
        if update.client_id not in attacking:
            yield update
            continue
        start = reference(update, tensors.layout)
        if kind not in changes:
            alike = [position for position, of_update in enumerate(kinds) if of_update == kind]
            honest = [position for position in alike if updates[position].client_id not in attacking]
            visible = honest if attack.knowledge == "all" else []
            own = [position for position in alike if updates[position].client_id in attacking]
            known = HonestUpdates([flat[position].vector for position in visible or own], start)
            with naming_failures(attack, "together", f"round {round_index + 1}", kind="attack"):
                changes[kind] = attack.together(known, cohort)
        yield _replace_values(update, tensors.layout, start, changes[kind])


def _replace_values(update: Update, layout: Layout, reference: np.ndarray, change: np.ndarray) -> Update:
    """Return the update with the server's values plus ``change`` in float32."""
    # Clipped, because a server would reject an update that is not finite.
    vector = np.clip(reference + change, -_LARGEST, _LARGEST).astype(np.float32)
    return dataclasses.replace(update, tensors=FlatTensors(layout, vector))
