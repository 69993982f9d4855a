"""Multiply-adds of networks and trainings, against hand counts and PyTorch's own counter."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from seen_and_heard import CLIENTS, federation, write
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from raydfl import read_rows
from raydfl.core import ops
from raydfl.core.types import Batch, ModelSpec
from raydfl.data.population import Population
from raydfl.engine.config import Config
from raydfl.models import build_model
from raydfl.testing import train_federation
from raydfl.training import count_multiply_adds

Tiny = Callable[..., Config]


class Plain(nn.Module):
    """A layer of PyTorch as a network."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> object:
        return self.layer(x)


def make_batch(*shape: int) -> Batch:
    return Batch({"": torch.randn(shape)}, torch.zeros(shape[0], dtype=torch.int64))


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (nn.Linear(7, 5), (1, 7), 7 * 5),
        (nn.Conv2d(2, 6, 3, stride=2, padding=1), (1, 2, 8, 10), (4 * 5) * 6 * (2 * 3 * 3)),
        (nn.Conv1d(4, 6, 3, groups=2), (1, 4, 9), 7 * 6 * (2 * 3)),
        (nn.ConvTranspose1d(4, 6, 3), (1, 4, 9), 9 * 4 * 6 * 3),
        # Fused by PyTorch: four gates with 5 inputs and 3 states in each of 6 frames.
        (nn.LSTM(5, 3, batch_first=True), (1, 6, 5), 6 * 4 * 3 * (5 + 3)),
        # Fused by PyTorch: four projections, scores and their products, two hidden layers.
        (
            nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True),
            (1, 6, 8),
            6 * (4 * 8 * 8 + 2 * 8 * 16) + 2 * 6 * 6 * 8,
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_a_layer_has_its_hand_count(layer: nn.Module, shape: tuple[int, ...], expected: int) -> None:
    batch = make_batch(*shape)
    state, fast = torch.get_rng_state(), torch.backends.mha.get_fastpath_enabled()
    assert count_multiply_adds(Plain(layer), batch).total() == expected
    assert layer.training
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert torch.backends.mkldnn.enabled


def list_weights(network: nn.Module) -> set[str]:
    return {name for name, value in network.named_parameters() if value.ndim > 1}


def test_a_recurrent_network_has_its_hand_count_by_weight() -> None:
    """Two convolutions with pooling (30, 15 and 7 frames), and three gates of 128 units in two directions."""
    network = build_model(ModelSpec("model", "crnn_base", 12, 5))
    counts = count_multiply_adds(network, make_batch(1, 30, 12))
    gates = {"gru.weight_ih_l0": 7 * 3 * 128 * 64, "gru.weight_hh_l0": 7 * 3 * 128 * 128}
    assert counts == {
        "convolutions.0.weight": 30 * 64 * 12 * 3,
        "convolutions.1.weight": 15 * 64 * 64 * 3,
        **gates,
        **{f"{name}_reverse": count for name, count in gates.items()},
        "output.weight": 256 * 5,
    }


@pytest.mark.parametrize(
    ("architecture", "inputs", "shape"),
    [("mlp", 12, (30, 12)), ("cnn", (1, 28, 28), (1, 28, 28)), ("resnet18", 32, (30, 32))],
)
def test_a_network_has_the_count_of_pytorchs_counter(
    architecture: str, inputs: int | tuple[int, int, int], shape: tuple[int, ...]
) -> None:
    network, batch = build_model(ModelSpec("model", architecture, inputs, 5)), make_batch(1, *shape)
    counts = count_multiply_adds(network, batch)
    with torch.no_grad(), ops.use("torch"), FlopCounterMode(display=False) as expected:
        network.eval()(*batch.input_of(network))
    assert 2 * counts.total() == expected.get_total_flops() > 0
    assert set(counts) == list_weights(network)  # Masks need the parameter of each product.


def read_total(config: Config) -> tuple[float, int]:
    """Return the run's multiply-adds, and the number of training examples of all clients."""
    train_federation(config)
    folder = Path(config.run.dir) / config.run.name
    rows = read_rows(folder).to_pylist()
    population = Population.load(folder / "population")
    examples = sum(len(population.data(index).train) for index in range(len(population.ids)))
    assert sum(row["value"] * row["count"] for row in rows if row["metric"] == "seconds/processor") > 0
    return sum(row["value"] * row["count"] for row in rows if row["metric"] == "multiply_adds"), examples


