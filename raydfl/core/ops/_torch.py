"""The operations as PyTorch operations, for any device and floating type, with their gradients written out.

Same arguments as the compiled operators of csrc/operators.cpp; ``codes`` and ``gates``, which a forward pass leaves for its
backward pass, have layouts of their own. All tensors of a call may have a dimension of clients in front, or none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NOWHERE = 255  # the code of a pool in which nothing is above 0

# --- convolution ----------------------------------------------------------------------------------------------------------


def _windows(x: Tensor, lengths: Tensor | None, padding: int, kernel: int) -> Tensor:
    """Return what a convolution sees at each frame: [clients, batch * frames, inputs * kernel]."""
    if lengths is not None:
        outside = torch.arange(x.shape[2], device=x.device) >= lengths.unsqueeze(2)
        x = x.masked_fill(outside.unsqueeze(3), 0.0)
    windows = torch.nn.functional.pad(x, (0, 0, padding, padding)).unfold(2, kernel, 1)
    return windows.reshape(x.shape[0], x.shape[1] * windows.shape[2], x.shape[3] * kernel)


def conv_forward(
    x: Tensor, weight: Tensor, bias: Tensor, lengths: Tensor | None, padding: int, pool: int
) -> tuple[Tensor, Tensor]:
    """See :func:`raydfl.ops.conv1d`; ``pool`` 0 is no pooling. Returns the output and ``codes`` uint8, its pools' argmax."""
    if x.dim() == 3:
        lengths = None if lengths is None else lengths.unsqueeze(0)
        output, codes = conv_forward(x.unsqueeze(0), weight.unsqueeze(0), bias.unsqueeze(0), lengths, padding, pool)
        return output.squeeze(0), codes.squeeze(0)
    clients, batch = x.shape[:2]
    outputs, kernel = weight.shape[1], weight.shape[3]
    frames = x.shape[2] + 2 * padding - kernel + 1
    windows = _windows(x, lengths, padding, kernel)
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
    """Return the gradients of x (empty unless needed), weight and bias."""
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
    windows = _windows(x, lengths, padding, kernel)
    dweight = (flat.transpose(1, 2) @ windows).view_as(weight)
    dbias = flat.sum(dim=1)
    if not needed:
        return dy.new_empty(clients, 0), dweight, dbias
    around = torch.nn.functional.pad(dy, (0, 0, kernel - 1 - padding, kernel - 1 - padding))
    reverse = weight.flip(3).transpose(1, 2).flatten(2).transpose(1, 2)  # [clients, outputs * kernel, inputs]
    dx = (_windows(around, None, 0, kernel) @ reverse).view(clients, batch, x.shape[2], inputs)
    if lengths is not None:
        dx.masked_fill_((torch.arange(x.shape[2], device=x.device) >= lengths.unsqueeze(2)).unsqueeze(3), 0.0)
    return dx, dweight, dbias


# --- GRU --------------------------------------------------------------------------------------------------------------------
#
# With r, z, n the gates and s = W_hn h + b_hn:  h' = n + z (h - n),  n = tanh(i + r s). The directions of all clients are one
# batch of products, [clients * directions, ...]; the second direction's time runs backwards, so "step" is not "frame".


def _in_steps(x: Tensor, directions: int) -> Tensor:
    """Arrange [clients, batch, frames, width] as each direction meets it: [clients, directions, frames, batch, width]."""
    x = x.transpose(1, 2)
    return torch.stack([x, x.flip(1)][:directions], dim=1)


def _stacked(weights: Sequence[Tensor], kind: int) -> Tensor:
    """Stack one kind of weight of all directions: [clients, directions, ...]."""
    return torch.stack(list(weights[kind::4]), dim=1)


def _counting(lengths: Tensor, frames: int, directions: int) -> Tensor:
    """Return which steps count: bool [clients, directions, frames, batch, 1]."""
    counting = torch.arange(frames, device=lengths.device) < lengths.unsqueeze(2)
    return _in_steps(counting.unsqueeze(3), directions)


