"""A user's own Tuner over raydfl.trainable, as a program: ``own_tuner.py asha|pbt FOLDER``. A second call restores the Tuner.

``FOLDER/config.json`` is the common configuration of the trials.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining

import raydfl

METRIC = "test model/loss"
LR = "train.optimiser.lr"


def main(scheduler: str, folder: Path) -> None:
    federation = raydfl.trainable(json.loads((folder / "config.json").read_text()), cpus=0.5)
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=150 * 2**20, logging_level="ERROR")
    storage = folder / "tune" / scheduler
    if tune.Tuner.can_restore(str(storage)):
        tuner = tune.Tuner.restore(str(storage), trainable=federation)
    else:
        schedulers = {
            "asha": ASHAScheduler(time_attr="round", grace_period=2, reduction_factor=2, max_t=4),
            "pbt": PopulationBasedTraining(
                time_attr="round",
                perturbation_interval=2,
                synch=True,  # Synchronised trials ensure a copy of the better trial's state.
                quantile_fraction=0.5,
                hyperparam_mutations={LR: tune.uniform(0.05, 0.3)},
            ),
        }
        values = [0.3, 0.001, 0.1] if scheduler == "asha" else [0.3, 0.001]
        tuner = tune.Tuner(
            federation,
            param_space={LR: tune.grid_search(values)},
            tune_config=tune.TuneConfig(metric=METRIC, mode="min", scheduler=schedulers[scheduler]),
            run_config=tune.RunConfig(name=scheduler, storage_path=str(folder / "tune"), verbose=0),
        )
    results = [
        {
            "settings": result.config,
            "metrics": {key: result.metrics.get(key) for key in ("round", "loss", METRIC, "iterations_since_restore")},
            "checkpoint": result.checkpoint.path,
            "error": str(result.error or ""),
        }
        for result in tuner.fit()
    ]
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
