"""Transcripts: decoding, error rates, padding, executors, predictions and errors."""

from __future__ import annotations

import csv
import functools
import io
import itertools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pytest
import torch
import transcripts
from torch import Tensor, nn

from raydfl import load_model, run
from raydfl.cli.predictions import show
from raydfl.core.errors import ClipError, ConfigError, DataError
from raydfl.core.metrics import count_edits, pool, summarise
from raydfl.core.types import Batch
from raydfl.data.build import build_population
from raydfl.data.population import Population
from raydfl.engine.config import Config
from raydfl.objectives.transcribe import Transcribe, count_needed_tokens
from raydfl.runs.inference import predictions
from raydfl.runs.inference.onnx import export_model
from raydfl.runs.inference.recordings import Recording
from raydfl.runs.inference.tested import score_tests
from raydfl.runs.report.data import read_run
from raydfl.testing import assert_same_bits, read_tensors, start_server, train_federation

Tiny = Callable[..., Config]
SPOKEN = (
    f"data.name={transcripts.__file__}:Spoken",
    "data.features={sample_rate: 8000, bands: 16, window_ms: 25, hop_ms: 10}",
    "data.label_sequences={units: characters}",
    "data.split={}",
    "data.partition={by: group}",
    "objective=transcribe",
)
"""Clips of different lengths."""


@functools.cache
def compute_distance(truth: str, answer: str) -> int:
    """Compute the edit distance by its recursive definition."""
    if not truth or not answer:
        return len(truth) + len(answer)
    if truth[0] == answer[0]:
        return compute_distance(truth[1:], answer[1:])
    pairs = ((truth[1:], answer), (truth, answer[1:]), (truth[1:], answer[1:]))
    return 1 + min(compute_distance(*pair) for pair in pairs)


def draw_text(rng: np.random.Generator) -> str:
    return "".join(rng.choice([*"ab "], size=rng.integers(0, 9)))


def test_edits_equal_the_recursive_definition() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        truth, answer = draw_text(rng), draw_text(rng)
        assert count_edits(truth, answer) == compute_distance(truth, answer)
    assert count_edits(["one", "two"], ["two"]) == 1


def test_error_rates_equal_jiwers() -> None:
    rng = np.random.default_rng(1)
    pairs = [[" ".join(draw_text(rng).split()) for _ in range(2)] for _ in range(1300)]
    pairs = [(truth, answer) for truth, answer in pairs if truth]
    assert len(pairs) >= 1000
    for truth, answer in pairs:
        assert count_edits(truth, answer) / len(truth) == pytest.approx(jiwer.cer(truth, answer))
        words = truth.split()
        assert count_edits(words, answer.split()) / len(words) == pytest.approx(jiwer.wer(truth, answer))


def test_decoding_merges_repeats_and_removes_blanks() -> None:
    tokens = np.eye(3)[[0, 1, 1, 0, 1, 2, 2, 0]]
    assert Transcribe().transcript(tokens, ["a", "b"], "") == "aab"
    assert Transcribe().transcript(tokens, ["one", "two"], " ") == "one one two"
    assert Transcribe().transcript(np.eye(3)[[0, 0]], ["a", "b"], "") == ""


def test_needed_tokens_count_units_and_repeats() -> None:
    assert count_needed_tokens(np.array([[0, 0, 1], [0, 1, 0], [1, -1, -1], [-1, -1, -1]])).tolist() == [4, 3, 1, 0]


def load_test(config: Config) -> tuple[Any, Any]:
    """Return the network of a fresh run, and its test examples."""
    server = start_server(config)
    worker = server._federation.pool.workers[""]  # type: ignore[attr-defined]
    federation = server._federation
    (order,) = federation._make_orders(federation.method.plan_evaluation(federation.state, federation.clients[:1]), ())
    step = worker.prepare(order, federation.broadcast({"global"}))
    server.close()
    return step, Population.load(next(Path(config.run.dir).iterdir()) / "population").use(config.data).test


def test_metrics_are_pooled_and_depend_on_neither_padding_nor_batches(tiny: Tiny) -> None:
    config = tiny(*SPOKEN)
    step, test = load_test(config)
    objective = config.components.method.objective
    whole = objective.evaluate(step, "model", test, 64)
    assert len(test) == 7
    assert whole["cer"].count == len("ab bb aabcbabc")
    assert whole["wer"].count == 8
    for size in (1, 3):
        again = objective.evaluate(step, "model", test, size)
        assert again["cer"] == whole["cer"]
        assert again["loss"].value == pytest.approx(whole["loss"].value, abs=1e-6)
    parts = [test.take(np.arange(3)), test.take(np.arange(3, 7))]
    pooled = summarise(pool(objective.evaluate(step, "model", part, 64) for part in parts))
    assert (pooled["cer"], pooled["wer"]) == (whole["cer"], whole["wer"])
    assert pooled["loss"].value == pytest.approx(whole["loss"].value, abs=1e-6)


