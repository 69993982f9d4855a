"""ResNet-18 and ShuffleNet V2: torchvision's computation, the published numbers of weights, and weights from its files."""

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
from raydfl.models import build_model, cuts_of, narrow, start_from_file

NAMES = ["resnet18", "shufflenet_v2"]
NORMS = {
    "resnet18": ("*bn?.*", "*downsample.1.*"),
    "shufflenet_v2": ("conv?.1.*", "*branch1.[13].*", "*branch2.[146].*"),
}
"""Patterns of the docs, docs/methods.md."""
FREED = {"resnet18": {"conv1", "bn1", "layer1"}, "shufflenet_v2": {"conv1", "stage2"}}


def spec(name: str, inputs: Any = (1, 8, 8), **options: Any) -> ModelSpec:
    return ModelSpec("model", name, inputs, 10, tuple(sorted(options.items())))


def theirs_of(name: str) -> nn.Module:
    from torchvision import models  # it takes seconds, which the process that runs other files need not wait for

    found: nn.Module = {"resnet18": models.resnet18, "shufflenet_v2": models.shufflenet_v2_x1_0}[name]()
    return found


def with_group_norm(network: nn.Module) -> nn.Module:
    for part in [*network.modules()]:
        for name, child in part.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(part, name, nn.GroupNorm(2, child.num_features))
    return network


@pytest.mark.parametrize("name", NAMES)
def test_a_network_computes_what_torchvisions_does_and_repeats_grey(name: str) -> None:
    torch.manual_seed(0)
    network: Any = build_model(spec(name, (1, 32, 32))).eval()
    theirs = with_group_norm(theirs_of(name)).eval()
    theirs.fc = nn.Linear(network.output.in_features, 10)
    named = {key.replace("output.", "fc."): value for key, value in network.state_dict().items()}
    theirs.load_state_dict(named)
    x = torch.randn(2, 1, 32, 32)
    with torch.no_grad():
        expected = theirs(x.repeat(1, 3, 1, 1))
        torch.testing.assert_close(network(x), expected)
        torch.testing.assert_close(network(x.repeat(1, 3, 1, 1)), expected)
        torch.testing.assert_close(network(x[:, 0]), expected)  # as features: 32 frames of 32 bands


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_without_normalisation_a_part_computes_what_the_whole_does_without_the_other_channels(name: str) -> None:
    torch.manual_seed(1)
    whole_spec, rng = spec(name, (1, 16, 16)), np.random.default_rng(2)
    part_spec = narrow(whole_spec, 0.3)
    cuts = cuts_of(part_spec, lambda group, channels, kept: np.sort(rng.choice(channels, kept, replace=False)))
    whole, part = build_model(whole_spec).eval(), build_model(part_spec).eval()
    for parameter in whole.parameters():
        if parameter.ndim == 4:  # so that values neither fade nor grow from layer to layer
            nn.init.kaiming_normal_(parameter)
    state = {f"model/{key}": tensor for key, tensor in whole.state_dict().items()}
    slices = cut_tensors(FlatTensors.of(state), cuts, "")
    part.load_state_dict({key.removeprefix("model/"): tensor for key, tensor in slices.items()})
    for key, tensor in whole.state_dict().items():
        if f"model/{key}" in cuts:
            kept = np.zeros(tuple(tensor.shape), np.float32)
            kept[cuts[f"model/{key}"].place(kept.shape)] = 1
            tensor.mul_(torch.from_numpy(kept))
    x = torch.randn(2, 1, 16, 16)
    assert not torch.allclose(part(x), whole(x), atol=0.01)  # a channel that is 0 counts in its group's mean
    for network in (whole, part):
        for path, layer in [*network.named_modules()]:
            if isinstance(layer, nn.GroupNorm):
                network.set_submodule(path, nn.Identity())
    torch.testing.assert_close(part(x), whole(x))
    assert float((part(x) - part(-x)).abs().max()) > 1e-3  # it is no constant


@pytest.mark.parametrize(("name", "candidates"), [("resnet18", 11_010_048), ("shufflenet_v2", 1_208_140)])
def test_without_the_frozen_stem_the_convolutions_have_fedaptas_weights(name: str, candidates: int) -> None:
    """What table 5 of the paper counts. Normalisations begin as 1 and 0."""
    network = build_model(spec(name, freeze=True))
    convolutions = [part for part in network.modules() if isinstance(part, nn.Conv2d)]
    assert sum(part.weight.numel() for part in convolutions if part.weight.requires_grad) == candidates
    fixed = {key.split(".")[0] for key, value in network.named_parameters() if not value.requires_grad}
    assert fixed == FREED[name]
    assert all(value.requires_grad for key, value in network.named_parameters() if key.split(".")[0] not in fixed)
    norms = [part for part in network.modules() if isinstance(part, nn.GroupNorm)]
    assert {part.num_groups for part in norms} == {2}
    assert all(bool((part.weight == 1).all()) and not bool(part.bias.any()) for part in norms)


@pytest.mark.parametrize("name", NAMES)
def test_torchvisions_file_is_accounted_for(name: str, tmp_path: Path) -> None:
    """Convolutions from the file; batch normalisation and the head of 1,000 classes are named as not used."""
    theirs: Any = theirs_of(name)
    file = tmp_path / "imagenet.pth"
    torch.save(theirs.state_dict(), file)
    network = build_model(spec(name))

    def begin(**init_from: Any) -> None:
        given = {"file": str(file), **init_from}
        start_from_file(network, ModelSpec("model", name, (1, 8, 8), 10, init_from=tuple(sorted(given.items()))))

    with pytest.raises(
        ConfigError, match=r"lacks 'output.weight', 'output.bias' of the network.* and has .*running_mean'"
    ):
        begin()
    statistics = ("*running_mean", "*running_var", "*num_batches_tracked")
    begin(keep=("output.*", *NORMS[name]), ignore=(*statistics, "fc.*"))
    norms = [key for key, part in network.named_modules() if isinstance(part, nn.GroupNorm)]
    own, weights = network.state_dict(), theirs.state_dict()
    loaded = [key for key in own if not key.startswith("output.") and key.rpartition(".")[0] not in norms]
    assert len(loaded) == sum(isinstance(part, nn.Conv2d) for part in theirs.modules())
    assert all(torch.equal(own[key], weights[key]) for key in loaded)
    assert all(bool((own[f"{key}.weight"] == 1).all()) for key in norms)


def test_what_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"models.model: groups is 3, and 64 channels make no 3 equal groups; take 1 or 2"
    ):
        build_model(spec("resnet18", groups=3))
    with pytest.raises(ConfigError, match=r"models.model: images of 2 channels; one .* or 3 can be taken"):
        build_model(spec("shufflenet_v2", (2, 8, 8)))
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ConfigError, match=r"torchvision's, which cannot be imported .* pip install 'raydfl\[vision\]'"):
        build_model(spec("resnet18"))
