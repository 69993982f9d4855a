"""Fast operators under their public name; see raydfl/core/ops."""

from raydfl.core.lazy import alias_former_names
from raydfl.core.ops import (
    GRU,
    Conv1d,
    Conv2d,
    Dropout,
    conv1d,
    conv2d,
    drift_term,
    group_norm,
    gru,
    is_compiled,
    mean_over_time,
    random_state,
    relu_pool,
    uniform,
    use,
)

__all__ = [
    "GRU",
    "Conv1d",
    "Conv2d",
    "Dropout",
    "conv1d",
    "conv2d",
    "drift_term",
    "group_norm",
    "gru",
    "is_compiled",
    "mean_over_time",
    "random_state",
    "relu_pool",
    "uniform",
    "use",
]

alias_former_names(__name__, {"compiled": "is_compiled"})
