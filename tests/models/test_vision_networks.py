"""ResNet-18 and ShuffleNet V2, compared with torchvision and the published numbers of weights, and torchvision's files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raydfl.core.cuts import cut_tensors
from raydfl.core.errors import ConfigError
from raydfl.core.tensors import FlatTensors
from raydfl.core.types import ModelSpec
from raydfl.methods._pruning import find_prunable_layers, make_masks
from raydfl.models import build_model, make_cuts, narrow, start_from_file
from raydfl.training.ownership import find_fixed_tensors

NAMES = ["resnet18", "shufflenet_v2"]
NORMS = {
    "resnet18": ("*bn?.*", "*downsample.1.*"),
    "shufflenet_v2": ("conv?.1.*", "*branch1.[13].*", "*branch2.[146].*"),
}
"""Patterns from docs/methods.md."""
FROZEN = {"resnet18": {"conv1", "bn1", "layer1"}, "shufflenet_v2": {"conv1", "stage2"}}


def make_spec(name: str, inputs: Any = (1, 8, 8), **options: Any) -> ModelSpec:
    return ModelSpec("model", name, inputs, 10, tuple(sorted(options.items())))


def build_torchvision(name: str) -> nn.Module:
    from torchvision import models  # the import takes seconds, and tests of other files do not need it

    network: nn.Module = {"resnet18": models.resnet18, "shufflenet_v2": models.shufflenet_v2_x1_0}[name]()
    return network


def replace_batch_norm(network: nn.Module) -> nn.Module:
    for part in [*network.modules()]:
        for name, child in part.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(part, name, nn.GroupNorm(2, child.num_features))
    return network


@pytest.mark.parametrize("name", NAMES)
def test_a_network_equals_torchvision_and_repeats_grey_channels(name: str) -> None:
    torch.manual_seed(0)
    network: Any = build_model(make_spec(name, (1, 32, 32))).eval()
    reference = replace_batch_norm(build_torchvision(name)).eval()
    reference.fc = nn.Linear(network.output.in_features, 10)
    weights = {key.replace("output.", "fc."): value for key, value in network.state_dict().items()}
    reference.load_state_dict(weights)
    x = torch.randn(2, 1, 32, 32)
    with torch.no_grad():
        expected = reference(x.repeat(1, 3, 1, 1))
        torch.testing.assert_close(network(x), expected)
        torch.testing.assert_close(network(x.repeat(1, 3, 1, 1)), expected)
        torch.testing.assert_close(network(x[:, 0]), expected)  # as features: 32 frames of 32 bands


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_without_normalisation_a_narrow_network_equals_the_whole_network_without_the_removed_channels(
    name: str,
) -> None:
    torch.manual_seed(1)
    whole_spec, rng = make_spec(name, (1, 16, 16)), np.random.default_rng(2)
    part_spec = narrow(whole_spec, 0.3)
    cuts = make_cuts(part_spec, lambda group, channels, count: np.sort(rng.choice(channels, count, replace=False)))
    whole, part = build_model(whole_spec).eval(), build_model(part_spec).eval()
    for parameter in whole.parameters():
        if parameter.ndim == 4:  # keeps the scale of values constant over layers
            nn.init.kaiming_normal_(parameter)
    state = {f"model/{key}": tensor for key, tensor in whole.state_dict().items()}
    slices = cut_tensors(FlatTensors.from_tensors(state), cuts, "")
    part.load_state_dict({key.removeprefix("model/"): tensor for key, tensor in slices.items()})
    for key, tensor in whole.state_dict().items():
        if f"model/{key}" in cuts:
            mask = np.zeros(tuple(tensor.shape), np.float32)
            mask[cuts[f"model/{key}"].place(mask.shape)] = 1
            tensor.mul_(torch.from_numpy(mask))
    x = torch.randn(2, 1, 16, 16)
    assert not torch.allclose(part(x), whole(x), atol=0.01)  # zero channels count in the mean of their group
    for network in (whole, part):
        for path, layer in [*network.named_modules()]:
            if isinstance(layer, nn.GroupNorm):
                network.set_submodule(path, nn.Identity())
    torch.testing.assert_close(part(x), whole(x))
    assert float((part(x) - part(-x)).abs().max()) > 1e-3  # not constant


@pytest.mark.parametrize(("name", "candidates"), [("resnet18", 11_010_048), ("shufflenet_v2", 1_208_140)])
def test_the_trained_convolutions_have_the_number_of_weights_of_fedapta(name: str, candidates: int) -> None:
    """The numbers are from table 5 of the paper. Normalisations start at 1 and 0."""
    network = build_model(make_spec(name, freeze=True))
    convolutions = [part for part in network.modules() if isinstance(part, nn.Conv2d)]
    assert sum(part.weight.numel() for part in convolutions if part.weight.requires_grad) == candidates
    fixed = {key.split(".")[0] for key, value in network.named_parameters() if not value.requires_grad}
    assert fixed == FROZEN[name]
    assert all(value.requires_grad for key, value in network.named_parameters() if key.split(".")[0] not in fixed)
    norms = [part for part in network.modules() if isinstance(part, nn.GroupNorm)]
    assert {part.num_groups for part in norms} == {2}
    assert all(bool((part.weight == 1).all()) and not bool(part.bias.any()) for part in norms)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("resnet18", (8.81, 6.61, 4.40, 2.20)), ("shufflenet_v2", (0.97, 0.72, 0.48, 0.24))],
)
def test_the_kept_weights_at_each_ratio_are_those_of_fedaptas_table_5(name: str, millions: tuple[float, ...]) -> None:
    network = build_model(make_spec(name, freeze=True))
    layers = find_prunable_layers({"model": network}, (), ["convolution"])
    tensors = {f"model/{key}": value for key, value in network.state_dict().items()}
    for ratio, expected in zip((0.2, 0.4, 0.6, 0.8), millions, strict=True):
        masks = make_masks(layers, tensors, ratio)
        kept = sum(layer.weights(tensors) * float(masks[layer.name].mean()) for layer in layers)
        assert kept / 1e6 == pytest.approx(expected, abs=0.01)  # whole units meet a ratio approximately


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_torchvision_is_loaded_without_batch_normalisation_and_head(name: str, tmp_path: Path) -> None:
    """Convolutions come from the file. Options exclude batch normalisation and the head of 1,000 classes."""
    reference: Any = build_torchvision(name)
    file = tmp_path / "imagenet.pth"
    torch.save(reference.state_dict(), file)
    network = build_model(make_spec(name))

    def start(**init_from: Any) -> None:
        options = {"file": str(file), **init_from}
        start_from_file(network, ModelSpec("model", name, (1, 8, 8), 10, init_from=tuple(sorted(options.items()))))

    with pytest.raises(
        ConfigError, match=r"lacks 'output.weight', 'output.bias' of the network.* and has .*running_mean'"
    ):
        start()
    statistics = ("*running_mean", "*running_var", "*num_batches_tracked")
    start(keep=("output.*", *NORMS[name]), ignore=(*statistics, "fc.*"))
    norms = [key for key, part in network.named_modules() if isinstance(part, nn.GroupNorm)]
    state, weights = network.state_dict(), reference.state_dict()
    loaded = [key for key in state if not key.startswith("output.") and key.rpartition(".")[0] not in norms]
    assert len(loaded) == sum(isinstance(part, nn.Conv2d) for part in reference.modules())
    assert all(torch.equal(state[key], weights[key]) for key in loaded)
    assert all(bool((state[f"{key}.weight"] == 1).all()) for key in norms)


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """Write torchvision's ResNet-18 with random statistics, scales and shifts, in the form of its file of ImageNet weights."""
    torch.manual_seed(0)
    reference = build_torchvision("resnet18").eval()
    for part in reference.modules():
        if isinstance(part, nn.BatchNorm2d):
            for tensor in (part.weight, part.running_var):
                assert tensor is not None
                nn.init.uniform_(tensor, 0.5, 1.5)
            for tensor in (part.bias, part.running_mean):
                assert tensor is not None
                nn.init.normal_(tensor, std=0.2)
    file = tmp_path_factory.mktemp("imagenet") / "resnet18.pth"
    torch.save(reference.state_dict(), file)
    reference.fc = nn.Identity()
    return reference, file


