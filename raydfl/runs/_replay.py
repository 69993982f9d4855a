"""One client's work of one round, done again: to look at it, or to find a method's mistake."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from raydfl.cluster import open_serial_pool
from raydfl.core.errors import InputError, RunDirectoryError
from raydfl.core.tensors import FlatTensors
from raydfl.core.types import Client, Update
from raydfl.data import Population
from raydfl.engine import Config, Federation, UpdateChecker
from raydfl.engine.storage import RunStore, check_revision, local_run, read_config, round_of


@dataclass(frozen=True, slots=True)
class Replayed:
    """One client's work in one round, done again."""

    client: Client
    round: int
    phase: str
    update: Update | None
    rejected: str
    received: dict[str, FlatTensors]
    metrics: dict[str, float]
    further: tuple[Update, ...] = ()
    """The client's updates to further keys of the server's state."""


def _strict(config: Config) -> Config:
    train = config.train.model_copy(update={"deadline": None})
    return config.model_copy(update={"train": train, "run": config.run.model_copy(update={"on_error": "stop"})})


def replay(run_dir: str | Path, round_number: int, client_id: str, trust: bool = False) -> Replayed:
    """Do one client's work of one round again, in this process, from what the run has kept; the run is not changed.

    Args:
        round_number: counted from 1, as printed.
        trust: approves the code that the run's configuration names.

    Raises:
        RunDirectoryError: no commit before that round is kept, the run has not come that far, or it began with other equations.
        InputError: the client took no part in that round.
        ClientError: the method's code fails again; its cause is the original exception.
    """
    run_dir = local_run(run_dir)
    config = read_config(run_dir, trust)
    check_revision(run_dir, config)
    store = RunStore(run_dir)
    latest = store.latest()
    done = 0 if latest is None else round_of(latest)
    if round_number > done + config.run.commit_every:
        raise RunDirectoryError(
            f"round {round_number} of {run_dir} cannot be replayed: the last commit is of round {done}"
        )
    before = [name for name in store.commits() if round_of(name) < round_number]
    if not before:
        kept = store.rounds()
        span = f"rounds {kept[0] + 1} and later can be replayed" if kept else "none is kept"
        raise RunDirectoryError(
            f"round {round_number} of {run_dir} cannot be replayed: the commit before it is no longer kept ({span}); "
            f"set run.keep to keep more"
        )
    newest = store.newest()
    begun = () if newest is None else newest.begun
    phases = config.phases.replace_first(begun)
    own = config.train.phases.get(phases.find(round_number - 1))
    first = phases.first[phases.number(phases.find(round_number - 1)) - 1]
    if own is not None and own.begin == "best" and round_of(before[-1]) < first:
        raise RunDirectoryError(
            f"round {round_number} of {run_dir} cannot be replayed: its phase began with the models of an earlier round "
            f"(begin: best), and no commit of the phase before round {round_number} is kept; set run.keep to keep more"
        )
    with tempfile.TemporaryDirectory(prefix="raydfl-replay-") as name:
        scratch = Path(name)
        commit, copy = store.load(before[-1]), RunStore(scratch)
        copy.together = commit.together
        copy.commit(commit.state, commit.private, begun=begun)
        # Rounds are not measured again, so they cannot be compared: what has come of that is in the commits.
        unjudged = config.run.model_copy(update={"best": None, "stop": None})
        never = config.evaluate.model_copy(update={"every": 10**9})
        quiet = config.model_copy(update={"evaluate": never, "run": unjudged})
        population = Population.load(run_dir / "population", verify=True, verify_features=True)
        pool = open_serial_pool(run_dir, config, population, scratch / "private")
        with contextlib.closing(pool), contextlib.closing(Federation(quiet, population, copy, pool)) as federation:
            while federation.state.round_index < round_number - 1:
                federation.round()
            orders = federation.plan()
            matching = [order for order in orders if order.task.client_id == client_id]
            if not matching:
                took_part = ", ".join(repr(order.task.client_id) for order in orders[:12])
                raise InputError(
                    f"client {client_id!r} took no part in round {round_number}; the cohort was "
                    f"{took_part}{' ...' if len(orders) > 12 else ''}"
                )
            order = matching[0]
            group = [other for other in orders if other is order or (other.group == order.group and order.group >= 0)]
            received = federation.broadcast({key for other in group for key in other.task.receive})
            # Here nobody is dropped or hurried: what a client's code raises is what one wants to see.
            strict = open_serial_pool(run_dir, _strict(config), population, scratch / "private")
            with contextlib.closing(strict):
                result = next(each for each in strict.run(group, received) if each.position == order.position)
            measured = result.measured.get("train", {})
            checker = UpdateChecker(federation.state.tensors, federation.method.additions)
            misfit = next(filter(None, (checker.misfit(update, update.metrics) for update in result.updates)), "")
            return Replayed(
                client=federation.clients.by_id(client_id),
                round=round_number,
                phase=order.task.phase,
                update=result.update,
                further=result.further,
                rejected=result.rejected or misfit,
                received=received,
                metrics={name: ratio.value for name, ratio in measured.items() if hasattr(ratio, "value")},
            )
