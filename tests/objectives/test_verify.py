"""Speaker verification: loss, trials, scores, executors, predictions, export and errors."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
import voices
from commands import Raydfl
from sklearn.metrics import roc_curve
from torch import nn

from raydfl import load_model, read_rows, run
from raydfl.controls import measure_controls
from raydfl.core.errors import ConfigError, DataError
from raydfl.core.metrics import pool, summarise
from raydfl.core.types import Scores
from raydfl.data import Examples
from raydfl.data.population import Population
from raydfl.data.shards import Shard, cut_shards, join_shards
from raydfl.data.trials import TRIALS
from raydfl.engine.config import Config
from raydfl.objectives.verify import Verify, add_margin, measure_closeness
from raydfl.runs.inference import predictions
from raydfl.runs.inference.mistakes import read_predictions
from raydfl.runs.inference.onnx import export_model
from raydfl.runs.inference.recordings import Recording
from raydfl.runs.inference.tested import score_tests
from raydfl.runs.report.data import read_run
from raydfl.runs.report.mistakes import show_mistakes
from raydfl.testing import assert_same_bits, make_batch, read_tensors, start_server, train_federation

Tiny = Callable[..., Config]
VOICES = (
    f"data.name={voices.__file__}:Voices",
    "data.features={sample_rate: 8000, bands: 16, window_ms: 25, hop_ms: 10, normalise: part}",
    "data.label_from=group",
    "data.unseen=keep",
    "data.split={}",
    "data.partition={by: group, column: client}",
    "objective={name: verify, size: 6, ramp: 2}",
)
"""Two clients with two speakers each, and three further speakers in the test set. Clips have different lengths."""


# -- the loss ----------------------------------------------------------------------------------------------------------


class Identity(nn.Module):
    """A network that returns the mean frame of its input."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.objective = nn.Linear(rows.shape[1], len(rows), bias=False)
        self.objective.weight = nn.Parameter(rows.clone())

    def forward(self, x: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        return x.mean(dim=1)


def compute_loss(objective: Verify, network: nn.Module, batch: Any, round_index: int = 100) -> torch.Tensor:
    step: Any = SimpleNamespace(
        models={"model": network}, round_index=round_index, forward=lambda _, batch: network(batch.x)
    )
    return objective.loss(step, "model", batch)


def compute_reference(
    outputs: np.ndarray, rows: np.ndarray, y: np.ndarray, objective: Verify, margin: float
) -> tuple[float, float]:
    """Compute both terms of the loss from their definition, in loops over examples and pairs of rows."""
    unit = [row / np.linalg.norm(row) for row in rows]
    losses = []
    for output, label in zip(outputs, y, strict=True):
        angles = [math.acos(float(output @ row) / np.linalg.norm(output)) for row in unit]
        cosines = [math.cos(angle) for angle in angles]
        own = angles[label] + margin
        cosines[label] = math.cos(own) if own < math.pi else cosines[label] - margin * math.sin(margin)
        losses.append(-objective.scale * cosines[label] + math.log(sum(math.exp(objective.scale * c) for c in cosines)))
    spread = sum(
        max(0.0, objective.distance - float(np.linalg.norm(a - b))) ** 2 for a, b in itertools.permutations(unit, 2)
    )
    return float(np.mean(losses)), spread


@pytest.mark.parametrize("margin", [0.0, 0.3, 1.2])
def test_the_loss_and_its_gradients_equal_the_definition_in_float64(margin: float) -> None:
    rng = np.random.default_rng(3)
    outputs, rows, y = rng.normal(size=(9, 5)), rng.normal(size=(4, 5)), rng.integers(0, 4, 9)
    outputs[0] = -rows[y[0]] + 0.05 * rng.normal(size=5)  # an angle above pi - margin
    objective = Verify(size=5, scale=6.0, margin=margin, spread=0.7, distance=1.6)
    network = Identity(torch.from_numpy(rows)).double()
    x = torch.from_numpy(outputs).unsqueeze(1).requires_grad_()
    loss = compute_loss(objective, network, make_batch(x, torch.from_numpy(y)))
    first, second = compute_reference(outputs, rows, y, objective, margin)
    assert loss.item() == pytest.approx(first + 0.7 * second, abs=1e-9)
    assert second > 0.1
    loss.backward()
    for tensor, values in ((x, outputs), (network.objective.weight, rows)):
        gradient = tensor.grad.reshape(values.shape).numpy()  # type: ignore[union-attr]
        for place in [(0, 0), (1, 2), (3, 4)]:
            kept, found = values[place], []
            for step in (1e-6, -1e-6):
                values[place] = kept + step
                a, b = compute_reference(outputs, rows, y, objective, margin)
                found.append(a + 0.7 * b)
            values[place] = kept
            assert gradient[place] == pytest.approx((found[0] - found[1]) / 2e-6, abs=1e-5)


def test_three_values_by_hand() -> None:
    cosine, y = torch.tensor([[1.0, 0.0], [0.5, 0.0], [-1.0, 0.0]]), torch.tensor([0, 0, 0])
    moved = add_margin(cosine, y, math.pi / 6)
    # cos(0 + 30), cos(60 + 30), and beyond 150 degrees -1 - m sin m.
    expected = [math.sqrt(3) / 2, 0.0, -1 - math.pi / 12]
    torch.testing.assert_close(moved[:, 0], torch.tensor(expected), atol=1e-6, rtol=0)
    assert moved[:, 1].tolist() == [0.0, 0.0, 0.0]
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    # Distances sqrt(2), sqrt(0.8) and sqrt(0.4): only the last two are below 1, each twice.
    expected_closeness = 2 * ((1 - math.sqrt(0.8)) ** 2 + (1 - math.sqrt(0.4)) ** 2)
    assert measure_closeness(rows, 1.0).item() == pytest.approx(expected_closeness, abs=1e-6)


def test_without_margin_the_loss_is_the_softmax_of_the_cosines_and_the_ramp_is_linear() -> None:
    torch.manual_seed(0)
    network, y = Identity(torch.randn(4, 6)), torch.tensor([0, 3, 1])
    batch = make_batch(torch.randn(3, 5, 6), y)
    cosines = F.cosine_similarity(network(batch.x).unsqueeze(1), network.objective.weight.unsqueeze(0), dim=2)
    plain = F.cross_entropy(16 * cosines, y).item()
    assert compute_loss(Verify(size=6, margin=0), network, batch).item() == pytest.approx(plain, abs=1e-5)
    ramp = Verify(size=6, margin=0.4, ramp=4)
    assert compute_loss(ramp, network, batch, 0).item() == pytest.approx(plain, abs=1e-5)
    for completed, margin in ((1, 0.1), (3, 0.3), (4, 0.4), (9, 0.4)):
        fixed = Verify(size=6, margin=margin, ramp=0)
        assert compute_loss(ramp, network, batch, completed).item() == compute_loss(fixed, network, batch).item()


# -- trials and scores -------------------------------------------------------------------------------------------------


def make_clips(labels: list[int], segments: int = 1, trials: Any = None) -> Examples:
    labels = np.repeat(labels, segments)
    clips = np.repeat(np.arange(len(labels) // segments) * 3 + 5, segments)
    return Examples({}, labels, clips, trials=None if trials is None else np.array(trials, np.int32))


def list_scores(objective: Verify, outputs: torch.Tensor, examples: Examples) -> tuple[np.ndarray, np.ndarray]:
    scores = objective.metrics(outputs, examples)["scores"]
    assert isinstance(scores, Scores)
    return scores.values, scores.truth


def test_trials_are_all_pairs_of_clips_with_the_mean_of_their_segments() -> None:
    labels = [2, 0, 2, 1, 0, 2, -100]  # the last clip has no label
    outputs = torch.randn(14, 5, generator=torch.Generator().manual_seed(1))
    values, truth = list_scores(Verify(size=5), outputs, make_clips(labels, segments=2))
    unit = F.normalize(outputs.double(), dim=1).reshape(7, 2, 5).mean(dim=1).numpy()
    expected = [
        (float(unit[i] @ unit[j] / np.linalg.norm(unit[i]) / np.linalg.norm(unit[j])), labels[i] == labels[j])
        for i, j in itertools.combinations(range(6), 2)
    ]
    assert sorted(zip(values.round(10), truth.tolist(), strict=True)) == sorted((round(v, 10), t) for v, t in expected)


def test_trials_of_a_file_use_the_clips_of_the_examples() -> None:
    outputs = torch.eye(3)
    outputs[2] = torch.tensor([0.6, 0.8, 0.0])
    trials = [[5, 11, 1], [11, 8, 0], [5, 99, 1], [8, 8, 1]]  # clip 99 is elsewhere
    values, truth = list_scores(Verify(size=3), outputs, make_clips([0, 1, 2], trials=trials))
    np.testing.assert_allclose(values, [0.6, 0.8, 1.0], atol=1e-7)
    assert truth.tolist() == [True, False, True]
    assert Verify(size=3).metrics(outputs[:1], make_clips([0], trials=[[5, 99, 1]])) == {}


def test_joined_shards_have_all_examples_of_each_split_and_place() -> None:
    cut = cut_shards({"test": np.arange(1300), "triggered": np.arange(3)})
    assert len(cut) == 4
    north = [Shard("test", 0, 5, "north"), Shard("test", 5, 9, "north")]
    assert join_shards([*cut, *north]) == [
        Shard("test", 0, 1300, ""),
        Shard("triggered", 0, 3, ""),
        Shard("test", 0, 9, "north"),
    ]


def test_many_pairs_are_drawn_without_repetition_and_equally_in_all_runs() -> None:
    labels = np.random.default_rng(0).integers(0, 9, 60).tolist()
    outputs = torch.randn(60, 8, generator=torch.Generator().manual_seed(2))
    everything = list_scores(Verify(size=8), outputs, make_clips(labels))
    assert len(everything[0]) == 60 * 59 // 2
    objective = Verify(size=8, pairs=100)
    values, truth = list_scores(objective, outputs, make_clips(labels))
    assert (int(truth.sum()), int((~truth).sum())) == (50, 50)
    pairs = set(zip(values, truth, strict=True))
    assert len(pairs) == 100
    assert pairs <= set(zip(*everything, strict=True))
    again = list_scores(objective, outputs, make_clips(labels))
    np.testing.assert_array_equal(values, again[0])


def load_test(config: Config) -> tuple[Any, Examples]:
    """Return the network of a fresh run, and its test examples."""
    server = start_server(config)
    federation = server._federation
    worker = federation.pool.workers[""]  # type: ignore[attr-defined]
    (order,) = federation._make_orders(federation.method.plan_evaluation(federation.state, federation.clients[:1]), ())
    step = worker.prepare(order, federation.broadcast({"global"}))
    server.close()
    return step, Population.load(next(Path(config.run.dir).iterdir()) / "population").use(config.data).test


def test_scores_depend_on_neither_padding_nor_batches_and_pool_over_clients(tiny: Tiny) -> None:
    config = tiny(*VOICES)
    step, test = load_test(config)
    objective = config.components.method.objective
    whole = objective.evaluate(step, "model", test, 64)["scores"]
    assert isinstance(whole, Scores)
    assert len(whole.values) == 12 * 11 // 2
    assert whole.truth.sum() == 3 * 6
    for size in (1, 5):
        again = objective.evaluate(step, "model", test, size)["scores"]
        np.testing.assert_allclose(again.values, whole.values, atol=1e-6)  # type: ignore[union-attr]
    parts = [test.take(np.arange(5)), test.take(np.arange(5, 12))]
    measured = [objective.evaluate(step, "model", part, 64) for part in parts]
    pooled = summarise(pool(measured))
    inside = Scores(
        np.concatenate([part["scores"].values for part in measured]),  # type: ignore[union-attr]
        np.concatenate([part["scores"].truth for part in measured]),  # type: ignore[union-attr]
        of_pairs=True,
    )
    assert pooled == summarise({"scores": inside})
    assert pooled["eer"].count == 10 + 21
    assert set(pooled) == {"eer", "min_dcf"}
    step.models["model"].eval()
    batch = test.batch(np.arange(len(test)))
    losses = [objective.loss(step, "model", test.batch(np.array([index]))).item() for index in range(len(test))]
    assert objective.loss(step, "model", batch).item() == pytest.approx(np.mean(losses), abs=1e-5)
    longer = dataclasses.replace(batch, views={name: F.pad(x, (0, 0, 0, 9)) for name, x in batch.views.items()})
    assert objective.loss(step, "model", longer).item() == pytest.approx(np.mean(losses), abs=1e-5)
    weighted = dataclasses.replace(batch, weight=torch.tensor([1.0, 1.0, *[0.0] * 10]))
    assert objective.loss(step, "model", weighted).item() == pytest.approx(np.mean(losses[:2]), abs=1e-5)


def test_batched_clients_equal_unbatched_clients(tiny: Tiny) -> None:
    settings = (*VOICES, "train.rounds=3", "train.cohort=1.0", "train.batch_size=3", "objective.spread=0.2")
    looped = train_federation(tiny(*settings, "train.together=1", "run.name=looped"))
    batched = train_federation(tiny(*settings, "train.together=2", "run.name=batched"))
    assert set(looped) == set(batched)
    for name in looped:
        if name.endswith(("weight", "bias")) or "gru" in name:
            first, second = (np.frombuffer(values[name], np.float32) for values in (looped, batched))
            np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-6)
    assert_same_bits(batched, train_federation(tiny(*settings, "train.together=2", "run.name=again")))


@pytest.mark.parametrize("actors", [1, 2])
def test_actors_give_the_same_bits(tiny: Tiny, ray_session: None, actors: int) -> None:
    settings = (*VOICES, "train.rounds=2", "train.cohort=1.0", "train.batch_size=3", "evaluate.every=1")
    serial = run(tiny(*settings, "run.name=serial", "ray.actors=0")).run_dir
    parallel = run(tiny(*settings, "run.name=actors", f"ray.actors={actors}")).run_dir
    assert_same_bits(read_tensors(serial), read_tensors(parallel))
    first, second = (
        {(row["round"], row["metric"]): row["value"] for row in read_rows(folder).to_pylist() if row["split"] == "test"}
        for folder in (serial, parallel)
    )
    assert first == second
    assert (2, "model/min_dcf") in first


# -- predictions and export --------------------------------------------------------------------------------------------


def learn(tiny: Tiny, *overrides: str) -> Path:
    settings = ("train.rounds=20", "train.cohort=1.0", "train.optimiser={name: adam, lr: 0.01}", "evaluate.every=20")
    return run(tiny(*VOICES, *settings, *overrides)).run_dir


def read_tests(dataset: voices.Voices) -> tuple[list[Recording], list[str]]:
    rows = [row for row in dataset.manifest().to_pylist() if row["split"] == "test"]
    sounds = [Recording(Path(row["clip"]), dataset.read(row)[0], voices.RATE) for row in rows]
    return sounds, [row["group"] for row in rows]


@pytest.mark.slow
def test_predictions_give_the_values_of_the_run(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raydfl.data.shards._SHARD", 5)  # pairs across shards must count too
    folder = learn(tiny)
    record = read_run(folder)
    assert record.headline == "eer"
    sounds, speakers = read_tests(voices.Voices())
    found = [*predictions(load_model(folder), sounds)]
    embeddings = np.stack([item.embedding for item in found])
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-6)
    assert (found[0].label, found[0].answers) == ("", "embedding")
    pairs = [*itertools.combinations(range(len(speakers)), 2)]
    cosines = [embeddings[i] @ embeddings[j] for i, j in pairs]
    false, true, _ = roc_curve([speakers[i] == speakers[j] for i, j in pairs], cosines, drop_intermediate=False)
    place = int(np.argmax(false >= 1 - true))
    low, high = sorted((false[place - 1 : place + 1] + 1 - true[place - 1 : place + 1]) / 2)
    assert low <= record.curves["test", "model/eer"].last <= high
    rows = [row for row in read_rows(folder).to_pylist() if row["metric"] == "model/eer"]
    assert [(row["split"], row["client"], row["count"]) for row in rows] == [("test", "", len(pairs))]
    cost = min(0.01 * (1 - true) + 0.99 * false) / 0.01
    assert record.curves["test", "model/min_dcf"].last == pytest.approx(cost, abs=1e-9)
    assert 0 < record.curves["test", "model/eer"].last < 0.4  # it has learned something, but not everything
    trials = read_predictions(score_tests(folder).parent)
    places = {str(sound.name): index for index, sound in enumerate(sounds)}
    wrong = [trial for trial in trials if trial.label != trial.predicted]
    assert trials[: len(wrong)] == wrong, "wrong trials come first"
    share = {
        label: np.mean([trial.predicted != label for trial in trials if trial.label == label])
        for label in ("same speaker", "different speakers")
    }
    assert all(low - 0.1 <= value <= high + 0.1 for value in share.values()), "the threshold is near equal errors"
    for trial in trials:
        left, right = (places[name] for name in trial.clip.split(" and "))
        assert trial.label == ("same speaker" if speakers[left] == speakers[right] else "different speakers")
        assert trial.probability == pytest.approx(embeddings[left] @ embeddings[right], abs=1e-4)
    assert len(trials) == len(pairs)
    section = show_mistakes(read_run(folder))
    assert section.headings == ("listen", "spectrogram", "trial", "truth", "prediction", "cosine")
    assert {len(row) for row in section.rows} == {len(section.headings)}
    assert len(section.rows) == min(12, len(wrong))
    # The command line
    import soundfile

    files = [tmp_path / f"{index}.wav" for index in range(3)]
    for file, sound in zip(files, sounds, strict=False):
        soundfile.write(file, sound.values, sound.rate, subtype="FLOAT")
    raydfl = Raydfl(capsys)
    table = raydfl("predict", folder, *files).out
    for i, j in itertools.combinations(range(3), 2):
        assert [f"{i}.wav", f"{j}.wav", f"{embeddings[i] @ embeddings[j]:.3f}"] in [
            line.split() for line in table.splitlines()
        ]
    assert "embedding of 0.wav: " in raydfl("predict", folder, files[0]).out
    events = raydfl("predict", folder, *files, "--json").events
    np.testing.assert_allclose([event["embedding"] for event in events], embeddings[:3], atol=1e-5)
    lines = [*csv.reader(io.StringIO(raydfl("predict", folder, *files, tmp_path / "no.wav", "--csv").out))]
    assert lines[0] == ["file", *map(str, range(6)), "error"]
    by_file = {Path(line[0]).name: line for line in lines[1:]}
    np.testing.assert_allclose([float(value) for value in by_file["1.wav"][1:7]], embeddings[1], atol=1e-5)
    assert by_file["no.wav"][1:7] == [""] * 6


@pytest.mark.slow
def test_an_exported_graph_gives_the_embeddings(tiny: Tiny) -> None:
    folder = learn(tiny, "train.rounds=2", "data.features.seconds=0.3")
    sounds, _ = read_tests(voices.Voices())
    expected = np.stack([item.embedding for item in predictions(load_model(folder), sounds)])
    exported = export_model(folder, input="wave")
    assert exported.description["onnx"]["outputs"]["embedding"]["shape"] == ["batch", 6]
    session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
    actual = [session.run(["embedding"], {"samples": sound.values[None, :, 0]})[0][0] for sound in sounds]
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    features = export_model(folder)
    assert features.output == "embedding"
    assert features.difference < 1e-4


def test_controls_score_raw_features_on_the_same_trials(tiny: Tiny) -> None:
    config = tiny(*VOICES)
    start_server(config).close()
    population = Population.load(next(Path(config.run.dir).iterdir()) / "population").use(config.data)
    controls, note = measure_controls(population, config.components.method.objective, 1)
    assert note == ""
    assert [(control.name, control.metric, control.count) for control in controls] == [
        ("chance", "eer", 12),
        ("raw features: cosine", "eer", 12),
    ]
    assert controls[0].value == 0.5
    assert controls[1].value < 0.5  # each voice has a pitch of its own


# -- data and errors ---------------------------------------------------------------------------------------------------


def test_a_file_of_trials_decides_the_scores(tiny: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "trials.txt"
    file.write_text("1 v4/0.wav v4/1.wav\n0 v4/0.wav v5/1.wav\n\n1 v0/0.wav v0/1.wav\n0 v6/0.wav v5/1.wav\n")
    config = tiny(*VOICES, f"data.trials={file}")
    step, test = load_test(config)
    population = Population.load(next(Path(config.run.dir).iterdir()) / "population")
    assert population._part.tables.arrays[TRIALS].tolist() == [[16, 17, 1], [16, 21, 0], [0, 1, 1], [24, 21, 0]]
    scores = config.components.method.objective.evaluate(step, "model", test, 64)["scores"]
    assert scores.truth.tolist() == [True, False, False]  # the third trial is not in the test set


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (
            ("data.label_from=null", "data.leave_out=[word1]"),
            DataError,
            "they have a single label. .* data.label_from",
        ),
        (("data.label_from=author",), DataError, "data.label_from: the recordings have no column 'author'"),
        (("data.speakers=5", "data.tested=1"), DataError, "data.split: all clips .* are of the speaker 'v4'"),
        (("data.takes=1",), DataError, "data.split: no speaker has two clips in the test set"),
        (
            ("data.split={test: null, client_test: {by: clip, fraction: 0.2}}", "data.partition={by: group}"),
            DataError,
            "data.split.client_test: 7 of 7 clients have no trials of both kinds",
        ),
        (("method=moon",), ConfigError, "method 'moon' needs objective=classify, but the objective is 'verify'"),
        (("method=fedmlac", "models.plugin=crnn_tiny"), ConfigError, "method 'fedmlac' needs objective=classify"),
        (("data.label_sets={}",), ConfigError, "objective 'verify' needs one label for each clip"),
        (("data.label_sequences={}",), ConfigError, "objective 'verify' needs"),
        (("data.sites={here: {folder: /here}}", "data.trials=t.txt"), ConfigError, "data.trials names clips"),
        (("objective.margin=1.6",), ConfigError, "objective.margin"),
    ],
)
def test_errors_name_the_place_the_problem_and_the_remedy(
    tiny: Tiny, overrides: tuple[str, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        start_server(tiny(*VOICES, *overrides))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no trials. Write a line 1 CLIP CLIP"),
        ("1 v4/0.wav v4/1.wav\n2 v4/0.wav v4/1.wav\n", r"line 2 is '2 v4/0.wav v4/1.wav'. Write 1 or 0"),
        ("1 v4/0.wav\n", "line 1 is '1 v4/0.wav'"),
        ("1 v0/0.wav v0/0.wav\n", r"line 1 compares the clip 'v0/0.wav' with itself"),
        ("1 v0/0.wav v0/1.wav\n0 v0/1.wav v0/0.wav\n", r"line 2: an earlier line has the other answer for 'v0/1.wav'"),
        ("\n0 v4/0.wav v4/nine.wav\n", r"line 2: unknown clip 'v4/nine.wav'. .* such as 'v0/0.wav'"),
        ("1 v0/0.wav v0/1.wav\n", "0 trials have both clips in the test set"),
        ("1 v4/0.wav v4/1.wav\n", "1 trials have both clips in the test set, 1 of them of the same speaker"),
        (None, "trials.txt: cannot be read"),
    ],
)
def test_invalid_trials_are_rejected(tiny: Tiny, tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "trials.txt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=f"^data.trials.*{message}"):
        start_server(tiny(*VOICES, f"data.trials={file}"))


def test_remarks_warn_of_clients_with_one_speaker_and_of_tests_without_trials(tiny: Tiny) -> None:
    def list_remarks(*overrides: str) -> list[str]:
        config = tiny(*VOICES, *overrides)
        start_server(config).close()
        folder = Path(config.run.dir) / config.run.name
        population = Population.load(folder / "population").use(config.data)
        return [*config.components.method.objective.remarks(population)]

    assert list_remarks("run.name=two") == []
    grouped = ("data.partition={by: group}", "run.name=one")
    assert "4 of 4 clients have clips of one speaker only" in list_remarks(*grouped)[0]
    assert list_remarks(*grouped[:1], "run.name=spread", "objective.spread=0.1") == []
    tested = list_remarks(*grouped[:1], "run.name=tested", "data.split.client_test={by: clip, fraction: 0.5}")
    assert "4 of 4 clients have no trials of both kinds in their own test" in tested[1]


def test_labels_come_from_a_column_after_labels_are_left_out(tiny: Tiny) -> None:
    config = tiny(*VOICES, "data.leave_out=[word1]")
    start_server(config).close()
    population = Population.load(next(Path(config.run.dir).iterdir()) / "population")
    assert population.classes == ("v0", "v1", "v2", "v3", "v4", "v5", "v6")
    assert population.class_counts().tolist() == [2, 2, 2, 2, 0, 0, 0]
