"""Measure the time to plan the calls of a round: the clients' costs are sorted, and every idle actor gets its first calls.

    python benchmarks/planning.py --actors 1000 --clients 10000

Costs are log-normal. A row is a pace in seconds for a unit of cost; 0 is an unknown pace, as in a run's first round. Columns:
processor milliseconds of the fastest repeat, and the number of planned calls.
"""

from __future__ import annotations

import argparse
import random
import time

from raydfl.cluster.scheduling import Backlog, Lane, schedule


def plan(actors: int, clients: int, pace: float) -> tuple[float, int]:
    """Return the processor milliseconds and the number of calls of one plan."""
    draws = random.Random(0)
    costs = [draws.lognormvariate(0.0, 0.5) for _ in range(clients)]
    lanes = [Lane(number, 0, 0.0, pace) for number in range(actors)]
    started = time.process_time()
    calls = schedule(Backlog(enumerate(costs)), Backlog(), lanes, 0.0)
    return 1e3 * (time.process_time() - started), len(calls)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--paces", type=float, nargs="+", default=[0.0, 0.001, 0.01, 0.1, 1.0])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    print(f"{'pace':>8} {'ms':>8} {'calls':>8}")
    for pace in arguments.paces:
        milliseconds, calls = min(plan(arguments.actors, arguments.clients, pace) for _ in range(arguments.repeats))
        print(f"{pace:8g} {milliseconds:8.1f} {calls:8}")


if __name__ == "__main__":
    main()
