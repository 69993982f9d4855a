"""All that needs Ray, but for Ray Tune: actors, the pool, nodes, GPUs, sites, jobs.

Imports engine and all below it. Begin with server.py and pool.py.
"""
