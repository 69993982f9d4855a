"""Print the time and the number of worker nodes at each change: ``python count_nodes.py ADDRESS``."""

from __future__ import annotations

import sys
import time

import ray

ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR", namespace="count")
shown = -1
print("ready", flush=True)
while True:
    nodes = sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())
    if nodes != shown:
        shown = nodes
        print(f"{time.time():.1f} {nodes}", flush=True)
    time.sleep(0.2)
