"""Runs with every objective: supported methods, metrics, predictions, exports and errors."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import beeps
import numpy as np
import pyarrow.compute as pc
import pytest
import soundfile
import torch
from commands import Raydfl, write_config
from helpers import marks_of, stop_after
from machines import RATE, synthesise_hum
from sklearn.metrics import average_precision_score, roc_auc_score

from raydfl import load_model, read_rows, run
from raydfl.core import registry
from raydfl.core.errors import ConfigError
from raydfl.core.yaml import to_yaml
from raydfl.data import Examples
from raydfl.data.population import Population
from raydfl.engine.config import Config
from raydfl.experiments.load import load_study
from raydfl.methods import Method
from raydfl.methods._server_optimiser import ServerOptimiser
from raydfl.runs.report.data import read_run
from raydfl.testing import assert_same_bits, read_tensors, start_server

HERE = Path(__file__).parent
MACHINES, CHORDS = (f"data.name={HERE / 'machines.py'}:{name}" for name in ("Machines", "Chords"))
LOUDNESS = "data.features.normalise=group"
"""Normalise each band over the training clips. Normalisation by clip would erase a stationary sound."""
IDENTIFIED = ("data.columns=[group]", "data.split={test: null, validation: {by: clip, fraction: 0.4, stratify: true}}")
"""Only clients measure the scores of identify, here on validation clips of both conditions."""
SETTINGS: dict[str, tuple[str, ...]] = {
    "classify": ("objective=classify",),
    "multi_label": (CHORDS, "data.label_sets={}", "objective=multi_label"),
    "compact": (MACHINES, "objective={name: compact, size: 4, normal: [normal]}"),
    "reconstruct": (MACHINES, "objective={name: reconstruct, size: 4, bins: 4, hidden: 16, normal: [normal]}"),
    "contrast": ("objective={name: contrast, frames: 12, size: 8}",),
    "identify": (MACHINES, *IDENTIFIED, "objective={name: identify, size: 4, machines: 4, normal: [normal]}"),
    "transcribe": ("data.label_sequences={}", "objective=transcribe"),
    "events": (
        f"data.name={beeps.__file__}:Beeps",
        *("data.groups=4", "data.features.seconds=1.2", "data.split={test: {by: split}, validation: 0.2}"),
        *("data.events={}", "objective=events"),
    ),
    "verify": ("objective={name: verify, size: 4, ramp: 1}",),
}
HEADLINES = {
    "classify": "accuracy",
    "multi_label": "map",
    "compact": "auc",
    "reconstruct": "auc",
    "contrast": "accuracy",
    "identify": "auc",
    "transcribe": "cer",
    "events": "psds1",
    "verify": "eer",
}

Tiny = Callable[..., Config]


def is_supported(method: str, objective: str) -> bool:
    accepted = registry.find("raydfl.methods", method, Method, "method")().needs.objectives
    return not accepted or objective in accepted


SEEN = f"data.name={HERE / 'seen.py'}:Seen"
SEEN_SETTINGS: dict[str, tuple[str, ...]] = {
    **SETTINGS,
    "multi_label": ("data.label_sets={}", "objective=multi_label"),
    "compact": ("objective={name: compact, size: 4, normal: [a]}",),
    "reconstruct": ("objective={name: reconstruct, size: 4, bins: 4, hidden: 16, normal: [a]}",),
    "identify": (*IDENTIFIED, "objective={name: identify, size: 4, machines: 4, normal: [a]}"),
    "events": ("data.events={}", "objective=events"),
}
SECOND = "{column: second, features: {sample_rate: 8000, bands: 12, window_ms: 25, hop_ms: 10, seconds: 0.3}}"
VIEWS: dict[str, tuple[str, ...]] = {
    "first": (),
    "image": (SEEN, "data.features={kind: image, size: 8}"),
    "further": (SEEN, f"data.views={{second: {SECOND}}}"),
}
NETWORKS = {
    "first": [],
    "image": ["{name: cnn_small, hidden: 8}"],
    "further": ["{name: crnn_tiny, hidden: 8, filters: [4], view: second}"],
}
"""With "further" the last model of a method reads the second microphone, whose bands and frames differ from the first."""


def list_cases() -> list[Any]:
    """List the combinations of methods, objectives and views.

    The fast suite runs the representatives, and each objective once with an additional view. Methods with FedAvg's client
    work run only with classification.
    """
    cases = []
    at_server = {
        name
        for name in registry.names("raydfl.methods")
        if issubclass(registry.find("raydfl.methods", name, Method, "method"), ServerOptimiser)
    }
    for view in VIEWS:
        for method in registry.names("raydfl.methods"):
            for objective in registry.names("raydfl.objectives"):
                slow = objective != "classify" and (method in at_server or (view != "first" and method != "fedavg"))
                marks = [pytest.mark.slow] if slow else marks_of(method)
                cases.append(pytest.param(method, objective, view, marks=marks))
    return cases


@pytest.mark.parametrize(("method", "objective", "view"), list_cases())
def test_methods_learn_supported_objectives_from_each_view_and_reject_unsupported_ones(
    tiny: Tiny, method: str, objective: str, view: str
) -> None:
    rounds = 2 if view == "first" else 1
    overrides = [
        *(SETTINGS if view == "first" else SEEN_SETTINGS)[objective],
        f"train.rounds={rounds}",
        f"evaluate.every={rounds}",
    ]
    overrides += VIEWS[view]
    for network in NETWORKS[view]:
        cls = registry.find("raydfl.methods", method, Method, "method")
        names = [name for name in cls.models if name not in (*cls.copies, *cls.on_features)]
        overrides += [f"models.{name}={network}" for name in (names if view == "image" else names[-1:])]
    overrides += ["method.layers=[output]"] if method == "fedbn" and view != "first" else []
    if view == "image" and objective == "events":
        with pytest.raises(ConfigError, match=r"data.events needs frames at known times"):
            tiny(*overrides, "data.unlabelled=null", method=method)
        return
    if not is_supported(method, objective):
        (supported,) = registry.find("raydfl.methods", method, Method, "method")().needs.objectives
        with pytest.raises(
            ConfigError, match=f"method '{method}' needs objective={supported}, but the objective is '{objective}'"
        ):
            tiny(*overrides, "data.unlabelled=null", method=method)
        return
    config = tiny(*overrides, method=method)
    if view == "image" and objective in ("reconstruct", "contrast"):
        with pytest.raises(ConfigError, match=f"objective: {objective} .* the network reads images"):
            start_server(config)
        return
    if view == "further" and objective == "events":
        with pytest.raises(
            ConfigError, match=r"the network reads the view 'second', but events have the times of data"
        ):
            start_server(config)
        return
    if objective in ("transcribe", "events") and (view == "image" or (method == "fedbn" and view == "first")):
        with pytest.raises(ConfigError, match=rf"objective '{objective}' needs .* has no frames\(\)"):
            start_server(config)
        return
    server = start_server(config)
    for _ in range(rounds):
        server.round()
    server.finish()
    server.close()
    rows = read_rows(next(Path(config.run.dir).iterdir())).to_pylist()
    scores = [row for row in rows if row["metric"].rpartition("/")[2] == HEADLINES[objective] and row["count"]]
    assert {row["split"] for row in scores} & {"test", "validation"}
    assert all(np.isfinite(row["value"]) for row in scores)
    assert all(row["array"] is None for row in rows if row["client"])  # reports of clients contain no clips


def test_only_methods_with_class_probabilities_reject_objectives() -> None:
    rejecting = {m for m in registry.names("raydfl.methods") if not is_supported(m, "compact")}
    multi_view = {"multifl", "unifl", "harmony", "modality_mirror"}
    assert rejecting == {
        "fedgen",
        "fedkad",
        "fedlc",
        "fedmlac",
        "fedntd",
        "fedproto",
        "fedstar",
        "hermes",
        "moon",
        *multi_view,
    }


def test_the_metrics_of_an_anomaly_detector_equal_scikit_learn(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydfl.data.shards._SHARD", 5)  # several shards must not change the result
    config = tiny(
        *SETTINGS["reconstruct"],
        LOUDNESS,
        "train.rounds=8",
        "train.optimiser={name: adam, lr: 0.01}",
        "evaluate.every=8",
    )
    folder = run(config).run_dir
    test = Population.load(folder / "population").test
    model = load_model(folder)
    batch = test.batch(np.arange(len(test)))
    scores = model.logits(batch.x, batch.lengths)[:, 0].numpy()
    truth = np.array(test.classes)[test.labels] == "anomalous"
    record = read_run(folder)
    expected = roc_auc_score(truth, scores)
    assert record.headline == "auc"
    assert record.curves["test", "model/auc"].last == pytest.approx(expected, abs=1e-9)
    assert record.curves["test", "model/pauc"].last == pytest.approx(
        roc_auc_score(truth, scores, max_fpr=0.1), abs=1e-9
    )
    assert record.curves["test", "model/loss"].last == pytest.approx(scores[~truth].mean(), rel=1e-5)
    assert expected > 0.9  # the whine is easy to detect
    page = (folder / "report.html").read_text()
    assert "AUC of model, test data" in page
    assert "equal error rate" in page


def test_scores_relative_to_training_clips_use_segments(tiny: Tiny) -> None:
    """Training clips are segmented like test clips, and anomalous training clips are not part of the reference."""
    config = tiny(
        MACHINES,
        "objective={name: compact, size: 4, normal: [normal], score: own_centre}",
        "data.transforms=[{name: random_crop, size: 10, test: segments, stride: 8}]",
        "data.split={test: null, client_test: {by: clip, fraction: 0.5, stratify: true}}",
        "train.rounds=1",
        "train.cohort=1.0",
        "evaluate.clients=all",
    )
    server = start_server(config)
    server.round()
    server.finish()
    worker, federation = server._federation.pool.workers[""], server._federation  # type: ignore[attr-defined]
    (order,) = federation._make_orders(federation.method.plan_evaluation(federation.state, federation.clients[:1]), ())
    step = worker.prepare(order, federation.broadcast({"global"}))
    server.close()
    train = step.data.train
    normal = train.take(np.flatnonzero(np.array(train.classes)[train.labels] == "normal"))
    assert 0 < len(normal) < len(train)
    network = step.models["model"].eval()

    def embed(examples: Examples, offset: int) -> torch.Tensor:
        segments = [examples.first_view.store.frames[s + offset : s + offset + 10] for s in examples.first_view.starts]
        with torch.no_grad():
            return torch.nn.functional.normalize(network(torch.from_numpy(np.stack(segments))).double(), dim=1)

    centre = torch.cat([embed(normal, offset) for offset in (0, 8, 16)]).mean(dim=0)  # segments of 26 frames
    test = step.data.test
    scores = (embed(test, 0) - centre).square().sum(dim=1).numpy()  # test examples are segments
    clips = [scores[test.clips == clip].mean() for clip in np.unique(test.clips)]
    actual = federation.method.objective.evaluate(step, "model", test, 64)["scores"]
    np.testing.assert_allclose(actual.values, clips, rtol=1e-4)  # type: ignore[union-attr]
    rows = read_rows(next(Path(config.run.dir).iterdir())).to_pylist()
    assert {row["split"] for row in rows if row["metric"] == "model/auc"} == {"client_test"}


def test_identify_scores_by_the_nearest_other_clip_of_the_same_machine(tiny: Tiny) -> None:
    config = tiny(
        *SETTINGS["identify"],
        "data.split={test: null, client_test: {by: clip, fraction: 0.4, stratify: true}}",
        "data.partition={by: iid, clients: 1}",
        "train.rounds=1",
        "train.cohort=1.0",
        "evaluate.clients=all",
    )
    server = start_server(config)
    server.round()
    server.finish()
    worker, federation = server._federation.pool.workers[""], server._federation  # type: ignore[attr-defined]
    (order,) = federation._make_orders(federation.method.plan_evaluation(federation.state, federation.clients), ())
    step = worker.prepare(order, federation.broadcast({"global"}))
    server.close()
    train, test, network = step.data.train, step.data.test, step.models["model"].eval()
    normal = train.take(np.flatnonzero(np.array(train.classes)[train.labels] == "normal"))
    assert len(set(normal.columns["group"].tolist())) == 4

    def embed(examples: Examples) -> np.ndarray:
        with torch.no_grad():
            z = network(examples.batch(np.arange(len(examples))).x)
        return torch.nn.functional.normalize(z.double(), dim=1).numpy()

    def score(examples: Examples) -> np.ndarray:
        neighbours = examples.columns["group"][:, None] == normal.columns["group"]
        neighbours &= examples.clips[:, None] != normal.clips
        nearest: np.ndarray = np.where(neighbours, embed(examples) @ embed(normal).T, -1.0).max(axis=1)
        return 2 - 2 * nearest

    metrics = federation.method.objective.evaluate(step, "model", test, 64)
    scores = score(test)[np.argsort(test.clips)]
    np.testing.assert_allclose(metrics["scores"].values, scores, atol=1e-6)  # type: ignore[union-attr]
    assert metrics["threshold"].value == pytest.approx(np.quantile(score(normal), 0.95), abs=1e-6)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["data.columns=[label]"], "data.columns has only label. Add 'group' to data.columns"),
        (["objective.machines=3"], "objective.machines is 3, but column 'group' has 4 values. .* at least 4"),
    ],
)
def test_identify_rejects_data_without_the_machines_of_clips(tiny: Tiny, overrides: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        run(tiny(*SETTINGS["identify"], *overrides))


def test_multi_label_metrics_equal_scikit_learn(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(
        *SETTINGS["multi_label"],
        LOUDNESS,
        "train.rounds=15",
        "train.optimiser={name: adam, lr: 0.03}",
        "evaluate.every=15",
    )
    folder = run(config).run_dir
    population = Population.load(folder / "population")
    assert population.classes == ("high", "low", "middle")
    # Each of four players has three clips of six chords, of which some are held out.
    clips = sum(population.label_counts()[:, population.classes.index("low")])
    batch = population.test.batch(np.arange(len(population.test)))
    assert batch.y.shape == (24, 3)
    probabilities = load_model(folder).logits(batch.x, batch.lengths).sigmoid().numpy()
    expected = average_precision_score(batch.y.numpy(), probabilities, average="macro")
    record = read_run(folder)
    assert record.curves["test", "model/map"].last == pytest.approx(expected, abs=1e-9)
    assert expected > 0.9
    assert 0 < clips <= 4 * 3 * 3


@pytest.mark.parametrize("objective", ["compact", "contrast", "multi_label", "transcribe", "events", "verify"])
def test_a_resumed_run_equals_an_uninterrupted_run_to_the_bit(tiny: Tiny, objective: str) -> None:
    whole, parts = (tiny(*SETTINGS[objective], "train.rounds=4", f"run.name={name}") for name in ("whole", "parts"))
    first = start_server(whole)
    for _ in range(4):
        first.round()
    first.finish()
    first.close()
    stop_after(parts, 2)
    second = start_server(parts)
    for _ in range(2):
        second.round()
    second.finish()
    second.close()
    assert_same_bits(read_tensors(Path(whole.run.dir) / "whole"), read_tensors(Path(parts.run.dir) / "parts"))


def test_the_digest_contains_every_objective_except_classification(tiny: Tiny) -> None:
    assert tiny().digest() == tiny("objective=classify").digest()
    digests = [
        tiny(setting).digest()
        for setting in ("objective={name: contrast, frames: 12}", "objective={name: contrast, frames: 13}")
    ]
    assert len({tiny().digest(), *digests}) == 3


def test_studies_compare_the_headline_metric_by_default(tiny: Tiny, tmp_path: Path) -> None:
    detector = tiny(*SETTINGS["compact"])
    file = tmp_path / "search.yaml"
    space = {"train.optimiser.lr": {"uniform": [0.01, 0.1]}}
    settings = detector.model_dump(mode="json", exclude={"run"})
    file.write_text(to_yaml({"title": "t", "settings": settings, "space": space}, flow=False))
    for overrides, expected in (
        ([], ("auc", "max", "validation")),
        (["metric.score=eer"], ("eer", "min", "validation")),
        (["metric.score=accuracy"], ("accuracy", "max", "validation")),
        (["objective=classify"], ("accuracy", "max", "validation")),
    ):
        metric = load_study(file, [f"dir={tmp_path}/search", *overrides]).first.metric
        assert (metric.score, metric.best, metric.split) == expected


# -- predict and export ------------------------------------------------------------------------------------------------


@pytest.fixture
def recordings(tmp_path: Path) -> list[Path]:
    files = []
    for name, anomalous in (("normal", False), ("strange", True)):
        files.append(tmp_path / f"{name}.wav")
        soundfile.write(files[-1], synthesise_hum(name, anomalous), RATE)
    return files


def test_predict_prints_scores(tiny: Tiny, recordings: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny(
        *SETTINGS["reconstruct"],
        LOUDNESS,
        "train.rounds=8",
        "train.optimiser={name: adam, lr: 0.01}",
        "evaluate.every=8",
    )
    folder = run(config).run_dir
    raydfl = Raydfl(capsys)
    predictions = raydfl("predict", folder, *recordings, "--json").events
    assert [set(item) for item in predictions] == [{"file", "score", "decision", "threshold", "threshold_origin"}] * 2
    assert predictions[1]["score"] > 2 * predictions[0]["score"]
    row_of_threshold = [
        row for row in read_rows(folder).to_pylist() if row["metric"] == "model/threshold" and not row["client"]
    ][-1]
    clients = f"of each of {row_of_threshold['count']:.0f} clients, their mean, round 8"
    assert predictions[0]["threshold"] == pytest.approx(row_of_threshold["value"])
    assert predictions[0]["threshold_origin"] == f"objective.quantile of the scores of normal training clips {clients}"
    assert [item["decision"] for item in predictions] == [
        "anomaly" if i["score"] >= i["threshold"] else "normal" for i in predictions
    ]
    client_prediction = raydfl("predict", folder, *recordings, "--json", "--client", "m1").events[0]
    assert (
        client_prediction["threshold_origin"]
        == "objective.quantile of the scores of normal training clips of m1, round 8"
    )
    higher = raydfl("predict", folder, *recordings, "--threshold", str(predictions[1]["score"] + 1)).out
    assert "anomaly" not in higher
    assert "(given)" in higher
    rows = list(csv.DictReader(io.StringIO(raydfl("predict", folder, *recordings, "--csv").out)))
    assert [float(row["score"]) for row in rows] == [item["score"] for item in predictions]
    assert f"{predictions[0]['score']:.4g}" in raydfl("predict", folder, *recordings).out


def test_predict_prints_sets(tiny: Tiny, recordings: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny(*SETTINGS["multi_label"], "train.rounds=1", "objective={name: multi_label, threshold: 0.01}")
    folder = run(config).run_dir
    raydfl = Raydfl(capsys)
    predictions = raydfl("predict", folder, *recordings, "--json", "--top", 2).events
    assert [item["labels"] for item in predictions] == [
        ["high", "low", "middle"]
    ] * 2  # every class exceeds this threshold
    assert all(len(item["top"]) == 2 for item in predictions)
    rows = list(csv.DictReader(io.StringIO(raydfl("predict", folder, *recordings, "--csv").out)))
    assert [row["labels"] for row in rows] == ["high|low|middle"] * 2
    assert "high, low, middle" in raydfl("predict", folder, *recordings).out


def test_predict_rejects_an_objective_without_answers(
    tiny: Tiny, recordings: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tiny(*SETTINGS["contrast"], "train.rounds=1")).run_dir
    Raydfl(capsys)("predict", folder, *recordings).refuses("objective without predictions")


# -- user-defined objectives -------------------------------------------------------------------------------------------

MODULE = """
import torch
from pydantic.dataclasses import dataclass
from raydfl import Objective, Ratio


