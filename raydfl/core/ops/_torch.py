"""Operators in PyTorch operations with explicit gradients, for any device and floating-point type.

Arguments are those of the compiled operators in csrc/operators.cpp. ``codes`` and ``gates``, saved for the backward pass, have
different layouts. Either all tensors of a call have a leading dimension of clients, or none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NOWHERE = 255  # code of a pool without positive values

# --- convolution ----------------------------------------------------------------------------------------------------------


def _make_windows(x: Tensor, lengths: Tensor | None, padding: int, kernel: int) -> Tensor:
    """Return the convolution's window at each frame: [clients, batch * frames, inputs * kernel]."""
    if lengths is not None:
        outside = torch.arange(x.shape[2], device=x.device) >= lengths.unsqueeze(2)
        x = x.masked_fill(outside.unsqueeze(3), 0.0)
    windows = torch.nn.functional.pad(x, (0, 0, padding, padding)).unfold(2, kernel, 1)
    return windows.reshape(x.shape[0], x.shape[1] * windows.shape[2], x.shape[3] * kernel)


def conv_forward(
    x: Tensor, weight: Tensor, bias: Tensor, lengths: Tensor | None, padding: int, pool: int
) -> tuple[Tensor, Tensor]:
    """Compute :func:`raydfl.ops.conv1d` (``pool`` 0: no pooling).

    Returns:
        The output, and ``codes`` uint8: the argmax of each pool.
    """
    if x.dim() == 3:
        lengths = None if lengths is None else lengths.unsqueeze(0)
        output, codes = conv_forward(x.unsqueeze(0), weight.unsqueeze(0), bias.unsqueeze(0), lengths, padding, pool)
        return output.squeeze(0), codes.squeeze(0)
    clients, batch = x.shape[:2]
    outputs, kernel = weight.shape[1], weight.shape[3]
    frames = x.shape[2] + 2 * padding - kernel + 1
    windows = _make_windows(x, lengths, padding, kernel)
    y = torch.baddbmm(bias.unsqueeze(1), windows, weight.flatten(2).transpose(1, 2))
    y = y.view(clients, batch, frames, outputs)
    if pool == 0:
        return y, y.new_empty((clients, 0), dtype=torch.uint8)
    y = y[:, :, : frames // pool * pool].reshape(clients, batch, frames // pool, pool, outputs)
    y, places = y.max(dim=3)
    return y.relu(), places.to(torch.uint8).masked_fill_(y <= 0, NOWHERE)


def conv_backward(
    dy: Tensor,
    codes: Tensor,
    x: Tensor,
    weight: Tensor,
    lengths: Tensor | None,
    padding: int,
    pool: int,
    needed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of x (empty unless ``needed``), weight and bias."""
    if x.dim() == 3:
        lengths = None if lengths is None else lengths.unsqueeze(0)
        dy, codes, x, weight = (tensor.unsqueeze(0) for tensor in (dy, codes, x, weight))
        dx, dweight, dbias = conv_backward(dy, codes, x, weight, lengths, padding, pool, needed)
        return dx.squeeze(0), dweight.squeeze(0), dbias.squeeze(0)
    clients, batch, _, inputs = x.shape
    outputs, kernel = weight.shape[1], weight.shape[3]
    frames = x.shape[2] + 2 * padding - kernel + 1
    if pool:
        places = torch.arange(pool, device=dy.device, dtype=torch.uint8).unsqueeze(1)
        spread = (dy.unsqueeze(3) * (codes.unsqueeze(3) == places)).flatten(2, 3)
        dy = torch.nn.functional.pad(spread, (0, 0, 0, frames - spread.shape[2]))
    flat = dy.reshape(clients, batch * frames, outputs)
    windows = _make_windows(x, lengths, padding, kernel)
    dweight = (flat.transpose(1, 2) @ windows).view_as(weight)
    dbias = flat.sum(dim=1)
    if not needed:
        return dy.new_empty(clients, 0), dweight, dbias
    around = torch.nn.functional.pad(dy, (0, 0, kernel - 1 - padding, kernel - 1 - padding))
    reverse = weight.flip(3).transpose(1, 2).flatten(2).transpose(1, 2)  # [clients, outputs * kernel, inputs]
    dx = (_make_windows(around, None, 0, kernel) @ reverse).view(clients, batch, x.shape[2], inputs)
    if lengths is not None:
        dx.masked_fill_((torch.arange(x.shape[2], device=x.device) >= lengths.unsqueeze(2)).unsqueeze(3), 0.0)
    return dx, dweight, dbias


# --- GRU --------------------------------------------------------------------------------------------------------------------
#
# Gates r, z, n and s = W_hn h + b_hn:  h' = n + z (h - n),  n = tanh(i + r s). The directions of all clients form a single
# batch of products, [clients * directions, ...]. The second direction runs backwards in time: its "step" is not the "frame".


def _to_steps(x: Tensor, directions: int) -> Tensor:
    """Arrange [clients, batch, frames, width] in each direction's order: [clients, directions, frames, batch, width]."""
    x = x.transpose(1, 2)
    return torch.stack([x, x.flip(1)][:directions], dim=1)


def _stack_weights(weights: Sequence[Tensor], kind: int) -> Tensor:
    """Stack a kind of weight over the directions: [clients, directions, ...]."""
    return torch.stack(list(weights[kind::4]), dim=1)


def _make_step_mask(lengths: Tensor, frames: int, directions: int) -> Tensor:
    """Return a mask over steps without padding: bool [clients, directions, frames, batch, 1]."""
    valid = torch.arange(frames, device=lengths.device) < lengths.unsqueeze(2)
    return _to_steps(valid.unsqueeze(3), directions)


def gru_forward(x: Tensor, lengths: Tensor | None, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Run :func:`raydfl.ops.gru` forward, and keep its gates for the backward pass.

    Returns:
        The output, and ``gates`` [clients, directions, frames, batch, 4 * hidden]: r, z, n, s.
    """
    if x.dim() == 3:
        lengths = None if lengths is None else lengths.unsqueeze(0)
        output, gates = gru_forward(x.unsqueeze(0), lengths, [weight.unsqueeze(0) for weight in weights])
        return output.squeeze(0), gates.squeeze(0)
    clients, batch, frames, inputs = x.shape
    directions, hidden = len(weights) // 4, weights[1].shape[-1]
    group = clients * directions
    w_ih, w_hh, b_ih, b_hh = (_stack_weights(weights, kind).flatten(0, 1) for kind in range(4))
    to_both, to_s = torch.split(w_hh.transpose(1, 2), [2 * hidden, hidden], dim=2)
    bias_s = b_hh[:, 2 * hidden :].unsqueeze(1)
    bias = b_ih + torch.nn.functional.pad(b_hh[:, : 2 * hidden], (0, hidden))
    steps = _to_steps(x, directions).reshape(group, frames * batch, inputs)
    gates = x.new_empty(group, frames, batch, 4 * hidden)
    input_gates = gates.view(group, frames * batch, 4 * hidden)[..., : 3 * hidden]
    torch.baddbmm(bias.unsqueeze(1), steps, w_ih.transpose(1, 2), out=input_gates)
    valid = None if lengths is None else _make_step_mask(lengths, frames, directions).flatten(0, 1)
    states = x.new_empty(group, frames, batch, hidden)
    state = x.new_zeros(group, batch, hidden)
    # On a GPU the number of launches in this loop determines the time: six operations, all in place.
    for step in range(frames):
        both, n, s = torch.split(gates[:, step], [2 * hidden, hidden, hidden], dim=2)
        both.baddbmm_(state, to_both).sigmoid_()
        torch.baddbmm(bias_s, state, to_s, out=s)
        n.addcmul_(both[..., :hidden], s).tanh_()
        state = torch.lerp(n, state, both[..., hidden:], out=states[:, step])
        if valid is not None:
            state.mul_(valid[:, step])
    states = states.view(clients, directions, frames, batch, hidden)
    parts = [states[:, 0], states[:, 1].flip(1)] if directions == 2 else [states[:, 0]]
    return torch.cat(parts, dim=-1).transpose(1, 2).contiguous(), torch.unflatten(gates, 0, (clients, directions))


def gru_backward(
    dy: Tensor, y: Tensor, gates: Tensor, x: Tensor, lengths: Tensor | None, weights: Sequence[Tensor], needed: bool
) -> list[Tensor]:
    """Compute the gradients of x (empty unless ``needed``) and of each weight."""
    if x.dim() == 3:
        lengths = None if lengths is None else lengths.unsqueeze(0)
        dy, y, gates, x = (tensor.unsqueeze(0) for tensor in (dy, y, gates, x))
        gradients = gru_backward(dy, y, gates, x, lengths, [weight.unsqueeze(0) for weight in weights], needed)
        return [gradient.squeeze(0) for gradient in gradients]
    clients, batch, frames, inputs = x.shape
    directions, hidden = len(weights) // 4, weights[1].shape[-1]
    group = clients * directions
    w_ih, w_hh = (_stack_weights(weights, kind).flatten(0, 1) for kind in range(2))

    def split_directions(tensor: Tensor) -> Tensor:
        parts = _to_steps(tensor, directions)  # [clients, directions, frames, batch, directions * hidden]
        units = [parts[:, d, ..., d * hidden : (d + 1) * hidden] for d in range(directions)]
        return torch.stack(units, dim=1).flatten(0, 1)

    dstates, before = split_directions(dy), torch.nn.functional.pad(split_directions(y), (0, 0, 0, 0, 1, 0))[:, :-1]
    valid = None if lengths is None else _make_step_mask(lengths, frames, directions).flatten(0, 1)
    r, z, n, s = torch.split(gates.flatten(0, 1), hidden, dim=-1)
    # Factors from a step's total gradient to r, z, s and the previous state. They do not depend on later steps, so compute them
    # for all steps at once.
    to_n = (1 - z) * (1 - n * n)
    to_r, to_z = to_n * s * r * (1 - r), (before - n) * z * (1 - z)
    factors = torch.stack([to_r, to_z, to_n * r, z], dim=-2)
    if valid is not None:
        factors, to_n = factors * valid.unsqueeze(-1), to_n * valid
    carry = x.new_zeros(group, batch, hidden)
    totals = torch.empty_like(dstates)
    dgates = torch.empty_like(factors)
    for step in reversed(range(frames)):
        total = torch.add(dstates[:, step], carry, out=totals[:, step])
        dgate = torch.mul(factors[:, step], total.unsqueeze(2), out=dgates[:, step])
        carry = torch.baddbmm(dgate[:, :, 3], dgate[:, :, :3].flatten(2), w_hh)
    state_gradients = dgates.view(group, frames * batch, 4 * hidden)[..., : 3 * hidden]
    input_gradients = torch.cat([dgates[..., :2, :], (totals * to_n).unsqueeze(3)], dim=3).view(
        group, frames * batch, 3 * hidden
    )
    steps = _to_steps(x, directions).reshape(group, frames * batch, inputs)
    dw_ih = input_gradients.transpose(1, 2) @ steps
    dw_hh = state_gradients.transpose(1, 2) @ before.reshape(group, frames * batch, hidden)
    kinds = [
        torch.unflatten(part, 0, (clients, directions))
        for part in (dw_ih, dw_hh, input_gradients.sum(1), state_gradients.sum(1))
    ]
    dweights = [kind[:, d] for d in range(directions) for kind in kinds]
    if not needed:
        return [x.new_empty(clients, 0), *dweights]
    dsteps = (input_gradients @ w_ih).view(clients, directions, frames, batch, inputs)
    dx = dsteps[:, 0] + dsteps[:, 1].flip(1) if directions == 2 else dsteps[:, 0]
    return [dx.transpose(1, 2), *dweights]


# --- dropout ----------------------------------------------------------------------------------------------------------------

_32_BITS = 0xFFFFFFFF


def _to_int64(value: int) -> int:
    """Reinterpret an unsigned 64-bit integer as int64."""
    return value - 2**64 if value >= 2**63 else value


def _scramble(bits: Tensor, shift: int, factor: int) -> Tensor:
    """Apply a round of splitmix64: xor with the shifted bits, then multiply modulo 2**64."""
    # Shifts of int64 copy the sign bit, so the mask clears it.
    product: Tensor = (bits ^ ((bits >> shift) & (2 ** (64 - shift) - 1))) * _to_int64(factor)
    return product


def random_bits(seed: Tensor, call: int, rows: int, columns: int) -> Tensor:
    """Draw 32 random bits for each element: int64 [rows, columns].

    Args:
        seed: int64 scalar, or [clients] for a result [clients, rows, columns].
        call: number of the draw from this seed.
        rows: number of rows.
        columns: number of columns.
    """
    # splitmix64 turns seed and call into two 32-bit keys. Each element then hashes its position with the keys.
    bits = seed + _to_int64((call + 1) * 0x9E3779B97F4A7C15 % 2**64)
    bits = _scramble(_scramble(bits, 30, 0xBF58476D1CE4E5B9), 27, 0x94D049BB133111EB)
    bits = bits ^ ((bits >> 31) & (2**33 - 1))
    first, second = (part.reshape(*seed.shape, 1, 1) for part in (bits & _32_BITS, (bits >> 32) & _32_BITS))
    numbers = torch.arange(rows, device=seed.device).unsqueeze(1) * 0x9E3779B1 + torch.arange(
        columns, device=seed.device
    )
    bits = (numbers & _32_BITS) ^ first
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D & _32_BITS) ^ second
    bits = (bits ^ (bits >> 15)) * 0x846CA68B & _32_BITS
    return bits ^ (bits >> 16)


def drop(x: Tensor, seed: Tensor, call: int, threshold: int, scale: float) -> Tensor:
    """Zero the elements of ``x`` with random bits below ``threshold``, and multiply the rest by ``scale``.

    Args:
        x: [batch, ...], or [clients, batch, ...] if ``seed`` is [clients].
        seed: int64 scalar or [clients].
        call: number of the draw from this seed.
        threshold: 0 to 2**32 - 1.
        scale: factor of the remaining elements.
    """
    shape = x.shape[seed.dim() :]
    remains = random_bits(seed, call, shape[0], shape[1:].numel()) >= threshold
    return torch.where(remains.view(x.shape), x * scale, 0.0)