def gru_forward(x: Tensor, lengths: Tensor | None, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """See :func:`raydfl.ops.gru`. Returns the output and ``gates`` [clients, directions, frames, batch, 4 * hidden]: r, z, n, s."""
    if x.dim() == 3:
        lengths = None if lengths is None else lengths.unsqueeze(0)
        output, gates = gru_forward(x.unsqueeze(0), lengths, [weight.unsqueeze(0) for weight in weights])
        return output.squeeze(0), gates.squeeze(0)
    clients, batch, frames, inputs = x.shape
    directions, hidden = len(weights) // 4, weights[1].shape[-1]
    group = clients * directions
    w_ih, w_hh, b_ih, b_hh = (_stacked(weights, kind).flatten(0, 1) for kind in range(4))
    to_both, to_s = torch.split(w_hh.transpose(1, 2), [2 * hidden, hidden], dim=2)
    bias_s = b_hh[:, 2 * hidden :].unsqueeze(1)
    bias = b_ih + torch.nn.functional.pad(b_hh[:, : 2 * hidden], (0, hidden))
    steps = _in_steps(x, directions).reshape(group, frames * batch, inputs)
    gates = x.new_empty(group, frames, batch, 4 * hidden)
    of_input = gates.view(group, frames * batch, 4 * hidden)[..., : 3 * hidden]
    torch.baddbmm(bias.unsqueeze(1), steps, w_ih.transpose(1, 2), out=of_input)
    counting = None if lengths is None else _counting(lengths, frames, directions).flatten(0, 1)
    states = x.new_empty(group, frames, batch, hidden)
    state = x.new_zeros(group, batch, hidden)
    # A GPU is kept waiting by the number of operations in this loop, not by what they compute: six, all in place.
    for step in range(frames):
        both, n, s = torch.split(gates[:, step], [2 * hidden, hidden, hidden], dim=2)
        both.baddbmm_(state, to_both).sigmoid_()
        torch.baddbmm(bias_s, state, to_s, out=s)
        n.addcmul_(both[..., :hidden], s).tanh_()
        state = torch.lerp(n, state, both[..., hidden:], out=states[:, step])
        if counting is not None:
            state.mul_(counting[:, step])
    states = states.view(clients, directions, frames, batch, hidden)
    parts = [states[:, 0], states[:, 1].flip(1)] if directions == 2 else [states[:, 0]]
    return torch.cat(parts, dim=-1).transpose(1, 2).contiguous(), torch.unflatten(gates, 0, (clients, directions))


def gru_backward(
    dy: Tensor, y: Tensor, gates: Tensor, x: Tensor, lengths: Tensor | None, weights: Sequence[Tensor], needed: bool
) -> list[Tensor]:
    """Return the gradients of x (empty unless needed) and of each weight."""
    if x.dim() == 3:
        lengths = None if lengths is None else lengths.unsqueeze(0)
        dy, y, gates, x = (tensor.unsqueeze(0) for tensor in (dy, y, gates, x))
        gradients = gru_backward(dy, y, gates, x, lengths, [weight.unsqueeze(0) for weight in weights], needed)
        return [gradient.squeeze(0) for gradient in gradients]
    clients, batch, frames, inputs = x.shape
    directions, hidden = len(weights) // 4, weights[1].shape[-1]
    group = clients * directions
    w_ih, w_hh = (_stacked(weights, kind).flatten(0, 1) for kind in range(2))

    def in_own_steps(tensor: Tensor) -> Tensor:
        parts = _in_steps(tensor, directions)  # [clients, directions, frames, batch, directions * hidden]
        own = [parts[:, d, ..., d * hidden : (d + 1) * hidden] for d in range(directions)]
        return torch.stack(own, dim=1).flatten(0, 1)

    dstates, before = in_own_steps(dy), torch.nn.functional.pad(in_own_steps(y), (0, 0, 0, 0, 1, 0))[:, :-1]
    counting = None if lengths is None else _counting(lengths, frames, directions).flatten(0, 1)
    r, z, n, s = torch.split(gates.flatten(0, 1), hidden, dim=-1)
    # All that does not depend on what comes back from later steps, for all steps at once: what a step's total gradient becomes
    # at r, z and s, and in the state before.
    to_n = (1 - z) * (1 - n * n)
    to_r, to_z = to_n * s * r * (1 - r), (before - n) * z * (1 - z)
    factors = torch.stack([to_r, to_z, to_n * r, z], dim=-2)
    if counting is not None:
        factors, to_n = factors * counting.unsqueeze(-1), to_n * counting
    carry = x.new_zeros(group, batch, hidden)
    totals = torch.empty_like(dstates)
    dgates = torch.empty_like(factors)
    for step in reversed(range(frames)):
        total = torch.add(dstates[:, step], carry, out=totals[:, step])
        dgate = torch.mul(factors[:, step], total.unsqueeze(2), out=dgates[:, step])
        carry = torch.baddbmm(dgate[:, :, 3], dgate[:, :, :3].flatten(2), w_hh)
    of_state = dgates.view(group, frames * batch, 4 * hidden)[..., : 3 * hidden]
    of_input = torch.cat([dgates[..., :2, :], (totals * to_n).unsqueeze(3)], dim=3).view(
        group, frames * batch, 3 * hidden
    )
    steps = _in_steps(x, directions).reshape(group, frames * batch, inputs)
    dw_ih = of_input.transpose(1, 2) @ steps
    dw_hh = of_state.transpose(1, 2) @ before.reshape(group, frames * batch, hidden)
    kinds = [
        torch.unflatten(part, 0, (clients, directions)) for part in (dw_ih, dw_hh, of_input.sum(1), of_state.sum(1))
    ]
    dweights = [kind[:, d] for d in range(directions) for kind in kinds]
    if not needed:
        return [x.new_empty(clients, 0), *dweights]
    dsteps = (of_input @ w_ih).view(clients, directions, frames, batch, inputs)
    dx = dsteps[:, 0] + dsteps[:, 1].flip(1) if directions == 2 else dsteps[:, 0]
    return [dx.transpose(1, 2), *dweights]


# --- dropout ----------------------------------------------------------------------------------------------------------------

_32_BITS = 0xFFFFFFFF


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned one."""
    return value - 2**64 if value >= 2**63 else value


def _scrambled(bits: Tensor, shift: int, factor: int) -> Tensor:
    """Do one round of splitmix64: the bits shifted in, then a product modulo 2**64."""
    product: Tensor = (bits ^ ((bits >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor)
    return product


def random_bits(seed: Tensor, call: int, rows: int, columns: int) -> Tensor:
    """Return 32 random bits, as int64, for each of ``rows`` times ``columns`` places: [rows, columns].

    Args:
        seed: int64 scalar or [clients]; then the result has the dimension of clients in front.
        call: number of the call that draws from this seed.
    """
    bits = seed + _signed((call + 1) * 0x9E3779B97F4A7C15 % 2**64)
    bits = _scrambled(_scrambled(bits, 30, 0xBF58476D1CE4E5B9), 27, 0x94D049BB133111EB)
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
    """Return ``x`` [batch, ...] times ``scale`` where its element's 32 random bits are at least ``threshold``, and 0 elsewhere.

    Args:
        x: with a dimension of clients in front if ``seed`` has one.
        seed: int64 scalar or [clients].
        call: number of the call that draws from this seed.
    """
    shape = x.shape[seed.dim() :]
    kept = random_bits(seed, call, shape[0], shape[1:].numel()) >= threshold
    return torch.where(kept.view(x.shape), x * scale, 0.0)
