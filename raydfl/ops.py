"""Fast operators under their public name; see raydfl/core/ops."""

from raydfl.core.ops import (
    GRU,
    Conv1d,
    Conv2d,
    Dropout,
    compiled,
    conv1d,
    conv2d,
    drift_term,
    group_norm,
    gru,
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
    "compiled",
    "conv1d",
    "conv2d",
    "drift_term",
    "group_norm",
    "gru",
    "mean_over_time",
    "random_state",
    "relu_pool",
    "uniform",
    "use",
]
