"""Computation of features on all CPUs of the connected Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import ray
from ray.exceptions import RayTaskError

from raydfl.cluster.faults import unwrap_error
from raydfl.data.features import Chunk, ChunkReport


def compute_on_cluster(function: Callable[[Chunk], ChunkReport], chunks: Sequence[Chunk]) -> Iterator[ChunkReport]:
    """Process each chunk as a Ray task with one CPU, and yield reports in order of completion. Ray retries lost tasks."""
    task = ray.remote(num_cpus=1)(function)
    pending = [task.remote(chunk) for chunk in chunks]
    try:
        while pending:
            done, pending = ray.wait(pending)
            try:
                report = ray.get(done[0])
            except RayTaskError as error:
                raise unwrap_error(error) from error
            yield report
    finally:  # After an error, the remaining tasks are useless.
        for reference in pending:
            ray.cancel(reference)
