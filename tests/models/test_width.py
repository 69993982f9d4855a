"""Networks with a share of their channels are parts of whole ones."""

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
from raydfl.models import build_model, cuts_of, narrow

FRAMES, IMAGE = 20, (1, 12, 12)
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "crnn": (6, {"filters": (5, 7), "hidden": 6}),
    "crnn_tiny": (6, {"filters": (5,), "hidden": 4}),
    "cnn": (IMAGE, {"filters": (3, 5), "kernel": 3, "hidden": 7}),
    "mlp": (6, {"hidden": 9}),
    "split_cnn": (6, {"filters": (8, 12), "groups": 2}),
}


def specification(kind: str, **options: Any) -> ModelSpec:
    inputs, own = KINDS[kind]
    return ModelSpec("model", kind, inputs, 3, tuple(sorted({**own, **options}.items())))


def outputs(kind: str, share: float) -> tuple[Tensor, Tensor]:
    """Of a network made of some channels, and of the whole one in which all that belongs to the others is 0."""
    torch.manual_seed(1)
    spec = specification(kind)
    small = narrow(spec, share)
    rng = np.random.default_rng(2)
    cuts = cuts_of(small, lambda group, channels, kept: np.sort(rng.choice(channels, kept, replace=False)))
    whole, part = build_model(spec).eval(), build_model(small).eval()
    state = {f"model/{name}": tensor for name, tensor in whole.state_dict().items()}
    slices = cut_tensors(FlatTensors.of(state), cuts, "")
    part.load_state_dict({name.removeprefix("model/"): tensor for name, tensor in slices.items()})
    for name, tensor in whole.state_dict().items():
        if f"model/{name}" in cuts:
            place = cuts[f"model/{name}"].place(tensor.shape)
            kept = np.zeros(tuple(tensor.shape), np.float32)
            kept[place] = 1
            tensor.mul_(torch.from_numpy(kept))
    shape = IMAGE if kind == "cnn" else (FRAMES, 6)
    x = torch.randn(4, *shape)
    lengths = None if kind == "cnn" else torch.tensor([20, 17, 9, 20])
    return part(x, lengths).detach(), whole(x, lengths).detach()


@pytest.mark.parametrize("kind", ["crnn", "crnn_tiny", "cnn", "mlp"])
def test_a_part_computes_what_the_whole_does_without_the_other_channels(kind: str) -> None:
    part, whole = outputs(kind, 0.5)
    torch.testing.assert_close(part, whole)
    assert float(whole.std()) > 0.01  # it is no constant


def test_behind_group_norm_a_part_is_another_function() -> None:
    """A channel that is 0 still counts in the mean and variance of its group, and one that is not there does not."""
    part, whole = outputs("split_cnn", 0.5)
    assert float((part - whole).abs().max()) > 0.05
    torch.testing.assert_close(*outputs("split_cnn", 1))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_share_is_that_of_every_group_of_channels(kind: str) -> None:
    counts: dict[str, tuple[int, int]] = {}

    def choose(group: str, channels: int, kept: int) -> np.ndarray:
        counts[group] = channels, kept
        return np.arange(kept)

    cuts_of(narrow(specification(kind), 0.5), choose)
    # Rounded up: to whole channels, and here to pairs for the groups that are normalised together.
    multiple = 2 if kind == "split_cnn" else 1
    assert counts
    assert all(kept == -(-channels // (2 * multiple)) * multiple for channels, kept in counts.values())
    assert narrow(specification(kind), 1) == specification(kind)
    assert cuts_of(specification(kind), choose) == {}


def test_a_width_of_a_width() -> None:
    spec = specification("mlp", width=0.5)
    cuts = cuts_of(narrow(spec, 0.5), lambda group, channels, kept: np.array([channels, kept]) - 1)
    assert [list(kept) for kept in cuts["model/hidden.bias"].indices if kept is not None] == [[4, 2]]  # 9, 5, 3


@pytest.mark.parametrize("kind", ["cnn", "crnn", "split_cnn"])
def test_scaling_makes_up_for_inputs_that_are_not_there_while_training(kind: str) -> None:
    """One convolution: what comes after ReLU is divided by the width, so twice the next layer's weights do the same."""
    filters = (8,) if kind == "split_cnn" else (6,)
    plain, scaled = (
        build_model(specification(kind, filters=filters, dropout=0.0, width=0.5, scaled=on)) for on in (False, True)
    )
    scaled.load_state_dict(plain.state_dict())
    x = torch.randn(2, *(IMAGE if kind == "cnn" else (FRAMES, 6)), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(plain.eval()(x), scaled.eval()(x))
    assert not torch.allclose(plain.train()(x), scaled.train()(x), atol=1e-7)
    if kind == "split_cnn":
        return  # normalisation takes the scale away again, but for its epsilon
    with torch.no_grad():
        (plain.hidden.weight if kind == "cnn" else plain.gru.weight_ih_l0).mul_(2)  # type: ignore[union-attr, operator]
        if kind == "crnn":
            plain.gru.weight_ih_l0_reverse.mul_(2)  # type: ignore[union-attr, operator]
    torch.testing.assert_close(plain(x), scaled(x))


class Odd(nn.Module):
    """A network whose ``channels()`` may be wrong."""

    wrong = "groups"

    def __init__(self, inputs: int, classes: int, width: float = 1.0, fault: str = "") -> None:
        super().__init__()
        units = round(8 * width) + (1 if fault == "more" and width < 1 else 0)
        self.fault, self.first = fault, nn.Linear(inputs, units)
        self.output = nn.Linear(units, classes if fault != "outputs" else 2 * units)

    def channels(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        found: dict[str, tuple[tuple[str, ...], ...]] = {
            "first.weight": (("first",), ()),
            "first.bias": (("first",),),
            "output.weight": ((), ("first",)),
        }
        if self.fault == "forgotten":
            del found["output.weight"]
        return {**found, "last.weight": ((),)} if self.fault == "name" else found


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("name", "channels.. says .* of 'last.weight', which is no tensor"),
        (
            "forgotten",
            r"by channels\(\), 'output.weight' of the narrower network should be \(3, 8\), and it is \(3, 4\)",
        ),
        ("outputs", r"'output.weight' of the narrower network should be \(16, 4\), and it is \(8, 4\)"),
    ],
)
def test_channels_that_do_not_fit_the_network_are_refused(fault: str, message: str) -> None:
    spec = ModelSpec("model", f"{__file__}:Odd", 6, 3, (("fault", fault),))
    with pytest.raises(ConfigError, match=message):
        narrow(spec, 0.5)
    with pytest.raises(ConfigError, match="linear has no channels that could be left out"):
        narrow(ModelSpec("model", "linear", 6, 3), 0.5)


def test_cut_tensors_takes_slices_in_any_order() -> None:
    whole = FlatTensors.of({"a": torch.arange(24.0).view(2, 3, 4), "b": torch.arange(3.0)})
    found = cut_tensors(whole, {"a": Cut([[1, 0], None, [3, 1]]), "c": Cut([[7]])}, "")
    assert torch.equal(found["a"], whole["a"][[1, 0]][:, :, [3, 1]])
    assert torch.equal(found["b"], whole["b"])
    with pytest.raises(ConfigError, match="client 's1': 'b' cannot be cut as the method planned: .* index 3 of dim"):
        cut_tensors(whole, {"b": Cut([[3]])}, "client 's1'")
