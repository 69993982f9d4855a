"""Fast operators under their public name; see raydfl/core/ops."""

from raydfl.core.ops import (
    GRU,
    Conv1d,
    Dropout,
    compiled,
    conv1d,
    gru,
    mean_over_time,
    random_state,
    uniform,
    use,
)

__all__ = ["GRU", "Conv1d", "Dropout", "compiled", "conv1d", "gru", "mean_over_time", "random_state", "uniform", "use"]
