"""The operations in which audio networks spend their time, made for many small clients.

``GRU``, ``Conv1d``, ``Conv2d`` and ``Dropout`` stand in for PyTorch's modules of these names: same constructors, state dicts and
results. ``gru`` and ``conv1d`` are the functions beneath, on data with time before channels; ``mean_over_time`` follows them.
``conv2d``, ``group_norm`` and ``relu_pool`` take images with rows and columns before channels. ``drift_term`` is over a network's
weights. What they add:

- each is one call forward and one backward, in C++ on a CPU (``compiled()``) and in PyTorch operations otherwise;
- under ``torch.func.vmap`` over clients each is still one call, for all clients; a client's result is what it is alone;
- inside of torch.autocast they compute in its type on a GPU and in float32 on a CPU;
- ``lengths`` leaves padding out; ``Dropout`` and ``uniform`` draw from a client's own seed (``random_state``).

They cannot be differentiated twice.

``spectra`` has what transforms do to the spectra of a batch; ``ClientVectors`` are the sums over clients that aggregation rules are
made of.
"""

from __future__ import annotations

from raydfl.core.ops import spectra
from raydfl.core.ops._backend import compiled, differing_kernels, kernels, use
from raydfl.core.ops.conv import Conv1d, conv1d
from raydfl.core.ops.dropout import Dropout, random_state, uniform
from raydfl.core.ops.gru import GRU, gru
from raydfl.core.ops.images import Conv2d, conv2d, group_norm, relu_pool
from raydfl.core.ops.reductions import drift_term, mean_over_time
from raydfl.core.ops.slices import Slice, add_elements, add_slices
from raydfl.core.ops.sums import ClientVectors, Parts, sums_are_compiled

__all__ = [
    "GRU",
    "ClientVectors",
    "Conv1d",
    "Conv2d",
    "Dropout",
    "Parts",
    "Slice",
    "add_elements",
    "add_slices",
    "compiled",
    "conv1d",
    "conv2d",
    "differing_kernels",
    "drift_term",
    "group_norm",
    "gru",
    "kernels",
    "mean_over_time",
    "random_state",
    "relu_pool",
    "spectra",
    "sums_are_compiled",
    "uniform",
    "use",
]
