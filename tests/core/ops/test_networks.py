"""Whole networks under torch.func, and the loading of the compiled operators."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raydfl.core import ops
from raydfl.core.ops import _backend
from raydfl.models.crnn import CRNN


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mode", ["sum", "grad"])
def test_vmap_of_a_crnn_over_clients_matches_a_loop(
    implementation: str, bidirectional: bool, padded: bool, mode: str
) -> None:
    torch.manual_seed(0)
    network = CRNN(6, 4, filters=(8, 5), kernel=5, hidden=7, bidirectional=bidirectional, dropout=0.3)
    parameters = {n: p.detach() + 0.1 * torch.randn(3, *p.shape) for n, p in network.named_parameters()}
    x, y, seeds = torch.randn(3, 5, 21, 6), torch.randint(0, 4, (3, 5)), torch.tensor([1, 2, 3])
    lengths = torch.randint(4, 22, (3, 5)) if padded else None

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor, seed: Tensor, lengths: Tensor | None) -> Tensor:
        with ops.random_state(seed):
            return F.cross_entropy(torch.func.functional_call(network, parameters, (x, lengths)), y)

    dims = (0, 0, 0, 0, 0 if padded else None)
    if mode == "grad":
        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=dims)(parameters, x, y, seeds, lengths)
    else:
        leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
        torch.func.vmap(loss, in_dims=dims)(leaves, x, y, seeds, lengths).sum().backward()
        gradients = {name: leaf.grad for name, leaf in leaves.items()}
    for client in range(3):
        client_parameters = {name: value[client].clone().requires_grad_() for name, value in parameters.items()}
        loss(
            client_parameters, x[client], y[client], seeds[client], None if lengths is None else lengths[client]
        ).backward()
        for name, leaf in client_parameters.items():
            torch.testing.assert_close(gradients[name][client], leaf.grad, atol=1e-6, rtol=1e-4)


def test_both_implementations_train_equal_weights() -> None:
    def train(choice: str) -> dict[str, Tensor]:
        with ops.use(choice):  # type: ignore[arg-type]
            torch.manual_seed(0)
            network = CRNN(6, 4, filters=(8, 5), hidden=7, dropout=0.2)
            optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
            for step in range(10):
                optimiser.zero_grad()
                with ops.random_state(torch.tensor(step)):
                    F.cross_entropy(network(torch.randn(5, 21, 6)), torch.randint(0, 4, (5,))).backward()
                optimiser.step()
            return network.state_dict()

    for a, b in zip(train("auto").values(), train("torch").values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_missing_library_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_backend, "_LIBRARY", tmp_path / "_cpu.so")
    _backend._load_operators.cache_clear()
    try:
        with caplog.at_level(logging.INFO, logger="raydfl"):
            assert not ops.is_compiled()
            assert ops.GRU(2, 3, batch_first=True)(torch.randn(1, 2, 2))[0].shape == (1, 2, 3)
        assert [record.getMessage() for record in caplog.records] == [
            "raydfl.ops: the operators are not compiled on this machine (_cpu.so is missing), so training on a CPU is slower."
        ]
        caplog.clear()
        (tmp_path / "_cpu.so").write_bytes(b"no library")
        _backend._load_operators.cache_clear()
        assert not ops.is_compiled()
        assert "does not load, so training on a CPU is slower. Install raydfl again." in caplog.text
        monkeypatch.undo()  # the library of an older version lacks an operator
        monkeypatch.setattr(_backend.torch.ops, "raydfl", object())
        _backend._load_operators.cache_clear()
        assert not ops.is_compiled()
    finally:
        _backend._load_operators.cache_clear()


@pytest.mark.skipif(not ops.is_compiled(), reason="the operators in C++ were not built here")
def test_compiled_operators_check_their_arguments() -> None:
    x, weight, bias = torch.randn(2, 9, 4), torch.randn(5, 4, 3), torch.randn(5)
    conv, gru = torch.ops.raydfl.conv_forward, torch.ops.raydfl.gru_forward
    for arguments, message in [
        ((x, weight[:, :3], bias, None, 1, 2), r"weight has shape \[5, 3, 3\], not \[5, 4, 3\]"),
        ((x, weight.double(), bias, None, 1, 2), "weight is Double, not float32"),
        ((x[0], weight, bias, None, 1, 2), "x has 2 dimensions, not 3"),
        ((x, weight, bias, torch.tensor([1, 2, 3]), 1, 2), r"lengths has shape \[3\], not \[2\]"),
        ((x, weight, bias, torch.tensor([1.0, 2.0]), 1, 2), "lengths are Float, not int64"),
        ((x, weight, bias, None, 3, 2), "padding 3 does not fit a kernel of 3"),
        ((x, weight, bias, None, 1, 255), "a pool of 255 cannot be"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            conv(*arguments)
    image, kernel = torch.randn(2, 9, 8, 4), torch.randn(5, 4, 3, 3)
    for call, message in [
        (lambda: torch.ops.raydfl.conv2d_forward(image, kernel[:, :3], None, [1, 1], [0] * 4), "weight has shape"),
        (lambda: torch.ops.raydfl.conv2d_forward(image, kernel, None, [0, 1], [0] * 4), "a stride of"),
        (
            lambda: torch.ops.raydfl.conv2d_forward(image, kernel, None, [1, 1], [3, 0, 0, 0]),
            "does not fit a kernel of 3 x 3",
        ),
        (
            lambda: torch.ops.raydfl.conv2d_forward(image[:, :2], kernel, None, [1, 1], [0] * 4),
            "smaller than the kernel",
        ),
        (lambda: ops.group_norm(image, bias[:4], bias[:4], 3, 1e-3), "4 channels make no 3 equal groups"),
        (lambda: ops.group_norm(image, bias[:4], bias[:4], 2, 1e-3, pool=2), "has no ReLU before it"),
        (lambda: ops.group_norm([image, image], bias[:4], bias[:4], 2, 1e-3), "do not belong together"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call()
    with pytest.raises(RuntimeError, match="3 weights are not 4 per direction"):
        gru(x, None, [weight] * 3)
    with pytest.raises(RuntimeError, match=r"weight_ih has shape \[9, 5\], not \[9, 4\]"):
        gru(x, None, [torch.randn(9, 5), torch.randn(9, 3), torch.randn(9), torch.randn(9)])
    assert torch.ops.raydfl.instruction_set() in ("avx512", "avx2", "portable")


COMPARE_IMPLEMENTATIONS = """
import torch
from raydfl import ops
from raydfl.core.ops import spectra
assert ops.is_compiled() and torch.ops.raydfl.instruction_set() == "portable"
torch.manual_seed(0)
for shape in ((2, 9, 5, 7), (3, 12, 32, 33)):
    batch, frames, inputs, hidden = shape
    convolution = ops.Conv1d(inputs, hidden, 3, padding=1)
    gru = ops.GRU(hidden, hidden, batch_first=True, bidirectional=True)
    x = torch.randn(batch, frames, inputs, requires_grad=True)
    image, kernel, scale = torch.randn(batch, frames, 7, inputs), torch.randn(hidden, inputs, 3, 2) / inputs, torch.rand(hidden)
    image, kernel, scale = (leaf.requires_grad_() for leaf in (image, kernel, scale))
    leaves = [x, *convolution.parameters(), *gru.parameters()]
    gradients = {}
    for choice in ("auto", "torch"):
        with ops.use(choice), ops.random_state(torch.tensor(3)):
            y = gru.outputs(ops.Dropout(0.3)(convolution.pooled(x, 2)))
            gradients[choice] = [y, *torch.autograd.grad(y.square().sum(), leaves)]
            maps = ops.conv2d(image, kernel, stride=(2, 1), padding=(1, 0, 1, 1))
            maps = ops.group_norm(maps, scale, scale, 1, 1e-3, relu=True, pool=2, ceil=True)
            gradients[choice] += [maps, *torch.autograd.grad(maps.square().sum(), [image, kernel, scale])]
            power = spectra.to_power(x.detach().clone(), torch.full((batch,), frames), 1e-10, 4.0)
            gradients[choice] += [power, spectra.to_logarithm(power.clone(), torch.full((batch,), frames), 1e-10, 4.0)]
    for one, other in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
