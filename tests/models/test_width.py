"""Networks with a fraction of their channels, compared with whole networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raydfl.core.cuts import Cut, cut_tensors
from raydfl.core.errors import ConfigError
from raydfl.core.tensors import FlatTensors
from raydfl.core.types import ModelSpec
from raydfl.models import build_model, fit_width, make_cuts, narrow

FRAMES, IMAGE = 20, (1, 12, 12)
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "crnn": (6, {"filters": (5, 7), "hidden": 6}),
    "crnn_tiny": (6, {"filters": (5,), "hidden": 4}),
    "cnn": (IMAGE, {"filters": (3, 5), "kernel": 3, "hidden": 7}),
    "mlp": (6, {"hidden": 9}),
    "split_cnn": (6, {"filters": (8, 12), "groups": 2}),
}


def make_spec(kind: str, **options: Any) -> ModelSpec:
    inputs, preset = KINDS[kind]
    return ModelSpec("model", kind, inputs, 3, tuple(sorted({**preset, **options}.items())))


def compute_outputs(kind: str, share: float) -> tuple[Tensor, Tensor]:
    """Compute the outputs of a narrow network, and of the whole network with its removed channels set to 0."""
    torch.manual_seed(1)
    spec = make_spec(kind)
    small = narrow(spec, share)
    rng = np.random.default_rng(2)
    cuts = make_cuts(small, lambda group, channels, count: np.sort(rng.choice(channels, count, replace=False)))
    whole, part = build_model(spec).eval(), build_model(small).eval()
    state = {f"model/{name}": tensor for name, tensor in whole.state_dict().items()}
    slices = cut_tensors(FlatTensors.from_tensors(state), cuts, "")
    part.load_state_dict({name.removeprefix("model/"): tensor for name, tensor in slices.items()})
    for name, tensor in whole.state_dict().items():
        if f"model/{name}" in cuts:
            place = cuts[f"model/{name}"].place(tensor.shape)
            mask = np.zeros(tuple(tensor.shape), np.float32)
            mask[place] = 1
            tensor.mul_(torch.from_numpy(mask))
    shape = IMAGE if kind == "cnn" else (FRAMES, 6)
    x = torch.randn(4, *shape)
    lengths = None if kind == "cnn" else torch.tensor([20, 17, 9, 20])
    return part(x, lengths).detach(), whole(x, lengths).detach()


@pytest.mark.parametrize("kind", ["crnn", "crnn_tiny", "cnn", "mlp"])
def test_a_narrow_network_equals_the_whole_network_without_the_removed_channels(kind: str) -> None:
    part, whole = compute_outputs(kind, 0.5)
    torch.testing.assert_close(part, whole)
    assert float(whole.std()) > 0.01  # not constant


def test_a_narrow_network_with_group_norm_differs_from_the_whole_network() -> None:
    """A channel of zeros counts in the mean and variance of its group, but a removed channel does not."""
    part, whole = compute_outputs("split_cnn", 0.5)
    assert float((part - whole).abs().max()) > 0.05
    torch.testing.assert_close(*compute_outputs("split_cnn", 1))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_width_applies_to_every_group_of_channels(kind: str) -> None:
    counts: dict[str, tuple[int, int]] = {}

    def choose(group: str, channels: int, count: int) -> np.ndarray:
        counts[group] = channels, count
        return np.arange(count)

    make_cuts(narrow(make_spec(kind), 0.5), choose)
    # Rounded up to whole channels, or to pairs for networks with two groups.
    multiple = 2 if kind == "split_cnn" else 1
    assert counts
    assert all(count == -(-channels // (2 * multiple)) * multiple for channels, count in counts.values())
    assert narrow(make_spec(kind), 1) == make_spec(kind)
    assert make_cuts(make_spec(kind), choose) == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.1, 0.4, 0.7, 0.95, 1.0])
def test_the_fitted_width_has_the_nearest_number_of_weights(kind: str, share: float) -> None:
    """Compare with all widths."""
    spec = make_spec(kind)
    counts = {}
    for width in [*np.arange(0.01, 1.0, 0.01), 1.0]:
        counts[width] = sum(p.numel() for p in build_model(narrow(spec, float(width))).parameters())
    fitted = sum(p.numel() for p in build_model(narrow(spec, fit_width(spec, share))).parameters())
    target = share * counts[1.0]
    assert abs(fitted - target) == min(abs(count - target) for count in counts.values())


def test_widths_multiply() -> None:
    spec = make_spec("mlp", width=0.5)
    cuts = make_cuts(narrow(spec, 0.5), lambda group, channels, count: np.array([channels, count]) - 1)
    assert [list(count) for count in cuts["model/hidden.bias"].indices if count is not None] == [[4, 2]]  # 9, 5, 3


@pytest.mark.parametrize("kind", ["cnn", "crnn", "split_cnn"])
def test_scaling_compensates_for_removed_inputs_during_training(kind: str) -> None:
    """Outputs of a convolution are divided by the width, equivalent to doubling the weights of the next layer."""
    filters = (8,) if kind == "split_cnn" else (6,)
    plain, scaled = (
        build_model(make_spec(kind, filters=filters, dropout=0.0, width=0.5, scaled=on)) for on in (False, True)
    )
    scaled.load_state_dict(plain.state_dict())
    x = torch.randn(2, *(IMAGE if kind == "cnn" else (FRAMES, 6)), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(plain.eval()(x), scaled.eval()(x))
    assert not torch.allclose(plain.train()(x), scaled.train()(x), atol=1e-7)
    if kind == "split_cnn":
        return  # normalisation removes the scale, except for its epsilon
    with torch.no_grad():
        (plain.hidden.weight if kind == "cnn" else plain.gru.weight_ih_l0).mul_(2)  # type: ignore[union-attr, operator]
        if kind == "crnn":
            plain.gru.weight_ih_l0_reverse.mul_(2)  # type: ignore[union-attr, operator]
    torch.testing.assert_close(plain(x), scaled(x))


class Odd(nn.Module):
    """A network with a possibly wrong ``channels()``."""

    wrong = "groups"

    def __init__(self, inputs: int, classes: int, width: float = 1.0, fault: str = "") -> None:
        super().__init__()
        units = round(8 * width) + (1 if fault == "more" and width < 1 else 0)
        self.fault, self.first = fault, nn.Linear(inputs, units)
        self.output = nn.Linear(units, classes if fault != "outputs" else 2 * units)

    def channels(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        groups: dict[str, tuple[tuple[str, ...], ...]] = {
            "first.weight": (("first",), ()),
            "first.bias": (("first",),),
            "output.weight": ((), ("first",)),
        }
        if self.fault == "forgotten":
            del groups["output.weight"]
        return {**groups, "last.weight": ((),)} if self.fault == "name" else groups


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("name", "channels.. returns .* for 'last.weight', but the tensor is unknown"),
        (
            "forgotten",
            r"according to channels\(\), 'output.weight' of the narrower network has the shape \(3, 8\), but it is \(3, 4\)",
        ),
        ("outputs", r"'output.weight' of the narrower network has the shape \(16, 4\), but it is \(8, 4\)"),
    ],
)
def test_channels_that_do_not_fit_the_network_are_rejected(fault: str, message: str) -> None:
    spec = ModelSpec("model", f"{__file__}:Odd", 6, 3, (("fault", fault),))
    with pytest.raises(ConfigError, match=message):
        narrow(spec, 0.5)
    with pytest.raises(ConfigError, match="linear has no removable channels"):
        narrow(ModelSpec("model", "linear", 6, 3), 0.5)


def test_cut_tensors_takes_slices_in_any_order() -> None:
    whole = FlatTensors.from_tensors({"a": torch.arange(24.0).view(2, 3, 4), "b": torch.arange(3.0)})
    slices = cut_tensors(whole, {"a": Cut([[1, 0], None, [3, 1]]), "c": Cut([[7]])}, "")
    assert torch.equal(slices["a"], whole["a"][[1, 0]][:, :, [3, 1]])
    assert torch.equal(slices["b"], whole["b"])
    with pytest.raises(ConfigError, match="client 's1': 'b' cannot be cut as the method planned: .* index 3 of dim"):
        cut_tensors(whole, {"b": Cut([[3]])}, "client 's1'")
