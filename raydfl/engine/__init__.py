"""The round, and what is kept of it: configuration, federation, worker, storage. No Ray and no terminal.

Imports attacks, methods, training, rules, models, data and core. Begin with federation.py and worker.py.
"""
