"""The comparison of a run's rounds, read back from its record."""

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
    """The best round of a run by ``run.best``: of the phase that it is in."""

    leader: Leader
    commit: Commit


def best_of(run_dir: Path, config: Config) -> Best | None:
    """Return the best round of a run; ``None``: none is asked for, none is evaluated yet, or none is kept.

    Raises:
        RunDirectoryError: a file of the record or a commit is damaged.
    """
    store = RunStore(run_dir)
    newest = store.newest()
    if newest is None or config.run.best is None:
        return None
    phases = config.phases.as_begun(newest.begun)
    selection = config.make_selection(Population.load(run_dir / "population", features=False))
    leader = restore_selection(store, selection, phases, newest.state.round_index)[0].best
    name = None if leader is None else store.commit_of(leader.round)
    return None if leader is None or name is None or not leader.round else Best(leader, store.load(name))


def restore_selection(
    store: RunStore, selection: Selection, phases: Phases, round_index: int
) -> tuple[Selection, Collection[str], Leader | None]:
    """Restore the comparison of a run's evaluated rounds. The best round is one whose commit is kept.

    Args:
        store: of the run.
        selection: before the first round.
        phases: as they have begun.
        round_index: the last committed round.

    Returns:
        The selection, the names of what was measured in its phase, and the best round where its commit is not kept.

    Raises:
        RunDirectoryError: a file of the record is damaged.
    """
    kept = set(store.rounds())
    where = (pc.field("client") == "") & (pc.field("phase") == "evaluate") & pc.field("shape").is_null()
    columns = ("round", "split", "metric", "value")
    scores: dict[int, dict[str, float]] = {}
    for row in read_rows(store.folder, round_index, where=where, columns=columns).to_pylist():
        scores.setdefault(row["round"], {})[f"{row['split']} {row['metric']}"] = row["value"]
    found, every = selection, selection
    names: dict[str, None] = {}
    for done, measured in sorted(scores.items()):
        phase = phases.at(done - 1)
        if phase != found.phase:
            names = {}
        names |= dict.fromkeys(measured)
        found = found.update(done, phase, measured, done in kept)
        every = every.update(done, phase, measured)
    lost = every.best if every.best is not None and found.best != every.best and every.best.round not in kept else None
    return found, names, lost


def check_file_names(selection: Selection, names: Iterable[str]) -> None:
    """Refuse names whose models would be written into the files of the best round.

    Args:
        selection: of the run.
        names: of the state's entries and of parts.

    Raises:
        ConfigError: naming the first.
    """
    for name in names if selection.for_best else ():
        if re.match(r"best($|-)", file_name_of(name)):
            raise ConfigError(
                f"run.best: the models of {name!r} would be written into model-best.safetensors, which is the best round's; "
                f"give it another name, or leave run.best out"
            )
