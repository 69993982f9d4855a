"""raydfl: federated learning for audio on Ray.

What users need is imported from here (``from raydfl import run, Method``) and from :mod:`raydfl.ops`. The code lives in thirteen
rooms, and each imports only rooms below it:

- ``cli``: the command line; words on a terminal
- ``experiments``: many runs: grids, and searches on Ray Tune
- ``runs``: one run from its folder to its page: run, resume, replay, progress, tracking, report, inference
- ``cluster``: all that needs Ray: actors, the pool, nodes, GPUs, sites, jobs
- ``engine``: the round and what is kept of it: configuration, federation, worker, storage; no Ray, no terminal
- ``attacks``: simulated attackers, one file an attack
- ``methods``: federated methods, one file a paper
- ``objectives``: what is learnt, one file an objective: classification, anomaly detection ...
- ``training``: one client's local work, or several clients' in one computation
- ``rules``: aggregation: many clients' updates in, the server's new tensors out
- ``models``: networks, one file a family
- ``data``: recordings in, batches of examples out
- ``core``: values, numbers and files that every room uses; fast operators

``rules``, ``models`` and ``data`` lie level: they do not know each other.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

# The one table of public names is the stub beside this file, which type checkers read in its place.
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOMES = {
    alias.name: str(line.module) for line in _STUB.body if isinstance(line, ast.ImportFrom) for alias in line.names
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: ``raydfl --help`` need not wait for PyTorch and Ray."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    if home == __name__:
        return importlib.import_module(f"{home}.{name}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
