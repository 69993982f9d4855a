"""Training in this process, comparison of every bit of two runs, and the ownership of examples."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from raydfl.cluster import Server
from raydfl.core.ops import kernels
from raydfl.data import Examples, Population, build_population
from raydfl.engine import Config
from raydfl.engine.storage import PrivateStore, RunStore
from raydfl.runs import Progress, create


def start_server(config: Config) -> Server:
    """Create a run's folder and open its server in this process, before the first round."""
    return Server(create(config, Progress("quiet")), config)


def train_federation(config: Config) -> dict[str, bytes]:
    """Train a federation to its last round in this process, and return its tensors as in :func:`read_tensors`."""
    run_dir = create(config, Progress("quiet"))
    with contextlib.closing(Server(run_dir, config)) as server:
        while server.round_index < config.train.rounds:
            server.round()
    return read_tensors(run_dir)


def read_tensors(run_dir: Path, *sites: Path) -> dict[str, bytes]:
    """Read the last commit of a run: the server's tensors and every client's private tensors.

    Args:
        run_dir: The run's folder.
        sites: Folders with private state at sites.

    Returns:
        The bytes of each tensor by name. ``round`` and ``extra`` contain the rest of the server's state.

    Raises:
        ValueError: The run has no commit.
    """
    store = RunStore(run_dir)
    latest = store.latest()
    if latest is None:
        raise ValueError(f"{run_dir} has no commit. Train at least one round.")
    commit = store.load(latest)
    private = PrivateStore(run_dir / "private", sites)
    content = {"round": str(commit.state.round_index).encode(), "extra": repr(commit.state.extra).encode()}
    groups = {f"server {key}": tensors for key, tensors in commit.state.tensors.items()}
    groups.update({f"client {index}": private.read(ref) for index, ref in commit.private.items()})
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            content[f"{group} {name}"] = to_bytes(tensor)
    return content


def to_bytes(tensor: Tensor) -> bytes:
    """Return a copy of a tensor's memory, contiguous and on the CPU."""
    return np.ascontiguousarray(tensor.detach().cpu().numpy()).tobytes()


def assert_same_bits(first: Mapping[str, bytes], second: Mapping[str, bytes]) -> None:
    """Raise an AssertionError with the names of different tensors if two runs differ."""
    if set(first) != set(second):
        raise AssertionError(f"Only the first or the second run has {sorted(set(first) ^ set(second))[:5]}.")
    differences = [name for name in first if first[name] != second[name]]
    if differences:
        raise AssertionError(f"{len(differences)} of {len(first)} tensors differ: {differences[:5]}.")


def digest(content: Mapping[str, bytes]) -> str:
    """Return the first 16 hexadecimal digits of a SHA-256 digest of named bytes."""
    total = hashlib.sha256()
    for name in sorted(content):
        total.update(f"{name} {len(content[name])}\n".encode() + content[name])
    return total.hexdigest()[:16]


def describe_kernels() -> str:
    """Name the kernels and the processor. They determine the last bits of results on this machine."""
    model = re.findall(r"^(?:cpu family|model|stepping)\s*: (\d+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[
        :3
    ]
    return ", ".join([*kernels().values(), f"numpy {np.__version__}", f"processor {'-'.join(model)}"])


def list_ownership(config: Config) -> dict[str, Any]:
    """List the ownership of all examples after every data step.

    Returns:
        Values for JSON. ``clients`` has an entry for each client: id, part, site, profile, and examples by split. ``server`` has
        the server's examples by part and split. An example is a list of integers: clip, first frame in its feature store,
        number of frames, label, columns, and the number of frames of each further view.
    """
    population = build_population(
        config.data, config.run.seed, attack=config.components.attack, labels_needed=config.labels_needed
    )
    return describe_population(population, config.components.attack is not None)


def describe_population(population: Population, attacked: bool) -> dict[str, Any]:
    """List the ownership of a population's examples, in the form of :func:`list_ownership`.

    Args:
        population: The population.
        attacked: Also list attackers' training examples.
    """
    return {
        "clients": [_describe_client(population, index, attacked) for index in range(len(population))],
        "server": {
            name: {
                "classes": list(part.classes),
                "test": _describe(part.test),
                "triggered": _describe(part.triggered),
                "validation": _describe(part.validation),
            }
            for name, part in population.parts.items()
        },
        "sizes": population.sizes().tolist(),
        "label_counts": population.label_counts().tolist(),
    }


def _describe_client(population: Population, index: int, attacked: bool) -> dict[str, Any]:
    data = population.data(index)
    splits = {
        "train": data.train,
        "validation": data.validation,
        "test": data.test,
        **{f"train@{name}": examples for name, examples in [*data.pools.items()][1:]},
    }
    if attacked:
        splits["attack"] = population.data(index, attacking=True).train
    return {
        "id": population.ids[index],
        "part": population.part_of(index),
        "site": population.place_of(index),
        "profile": population.profile(index),
        **{name: _describe(examples) for name, examples in splits.items()},
    }


def _describe(examples: Examples) -> list[list[int]]:
    first, *further = (examples.views[name] for name in sorted(examples.views))
    columns = [examples.clips, first.starts, first.counts, examples.labels]
    columns += [examples.columns[name] for name in sorted(examples.columns)]
    columns += [view.counts for view in further]
    rows: list[list[int]] = np.stack([np.asarray(column, np.int64) for column in columns], axis=1).tolist()
    return rows
