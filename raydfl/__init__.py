"""raydfl: federated learning for audio on Ray.

What users need is imported from here (``from raydfl import run, Method``) and from :mod:`raydfl.ops`. The code lives in fifteen
rooms, and each imports only rooms below it:

- ``cli``: the command line; words on a terminal
- ``testing``: helpers for tests of federations
- ``experiments``: many runs: grids, and searches on Ray Tune
- ``runs``: one run from its folder to its page: run, resume, replay, progress, tracking, report, inference
- ``cluster``: all that needs Ray: actors, the pool, nodes, GPUs, sites, jobs
- ``engine``: the round and what is kept of it: configuration, federation, worker, storage; no Ray, no terminal
- ``attacks``: simulated attackers, one file an attack
- ``methods``: federated methods, one file a paper
- ``controls``: scores without training, for comparison
- ``objectives``: what is learnt, one file an objective: classification, anomaly detection ...
- ``training``: one client's local work, or several clients' in one computation
- ``rules``: aggregation: many clients' updates in, the server's new tensors out
- ``models``: networks, one file a family
- ``data``: recordings in, batches of examples out
- ``core``: values, numbers and files that every room uses; fast operators

``rules``, ``models`` and ``data`` lie level: they do not know each other.
"""

from raydfl.core.lazy import lazy_names

# ``raydfl --help`` need not wait for PyTorch and Ray.
__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    __file__,
    {"computing_in": "autocast", "drawn": "sample_clients", "parts_of_rounds": "split_round_times"},
)
