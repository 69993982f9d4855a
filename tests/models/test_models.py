"""Networks by name, their options, user-defined networks, and dense networks on mean frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raydfl.core.errors import ConfigError
from raydfl.core.types import ModelSpec
from raydfl.models import architectures, build_model, find_architecture
from raydfl.models.crnn import CRNN


def make_spec(architecture: str, **options: Any) -> ModelSpec:
    return ModelSpec("plugin", architecture, 5, 3, tuple(sorted(options.items())))


FRAME_NETWORKS = [
    name
    for name in architectures()
    if getattr(find_architecture(name, "")[0], "images", False) is not True
    and name not in ("fusion", "pretrained")  # tests/models/test_pretrained.py
]


def test_every_architecture_builds_and_works_on_padded_batches() -> None:
    names = [name for name in FRAME_NETWORKS if not name.startswith("ssast")]  # SSAST needs 16 bands: test_ssast.py
    assert names == [
        "crnn",
        "crnn_base",
        "crnn_deep",
        "crnn_lite",
        "crnn_mid",
        "crnn_tiny",
        "film_cnn",
        "film_cnn_small",
        "film_cnn_tiny",
        "linear",
        "mlp",
        "resnet18",
        "shufflenet_v2",
        "split_cnn",
        "split_cnn_tiny",
    ]
    x, lengths = torch.randn(4, 30, 5), torch.tensor([30, 12, 8, 21])
    for name in names:
        network: Any = build_model(make_spec(name)).eval()
        with torch.no_grad():
            logits, embeddings = network(x, lengths), network.embed(x, lengths)
            assert logits.shape == (4, 3)
            assert logits.dtype == torch.float32
            torch.testing.assert_close(network.output(embeddings), logits)
            for index, length in enumerate(lengths):
                item = network(x[index : index + 1, :length])
                torch.testing.assert_close(logits[index : index + 1], item, atol=1e-6, rtol=1e-5)


def test_options_override_the_preset_of_an_architecture() -> None:
    network = build_model(make_spec("crnn_lite", kernel=5, filters=[7, 8, 9], dropout=0))
    assert isinstance(network, CRNN)
    assert [tuple(c.weight.shape) for c in network.convolutions] == [(7, 5, 5), (8, 7, 5), (9, 8, 5)]
    assert network.gru.hidden_size == 64
    assert network.dropout.p == 0


def test_equal_seeds_give_equal_weights() -> None:
    def draw_weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat([value.flatten() for value in build_model(make_spec("crnn_tiny")).state_dict().values()])

    assert torch.equal(draw_weights(4), draw_weights(4))
    assert not torch.equal(draw_weights(4), draw_weights(5))


def test_linear_is_a_linear_map_of_the_mean_frame() -> None:
    network: Any = build_model(make_spec("linear"))
    x, lengths = torch.randn(2, 6, 5), torch.tensor([6, 2])
    expected = torch.stack([x[0].mean(dim=0), x[1, :2].mean(dim=0)])
    torch.testing.assert_close(network.embed(x, lengths), expected)
    torch.testing.assert_close(network(x, lengths), expected @ network.output.weight.T + network.output.bias)
    torch.testing.assert_close(network(x), x.mean(dim=1) @ network.output.weight.T + network.output.bias)
    assert sum(p.numel() for p in network.parameters()) == 5 * 3 + 3


def test_mlp_has_one_hidden_layer() -> None:
    network: Any = build_model(make_spec("mlp", hidden=7))
    x = torch.randn(2, 6, 5)
    hidden = (x.mean(dim=1) @ network.hidden.weight.T + network.hidden.bias).clamp_min(0)
    torch.testing.assert_close(network(x), hidden @ network.output.weight.T + network.output.bias)
    assert network.hidden.weight.shape == (7, 5)


def test_an_example_without_frames_has_finite_logits() -> None:
    """Padding examples of a batch have no frames, and their weight of 0 must not multiply a NaN."""
    for name in FRAME_NETWORKS:  # images have no lengths
        if not name.startswith("ssast"):
            assert build_model(make_spec(name))(torch.zeros(2, 9, 5), torch.tensor([9, 0])).isfinite().all()


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("crnn_base", {"kernal": 5}, "models.plugin: crnn_base: unknown option 'kernal'. Did you mean 'kernel'"),
        (
            "crnn_bass",
            {},
            "models.plugin: unknown architecture 'crnn_bass'. Did you mean 'crnn_base'.*my_file.py:Class",
        ),
        (
            "crnn_base",
            {"hidden": "many"},
            r"models.plugin: crnn_base.hidden: Input should be a valid integer",
        ),
        ("crnn_base", {"dropout": 1.0}, "crnn_base.dropout: Input should be less than 1"),
        ("crnn_base", {"filters": []}, r"crnn_base.filters: .* should have at least 1 item"),
        (
            "crnn_base",
            {"filters": [3, 0]},
            "crnn_base.filters.1: Input should be greater than or equal to 1",
        ),
        ("crnn_base", {"kernel": 4}, "models.plugin: kernel is 4, .* Use 5"),
        ("crnn_base", {"inputs": 4}, "unknown option 'inputs'"),
        ("linear", {"hidden": 4}, "models.plugin: linear: unknown option 'hidden'. It has no options"),
        ("no_such_file.py:Net", {}, "there is no file"),
    ],
)
def test_invalid_settings_are_rejected(architecture: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(make_spec(architecture, **options))


MODULE = """
from __future__ import annotations
from typing import TYPE_CHECKING
from torch import nn
if TYPE_CHECKING:
    from nowhere import Unknown

class Net(nn.Module):
    def __init__(self, inputs: int, classes: int, width: int = 4):
        super().__init__()
        self.output = nn.Linear(inputs * width, classes)
    def forward(self, x, lengths=None):
        return self.output(x[:, : self.output.in_features // x.shape[2]].flatten(1))

class Loose(Net):
    def __init__(self, inputs, classes, **anything):
        super().__init__(inputs, classes, **anything)

class Unresolved(Net):
    def __init__(self, inputs, classes, width: Unknown = 4):
        super().__init__(inputs, classes, width)

class Needy(Net):
    def __init__(self, inputs, classes, width):
        if width == 13:
            raise RuntimeError("unlucky")
        super().__init__(inputs, classes, width)

class NotOne:
    pass
"""


@pytest.fixture
def module_file(tmp_path: Path) -> str:
    file = tmp_path / "own.py"
    file.write_text(MODULE)
    return str(file)


@pytest.mark.parametrize("name", ["Net", "Loose", "Unresolved", "Needy"])
def test_a_user_defined_network_is_built_with_its_options(module_file: str, name: str) -> None:
    assert build_model(make_spec(f"{module_file}:{name}", width=2))(torch.randn(3, 9, 5)).shape == (3, 3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Net", {"widht": 2}, "unknown option 'widht'. Did you mean 'width'"),
        ("Net", {"width": "x"}, "Net.width: Input should be a valid integer"),
        ("Needy", {}, "cannot be built: TypeError: .*missing 1 required positional argument: 'width'"),
        ("Needy", {"width": 13}, "cannot be built: RuntimeError: unlucky"),
        ("NotOne", {}, "is not a subclass of torch.nn.Module"),
        ("Nat", {}, "has no 'Nat'. Did you mean 'Net'"),
    ],
)
def test_a_user_defined_network_that_cannot_be_built_is_rejected(
    module_file: str, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(make_spec(f"{module_file}:{name}", **options))
