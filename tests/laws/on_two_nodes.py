"""Runs on a cluster of two nodes with a shared network file system: ``python on_two_nodes.py FOLDER``.

FOLDER holds ``configs.json``, a list of configurations. Each has its ``run.dir`` at ``FOLDER/runs``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

sys.path.insert(0, str(Path(__file__).parents[1]))

from shared_disk import SharedDisk

from raydfl.engine.config import make_config
from raydfl.runs._run import run

FOLDER = "RAYDFL_TEST_FOLDER"
STORE = 100 << 20


def mount() -> None:
    """Apply the rules of the network file system to this process."""
    folder = Path(os.environ[FOLDER])
    SharedDisk(folder / "runs", folder / "caches").mount(pytest.MonkeyPatch())


def main(folder: Path) -> None:
    os.environ[FOLDER] = str(folder)
    mount()
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE}
    )
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=STORE)
    paths = os.pathsep.join(map(str, (Path(__file__).parent, *Path(__file__).parents[1:3])))
    environment = {
        "worker_process_setup_hook": "on_two_nodes.mount",
        "env_vars": {FOLDER: str(folder), "PYTHONPATH": paths},
    }
    ray.init(cluster.address, namespace="raydfl", log_to_driver=False, runtime_env=environment)
    for values in json.loads((folder / "configs.json").read_text()):
        run(make_config(values))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