"""


@pytest.mark.slow
@pytest.mark.skipif(not ops.is_compiled(), reason="the operators in C++ were not built here")
def test_portable_kernels_match_torch() -> None:
    environment = {**os.environ, "RAYDFL_KERNELS": "portable"}
    process = subprocess.run(
        [sys.executable, "-c", COMPARE_IMPLEMENTATIONS], env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


COMPUTE_LAYERS = """
import sys
import torch
from raydfl import ops
assert ops.is_compiled() and torch.ops.raydfl.instruction_set() == sys.argv[2]
torch.manual_seed(0)
results = []
def keep(y, leaves):
    results.extend([y, *torch.autograd.grad((y * torch.arange(y.numel()).reshape(y.shape).sin()).sum(), leaves)])
for inputs, outputs in ((40, 64), (24, 6), (33, 50), (16, 130)):
    x = torch.randn(3, 45, inputs, requires_grad=True)
    lengths = torch.tensor([45, 7, 30])
    for taps in (1, 3, 5):
        layer = ops.Conv1d(inputs, outputs, taps, padding=taps // 2)
        keep(layer.pooled(x, 2), [x, *layer.parameters()])
        keep(layer(x.transpose(1, 2)), [x, *layer.parameters()])
    gru = ops.GRU(inputs, outputs, batch_first=True, bidirectional=True)
    keep(gru.outputs(x, lengths), [x, *gru.parameters()])
    image, scale = torch.randn(3, 19, 8, inputs, requires_grad=True), torch.rand(inputs, requires_grad=True)
    for kernel, stride, padding in (
        ((3, 3), (1, 1), (1, 1, 1, 1)),
        ((4, 1), (1, 1), (1, 0, 2, 0)),
        ((3, 2), (2, 1), (1, 0, 1, 1)),
        ((1, 1), (1, 1), (0, 0, 0, 0)),
    ):
        weight, bias = torch.randn(outputs, inputs, *kernel, requires_grad=True), torch.randn(outputs, requires_grad=True)
        keep(ops.conv2d(image, weight, bias, stride=stride, padding=padding), [image, weight, bias])
    for pool in (0, 2, 3):
        rows = torch.tensor([19, 4, 11])
        maps = ops.group_norm(image, scale, scale, 1, 1e-3, relu=True, pool=pool, ceil=True, lengths=rows)
        keep(maps, [image, scale])
    with ops.random_state(torch.tensor(3)):
        keep(ops.Dropout(0.3)(x), [x])
torch.save(results, sys.argv[1])
"""


def test_kernels_for_avx512_give_the_bits_of_those_for_avx2(tmp_path: Path) -> None:
    if not ops.is_compiled() or torch.ops.raydfl.instruction_set() != "avx512":
        pytest.skip("needs the compiled operators and a CPU with AVX-512")
    results = {}
    for name in ("avx2", "avx512"):
        file, environment = tmp_path / name, {**os.environ, "RAYDFL_KERNELS": name}
        subprocess.run([sys.executable, "-c", COMPUTE_LAYERS, file, name], env=environment, check=True)
        results[name] = torch.load(file)
    assert all(torch.equal(one, other) for one, other in zip(*results.values(), strict=True))
