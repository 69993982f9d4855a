"""Federated methods. One file a paper; its name is the method's name in a configuration.

Imports objectives, training, rules, models, data and core, never engine. Begin with fedavg.py, fedprox.py (another loss) and
scaffold.py (state on both sides). A method of your own is a subclass of :class:`Method`.
"""

from raydfl.methods._cutting import CuttingMethod
from raydfl.methods._layers import check_prefixes
from raydfl.methods._method import CLIENTS, Method, drawn
from raydfl.methods._views import WithViews, compute_logits

__all__ = ["CLIENTS", "CuttingMethod", "Method", "WithViews", "check_prefixes", "compute_logits", "drawn"]
