"""The server and client actors on Ray: pools, sites, nodes, GPUs, resources and jobs. Ray Tune is in ``experiments``.

A *pool* holds client actors. An *order* is a task for one client. A *site* is a node with data that never leave it, and a *place*
is a site or, with an empty name, the whole cluster.

Imports engine and every room below it. Read server.py and pool.py first, then actors.py, which schedules the client actors of a
place, and client.py, the actor itself. Names are imported at their first use, so that ``raydfl --help`` needs no Ray.
"""

from raydfl.core.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
