"""The networks of peers/model.py in plain JAX: functions of PyTorch's state dict.

Their equations, and so their results, are PyTorch's. Convolutions and pooling have the channels last, the input
products of a GRU are computed for all frames at once, and the recurrence is a ``lax.scan``.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax

Weights = Mapping[str, Array]


def logits(weights: Weights, x: Array) -> Array:
    """Return float32 [batch, classes] for x [batch, frames, bands] or, for images, [batch, channels, rows, columns]."""
    features = cnn(weights, x) if x.ndim == 4 else crnn(weights, x)
    return linear(weights, "output", features)


def crnn(weights: Weights, x: Array) -> Array:
    """Compute 1-d convolutions with ReLU and pooling, a GRU, the mean over time: [batch, hidden or 2 hidden]."""
    x = apply_convolutions(weights, x)
    ends = ("l0", "l0_reverse") if "gru.weight_ih_l0_reverse" in weights else ("l0",)
    return jnp.concatenate([gru(weights, end, x).mean(0) for end in ends], axis=1)


def cnn(weights: Weights, x: Array) -> Array:
    """Compute 2-d convolutions with ReLU and pooling by 2 x 2, a hidden layer with ReLU: [batch, hidden]."""
    x = apply_convolutions(weights, x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    return jax.nn.relu(linear(weights, "hidden", x.reshape(len(x), -1)))


def apply_convolutions(weights: Weights, x: Array) -> Array:
    """Apply every convolution in turn, each with ReLU and pooling by 2; channels last."""
    number = 0
    while (name := f"convolutions.{number}.weight") in weights:
        kernel = weights[name]
        layout = ("NWC", "OIW", "NWC") if x.ndim == 3 else ("NHWC", "OIHW", "NHWC")
        x = lax.conv_general_dilated(x, kernel, [1] * (x.ndim - 2), "SAME", dimension_numbers=layout)
        x = jax.nn.relu(x + weights[f"convolutions.{number}.bias"])
        for axis in range(1, x.ndim - 1):
            x = pool_axis(x, axis)
        number += 1
    return x


def pool_axis(x: Array, axis: int) -> Array:
    """Return the larger of each two neighbours; a last one without a neighbour is left out, as in PyTorch."""
    size = x.shape[axis] // 2
    pairs = lax.slice_in_dim(x, 0, 2 * size, axis=axis)
    return pairs.reshape(*x.shape[:axis], size, 2, *x.shape[axis + 1 :]).max(axis + 1)


def gru(weights: Weights, end: str, x: Array) -> Array:
    """Return every hidden state of a GRU, float32 [frames, batch, hidden], for x float32 [batch, frames, inputs]."""
    inputs = x.transpose(1, 0, 2) @ weights[f"gru.weight_ih_{end}"].T + weights[f"gru.bias_ih_{end}"]
    matrix, bias = weights[f"gru.weight_hh_{end}"].T, weights[f"gru.bias_hh_{end}"]

    def step(hidden: Array, frame: Array) -> tuple[Array, Array]:
        input_r, input_z, input_n = jnp.split(frame, 3, axis=1)
        hidden_r, hidden_z, hidden_n = jnp.split(hidden @ matrix + bias, 3, axis=1)
        reset, update = jax.nn.sigmoid(input_r + hidden_r), jax.nn.sigmoid(input_z + hidden_z)
        new = jnp.tanh(input_n + reset * hidden_n)
        hidden = (1 - update) * new + update * hidden
        return hidden, hidden

    first = jnp.zeros((x.shape[0], matrix.shape[0]), x.dtype)
    return lax.scan(step, first, inputs, reverse=end.endswith("reverse"))[1]


def linear(weights: Weights, name: str, x: Array) -> Array:
    """Apply a linear layer."""
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
