"""The round, and what is kept of it: configuration, federation, worker and storage. No Ray and no terminal.

Imports attacks, methods, training, rules, models, data and core. Begin with federation.py and worker.py; config.py has what users
write, storage/ what a run keeps on the disk.
"""

from raydfl.engine.autotune import remembered
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config, load_config, make_config
from raydfl.engine.evaluation import label_entry, received_entries
from raydfl.engine.federation import Federation
from raydfl.engine.networks import build_models, fixed_of_whole
from raydfl.engine.orders import SERVER, Order, Reply, in_groups, keys_of
from raydfl.engine.overrides import apply_overrides, apply_values
from raydfl.engine.pool import Pool, SerialPool
from raydfl.engine.probe import try_models
from raydfl.engine.recall import Best, best_of
from raydfl.engine.selection import Criterion, Leader, holds_out
from raydfl.engine.settings import RaySettings, TrackSettings, without_password
from raydfl.engine.telemetry import TIMELINE, WALL, RoundReport, with_spans
from raydfl.engine.validation import UpdateChecker
from raydfl.engine.worker import KEPT_MODEL, Worker

__all__ = [
    "KEPT_MODEL",
    "SERVER",
    "TIMELINE",
    "WALL",
    "Best",
    "Clients",
    "Config",
    "Criterion",
    "Federation",
    "Leader",
    "Order",
    "Pool",
    "RaySettings",
    "Reply",
    "RoundReport",
    "SerialPool",
    "TrackSettings",
    "UpdateChecker",
    "Worker",
    "apply_overrides",
    "apply_values",
    "best_of",
    "build_models",
    "fixed_of_whole",
    "holds_out",
    "in_groups",
    "keys_of",
    "label_entry",
    "load_config",
    "make_config",
    "received_entries",
    "remembered",
    "try_models",
    "with_spans",
    "without_password",
]