def build_from_file(file: Path) -> Any:
    network = build_model(make_spec("resnet18", norm="frozen_batch"))
    init_from = (("file", str(file)), ("ignore", ("fc.*",)), ("keep", ("output.*",)))
    start_from_file(network, ModelSpec("model", "resnet18", (1, 8, 8), 10, init_from=init_from))
    return network


@torch.no_grad()
def test_frozen_batch_norm_equals_torchvision_in_evaluation(imagenet: tuple[nn.Module, Path]) -> None:
    """Training mode has the same outputs, and an example's output depends neither on the batch nor on padding."""
    reference, file = imagenet
    network, x = build_from_file(file), torch.randn(3, 3, 32, 32)
    expected = reference(x)
    for mode in (True, False):
        # Rounding of 18 layers: the order of sums differs between processors.
        torch.testing.assert_close(network.train(mode).embed(x), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(network.embed(x[:1]), expected[:1], rtol=1e-4, atol=1e-4)
    frames = torch.randn(2, 40, 16)
    frames[0, 25:] = 7.0
    torch.testing.assert_close(network.embed(frames, torch.tensor([25, 40]))[:1], network.embed(frames[:1, :25]))


def test_frozen_batch_norms_are_never_sent(imagenet: tuple[nn.Module, Path]) -> None:
    network = build_from_file(imagenet[1])
    norms = [key for key, part in network.named_modules() if isinstance(part, nn.BatchNorm2d)]
    assert len(norms) == 20
    kinds = ("weight", "bias", "running_mean", "running_var")
    assert find_fixed_tensors({"model": network}, ()) == {f"model/{key}.{kind}" for key in norms for kind in kinds}


def test_unsupported_networks_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"models.model: groups is 3, which does not divide 64 channels. Set groups to 1 or 2"
    ):
        build_model(make_spec("resnet18", groups=3))
    with pytest.raises(ConfigError, match=r"models.model: images have 2 channels, but the network needs 1 .* or 3"):
        build_model(make_spec("shufflenet_v2", (2, 8, 8)))
    with pytest.raises(ConfigError, match=r"models.model: norm: frozen_batch .* but width is 0.5. Set width to 1"):
        build_model(narrow(make_spec("resnet18", norm="frozen_batch"), 0.5))
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(
        ConfigError, match=r"needs torchvision, which cannot be imported .* pip install 'raydfl\[vision\]'"
    ):
        build_model(make_spec("resnet18"))
