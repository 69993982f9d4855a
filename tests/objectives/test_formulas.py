"""Formulas of objectives, compared with closed forms, NumPy and PyTorch."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.covariance import LedoitWolf
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.metrics import summarise
from raydfl.core.ops import random_state, uniform
from raydfl.core.types import Batch, ModelSpec, Ratio, Scores
from raydfl.data.label_sets import split_labels
from raydfl.models.dense import MeanLinear
from raydfl.objectives import Objective, find_objective
from raydfl.objectives._reference import distances
from raydfl.objectives.reconstruct import average_bins
from raydfl.testing import make_batch

BATCH, FRAMES, BANDS, CLASSES = 6, 8, 5, 3


def make_objective(name: str, **options: Any) -> tuple[Objective, nn.Module, Any]:
    torch.manual_seed(0)
    objective = find_objective({"name": name, **options})
    spec = ModelSpec("model", "linear", BANDS, CLASSES, outputs=objective.outputs(CLASSES))
    network = MeanLinear(BANDS, spec.width)
    objective.extend(network, spec)
    step = SimpleNamespace(models={"model": network}, forward=lambda name, batch: network(batch.x, batch.lengths))
    return objective, network, step


def make_small_batch(**fields: Any) -> Batch:
    torch.manual_seed(1)
    return make_batch(**{"x": torch.randn(BATCH, FRAMES, BANDS), "y": torch.tensor([0, 1, 1, 0, 2, 1]), **fields})


WEIGHT = torch.tensor([1.0, 1, 1, 1, 1, 0])
REAL = slice(0, 5)


def test_multi_label_equals_binary_cross_entropy() -> None:
    objective, network, step = make_objective("multi_label")
    y = (torch.arange(BATCH * CLASSES).view(BATCH, CLASSES) % 2).float()
    inputs = make_small_batch(y=y, weight=WEIGHT)
    expected = F.binary_cross_entropy_with_logits(network(inputs.x)[REAL], y[REAL])
    assert float(objective.loss(step, "model", inputs).detach()) == pytest.approx(float(expected.detach()), rel=1e-6)


def test_compact_equals_the_variance_around_the_mean_of_the_batch() -> None:
    objective, network, step = make_objective("compact", size=4, momentum=0.5)
    inputs = make_small_batch(weight=WEIGHT)
    z = F.normalize(network(inputs.x), dim=1)[REAL]
    value = objective.loss(step, "model", inputs)
    assert float(value) == pytest.approx(float((z - z.mean(dim=0)).square().sum(dim=1).mean()), rel=1e-5)
    centres = cast(Any, network).objective
    torch.testing.assert_close(centres.sums[0], z.sum(dim=0).detach())
    assert float(centres.counts) == 5
    objective.loss(step, "model", inputs)
    assert float(centres.counts) == 7.5  # half of the previous count, plus the batch
    score = objective.predictor(network)(inputs.x)
    torch.testing.assert_close(score[REAL, 0], (z - z.mean(dim=0)).square().sum(dim=1))


def test_distances_from_training_clips_equal_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    reference, z = rng.normal(size=(30, 3)) * [1, 2, 0.5] + 4, rng.normal(size=(5, 3))
    inputs = torch.from_numpy(z), torch.from_numpy(reference)
    covariance = LedoitWolf().fit(reference)
    np.testing.assert_allclose(distances("mahalanobis", *inputs), covariance.mahalanobis(z), rtol=1e-4)
    nearest = NearestNeighbors(n_neighbors=1).fit(reference).kneighbors(z)[0][:, 0]
    np.testing.assert_allclose(distances("nearest", *inputs), nearest**2, rtol=1e-6)
    to_neighbours = distances("nearest", inputs[1], inputs[1], torch.eye(30, dtype=torch.bool))
    assert float(to_neighbours.min()) > 0  # a clip is not its own neighbour
    np.testing.assert_allclose(distances("own_centre", *inputs), ((z - reference.mean(axis=0)) ** 2).sum(axis=1))
    assert torch.isfinite(distances("mahalanobis", inputs[0], inputs[1][:1])).all()  # a reference of one clip


def test_spread_equals_the_variance_term_of_vicreg_on_the_unit_sphere() -> None:
    objective, network, step = make_objective("compact", size=4, spread=0.7)
    plain, *_ = make_objective("compact", size=4)
    inputs = make_small_batch(weight=WEIGHT)
    z = F.normalize(network(inputs.x), dim=1)[REAL]
    term = (1 - (4 * z.var(dim=0) + 1e-4).sqrt()).clamp_min(0).mean()
    difference = float(objective.loss(step, "model", inputs)) - float(plain.loss(step, "model", inputs))
    assert difference == pytest.approx(0.7 * float(term), rel=1e-5)


@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_all_clips_collapse_to_one_point_without_spread(spread: float) -> None:
    objective, network, step = make_objective("compact", size=4, spread=spread)
    inputs = make_small_batch()
    optimiser = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(150):
        optimiser.zero_grad()
        objective.loss(step, "model", inputs).backward()
        optimiser.step()
    z = F.normalize(network(inputs.x), dim=1)
    distance = float((z - z.mean(dim=0)).square().sum(dim=1).mean())
    assert distance < 0.01 if not spread else distance > 0.2, distance


def test_compact_by_class_uses_the_nearest_known_centre() -> None:
    objective, network, step = make_objective("compact", size=4, by="class")
    inputs = make_small_batch(weight=torch.tensor([1.0, 1, 1, 1, 0, 1]))  # no example of class 2
    z = F.normalize(network(inputs.x), dim=1)
    centres = [z[[0, 3]].mean(dim=0), z[[1, 2, 5]].mean(dim=0)]
    expected = sum((z[i] - centres[c]).square().sum() for i, c in ((0, 0), (3, 0), (1, 1), (2, 1), (5, 1))) / 5
    assert float(objective.loss(step, "model", inputs).detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    score = objective.predictor(network)(inputs.x)[:, 0]
    squares = torch.stack([(z - centre).square().sum(dim=1) for centre in centres])
    torch.testing.assert_close(score, squares.amin(dim=0))


def test_identify_equals_cross_entropy_of_scaled_cosines() -> None:
    objective = find_objective({"name": "identify", "size": 2, "machines": 2, "scale": 2.0})
    network = nn.Module()
    objective.extend(network, ModelSpec("model", "made by the test", BANDS, CLASSES, outputs=2))
    with torch.no_grad():  # lengths have no effect
        cast(Any, network).objective.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 5.0]]))
    outputs = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0], [9.0, 0.0]])
    step: Any = SimpleNamespace(models={"model": network}, forward=lambda name, batch: outputs)
    inputs = make_batch(outputs, torch.zeros(4).long(), columns={"group": torch.tensor([0, 1, 0, 1])})
    # The first two clips are on the row of their machine, the third is between both rows.
    losses = [np.log1p(np.exp(-2)), np.log1p(np.exp(-2)), np.log(2)]
    padded = dataclasses.replace(inputs, weight=torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert float(objective.loss(step, "model", padded).detach()) == pytest.approx(np.mean(losses), rel=1e-6)
    last = np.log1p(np.exp(2))  # the fourth clip is on the row of the other machine
    assert float(objective.loss(step, "model", inputs).detach()) == pytest.approx(np.mean([*losses, last]), rel=1e-6)
    with pytest.raises(
        ConfigError, match="reads the machine of each clip from column 'group'.*Add 'group' to data.columns"
    ):
        objective.loss(step, "model", dataclasses.replace(inputs, columns={}))


@pytest.mark.parametrize("frames", [8, 6])
def test_bins_are_means_of_equal_intervals(frames: int) -> None:
    x = torch.randn(2, 8, BANDS)
    x[1, frames:] = 1e6  # frames beyond the length of an example do not count
    lengths = torch.tensor([8, frames])
    bins = average_bins(x, lengths, 2)
    torch.testing.assert_close(bins[1], x[1, :frames].view(2, frames // 2, BANDS).mean(dim=1))
    # With three intervals of eight frames, a frame on an edge counts by its fraction.
    third = average_bins(x, lengths, 3)[0, 0]
    torch.testing.assert_close(third, (x[0, 0] + x[0, 1] + x[0, 2] * 2 / 3) / (8 / 3))
    torch.testing.assert_close(average_bins(x[:1], None, 8)[0], x[0])


def test_reconstruct_equals_the_error_of_the_decoder() -> None:
    objective, network, step = make_objective("reconstruct", size=4, bins=2)
    inputs = make_small_batch(weight=WEIGHT)
    decoded = cast(Any, network).objective(network(inputs.x)).view(BATCH, 2, BANDS)
    target = inputs.x.view(BATCH, 2, FRAMES // 2, BANDS).mean(dim=2)
    error = (decoded - target).square().mean(dim=(1, 2))
    assert float(objective.loss(step, "model", inputs).detach()) == pytest.approx(float(error[REAL].mean()), rel=1e-5)
    torch.testing.assert_close(objective.predictor(network)(inputs.x)[:, 0], error)


def test_contrast_equals_cross_entropy_over_the_batch() -> None:
    objective, network, step = make_objective("contrast", size=4, frames=3)
    inputs = make_small_batch(weight=WEIGHT)
    crops: list[Tensor] = []

    def forward(_: str, cut: Batch) -> Tensor:
        crops.append(cut.x)
        return cast(Tensor, network(cut.x))

    step.forward = forward
    with random_state(torch.tensor(5)):
        value = objective.loss(step, "model", inputs)
    with random_state(torch.tensor(5)):
        starts = [(uniform(BATCH, torch.device("cpu")) * (FRAMES - 3 + 1)).floor().long() for _ in range(2)]
    for crop, first_frames in zip(crops, starts, strict=True):
        expected = torch.stack(
            [clip[start : start + 3] for clip, start in zip(inputs.x, first_frames.tolist(), strict=True)]
        )
        torch.testing.assert_close(crop, expected)
    part = cast(Any, network).objective
    first, second = (part.norm(network(crop[REAL])).tanh() for crop in crops)
    expected_value = F.cross_entropy(first @ part.weight @ second.T, torch.arange(5))
    assert float(value) == pytest.approx(float(expected_value), rel=1e-5)


def test_random_numbers_are_uniform_and_independent_of_padding() -> None:
    with random_state(torch.tensor(3)):
        many, again = uniform(20_000, torch.device("cpu")), uniform(20_000, torch.device("cpu"))
    with random_state(torch.tensor(3)):
        few = uniform(7, torch.device("cpu"))
    assert torch.equal(few, many[:7])  # rows of padding have no effect
    assert float(many.min()) >= 0
    assert float(many.max()) < 1
    edges = torch.histc(many, 10, 0, 1) / len(many)
    assert float((edges - 0.1).abs().max()) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([many, again]))[0, 1])) < 0.03


def make_examples(labels: list[int], clips: list[int], names: tuple[str, ...], sets: np.ndarray | None = None) -> Any:
    result = SimpleNamespace(labels=np.array(labels), clips=np.array(clips), classes=names, sets=sets, columns={})
    result.targets = lambda labels: sets[labels].astype(np.float32)
    return result


def test_the_anomaly_score_of_a_clip_is_the_mean_over_its_segments() -> None:
    objective = find_objective({"name": "reconstruct", "normal": ["a", "c"]})
    outputs = torch.tensor([[1.0], [3.0], [10.0], [4.0]])
    metrics = objective.metrics(outputs, make_examples([0, 0, 1, 2], [7, 7, 3, 9], ("a", "b", "c")))
    scores = cast(Scores, metrics["scores"])
    assert scores.values.tolist() == [10, 2, 4]  # in ascending order of clips
    assert scores.truth.tolist() == [True, False, False]
    assert metrics["loss"] == Ratio(6.0, 2)  # over normal clips
    unknown = find_objective({"name": "reconstruct"}).metrics(
        outputs, make_examples([0, 0, 1, 2], [7, 7, 3, 9], ("a", "b", "c"))
    )
    assert dict(unknown) == {"loss": Ratio(16.0, 3)}


def test_multi_label_averages_the_segments_of_clips() -> None:
    objective = find_objective({"name": "multi_label"})
    names, sets = split_labels(["dog|rain", "rain", "|"], "|")
    assert names == ["dog", "rain"]
    assert sets.tolist() == [[True, True], [False, True], [False, False]]
    logits = torch.tensor([[2.0, 2.0], [0.0, 2.0], [-1.0, 3.0], [-3.0, -2.0]])
    metrics = objective.metrics(logits, make_examples([0, 0, 1, 2], [0, 0, 1, 2], ("dog", "rain"), sets))
    p = logits.double().sigmoid().numpy()
    p = np.stack([p[:2].mean(axis=0), p[2], p[3]])
    y = np.array([[1, 1], [0, 1], [0, 0]])
    expected = -(y * np.log(p) + (1 - y) * np.log(1 - p)).mean(axis=1).sum()
    assert cast(Ratio, metrics["loss"]).total == pytest.approx(expected)
    summary = summarise(metrics)
    assert summary["map"].value == summary["auc"].value == summary["macro_f1"].value == 1.0  # perfect ranking


@pytest.mark.parametrize(
    ("setting", "classes", "length", "match"),
    [
        (
            {"name": "compact", "normal": ["nromal"]},
            ("normal", "x"),
            9,
            r"objective.normal: there is no class 'nromal'. Did you mean 'normal'",
        ),
        ({"name": "reconstruct", "normal": ["a", "b"]}, ("a", "b"), 9, "names every class of the data"),
        ({"name": "contrast", "frames": 9}, ("a",), 9, r"objective.frames is 9, but clips have 9 frames"),
    ],
)
def test_options_that_do_not_fit_the_data_are_rejected(
    setting: dict[str, Any], classes: tuple[str, ...], length: int, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        find_objective(setting).check(classes, length)


def test_a_network_with_an_attribute_objective_is_rejected() -> None:
    objective, network, _ = make_objective("compact", size=4)
    with pytest.raises(ConfigError, match="has an attribute 'objective'"):
        objective.extend(copy.deepcopy(network), ModelSpec("model", "x", BANDS, CLASSES, outputs=4))
    assert dataclasses.is_dataclass(objective)