@dataclass(frozen=True, kw_only=True)
class Margin(Objective):
    labels = "one"
    headline = "accuracy"
    answers = "class"
    margin: float = 1.0

    def loss(self, step, name, batch):
        return batch.mean(torch.nn.functional.multi_margin_loss(
            step.forward(name, batch), batch.y, margin=self.margin, reduction="none"))

    def metrics(self, outputs, examples):
        right = float((outputs.argmax(1).numpy() == examples.labels).sum())
        return {"accuracy": Ratio(right, len(examples))}


class Nothing(Objective):
    pass
"""


def test_a_user_defined_objective_is_loaded_from_its_file(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    config = tiny(f"objective={{name: '{tmp_path}/mine.py:Margin', margin: 0.5}}", "train.rounds=2")
    folder = run(config).run_dir
    rows = read_rows(folder, where=pc.field("metric") == "model/accuracy").to_pylist()
    assert {row["split"] for row in rows} >= {"test", "validation"}
    assert config.digest() != tiny().digest()
    with pytest.raises(ConfigError, match="method 'fedkad' needs objective=classify"):
        tiny(f"objective={tmp_path}/mine.py:Margin", method="fedkad")
    with pytest.raises(ConfigError, match=r"mine.py:Nothing' has no loss\(\). Define it in the class Nothing"):
        tiny(f"objective={tmp_path}/mine.py:Nothing")


# -- bad input ---------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown": (("objective=clasify",), "unknown objective 'clasify'. Did you mean 'classify'"),
    "option": (("objective={name: contrast, frame: 3}",), "unknown key 'frame' for Contrast. Did you mean 'frames'"),
    "range": (("objective={name: compact, momentum: 1}",), "objective.momentum: Input should be less than 1"),
    "no name": (("objective={frames: 3}",), "objective: the name is missing. Choose one of classify, compact"),
    "sets for classes": (
        ("data.label_sets={}",),
        "needs one label for each clip, but data.label_sets splits labels into sets",
    ),
    "top k": (
        ("objective={name: classify, top_k: 3}",),
        "objective.top_k is 3, but with 3 classes every answer would be correct",
    ),
    "classes for sets": (("objective=multi_label",), "needs a set of classes for each clip, but a label is one class"),
    "wrong labels of sets": (
        (CHORDS, "data.label_sets={}", "objective=multi_label", "data.corrupt.labels={clients: 0.5, rate: 0.5}"),
        "data.corrupt.labels replaces the class of a clip",
    ),
    "attack": (
        (*SETTINGS["compact"], "attack={name: label_flip}"),
        "attack 'label_flip' needs an objective that learns one class for each clip, but the objective is 'compact'",
    ),
    "normal": (
        (MACHINES, "objective={name: compact, normal: [nromal]}"),
        "there is no class 'nromal'. Did you mean 'normal'",
    ),
    "all normal": (
        (MACHINES, "objective={name: compact, normal: [normal, anomalous]}"),
        "names every class of the data",
    ),
    "long crop": (("objective=contrast",), "objective.frames is 96, but clips have 26 frames"),
    "untrained label": ((MACHINES,), "no client has a clip of label 'anomalous'"),
    "untrained class": (
        (*SETTINGS["multi_label"], "data.late=true"),
        "no client has a clip of class 'top'. Change data.split",
    ),
    "no class": (
        (*SETTINGS["multi_label"], "data.leave_out=[low, high, middle|low, 'low|high', high|middle]"),
        "data.label_sets: no label has a class with the separator '[|]'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_rejected_before_the_first_round(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    overrides, message = BAD[case]
    file = write_config(tiny("run.name=bad"), tmp_path)
    Raydfl(capsys)("run", file, *overrides).refuses(message)
    assert not list(tmp_path.glob("runs/bad/commits/*"))