def test_the_loss_ignores_padding_and_divides_each_clip_by_its_units(tiny: Tiny) -> None:
    config = tiny(*SPOKEN)
    step, test = load_test(config)
    objective = config.components.method.objective
    step.models["model"].eval()
    batch = test.batch(np.arange(len(test)))
    losses = [objective.loss(step, "model", test.batch(np.array([index]))).item() for index in range(len(test))]
    assert objective.loss(step, "model", batch).item() == pytest.approx(np.mean(losses), abs=1e-6)
    longer = Batch(
        {name: nn.functional.pad(x, (0, 0, 0, 9)) for name, x in batch.views.items()}, batch.y, batch.view_lengths
    )
    assert objective.loss(step, "model", longer).item() == pytest.approx(np.mean(losses), abs=1e-6)
    weighted = Batch(batch.views, batch.y, batch.view_lengths, weight=torch.tensor([1.0, 1.0, *[0.0] * 5]))
    assert objective.loss(step, "model", weighted).item() == pytest.approx(np.mean(losses[:2]), abs=1e-6)
    # Independent: torch's own loss of a single clip, with its own lengths.
    network, index = step.models["model"], next(row for row, label in enumerate(batch.y.tolist()) if label[3] >= 0)
    frames, count = network.frames(*test.batch(np.array([index])).input_of(network))
    log_probabilities = network.output(frames).log_softmax(dim=2).transpose(0, 1)
    own = nn.functional.ctc_loss(
        log_probabilities, batch.y[index : index + 1] + 1, count, torch.tensor([4]), reduction="sum"
    )
    assert losses[index] == pytest.approx(own.item() / 4, abs=1e-6)


def test_batched_clients_equal_unbatched_clients(tiny: Tiny) -> None:
    settings = (*SPOKEN, "train.rounds=2", "train.cohort=1.0", "train.batch_size=3", "data.groups=3")
    looped = train_federation(tiny(*settings, "train.together=1", "run.name=looped"))
    batched = train_federation(tiny(*settings, "train.together=3", "run.name=batched"))
    assert set(looped) == set(batched)
    for name in looped:
        if name.endswith(("weight", "bias")) or "gru" in name:
            first, second = (np.frombuffer(values[name], np.float32) for values in (looped, batched))
            np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-6)
    config = tiny(*settings, "train.together=3", "run.name=again")
    assert_same_bits(batched, train_federation(config))


@pytest.mark.parametrize("actors", [1, 2])
def test_actors_give_the_same_bits(tiny: Tiny, ray_session: None, actors: int) -> None:
    settings = (*SPOKEN, "train.rounds=2", "train.cohort=1.0", "train.batch_size=3", "data.groups=3")
    serial = train_federation(tiny(*settings, "run.name=serial"))
    outcome = run(tiny(*settings, "run.name=actors", f"ray.actors={actors}"))
    assert_same_bits(serial, read_tensors(outcome.run_dir))


@pytest.mark.slow
def test_predictions_equal_the_values_of_the_run(tiny: Tiny) -> None:
    config = tiny(
        *SPOKEN,
        "models.model={name: crnn_tiny, hidden: 16, filters: [8]}",
        "train.rounds=40",
        "train.optimiser={name: adam, lr: 0.03}",
        "train.cohort=1.0",
        "evaluate.every=40",
    )
    folder = run(config).run_dir
    record = read_run(folder)
    assert record.headline == "cer"
    csv_file = score_tests(folder)
    with csv_file.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    edits, characters = (
        sum(count_edits(row["label"], row["predicted"]) for row in rows),
        sum(len(row["label"]) for row in rows),
    )
    assert record.curves["test", "model/cer"].last == pytest.approx(edits / characters, abs=1e-12)
    assert 0 < edits < characters  # it has learned something, but not everything
    rates = [count_edits(row["label"], row["predicted"]) / max(1, len(row["label"])) for row in rows]
    assert rates == sorted(rates, reverse=True)
    spoken = transcripts.Spoken()
    tests = [row for row in spoken.manifest().to_pylist() if row["split"] == "test"]
    sounds = [Recording(Path(row["clip"]), spoken.read(row)[0], transcripts.RATE) for row in tests]
    found = {str(item.file): item for item in predictions(load_model(folder), sounds)}
    assert {name: item.text for name, item in found.items()} == {row["clip"]: row["predicted"] for row in rows}
    out = io.StringIO()
    show(found.values(), 1, "csv", "", out, "text")
    written = [*csv.DictReader(io.StringIO(out.getvalue()))]
    assert [row["text"] for row in written] == [item.text for item in found.values()]
    assert [*written[0]] == ["file", "text", "error"]
    json_out = io.StringIO()
    show(found.values(), 1, "json", "", json_out, "text")
    assert '"text": ' in json_out.getvalue()
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    exported = export_model(folder, input="wave")
    assert exported.difference < 1e-4
    facts = exported.description["onnx"]["outputs"]["log_probabilities"]
    assert facts["shape"] == ["batch", "any", len(exported.description["classes"])]
    session = onnxruntime.InferenceSession(exported.path)
    for sound in sounds:
        (answers,) = session.run(None, {"samples": sound.values.reshape(1, -1)})
        best = [index for index, _ in itertools.groupby(answers[0].argmax(axis=1).tolist())]
        units = [exported.description["classes"][index] for index in best if index]
        assert exported.description["separator"].join(units) == found[str(sound.name)].text


