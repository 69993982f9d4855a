"""FiLM CNN, compared with the published sizes and with formulas in NumPy, and the effect of its prototype."""

from __future__ import annotations

import numpy as np
import torch

from raydfl.models.film_cnn import FilmCNN


def test_modules_have_the_published_numbers_of_weights() -> None:
    network = FilmCNN(128, 128)
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in network.named_children()}
    assert sizes == {"film": 197_440, "adapter": 18_880, "encoder": 1_616_896, "output": 66_176}
    assert network.prototype.shape == (128,)
    assert not isinstance(network.prototype, torch.nn.Parameter)
    shapes = []
    for layer in network.encoder.convolutions:
        layer.register_forward_hook(lambda *arguments: shapes.append(tuple(arguments[2].shape[1:])))
    with torch.no_grad():
        network.eval()(torch.randn(1, 9, 128))
    assert shapes == [(128, 5, 64), (256, 3, 32), (512, 2, 16)]


def test_every_step_equals_its_formula() -> None:
    torch.manual_seed(0)
    network = FilmCNN(5, 3, adapter=(2, 4), filters=(3,), film=(6,), embedding=4, projection=5).eval()
    with torch.no_grad():
        for tensor in (*network.parameters(), network.prototype, network.encoder.norms[0].running_mean):
            tensor.add_(0.3 * torch.randn(tensor.shape))
        network.encoder.norms[0].running_var.fill_(2.0)
    w = {name: value.double().numpy() for name, value in network.state_dict().items()}

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def layer_norm(x: np.ndarray, name: str) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def convolve(x: np.ndarray, name: str, stride: int) -> np.ndarray:
        kernel, padded = w[f"{name}.weight"], np.pad(x, ((0, 0), (1, 1), (1, 1)))
        rows, columns = (-(-size // stride) for size in x.shape[1:])
        y = np.zeros((len(kernel), rows, columns))
        for row in range(rows):
            for column in range(columns):
                part = padded[:, stride * row : stride * row + 3, stride * column : stride * column + 3]
                y[:, row, column] = np.einsum("oihw,ihw->o", kernel, part)
        return y + w[f"{name}.bias"][:, None, None]

    gamma, beta = np.split(linear(np.maximum(linear(w["prototype"], "film.0"), 0), "film.3"), 2)
    x = torch.randn(2, 7, 5)
    for item, actual in zip(x.double().numpy(), network(x).detach().numpy(), strict=True):
        u = convolve(item[None], "adapter.first", 1).transpose(1, 2, 0)
        u = gamma * np.maximum(layer_norm(u, "adapter.norm"), 0) + beta
        maps = convolve(convolve(u.transpose(2, 0, 1), "adapter.second", 1), "encoder.convolutions.0", 2)
        mean, deviation = w["encoder.norms.0.running_mean"], np.sqrt(w["encoder.norms.0.running_var"] + 1e-5)
        maps = (maps - mean[:, None, None]) / deviation[:, None, None]
        maps = maps * w["encoder.norms.0.weight"][:, None, None] + w["encoder.norms.0.bias"][:, None, None]
        embedding = linear(np.maximum(maps, 0).mean(axis=(1, 2)), "encoder.linear")
        hidden = np.maximum(linear(np.maximum(layer_norm(embedding, "encoder.norm"), 0), "output.0"), 0)
        np.testing.assert_allclose(actual, layer_norm(linear(hidden, "output.2"), "output.3"), rtol=1e-4, atol=1e-4)


def test_the_prototype_changes_the_outputs_and_gets_no_gradient() -> None:
    torch.manual_seed(0)
    network, x = (
        FilmCNN(5, 3, adapter=(2, 4), filters=(3,), film=(6,), embedding=4, projection=5).eval(),
        torch.ones(1, 4, 5),
    )
    with torch.no_grad():
        before = network(x)
        network.prototype.add_(5.0)
        assert not torch.allclose(before, network(x))
    network(x).sum().backward()
    assert network.prototype.grad is None
    plus_one = FilmCNN(5, 3, adapter=(2, 4), filters=(3,), film=(6,), embedding=4, projection=5, plus_one=True).eval()
    plus_one.load_state_dict(network.state_dict())
    shifted = FilmCNN(5, 3, adapter=(2, 4), filters=(3,), film=(6,), embedding=4, projection=5).eval()
    shifted.load_state_dict(network.state_dict())
    with torch.no_grad():
        shifted.film[-1].bias[:2] += 1.0
    torch.testing.assert_close(plus_one(x), shifted(x))
