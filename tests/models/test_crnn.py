"""CRNN, compared with the published sizes and with formulas in NumPy, and its treatment of padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raydfl.core.errors import ConfigError, DataError
from raydfl.models.crnn import ARCHITECTURES, CRNN

SIZES = ("crnn_tiny", "crnn_lite", "crnn_mid", "crnn_base", "crnn_deep")

# Weights by (inputs, classes), as printed by FedMLAC for its data sets.
PUBLISHED = {
    "crnn_tiny": {(128, 35): 12_115, (128, 10): 11_290, (512, 4): 29_524},
    "crnn_lite": {(128, 35): 36_515, (128, 10): 34_890, (512, 4): 71_364},
    "crnn_mid": {(128, 35): 39_619, (128, 10): 37_994, (512, 4): 74_468},
    "crnn_base": {(128, 35): 194_979, (128, 10): 188_554, (512, 4): 260_740},
    "crnn_deep": {(128, 35): 305_763, (128, 10): 299_338, (512, 4): 371_524},
}


def build(size: str, inputs: int = 6, classes: int = 4, seed: int = 0, **options: object) -> CRNN:
    torch.manual_seed(seed)
    cls, preset = ARCHITECTURES[size]
    network = cls(inputs, classes, **{**preset, **options})
    assert isinstance(network, CRNN)
    return network.eval()


def make_noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_networks_have_the_published_numbers_of_weights() -> None:
    combinations = 0
    for size, counts in PUBLISHED.items():
        for (inputs, classes), weights in counts.items():
            assert sum(p.numel() for p in build(size, inputs, classes).parameters()) == weights
            combinations += 1
    assert combinations == 15
    assert set(PUBLISHED) == set(SIZES) == set(ARCHITECTURES) - {"crnn"}


def test_layers_are_pruned_separately() -> None:
    layers = {name.rpartition(".")[0] for name in build("crnn_lite").state_dict()}
    assert layers == {"convolutions.0", "convolutions.1", "gru", "output"}


def compute_logits(network: CRNN, x: np.ndarray) -> np.ndarray:
    """Compute the logits of a single example, x [frames, inputs], in float64."""
    weights = {name: value.double().numpy() for name, value in network.state_dict().items()}

    def sigmoid(values: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-values))

    def recur(frames: np.ndarray, suffix: str) -> np.ndarray:
        state, states = np.zeros(network.gru.hidden_size), []
        for frame in frames:
            from_input = weights[f"gru.weight_ih_l0{suffix}"] @ frame + weights[f"gru.bias_ih_l0{suffix}"]
            from_state = weights[f"gru.weight_hh_l0{suffix}"] @ state + weights[f"gru.bias_hh_l0{suffix}"]
            (reset_i, update_i, new_i), (reset_s, update_s, new_s) = np.split(from_input, 3), np.split(from_state, 3)
            update = sigmoid(update_i + update_s)
            new = np.tanh(new_i + sigmoid(reset_i + reset_s) * new_s)
            state = (1 - update) * new + update * state
            states.append(state)
        return np.array(states)

    for index in range(len(network.convolutions)):
        weight, bias = weights[f"convolutions.{index}.weight"], weights[f"convolutions.{index}.bias"]
        half = weight.shape[2] // 2
        padded = np.pad(x, ((half, half), (0, 0)))
        x = np.array([np.einsum("ock,kc->o", weight, padded[t : t + 2 * half + 1]) + bias for t in range(len(x))])
        x = np.maximum(x, 0)
        x = np.array([x[t : t + network.pool].max(axis=0) for t in range(0, len(x) - network.pool + 1, network.pool)])
    states = recur(x, "")
    if network.gru.bidirectional:
        states = np.concatenate([states, recur(x[::-1], "_reverse")[::-1]], axis=1)
    return np.asarray(weights["output.weight"] @ states.mean(axis=0) + weights["output.bias"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [{}, {"kernel": 5}, {"pool": 1}, {"pool": 3, "kernel": 1}])
def test_the_network_equals_its_formulas(size: str, options: dict[str, int]) -> None:
    network, x = build(size, **options), make_noise(2, 29, 6)
    with torch.no_grad():
        logits = network(x).numpy()
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, [compute_logits(network, item.double().numpy()) for item in x], atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernel", [3, 5])
def test_a_padded_batch_equals_its_items(size: str, kernel: int) -> None:
    network, lengths = build(size, kernel=kernel), [40, 8, 13, 31, 39]
    x = make_noise(5, 40, 6)  # noise in the padding must have no effect
    batch = torch.tensor(lengths)
    with torch.no_grad():
        logits, embeddings = network(x, batch), network.embed(x, batch)
        for index, length in enumerate(lengths):
            item = x[index : index + 1, :length]
            torch.testing.assert_close(logits[index : index + 1], network(item), atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(embeddings[index : index + 1], network.embed(item), atol=1e-6, rtol=1e-5)


@given(lengths=st.lists(st.integers(4, 20), min_size=1, max_size=5), padding=st.integers(0, 9), pool=st.integers(1, 2))
@settings(max_examples=30)
def test_padding_does_not_change_the_outputs(lengths: list[int], padding: int, pool: int) -> None:
    network, x = (
        build("crnn_base", hidden=5, filters=(3, 4), pool=pool),
        make_noise(len(lengths), max(lengths) + padding, 6),
    )
    batch = torch.tensor(lengths)
    with torch.no_grad():
        torch.testing.assert_close(network(x, batch), network(x[:, : max(lengths)], batch), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("size", ["crnn_lite", "crnn_base"])
def test_gradients_of_a_padded_batch_equal_the_sum_over_its_items(size: str) -> None:
    network, x, lengths = build(size), make_noise(3, 24, 6), [24, 9, 16]
    network(x, torch.tensor(lengths)).square().sum().backward()
    batched = [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None]
    network.zero_grad()
    for index, length in enumerate(lengths):
        network(x[index : index + 1, :length]).square().sum().backward()
    summed = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    assert len(batched) == len(summed) == len(list(network.parameters()))
    for actual, expected in zip(batched, summed, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_full_lengths_equal_no_lengths() -> None:
    network, x = build("crnn_base"), make_noise(3, 21, 6)
    torch.testing.assert_close(network(x, torch.full((3,), 21)), network(x), atol=1e-6, rtol=1e-5)


def test_an_item_too_short_for_the_pools_counts_as_one_frame() -> None:
    network, x = build("crnn_deep"), make_noise(2, 24, 6)
    with torch.no_grad():
        logits = network(x, torch.tensor([24, 3]))
        longer = network(torch.cat([x, make_noise(2, 16, 6)], dim=1), torch.tensor([24, 3]))
        silent = network(torch.cat([x[1:, :3], torch.zeros(1, 5, 6)], dim=1))  # 3 frames padded to the required 8
    assert logits.isfinite().all()
    torch.testing.assert_close(logits, longer, atol=1e-6, rtol=1e-5)
    assert silent.shape == logits[1:].shape


@pytest.mark.parametrize(("size", "minimum"), [("crnn_tiny", 2), ("crnn_base", 4), ("crnn_deep", 8)])
def test_too_few_frames_are_an_error_with_the_required_number(size: str, minimum: int) -> None:
    network = build(size)
    assert network(make_noise(1, minimum, 6)).shape == (1, 4)
    with pytest.raises(
        DataError, match=f"^{minimum - 1} frames are too few: .* need at least {minimum}. Use longer clips"
    ):
        network(make_noise(1, minimum - 1, 6))


@pytest.mark.parametrize(("size", "width"), [("crnn_tiny", 32), ("crnn_mid", 64), ("crnn_base", 256)])
def test_the_embedding_is_the_input_of_the_last_layer(size: str, width: int) -> None:
    network, x, lengths = build(size), make_noise(3, 20, 6), torch.tensor([20, 11, 15])
    embeddings = network.embed(x, lengths)
    assert embeddings.shape == (3, width)
    assert torch.equal(network.output(embeddings), network(x, lengths))


def test_dropout_acts_only_in_training_and_0_disables_it() -> None:
    x = make_noise(4, 20, 6)
    network = build("crnn_lite", dropout=0.5)
    assert torch.equal(network(x), network(x))
    network.train()
    torch.manual_seed(3)
    assert not torch.equal(network(x), network(x))
    network = build("crnn_lite", dropout=0.0)
    assert torch.equal(network.train()(x), build("crnn_lite", dropout=0.5)(x))
    assert [module.p for module in build("crnn_deep").modules() if isinstance(module, torch.nn.Dropout)] == [0.1]


def test_an_even_kernel_is_an_error() -> None:
    with pytest.raises(ConfigError, match="kernel is 4, but kernels must be odd. Use 5"):
        CRNN(6, 4, kernel=4)