@pytest.mark.parametrize(("seconds", "warns"), [("null", False), ("0.1", True), ("2.0", False)])
def test_clips_that_may_be_cut_off_cause_a_warning(tiny: Tiny, seconds: str, warns: bool) -> None:
    config = tiny(*SPOKEN, f"data.features.seconds={seconds}")
    remarks = Transcribe().remarks(build_population(config.data, 1))
    assert [
        bool(re.search(r"training clips last at least data.features.seconds.*Raise", text)) for text in remarks
    ] == [True] * warns


class NoFrames(nn.Module):
    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.output = nn.Linear(inputs, classes)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.output(x.mean(dim=1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (
            ("models.model=mlp",),
            ConfigError,
            r"models.model: objective 'transcribe' needs .* \w+ has no frames\(\)",
        ),
        ((f"models.model={__file__}:NoFrames",), ConfigError, r"NoFrames has no frames\(\)"),
        (
            ("models.model={name: crnn, pool: 4, filters: [4, 4], hidden: 4}",),
            DataError,
            r"models.model: the transcript 'ab b' of clip 0/2 needs 4 tokens: .* has 3 for its \d+ frames. "
            r"Lower models.model.pool, data.features.hop_ms or window_ms",
        ),
        (("data.label_sequences=null",), ConfigError, "data.label_sequences: objective 'transcribe' needs transcripts"),
        (
            ("objective=classify",),
            ConfigError,
            "data.label_sequences: objective 'classify' needs labels that are no transcripts",
        ),
        (
            ("objective={name: compact, size: 4, normal: [a]}",),
            ConfigError,
            "objective 'compact' needs labels that are no transcripts",
        ),
        (("method=moon",), ConfigError, "method 'moon' needs objective=classify, but the objective is 'transcribe'"),
        (
            ("attack={name: label_flip, clients: 1}",),
            ConfigError,
            "attack 'label_flip' needs an objective .* class for each clip",
        ),
        (('data.texts=["-", "?"]',), DataError, "all 2 transcripts are empty"),
    ],
)
def test_errors_name_the_place_the_problem_and_the_remedy(
    tiny: Tiny, overrides: tuple[str, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        start_server(tiny(*SPOKEN, *overrides))


def test_units_without_training_clips_are_rejected_or_kept_for_tests(tiny: Tiny, tmp_path: Path) -> None:
    table = tmp_path / "clips.csv"
    manifest = transcripts.Spoken().manifest().to_pylist()
    lines = [f"{row['clip']},{'test' if 'c' in row['label'] else 'train'}" for row in manifest]
    table.write_text("\n".join(["clip,role", *lines]) + "\n")
    settings = (*SPOKEN, f"data.tables.clips={table}", "run.name=unseen")
    with pytest.raises(DataError, match=r"no client has a clip of character 'c', but clip '[^']+' has it.*unseen=keep"):
        start_server(tiny(*settings))
    start_server(tiny(*settings, "data.unseen=keep", "run.name=kept")).close()


def test_an_error_of_a_clip_survives_pickle() -> None:
    error = pickle.loads(pickle.dumps(ClipError(7, "the transcript of clip {clip} is long")))
    assert (error.clip, str(error)) == (7, "the transcript of clip number 7 is long")
    assert error.describe("a.wav") == "the transcript of clip a.wav is long"
