"""All that needs Ray, but for Ray Tune: the server and client actors, their pools, sites, nodes, GPUs, resources, jobs.

Imports engine and every room below it. Begin with server.py and pool.py, then actors.py, which hands out the work of one site's
actors, and client.py, one of them. Names of this room are imported when they are first used: ``raydfl --help`` needs no Ray.
"""

from raydfl.core.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