@pytest.mark.parametrize(
    ("method", "options", "each"),
    [
        ("fedavg", [], 16 * 10 + 10 * 3),
        ("fedavg", ["train.together=4"], 16 * 10 + 10 * 3),
        ("ditto", ["models.personal={name: mlp, hidden: 10}", "method.personal_epochs=4"], 3 * (16 * 10 + 10 * 3)),
        ("feddrop", ["method.share=0.4"], 16 * 4 + 4 * 3),
        ("fedapta", ["method.ratio=0.4", "method.prune=[linear]"], 16 * 6 + 10 * 3),
        ("fedlps", ["method.ratio=0.5"], 8 * 10 + 5 * 3),
    ],
)
def test_a_training_counts_each_trained_network_and_example(
    tiny: Tiny, method: str, options: list[str], each: int
) -> None:
    """The network has 16 inputs, 10 units and 3 classes. Each client trains for two epochs.

    FedDrop builds 4 of 10 units. FedAPTA masks 4 units, and their outgoing weights remain. FedLPS masks half of the inputs of
    each layer.
    """
    common = ["models.model={name: mlp, hidden: 10}", "train.rounds=1", "train.cohort=1.0", "train.local_epochs=2"]
    total, examples = read_total(tiny(*common, *options, method=method))
    assert total == pytest.approx(2 * examples * each, rel=1e-9)


def test_the_classifier_of_fused_features_counts(tiny: Tiny, tmp_path: Path) -> None:
    """Sound network: 8 inputs, 10 units, 2 classes. Image network: 64, 4, 2. Fusion: 10 + 4, 4, 2.

    Each client trains all networks on two clips, for an epoch.
    """
    folder = write(tmp_path / "views", takes=2)
    config = federation(tiny, folder, "multifl", "models.audio={name: mlp, hidden: 10}", "train.rounds=1")
    each = (8 * 10 + 10 * 2) + (64 * 4 + 4 * 2) + (14 * 4 + 4 * 2)
    assert read_total(config) == (pytest.approx(2 * CLIENTS * each), 2 * CLIENTS)


def test_clients_without_labels_count_unlabelled_clips(tiny: Tiny) -> None:
    """Two clips of each class keep labels, so a client has no label.

    A batch has two unlabelled clips, and at most two labelled clips.
    """
    network = ["models.model={name: mlp, hidden: 10}", "train.rounds=1", "train.cohort=1.0", "train.batch_size=4"]
    config = tiny(*network, "data.unlabelled={keep_clips: 2}", method="fedstar")
    total, _ = read_total(config)
    population = Population.load(Path(config.run.dir) / config.run.name / "population")
    pools = [population.data(index).pools for index in range(len(population))]
    sizes = [(len(pool["labelled"]), len(pool["unlabelled"])) for pool in pools]
    assert min(sizes)[0] == 0
    examples = sum(unlabelled + math.ceil(unlabelled / 2) * min(labelled, 2) for labelled, unlabelled in sizes)
    assert total == pytest.approx(examples * (16 * 10 + 10 * 3))


class EachFrame(nn.Module):
    """A linear layer on each frame, and a mean over the frames."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        outputs: Tensor = self.layer(x).mean(dim=1)
        return outputs


def test_clips_of_unequal_lengths(tiny: Tiny) -> None:
    """The layer has 16 inputs and 4 classes in each frame. A client counts the clip nearest to the mean length."""
    uneven = [f"data.name={Path(__file__).parents[1]}/data/tiny_sets.py:Made", "data.uneven=true"]
    network = f"models.model={{name: '{__file__}:EachFrame'}}"
    config = tiny(*uneven, "data.features.seconds=null", network, "train.rounds=1", "train.cohort=1.0")
    total, _ = read_total(config)
    population = Population.load(Path(config.run.dir) / config.run.name / "population")
    counts = [population.data(index).train.first_view.counts for index in range(len(population))]
    nearest = [min(frames.tolist(), key=lambda count: abs(count - frames.mean())) for frames in counts]
    assert len(set(nearest)) > 1
    assert total == 16 * 4 * sum(len(frames) * chosen for frames, chosen in zip(counts, nearest, strict=True))
