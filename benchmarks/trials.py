"""Time from the end of a trial of a study to the first commit of the next, with client actors.

    python benchmarks/trials.py [--trials 5] [--actors 2] [--rounds 2]

The trials run one after another in one process of Ray Tune, with different learning rates. A trial ends with its report.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from raydfl.core.yaml import to_yaml
from raydfl.experiments.load import load_study
from raydfl.experiments.run import run_study
from raydfl.runs.progress import Progress

BASE = Path(__file__).parents[1] / "jobs" / "tiny.yaml"


def measure(folder: Path, trials: int, actors: int, rounds: int) -> list[float]:
    """Return the seconds between neighbouring trials.

    Args:
        folder: for the study.
        trials: number of trials.
        actors: client actors of a trial; 0: none.
        rounds: rounds of a trial.
    """
    values = {
        "title": "Trials",
        "base": str(BASE),
        "settings": {"train.rounds": rounds, "evaluate.every": rounds, "run.commit_every": 1, "track.mlflow": False},
        "axes": {"lr": {f"trial {n}": {"train.optimiser.lr": 0.05 + 0.01 * n} for n in range(trials)}},
        "repeat": {"run.seed": [1]},
        "actors": actors,
        "parallel": 1,
        "dir": str(folder / "study"),
    }
    file = folder / "study.yaml"
    file.write_text(to_yaml(values, flow=False))
    study = load_study(file)
    run_study(study, Progress("quiet"))
    begun = [min(path.stat().st_mtime for path in (trial.run_dir / "commits").iterdir()) for trial in study.trials]
    ended = [(trial.run_dir / "report.html").stat().st_mtime for trial in study.trials]
    return [begin - end for end, begin in zip(sorted(ended), sorted(begun)[1:], strict=False)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trials-") as folder:
        seconds = measure(Path(folder), given.trials, given.actors, given.rounds)
    print(f"seconds between trials: median {statistics.median(seconds):.2f}, at most {max(seconds):.2f}")


if __name__ == "__main__":
    main()
