"""Federated methods: one module per paper, named as in the configuration.

Imports objectives, training, rules, models, data and core, and never engine. Begin with fedavg.py, fedprox.py (a new
loss) and scaffold.py (state at server and clients). To add a method, subclass :class:`Method`.
"""

from raydfl.methods._cutting import CuttingMethod
from raydfl.methods._layers import check_prefixes
from raydfl.methods._method import CLIENTS, Method, sample_clients
from raydfl.methods._views import WithViews, compute_logits

__all__ = [
    "CLIENTS",
    "CuttingMethod",
    "Method",
    "WithViews",
    "check_prefixes",
    "compute_logits",
    "sample_clients",
]
