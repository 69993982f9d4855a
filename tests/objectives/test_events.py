"""Sound event detection: loss, scores, segments, padding, executors, predictions, export and errors."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import beeps
import numpy as np
import pytest
import soundfile
import torch
from beeps import BEEPS
from test_transcribe import load_test
from torch import Tensor, nn

from raydfl import load_model, run
from raydfl.cli.predictions import format_answer, show
from raydfl.core.errors import ConfigError
from raydfl.core.metrics import pool, summarise
from raydfl.core.psds import compute_psds, count_detections
from raydfl.core.types import Batch
from raydfl.data.build import build_population
from raydfl.data.segment import segments
from raydfl.data.steps.events import parse_events
from raydfl.engine.config import Config
from raydfl.models.crnn import CRNN
from raydfl.objectives.events import Events, count_segments
from raydfl.runs.inference import predictions
from raydfl.runs.inference.onnx import export_model
from raydfl.runs.inference.recordings import Recording
from raydfl.runs.inference.tested import score_tests
from raydfl.runs.report.data import read_run
from raydfl.testing import assert_same_bits, make_batch, read_tensors, start_server, train_federation

Tiny = Callable[..., Config]
INF = float("inf")


class Logits(nn.Module):
    """A network whose tokens are logits given as its inputs."""

    frames_per_token = 2

    def frames(self, x: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return x[:, ::2], None if lengths is None else lengths // 2

    def head(self, tokens: Tensor) -> Tensor:
        return tokens


def compute_loss(x: Tensor, y: Tensor, lengths: Tensor | None = None, **options: Any) -> float:
    class Step:
        models = {"model": Logits()}  # noqa: RUF012 - never changed

    return Events(**options).loss(Step(), "model", make_batch(x, y, lengths)).item()  # type: ignore[arg-type]


def compute_by_loops(x: Tensor, y: Tensor, tokens: list[int], times: bool) -> float:
    """Compute the loss in float64, by its definition."""
    losses = []
    for logits, events, count in zip(x[:, ::2].double().numpy(), y.double().tolist(), tokens, strict=True):
        p = 1 / (1 + np.exp(-logits[:count]))
        present = [any(label == c for *_, label in events) for c in range(p.shape[1])]
        values = []
        for c, is_present in enumerate(present):
            if times and events[0][0] != -INF:
                for t in range(count):
                    active = any(onset <= 2 * t + 1 < offset for onset, offset, label in events if label == c)
                    values.append(-np.log(p[t, c] if active else 1 - p[t, c]))
            else:
                pooled = (p[:, c] ** 2).sum() / p[:, c].sum()
                values.append(-np.log(pooled if is_present else 1 - pooled))
        losses.append(np.mean(values))
    return float(np.mean(losses))


@pytest.mark.parametrize("times", [True, False])
def test_the_loss_equals_its_definition_in_float64(times: bool) -> None:
    x = torch.randn(4, 24, 3, generator=torch.Generator().manual_seed(0))
    y = torch.tensor(
        [
            [[3.0, 9.5, 0], [-4.0, 6.2, 2]],
            [[-INF, INF, 1], [-INF, INF, 2]],
            [[0, 0, -1], [0, 0, -1]],
            [[7.0, 7.5, 1], [0, 0, -1]],
        ]
    )
    lengths = torch.tensor([24, 18, 11, 20])
    found = compute_loss(x, y, lengths, times=times)
    assert found == pytest.approx(compute_by_loops(x, y, [12, 9, 5, 10], times), rel=1e-5)
    assert compute_loss(x, y, times=times) == pytest.approx(compute_by_loops(x, y, [12] * 4, times), rel=1e-5)


def test_losses_by_hand() -> None:
    """Two tokens with p = 0.5 and 0.2, by logits 0 and -log 4. Centres are at frames 1 and 3."""
    x = torch.tensor([0.0, 0.0, -np.log(4), 0.0], dtype=torch.float32).reshape(1, 4, 1)
    first, weak, none = (torch.tensor([[event]]) for event in ([0.5, 2.0, 0.0], [-INF, INF, 0.0], [0.0, 0.0, -1.0]))
    assert compute_loss(x, first) == pytest.approx(-(np.log(0.5) + np.log(0.8)) / 2, rel=1e-6)
    assert compute_loss(x, weak) == pytest.approx(-np.log(0.29 / 0.7), rel=1e-6)
    assert compute_loss(x, none) == pytest.approx(-(np.log(0.5) + np.log(0.8)) / 2, rel=1e-6)
    assert compute_loss(x, none, times=False) == pytest.approx(-np.log(0.41 / 0.7), rel=1e-6)


def test_saturated_probabilities_give_finite_losses_and_gradients() -> None:
    x = torch.tensor([[-200.0, 0, 200.0, 0], [-200.0, 0, -200.0, 0]]).unsqueeze(2).requires_grad_()
    y = torch.tensor([[[-INF, INF, 0.0]], [[-INF, INF, 0.0]]])

    class Step:
        models = {"model": Logits()}  # noqa: RUF012 - never changed

    loss = Events().loss(Step(), "model", make_batch(x, y))  # type: ignore[arg-type]
    loss.backward()
    assert loss.isfinite()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_segments_of_1_s_are_active_if_any_part_is() -> None:
    truth, answer = np.array([[0.5, 1.0, 0], [2.9, 3.1, 1]]), np.array([[0.9, 1.1, 0], [3.0, 4.0, 1]])
    assert count_segments(truth, answer, 2) == (2, 4)  # (0, 0), (3, 1); (1, 0), (2, 1)
    assert count_segments(truth, truth, 2) == (3, 3)
    assert count_segments(truth, np.zeros((0, 3)), 2) == (0, 3)
    assert count_segments(np.array([[0.0, 3 * 0.1 / 0.3, 0]]), np.zeros((0, 3)), 1) == (0, 1)  # rounding


def test_answers_of_segments_are_joined_and_filtered(tiny: Tiny) -> None:
    step, test = load_test(tiny(*BEEPS, "data.segment={frames: 40, stride: 20}"))
    network, objective = step.models["model"], Events()
    clip = test.take(np.flatnonzero(test.clips == test.clips[0]))
    _, starts, counts = segments(clip.first_view.store.lengths[clip.clips[:1]], None, None)
    outputs = objective.answers_to(step, "model", clip, 64).double()
    joined = objective.answer_of_examples(outputs, clip, network)
    assert len(clip) > 2
    assert starts.tolist() == [0]
    assert len(joined) == 10 * (len(clip) + 1) <= counts[0] / 2
    torch.testing.assert_close(joined[:10], outputs[0, :10])
    torch.testing.assert_close(joined[10:20], (outputs[0, 10:] + outputs[1, :10]) / 2)
    peak = torch.zeros_like(outputs)
    peak[0, 3] = 1.0
    filtered = Events(median_filter=0.06).answer_of_examples(peak, clip, network)
    assert objective.answer_of_examples(peak, clip, network).sum() == 3
    assert filtered.sum() == 0


def test_metrics_are_pooled_and_depend_on_neither_padding_nor_batches(tiny: Tiny) -> None:
    config = tiny(*BEEPS, "data.weak=2")
    step, test = load_test(config)
    objective = config.components.method.objective
    whole = objective.evaluate(step, "model", test, 64)
    assert len(test) == 6
    assert whole["loss"].count == 6
    timed = [row for row in beeps.Beeps(weak=2).manifest().to_pylist() if row["split"] == "test"]
    events = [event for row in timed for event in parse_events(row["label"]) if event[0] >= 0]
    assert summarise(whole)["psds1"].count == len(events) == 4
    for size in (1, 4):
        again = objective.evaluate(step, "model", test, size)
        assert again["segment_f1"] == whole["segment_f1"]
        np.testing.assert_array_equal(again["detections"], whole["detections"])
        assert again["loss"].value == pytest.approx(whole["loss"].value, abs=1e-6)
    parts = [test.take(np.arange(2)), test.take(np.arange(2, 6))]
    pooled = pool(objective.evaluate(step, "model", part, 64) for part in parts)
    assert pooled["segment_f1"] == whole["segment_f1"]
    np.testing.assert_array_equal(pooled["detections"], whole["detections"])
    assert pooled["loss"].value == pytest.approx(whole["loss"].value, abs=1e-6)


def test_the_loss_ignores_padding(tiny: Tiny) -> None:
    config = tiny(*BEEPS, "data.weak=2")
    step, test = load_test(config)
    objective = config.components.method.objective
    step.models["model"].eval()
    batch = test.batch(np.arange(len(test)))
    losses = [objective.loss(step, "model", test.batch(np.array([index]))).item() for index in range(len(test))]
    assert objective.loss(step, "model", batch).item() == pytest.approx(np.mean(losses), abs=1e-6)
    assert objective.evaluate(step, "model", test, 3)["loss"].value == pytest.approx(np.mean(losses), abs=1e-6)
    longer = {name: nn.functional.pad(x, (0, 0, 0, 9)) for name, x in batch.views.items()}
    padded = objective.loss(step, "model", Batch(longer, batch.y, batch.view_lengths))
    assert padded.item() == pytest.approx(np.mean(losses), abs=1e-6)
    weight = torch.tensor([1.0, 1.0, 0, 0, 0, 0])
    weighted = objective.loss(step, "model", Batch(batch.views, batch.y, batch.view_lengths, weight=weight))
    assert weighted.item() == pytest.approx(np.mean(losses[:2]), abs=1e-6)


CROP = "data.transforms=[{name: random_crop, size: 60, test: segments}]"


@pytest.mark.parametrize(
    "settings", [(), (CROP,), ("data.segment={frames: 60, stride: 30}",)], ids=["whole", "crop", "segment"]
)
def test_batched_clients_equal_unbatched_clients(tiny: Tiny, settings: tuple[str, ...]) -> None:
    common = (
        *BEEPS,
        *settings,
        "train.rounds=2",
        "train.cohort=1.0",
        "train.batch_size=2",
        "data.groups=3",
        "data.weak=1",
    )
    looped = train_federation(tiny(*common, "train.together=1", "run.name=looped"))
    batched = train_federation(tiny(*common, "train.together=3", "run.name=batched"))
    assert set(looped) == set(batched)
    for name in looped:
        if name.endswith(("weight", "bias")) or "gru" in name:
            first, second = (np.frombuffer(values[name], np.float32) for values in (looped, batched))
            np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("actors", [1, 2])
def test_actors_give_the_same_bits(tiny: Tiny, ray_session: None, actors: int) -> None:
    settings = (*BEEPS, CROP, "train.rounds=2", "train.cohort=1.0", "train.batch_size=2", "data.groups=3")
    serial = train_federation(tiny(*settings, "run.name=serial"))
    outcome = run(tiny(*settings, "run.name=actors", f"ray.actors={actors}"))
    assert_same_bits(serial, read_tensors(outcome.run_dir))


LEARNS = (
    *BEEPS,
    "data.takes=12",
    "data.groups=3",
    "models.model={name: crnn_tiny, hidden: 16, filters: [8]}",
    "data.features.normalise=part",
    "train.rounds=30",
    "train.optimiser={name: adam, lr: 0.02}",
    "train.cohort=1.0",
    "evaluate.every=30",
)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("data.segment={frames: 60, stride: 30}",)], ids=["whole", "segment"])
def test_predictions_equal_the_values_of_the_run(tiny: Tiny, tmp_path: Path, settings: tuple[str, ...]) -> None:
    folder = run(tiny(*LEARNS, *settings)).run_dir
    record = read_run(folder)
    assert record.headline == "psds1"
    assert record.curves["test", "model/psds1"].last > 0.3  # it has learned
    with score_tests(folder).open(newline="") as file:
        rows = {row["clip"]: row for row in csv.DictReader(file)}
    spoken = beeps.Beeps(takes=12, groups=3)
    tests = [row for row in spoken.manifest().to_pylist() if row["split"] == "test"]
    for row in tests:
        soundfile.write(tmp_path / row["clip"].replace("/", "-"), spoken.read(row)[0], beeps.RATE, subtype="FLOAT")
    model = load_model(folder)
    sounds = [Recording(Path(row["clip"]), spoken.read(row)[0], beeps.RATE) for row in tests]
    found = {str(item.file): item for item in predictions(model, sounds)}
    right, wrong, counts = 0, 0, np.zeros(())
    for row in tests:
        assert parse_events(rows[row["clip"]]["label"]) == sorted(parse_events(row["label"]))
        item, codes = found[row["clip"]], {name: number for number, name in enumerate(model.classes)}
        np.testing.assert_allclose(
            [event[:2] for event in parse_events(rows[row["clip"]]["predicted"])],
            sorted(event[:2] for event in item.intervals),
            atol=1e-4,
        )
        truth, answer = (
            np.array([(*event[:2], codes[event[2]]) for event in events]).reshape(-1, 3)
            for events in (parse_events(row["label"]), item.intervals)
        )
        both, either = count_segments(truth, answer, 3)
        right, wrong = right + both, wrong + either - both
        counts = counts + count_detections(item.probabilities, 0.01 * model.network.frames_per_token, truth)
    for name in ("psds1", "psds2"):
        assert record.curves["test", f"model/{name}"].last == pytest.approx(compute_psds(counts, name), abs=1e-12)
    assert record.curves["test", "model/segment_f1"].last == pytest.approx(2 * right / (2 * right + wrong), abs=1e-12)
    out = io.StringIO()
    show(found.values(), 1, "csv", "", out, "intervals")
    written = [*csv.reader(io.StringIO(out.getvalue()))]
    assert written[0] == ["file", "onset", "offset", "label", "error"]
    assert len(written) == 1 + sum(max(1, len(item.intervals)) for item in found.values())
    out = io.StringIO()
    show(found.values(), 1, "json", "", out, "intervals")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [len(line["events"]) for line in lines] == [len(item.intervals) for item in found.values()]
    out = io.StringIO()
    show(found.values(), 1, "table", "heading", out, "intervals")
    event = next(item for item in found.values() if item.intervals)
    onset, offset, label = event.intervals[0]
    assert f"{onset:.2f}" in out.getvalue()
    assert format_answer(event).startswith(f"{label} {onset:.2f}-{offset:.2f} s")


@pytest.mark.slow
def test_the_export_equals_predict(tiny: Tiny) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    folder = run(tiny(*BEEPS, "train.rounds=1")).run_dir
    exported = export_model(folder)
    assert exported.difference < 1e-4
    facts = exported.description["onnx"]["outputs"]["probabilities"]
    assert facts["seconds_per_token"] == pytest.approx(0.02)
    assert facts["shape"][2] == 3
    assert exported.description["has_class_from"] == 0.5
    model, x, lengths = load_model(folder), torch.randn(2, 90, 16), torch.tensor([90, 71])
    x[1, 71:] = 0
    session = onnxruntime.InferenceSession(exported.path)
    (outputs,) = session.run(None, {"x": x.numpy(), "lengths": lengths.numpy()})
    assert outputs.shape == (2, 45, 3)
    np.testing.assert_allclose(outputs, model.logits(x, lengths).numpy(), atol=1e-4)
    assert (outputs[1, 35:] == -1).all()


class NoFrames(nn.Module):
    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.output = nn.Linear(inputs, classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.output(x.mean(dim=1))  # type: ignore[no-any-return]


class WrongRate(CRNN):
    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__(inputs, classes, filters=(4,), hidden=4)
        self.frames_per_token = 1


SECOND = "data.views={second: {column: path, features: {sample_rate: 8000, bands: 12, hop_ms: 10}}}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("models.model=mlp",), r"models.model: objective 'events' needs .* \w+ has no frames\(\)"),
        ((f"models.model={__file__}:NoFrames",), r"NoFrames has no frames\(\)"),
        (
            (f"models.model={__file__}:WrongRate",),
            r"WrongRate has 6\d tokens for 1\d\d frames, but frames_per_token 1 means 1\d\d",
        ),
        (
            ("models.model={name: ssast_tiny, frames: 32}",),
            r"SSAST has 2 tokens for 1\d\d frames, .* Raise its number of frames",
        ),
        (("data.events=null",), "data.events: objective 'events' needs events, but a label is a class"),
        (("objective=classify",), "data.events: objective 'classify' needs labels without times"),
        (("objective=multi_label",), "objective 'multi_label' needs labels without times"),
        (("method=moon",), "method 'moon' needs objective=classify, but the objective is 'events'"),
        (("attack={name: label_flip, clients: 1}",), "attack 'label_flip' needs an objective .* class for each clip"),
    ],
)
def test_errors_name_the_place_the_problem_and_the_remedy(tiny: Tiny, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start_server(tiny(*BEEPS, *overrides))


def test_a_test_without_times_gives_a_warning(tiny: Tiny) -> None:
    config = tiny(*BEEPS, "data.weak=6")
    objective = config.components.method.objective
    population = build_population(config.data, config.run.seed)
    assert list(objective.remarks(population)) == [
        "no test clip has the times of an event, so psds1, psds2 and segment_f1 have no value"
    ]
    assert not objective.remarks(build_population(tiny(*BEEPS, "run.name=timed").data, 1))


def test_a_diverged_network_has_no_finite_loss_and_no_answer(tiny: Tiny) -> None:
    config = tiny(*BEEPS)
    step, test = load_test(config)
    for parameter in step.models["model"].parameters():
        parameter.data.fill_(torch.nan)
    objective = config.components.method.objective
    metrics = summarise(objective.evaluate(step, "model", test, 64))
    assert np.isnan(metrics["loss"].value)
    assert metrics["psds1"].value == 0
    clip = test.take(np.arange(1))
    outputs = objective.answers_to(step, "model", clip, 1).double()
    assert objective.answer_of_examples(outputs, clip, step.models["model"]).isnan().all()  # predict raises an error
