"""A cluster of several nodes on this machine, controlled through the standard input of its process.

``python fleet.py`` prints the address. ``add CPUS GPUS`` adds a node, ``remove N`` crashes the Nth added node, ``end`` ends all
nodes. The process answers each command with a line.
"""

from __future__ import annotations

import sys
import time

from ray.cluster_utils import Cluster

STORE = 100 << 20


def count_alive(cluster: Cluster) -> int:
    return sum(node["Alive"] for node in cluster.global_state.node_table())


def main() -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": False,
            "object_store_memory": STORE,
            "_system_config": {  # crashed nodes are noticed within seconds
                "health_check_initial_delay_ms": 0,
                "health_check_period_ms": 1000,
                "health_check_failure_threshold": 10,
            },
        },
    )
    added = []
    print(cluster.address, flush=True)
    for line in sys.stdin:
        word, *numbers = line.split()
        if word == "add":
            added.append(
                cluster.add_node(num_cpus=int(numbers[0]), num_gpus=int(numbers[1]), object_store_memory=STORE)
            )
        elif word == "remove":
            alive = count_alive(cluster)
            cluster.remove_node(added[int(numbers[0])], allow_graceful=False)
            while count_alive(cluster) >= alive:  # until the cluster notices
                time.sleep(0.1)
        else:
            break
        print("done", flush=True)
    cluster.shutdown()
    print("ended", flush=True)


if __name__ == "__main__":
    main()
