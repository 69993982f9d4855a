"""Replay of a client's training in a round, for inspection and for debugging a method."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path

from raydfl.cluster import open_serial_pool
from raydfl.core.errors import InputError, RunDirectoryError
from raydfl.core.tensors import FlatTensors, Layout
from raydfl.core.types import Client, Update
from raydfl.data import Population
from raydfl.engine import Config, Federation, UpdateChecker, keys_of
from raydfl.engine.storage import RunStore, check_revision, local_run, read_config, round_of


@dataclass(frozen=True, slots=True)
class Replay:
    """Repeated training of a client in a round."""

    client: Client
    round: int
    phase: str
    update: Update | None
    rejected: str
    received: dict[str, FlatTensors]
    metrics: dict[str, float]
    further: tuple[Update, ...] = ()
    """The client's updates to other keys of the server's state."""


def _make_strict(config: Config) -> Config:
    train = config.train.model_copy(update={"deadline": None})
    return config.model_copy(update={"train": train, "run": config.run.model_copy(update={"on_error": "stop"})})


def replay(run_dir: str | Path, round_number: int, client_id: str, trust: bool = False) -> Replay:
    """Repeat a client's training in a round, in this process. The run does not change.

    Args:
        run_dir: The run's folder or URI.
        round_number: Number of the round, counted from 1 as printed.
        client_id: Id of a client in the round's cohort.
        trust: Approve the code named in the run's configuration.

    Raises:
        RunDirectoryError: No commit before the round is kept, the run has not reached the round, or a method's revision changed.
        InputError: The client was not in the round's cohort.
        ClientError: The method's code fails again. The cause is the original exception.
    """
    run_dir = local_run(run_dir)
    config = read_config(run_dir, trust)
    check_revision(run_dir, config)
    store = RunStore(run_dir)
    latest = store.latest()
    done = 0 if latest is None else round_of(latest)
    if round_number > done + config.run.commit_every:
        raise RunDirectoryError(
            f"round {round_number} of {run_dir} cannot be replayed: the last commit is of round {done}. Choose an earlier round."
        )
    before = [name for name in store.commits() if round_of(name) < round_number]
    if not before:
        rounds = store.rounds()
        span = f"Choose round {rounds[0] + 1} or later, or set" if rounds else "Set"
        raise RunDirectoryError(
            f"round {round_number} of {run_dir} cannot be replayed: the commit before it is no longer kept. {span} `run.keep` to "
            f"keep more commits."
        )
    newest = store.newest()
    begun = () if newest is None else newest.begun
    phases = config.phases.replace_first(begun)
    settings = config.train.phases.get(phases.find(round_number - 1))
    first = phases.first[phases.number(phases.find(round_number - 1)) - 1]
    if settings is not None and settings.begin == "best" and round_of(before[-1]) < first:
        raise RunDirectoryError(
            f"round {round_number} of {run_dir} cannot be replayed: its phase started from an earlier round's models "
            f"(`begin: best`), and no commit of the phase before this round is kept. Set `run.keep` to keep more commits."
        )
    with tempfile.TemporaryDirectory(prefix="raydfl-replay-") as name:
        scratch = Path(name)
        commit, copy = store.load(before[-1]), RunStore(scratch)
        copy.together, copy.block = commit.together, commit.block
        copy.commit(commit.state, commit.private, begun=begun, in_flight=commit.in_flight)
        # The replay measures no scores. The choices of `run.best` and `run.stop` are read from the commits instead.
        run_settings = config.run.model_copy(update={"best": None, "stop": None})
        evaluation = config.evaluate.model_copy(update={"every": 10**9})
        unmeasured = config.model_copy(update={"evaluate": evaluation, "run": run_settings})
        population = Population.load(run_dir / "population", verify=True, verify_features=True)
        pool = open_serial_pool(run_dir, config, population, scratch / "private")
        with (
            contextlib.closing(pool),
            contextlib.closing(Federation(unmeasured, population, copy, pool, run_dir)) as federation,
        ):
            while federation.state.round_index < round_number - 1:
                federation.round()
            orders = federation.plan()
            matching = [order for order in orders if order.task.client_id == client_id]
            if not matching:
                cohort = ", ".join(repr(order.task.client_id) for order in orders[:12])
                raise InputError(
                    f"client {client_id!r} is not in the cohort of round {round_number}. Choose one of "
                    f"{cohort}{' ...' if len(orders) > 12 else ''}."
                )
            order = matching[0]
            # Clients of a group train in one batched computation, so the whole group is repeated.
            # Without its block, so that the client's own update is returned.
            group = [
                dataclasses.replace(member, block=None)
                for member in orders
                if member is order or (member.group == order.group and order.group >= 0)
            ]
            broadcast = federation.broadcast(keys_of(group))
            received = {key: broadcast[order.find_entry(key)] for key in order.task.receive}
            # Without a deadline and with `on_error: stop`, an exception in the client's code reaches the user.
            strict = open_serial_pool(run_dir, _make_strict(config), population, scratch / "private")
            with contextlib.closing(strict):
                result = next(reply for reply in strict.run(group, broadcast) if reply.position == order.position)
            measured = result.measured.get("train", {})
            layouts = {key: Layout.from_tensors(group) for key, group in federation.state.tensors.items()}
            misfit = UpdateChecker(layouts, federation.method.additions).find_misfit(result)
            return Replay(
                client=federation.clients.by_id(client_id),
                round=round_number,
                phase=order.task.phase,
                update=result.update,
                further=result.further,
                rejected=result.rejected or misfit,
                received=received,
                metrics={name: ratio.value for name, ratio in measured.items() if hasattr(ratio, "value")},
            )
