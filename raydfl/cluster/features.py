"""Features computed by all CPUs of the Ray cluster that this process is connected to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import ray
from ray.exceptions import RayTaskError

from raydfl.cluster.faults import task_cause
from raydfl.data.features import Chunk, ChunkReport


def on_the_cluster(function: Callable[[Chunk], ChunkReport], chunks: Sequence[Chunk]) -> Iterator[ChunkReport]:
    """Do each chunk as a Ray task on one CPU; reports come in order of completion. What is lost with a node is done again."""
    task = ray.remote(num_cpus=1)(function)
    pending = [task.remote(chunk) for chunk in chunks]
    try:
        while pending:
            done, pending = ray.wait(pending)
            try:
                report = ray.get(done[0])
            except RayTaskError as error:
                raise task_cause(error) from error
            yield report
    finally:  # an error in one of them ends the preparation: the others need not go on
        for reference in pending:
            ray.cancel(reference)
