"""The entries of the server's state that clients receive: the other ones, such as an optimiser's moments, are no models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from raydfl.core import seeds
from raydfl.core.types import State
from raydfl.core.users_code import naming_failures
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config


def received_entries(config: Config, state: State, clients: Clients, begun: Sequence[int] = ()) -> frozenset[str]:
    """Return the keys of the entries that a task of the last round or of its evaluation receives, and ``"global"``.

    Args:
        config: configuration of the run.
        state: state after that round.
        clients: all clients of the run. The evaluation is planned for each of them.
        begun: rounds completed before each phase, if a phase has ended early.
    """
    method, last = config.parts.method, max(0, state.round_index - 1)
    phase = config.phases.as_begun(begun).at(last)
    # A plan may read a schedule that has no round after the last one, so the last round is planned once more.
    before = dataclasses.replace(state, round_index=last, phase=phase)
    cohort = config.train.in_phase(phase).cohort_size(clients.eligible)
    with naming_failures(method, "plan", f"round {last + 1}"):
        tasks = [*method.plan(before, clients, seeds.generator(config.run.seed, last, "", "plan"), cohort)]
    with naming_failures(method, "plan_evaluation", f"the evaluation after round {state.round_index}"):
        tasks += [*method.plan_evaluation(state, clients), *method.plan_evaluation(state, [])]
    return frozenset(["global", *(key for task in tasks for key in task.receive)])


def label_entry(part: str, key: str) -> list[str]:
    """Return the words that name an entry of the state in metrics and files: its part, and its key unless it is global."""
    return [word for word in (part, "" if key == "global" else key) if word]
