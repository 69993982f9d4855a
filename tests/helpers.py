"""What several test files compare runs with."""

from __future__ import annotations

import json
from pathlib import Path

from raydfl.cluster.server import Server
from raydfl.engine.config import Config
from raydfl.engine.storage.folder import final_state
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress
from raydfl.testing import read_tensors, train_federation


def finish_in(run_dir: Path, config: Config) -> dict[str, bytes]:
    """The same for a run whose folder is there."""
    server = Server(run_dir, config)
    try:
        while server.round_index < config.train.rounds:
            server.round()
    finally:
        server.close()
    return read_tensors(run_dir)


_KNOWN: dict[str, tuple[Path, dict[str, bytes]]] = {}


def known(config: Config) -> dict[str, bytes]:
    """Return what :func:`raydfl.testing.train_federation` returns; equal settings are trained once."""
    return _known(config)[1]


def known_run(config: Config) -> Path:
    """The folder of that run."""
    return _known(config)[0]


def _known(config: Config) -> tuple[Path, dict[str, bytes]]:
    values = config.model_dump(mode="json")
    del values["run"]["dir"], values["data"]["cache"]
    key = json.dumps(values, sort_keys=True)
    if key not in _KNOWN:
        name = f"known-{len(_KNOWN)}"
        found = train_federation(config.model_copy(update={"run": config.run.model_copy(update={"name": name})}))
        _KNOWN[key] = Path(config.run.dir) / name, found
    return _KNOWN[key]


def stop_after(config: Config, rounds: int) -> None:
    """The run up to some round, in this process; what comes after the rounds is not done."""
    server = Server(create(config, Progress("quiet")), config)
    try:
        for _ in range(rounds):
            server.round()
        server.finish()
    finally:
        server.close()


def differ(a: dict[str, bytes], b: dict[str, bytes]) -> bool:
    """Whether two runs know something else; a function of its own keeps pytest from printing all their bytes."""
    return a != b


__all__ = ["differ", "final_state", "finish_in", "known", "known_run", "stop_after"]
