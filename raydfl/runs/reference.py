"""Reference runs (``run.reference``): the same data pooled, and each client alone. Both train FedAvg's network and loss.

A reference has the budget of the run. The pooled run makes as many passes over the clips, and each client alone takes part in as
many rounds as in the federation. Its folder is ``reference/pooled`` or ``reference/local`` in the run's folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raydfl.engine import LOCAL, POOLED, Config, apply_values, make_config

_NEUTRAL: Mapping[str, Any] = {
    "method": {"name": "fedavg"},
    "attack": None,
    "train.groups": "none",
    "train.fleet": None,
    "train.phases": {},
    "run.best": None,
    "run.stop": None,
    "run.reference": None,
    "track.mlflow": False,
}


def configure_references(config: Config, run_dir: Path, clients: int) -> Iterator[tuple[str, Config]]:
    """Yield the name and the configuration of each reference run.

    Args:
        config: The run's configuration.
        run_dir: The run's folder.
        clients: Number of the run's clients.
    """
    wanted = config.run.reference
    names = [] if wanted is None else [name for name in ("pooled", "local") if getattr(wanted, name)]
    # Reference runs have no virtual time.
    every = config.evaluate.every if isinstance(config.evaluate.every, int) else math.ceil(config.train.rounds / 10)
    for name in names:
        place = {"run.dir": str(run_dir / "reference"), "run.name": name}
        settings = {**_NEUTRAL, **place, "evaluate.every": every, "train.deadline": config.train.real_deadline}
        if name == "pooled":
            share = config.train.cohort_size(clients) / clients
            settings |= {
                **POOLED,
                "train.clients": None,
                "train.rounds": math.ceil(config.train.rounds * share),
                "evaluate.every": math.ceil(every * share),
            }
        else:
            settings |= LOCAL
        yield name, make_config(apply_values(config.model_dump(mode="json"), settings), f"run.reference.{name}")
