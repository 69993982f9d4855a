"""What several test files compare runs with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from raydfl.cluster.server import Server
from raydfl.engine.config import Config
from raydfl.engine.storage.folder import final_state
from raydfl.engine.storage.private import PrivateStore
from raydfl.engine.storage.store import RunStore
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress


def finish(config: Config) -> dict[str, bytes]:
    """All rounds in this process; the exact bytes of everything that the run then knows."""
    return finish_in(create(config, Progress("quiet")), config)


def finish_in(run_dir: Path, config: Config) -> dict[str, bytes]:
    """The same for a run whose folder is there."""
    server = Server(run_dir, config)
    try:
        while server.round_index < config.train.rounds:
            server.round()
    finally:
        server.close()
    return truth(run_dir)


_KNOWN: dict[str, tuple[Path, dict[str, bytes]]] = {}


def known(config: Config) -> dict[str, bytes]:
    """What :func:`finish` gives for these settings, from the first time on: what others are compared with is trained once."""
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
        found = finish(config.model_copy(update={"run": config.run.model_copy(update={"name": name})}))
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


def truth(run_dir: Path, *sites: Path) -> dict[str, bytes]:
    """The server's tensors and every client's private tensors after the last commit, as bytes by name.

    Args:
        sites: folders of private state at sites.
    """
    store = RunStore(run_dir)
    latest = store.latest()
    assert latest is not None
    commit = store.load(latest)
    private = PrivateStore(run_dir / "private", sites)
    found = {"round": str(commit.state.round_index).encode(), "extra": repr(commit.state.extra).encode()}
    groups = {f"server {key}": tensors for key, tensors in commit.state.tensors.items()}
    groups.update({f"client {index}": private.read(ref) for index, ref in commit.private.items()})
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            found[f"{group} {name}"] = raw(tensor)
    return found


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's memory."""
    return np.ascontiguousarray(tensor.detach().cpu().numpy()).tobytes()


def same(a: dict[str, bytes], b: dict[str, bytes]) -> None:
    """Assert equality to the bit, naming what differs."""
    assert set(a) == set(b)
    differing = [name for name in a if a[name] != b[name]]
    assert not differing, f"differ: {differing[:5]} ({len(differing)} of {len(a)})"


def differ(a: dict[str, bytes], b: dict[str, bytes]) -> bool:
    """Whether two runs know something else; a function of its own keeps pytest from printing all their bytes."""
    return a != b


def start(config: Config) -> Server:
    """A new run's server in this process, before its first round."""
    return Server(create(config, Progress("quiet")), config)


__all__ = ["differ", "final_state", "finish", "finish_in", "raw", "same", "start", "truth"]
