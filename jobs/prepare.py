"""Features computed by all CPUs of a cluster.

Submit it with ``ray job submit --working-dir . -- python jobs/prepare.py jobs/X.yaml [key=value ...]``.

The nodes must share the folder of the feature cache (data.cache) and see the recordings under the same path. What is there already
is not computed again, so an interrupted job goes on where it was. On one machine: ``raydfl data prepare``.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import ray

from raydfl.config import load_config
from raydfl.data.chunks import Chunk, ChunkReport
from raydfl.data.population import build_population
from raydfl.errors import RaydflError
from raydfl.progress import Progress


def on_the_cluster(function: Callable[[Chunk], ChunkReport], chunks: Iterable[Chunk]) -> Iterator[ChunkReport]:
    """Each chunk as a Ray task on one CPU; reports in order of completion."""
    task = ray.remote(num_cpus=1)(function)
    pending = [task.remote(chunk) for chunk in chunks]
    while pending:
        done, pending = ray.wait(pending)
        yield ray.get(done[0])


def main(file: str, *overrides: str) -> None:
    """Prepare what the configuration needs."""
    config = load_config(Path(file), overrides)
    ray.init(config.ray.address, log_to_driver=False)
    with Progress() as progress:
        population = build_population(config.data, config.run.seed, progress, on_the_cluster, config.build_attack())
        for message in population.messages:
            progress.message(message)
        progress.message(f"{len(population)} clients, {len(population.test)} test examples; features are ready")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print("usage: python jobs/prepare.py FILE [key=value ...]", file=sys.stderr)
        sys.exit(2)
    try:
        main(*sys.argv[1:])
    except RaydflError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
