"""Helpers of several test files to train and compare runs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from raydfl.cluster.server import Server
from raydfl.engine.config import Config
from raydfl.engine.storage.folder import final_state
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress
from raydfl.testing import read_tensors, train_federation

REPRESENTATIVES = frozenset(
    (
        "fedavg",
        "fedadam",
        "scaffold",
        "fedper",
        "ditto",
        "fedmlac",
        "fedkad",
        "fedstar",
        "fedapta",
        "profila",
        "modality_mirror",
    )
)
"""Methods of the fast tests: the five papers', and one for each kind of state and of aggregation."""


def marks_of(method: str) -> list[pytest.MarkDecorator]:
    """Return the mark ``slow`` for a built-in method that is no representative."""
    return [] if method in REPRESENTATIVES or ":" in method else [pytest.mark.slow]


def each_method(methods: Iterable[str]) -> list[Any]:
    """Return the methods as parameters. All but the representatives are slow."""
    return [pytest.param(method, marks=marks_of(method)) for method in methods]


def finish_in(run_dir: Path, config: Config) -> dict[str, bytes]:
    """Continue a run in an existing folder."""
    server = Server(run_dir, config)
    try:
        while server.round_index < config.train.rounds:
            server.round()
    finally:
        server.close()
    return read_tensors(run_dir)


_KNOWN: dict[str, tuple[Path, dict[str, bytes]]] = {}
_RUNS = tempfile.TemporaryDirectory(prefix="raydfl-known-")  # Pytest removes the folders of passed tests.


def known(config: Config) -> dict[str, bytes]:
    """Call :func:`raydfl.testing.train_federation`, once for equal settings."""
    return _known(config)[1]


def known_run(config: Config) -> Path:
    """Return the folder of a run of :func:`known`."""
    return _known(config)[0]


def _known(config: Config) -> tuple[Path, dict[str, bytes]]:
    values = config.model_dump(mode="json")
    del values["run"]["dir"], values["data"]["cache"]
    key = json.dumps(values, sort_keys=True)
    if key not in _KNOWN:
        run = config.run.model_copy(update={"dir": _RUNS.name, "name": f"known-{len(_KNOWN)}"})
        _KNOWN[key] = Path(run.dir) / run.name, train_federation(config.model_copy(update={"run": run}))
    return _KNOWN[key]


def stop_after(config: Config, rounds: int) -> None:
    """Train a run up to a round in this process, without the steps after the last round."""
    server = Server(create(config, Progress("quiet")), config)
    try:
        for _ in range(rounds):
            server.round()
        server.finish()
    finally:
        server.close()


def differ(a: dict[str, bytes], b: dict[str, bytes]) -> bool:
    """Return whether two runs differ. As a function, it keeps pytest from printing all bytes."""
    return a != b


__all__ = ["differ", "final_state", "finish_in", "known", "known_run", "stop_after"]
