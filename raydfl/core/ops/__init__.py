"""Fast operators for audio networks, batched over many small clients.

``GRU``, ``Conv1d``, ``Conv2d`` and ``Dropout`` replace PyTorch's modules: same constructors, state dicts and results. ``gru``,
``conv1d``, ``mean_over_time`` and ``ctc_loss`` are functions on data with time before channels. ``conv2d``, ``group_norm`` and
``relu_pool`` are functions on images with channels last. ``drift_term`` is a loss term over a network's weights. In addition,

- each operator is a single call forward and a single call backward, in C++ on a CPU (``is_compiled()``), else in PyTorch
  operations;
- under ``torch.func.vmap`` over clients it is still a single call, and each client's result is the same as unbatched;
- inside torch.autocast it computes in autocast's type on a GPU, and in float32 on a CPU;
- ``lengths`` masks padding, and ``Dropout`` and ``uniform`` draw from a client's own seed (``random_state``).

Operators cannot be differentiated twice.

``spectra`` transforms the spectrograms of a batch. ``ClientVectors`` computes sums over clients for aggregation rules.
"""

from __future__ import annotations

from raydfl.core.ops import spectra
from raydfl.core.ops._backend import differing_kernels, is_compiled, kernels, use
from raydfl.core.ops.conv import Conv1d, conv1d
from raydfl.core.ops.ctc import ctc_loss
from raydfl.core.ops.dropout import Dropout, random_state, uniform
from raydfl.core.ops.gru import GRU, gru
from raydfl.core.ops.images import Conv2d, conv2d, group_norm, relu_pool
from raydfl.core.ops.reductions import drift_term, mean_over_time
from raydfl.core.ops.slices import Slice, add_elements, add_slices
from raydfl.core.ops.sums import ClientVectors, Ranges, sums_are_compiled

__all__ = [
    "GRU",
    "ClientVectors",
    "Conv1d",
    "Conv2d",
    "Dropout",
    "Ranges",
    "Slice",
    "add_elements",
    "add_slices",
    "conv1d",
    "conv2d",
    "ctc_loss",
    "differing_kernels",
    "drift_term",
    "group_norm",
    "gru",
    "is_compiled",
    "kernels",
    "mean_over_time",
    "random_state",
    "relu_pool",
    "spectra",
    "sums_are_compiled",
    "uniform",
    "use",
]
