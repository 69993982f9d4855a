"""The round and its results: configuration, federation, worker and storage. No Ray and no terminal.

Imports attacks, methods, training, rules, models, data and core. Begin with federation.py and worker.py. config.py has the settings
of users, and storage/ the files of a run.
"""

from raydfl.engine.autotune import measure_once
from raydfl.engine.banded_noise import sum_deviation
from raydfl.engine.baselines import LOCAL, POOLED
from raydfl.engine.best_round import Best, find_best
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config, load_config, make_config
from raydfl.engine.evaluation import find_received_entries, label_entry
from raydfl.engine.example_privacy import (
    choose_delta,
    expect_steps,
    measure_clients,
    measure_examples,
    plan_examples,
    prepare_examples,
)
from raydfl.engine.federation import Federation
from raydfl.engine.fine_tuning import personal_name
from raydfl.engine.forecast import Forecast, forecast_steps
from raydfl.engine.networks import build_fixed_tensors, build_models
from raydfl.engine.orders import SERVER, Order, Reply, keys_of, split_groups, split_pieces
from raydfl.engine.overrides import apply_overrides, apply_values
from raydfl.engine.pool import EarlyOrders, Pool, SerialPool
from raydfl.engine.privacy import STUDY, count_parameters, describe_run, plan_mechanism, prepare_privacy
from raydfl.engine.privacy_audit import audit_model
from raydfl.engine.probe import try_models
from raydfl.engine.rule_memory import compute_kept_bytes
from raydfl.engine.selection import Criterion, Leader, holds_out, is_evaluated
from raydfl.engine.settings import RaySettings, TrackSettings, hide_passwords
from raydfl.engine.software import check_same_software, describe_software
from raydfl.engine.telemetry import TIMELINE, WALL, RoundReport, add_spans
from raydfl.engine.validation import UpdateChecker
from raydfl.engine.worker import KEPT_MODEL, Worker

__all__ = [
    "KEPT_MODEL",
    "LOCAL",
    "POOLED",
    "SERVER",
    "STUDY",
    "TIMELINE",
    "WALL",
    "Best",
    "Clients",
    "Config",
    "Criterion",
    "EarlyOrders",
    "Federation",
    "Forecast",
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
    "add_spans",
    "apply_overrides",
    "apply_values",
    "audit_model",
    "build_fixed_tensors",
    "build_models",
    "check_same_software",
    "choose_delta",
    "compute_kept_bytes",
    "count_parameters",
    "describe_run",
    "describe_software",
    "expect_steps",
    "find_best",
    "find_received_entries",
    "forecast_steps",
    "hide_passwords",
    "holds_out",
    "is_evaluated",
    "keys_of",
    "label_entry",
    "load_config",
    "make_config",
    "measure_clients",
    "measure_examples",
    "measure_once",
    "personal_name",
    "plan_examples",
    "plan_mechanism",
    "prepare_examples",
    "prepare_privacy",
    "split_groups",
    "split_pieces",
    "sum_deviation",
    "try_models",
]
