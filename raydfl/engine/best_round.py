"""Restoration of the best round and of the comparison of rounds from a run's metrics table."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc

from raydfl.core.errors import ConfigError
from raydfl.data import Population
from raydfl.engine.config import Config
from raydfl.engine.phases import Phases
from raydfl.engine.selection import Leader, Selection
from raydfl.engine.storage.folder import file_name_of
from raydfl.engine.storage.record import read_rows
from raydfl.engine.storage.store import Commit, RunStore


@dataclass(frozen=True, slots=True)
class Best:
    """Best round by ``run.best`` in the current phase of a run, with its commit."""

    leader: Leader
    commit: Commit


def find_best(run_dir: Path, config: Config) -> Best | None:
    """Find the best round of a run.

    Returns:
        The best round; ``None`` without ``run.best``, before the first evaluation, or if the best round's commit is lost.

    Raises:
        RunDirectoryError: A metrics file or a commit is damaged.
    """
    store = RunStore(run_dir)
    newest = store.newest()
    if newest is None or config.run.best is None:
        return None
    phases = config.phases.replace_first(newest.begun)
    selection = config.make_selection(Population.load(run_dir / "population", features=False))
    leader = restore_selection(store, selection, phases, newest.state.round_index)[0].best
    name = None if leader is None else store.commit_of(leader.round)
    return None if leader is None or name is None or not leader.round else Best(leader, store.load(name))


def restore_selection(
    store: RunStore, selection: Selection, phases: Phases, round_index: int
) -> tuple[Selection, Collection[str], Leader | None]:
    """Restore the comparison of a run's evaluated rounds. Only a round with a commit can be the best round.

    Args:
        store: Store of the run.
        selection: Selection before the first round.
        phases: Phases with their actual first rounds.
        round_index: Number of the last committed round.

    Returns:
        The selection, the measured metrics of its phase, and the best of all rounds if its commit is lost.

    Raises:
        RunDirectoryError: A metrics file is damaged.
    """
    kept = set(store.rounds())
    where = (pc.field("client") == "") & (pc.field("phase") == "evaluate") & pc.field("shape").is_null()
    columns = ("round", "split", "metric", "value")
    scores: dict[int, dict[str, float]] = {}
    for row in read_rows(store.folder, round_index, where=where, columns=columns).to_pylist():
        scores.setdefault(row["round"], {})[f"{row['split']} {row['metric']}"] = row["value"]
    restored, every = selection, selection
    names: dict[str, None] = {}
    for done, measured in sorted(scores.items()):
        phase = phases.find(done - 1)
        if phase != restored.phase:
            names = {}
        names |= dict.fromkeys(measured)
        restored = restored.update(done, phase, measured, done in kept)
        every = every.update(done, phase, measured)
    best = every.best
    lost = best if best is not None and restored.best != best and best.round not in kept else None
    return restored, names, lost


def check_file_names(selection: Selection, names: Iterable[str]) -> None:
    """Reject names whose models would overwrite the files of the best round.

    Args:
        selection: Selection of the run.
        names: Names of the state's entries and of the parts.

    Raises:
        ConfigError: A name begins with ``best``.
    """
    for name in names if selection.for_best else ():
        if re.match(r"best($|-)", file_name_of(name)):
            raise ConfigError(
                f"run.best: the models of {name!r} would overwrite those of the best round in model-best.safetensors. Choose "
                f"another name, or remove run.best"
            )
