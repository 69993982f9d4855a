"""Thresholds of anomaly detectors from the clients' normal training clips, and remarks about the clients' data."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from commands import Raydfl
from sklearn.metrics import f1_score

from raydfl import read_rows, run
from raydfl.core.errors import DataError
from raydfl.data.build import build_population
from raydfl.data.population import Population
from raydfl.data.sets.machines import Machines
from raydfl.engine.config import Config
from raydfl.runs.folder import export
from raydfl.runs.inference import load_model
from raydfl.testing import start_server

Tiny = Callable[..., Config]
FAN = "{name: machines, kinds: [fan], ids: 3, clips: 12, test_clips: 10, seconds: 0.3, strength_db: 6"
FEATURES = "features: {bands: 8, window_ms: 64, hop_ms: 16, normalise: client}"
SPLIT = "split: {test: null, client_test: {by: split, values: [test]}, validation: 0.2}"
DETECT = "objective={name: reconstruct, size: 2, bins: 2, hidden: 4, normal: [normal]}"
HERE = ("evaluate.clients=all", "train.rounds=1", "train.cohort=1.0", DETECT)


def make_data(extra: str = "", split: str = SPLIT, machines: str = FAN) -> str:
    return f"data={machines}, {FEATURES}, partition: {{by: group}}, {split}{extra}}}"


def compute_scores(folder: Path, client: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Score the client's training and test clips with the final model, and return the mask of anomalous test clips."""
    population = Population.load(folder / "population").use(load_model(folder).data)
    client_data, model = population.data(population.index(client)), load_model(folder)
    scores = []
    for examples in (client_data.train.cut_for_test(), client_data.test):
        batch = examples.batch(np.arange(len(examples)))
        values = model.logits(batch.x, batch.lengths)[:, 0].numpy().astype(float)
        scores.append(np.array([values[examples.clips == clip].mean() for clip in np.unique(examples.clips)]))
    first = np.unique(client_data.test.clips, return_index=True)[1]
    return scores[0], scores[1], np.array(population.classes)[client_data.test.labels[first]] == "anomaly"


@pytest.mark.parametrize(
    "transforms", ["", ", transforms: [{name: random_crop, size: 6, test: segments}]"], ids=["whole", "segments"]
)
def test_the_threshold_is_the_quantile_of_training_scores_and_determines_f1(tiny: Tiny, transforms: str) -> None:
    config = tiny(*HERE, make_data(transforms), "objective.quantile=0.8")
    server = start_server(config)
    server.round()
    server.finish()
    server.close()
    folder = Path(config.run.dir) / "tiny"
    export(folder, config)
    rows = [row for row in read_rows(folder).to_pylist() if row["split"] == "client_test"]
    for client in ("fan_00", "fan_01", "fan_02"):
        metrics = {row["metric"]: row["value"] for row in rows if row["client"] == client}
        train, test, truth = compute_scores(folder, client)
        threshold = np.quantile(train, 0.8)
        assert metrics["model/threshold"] == pytest.approx(threshold, rel=1e-5)
        assert metrics["model/f1"] == pytest.approx(f1_score(truth, test >= threshold, zero_division=0), abs=1e-9)
        assert metrics["model/oracle_f1"] >= metrics["model/f1"]
        assert metrics["model/loss"] == pytest.approx(test[~truth].mean(), rel=1e-5)
    pooled = {row["metric"]: row["value"] for row in rows if not row["client"]}
    assert {"model/f1_client_mean", "model/auc_harmonic_mean", "model/threshold"} <= set(pooled)


def test_the_score_of_dcase_uses_the_columns_of_machines(tiny: Tiny) -> None:
    config = tiny(*HERE, make_data(", columns: [machine, id, domain]", machines=FAN + ", target_clips: 4"))
    server = start_server(config)
    server.round()
    server.close()
    rows = {row["metric"]: row for row in read_rows(Path(config.run.dir) / "tiny").to_pylist() if not row["client"]}
    assert 0 < rows["model/dcase_harmonic_mean"]["value"] <= 1
    assert rows["model/dcase_harmonic_mean"]["count"] == 3


def list_remarks(config: Config) -> list[str]:
    population = build_population(config.data, config.run.seed, labels_needed=config.labels_needed)
    return list(config.components.method.objective.remarks(population))


def test_remarks_list_clients_with_one_condition_or_few_normal_clips_in_their_test(tiny: Tiny) -> None:
    few = tiny(*HERE, make_data(machines=FAN.replace("test_clips: 10", "test_clips: 9")))
    assert list_remarks(tiny(*HERE, make_data())) == []
    (remark,) = list_remarks(few)
    assert remark.startswith(
        "3 of 3 clients have fewer than 10 normal clips in their own test (minimum 9): fan_00, fan_01"
    )
    assert remark.endswith("so their partial AUC is imprecise.")
    only = "split: {test: null, client_test: {by: condition, values: [anomaly]}}"
    (remark,) = list_remarks(tiny(*HERE, make_data(split=only)))
    assert remark.startswith(
        "3 of 3 clients have no normal clip in their own test, so their AUC is undefined: fan_00, fan_01"
    )
    random = "split: {test: null, client_test: {by: clip, fraction: 0.04}}"  # 1 of 32 clips
    about_training, about_tests = list_remarks(tiny(*HERE, make_data(split=random), "run.seed=2"))[:2]
    assert "training clips are anomalous. Most methods learn from them as from normal clips." in about_training
    assert "clients have no " in about_tests


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "objective.normal=[anomaly]",
            "client 'fan_00' has no normal training clip: all of its 12 clips are anomalous",
        ),
        (
            "data.clips=1",
            "client 'fan_00' has a single training clip, which does not show the variation of normal clips",
        ),
    ],
)
def test_clients_without_enough_normal_clips_are_rejected(tiny: Tiny, change: str, message: str) -> None:
    settings = [make_data(split="split: {test: null, client_test: {by: split, values: [test]}}"), change]
    with pytest.raises(DataError, match=message):
        start_server(tiny(*HERE, *settings))


def test_training_clips_are_segmented_like_test_clips(tiny: Tiny) -> None:
    config = tiny(*HERE, make_data(", transforms: [{name: random_crop, size: 6, test: segments, stride: 4}]"))
    population = build_population(config.data, 1, labels_needed=False)
    train = population.data(0).train
    cut = train.cut_for_test()
    assert set(train.first_view.counts.tolist()) == {19}
    assert np.bincount(cut.clips).max() == 1 + (19 - 6) // 4
    assert set(cut.first_view.counts.tolist()) == {6}
    x = cut.batch(np.arange(len(cut))).x
    whole = train.first_view.store.frames[train.first_view.starts[0] : train.first_view.starts[0] + 19]
    assert torch.equal(x[1], torch.from_numpy(np.array(whole[4:10], np.float32)))


def test_a_submission_to_dcase_has_files_for_each_machine(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(*HERE, make_data())
    folder = run(config).run_dir
    corpus = Machines(kinds=("fan",), ids=2, clips=1, test_clips=2, seconds=0.3, strength_db=6.0)
    rows = [row for row in corpus.manifest().to_pylist() if row["split"] == "test"]
    clips = tmp_path / "dev_data" / "fan" / "test"
    clips.mkdir(parents=True)
    for number, row in enumerate(rows):
        soundfile.write(clips / f"section_{row['id']}_{number:04d}.wav", *corpus.read(row))
    raydfl = Raydfl(capsys)
    result = raydfl("predict", folder, tmp_path / "dev_data", "--dcase", tmp_path / "out")
    assert result.code == 0, result.err
    kinds = ("anomaly_score", "decision_result")
    expected = [tmp_path / "out" / f"{kind}_fan_section_{nn}_test.csv" for nn in ("00", "01") for kind in kinds]
    assert result.out.split() == [str(path) for path in expected]
    for nn in ("00", "01"):
        predictions = raydfl("predict", folder, clips, "--json", "--client", f"fan_{nn}").events
        of_machine = sorted((Path(e["file"]).name, e) for e in predictions if f"section_{nn}" in e["file"])
        scores = [
            line.split(",")
            for line in (tmp_path / f"out/anomaly_score_fan_section_{nn}_test.csv").read_text().splitlines()
        ]
        assert [(name, float(score)) for name, score in scores] == [(name, e["score"]) for name, e in of_machine]
        decisions = (tmp_path / f"out/decision_result_fan_section_{nn}_test.csv").read_text()
        assert decisions == "".join(f"{name},{int(e['score'] >= e['threshold'])}\n" for name, e in of_machine)
    (clips / "noise.wav").touch()
    result = raydfl("predict", folder, clips, "--dcase", tmp_path / "out")
    assert result.code == 2
    assert "noise.wav do not identify a machine. Name files MACHINE/test/section_NN_...wav" in result.err


@pytest.mark.slow
def test_predict_scores_the_test_clips_of_a_run_and_the_report_shows_them(
    tiny: Tiny, capsys: pytest.CaptureFixture[str], pictures: object
) -> None:
    folder = run(tiny(*HERE, make_data())).run_dir
    raydfl = Raydfl(capsys)
    result = raydfl("predict", folder, "--test")
    assert result.code == 0, result.err
    rows = list(csv.DictReader((folder / "scores.csv").open(newline="")))
    assert len(rows) == 3 * 20
    for client in ("fan_00", "fan_02"):
        _, test, truth = compute_scores(folder, client)
        client_rows = [row for row in rows if row["client"] == client]
        assert [float(row["score"]) for row in client_rows] == pytest.approx(sorted(test, reverse=True), rel=1e-5)
        assert sum(row["label"] == "anomaly" for row in client_rows) == truth.sum() == 10
        assert all(
            (row["decision"] == "anomaly") == (float(row["score"]) >= float(row["threshold"])) for row in client_rows
        )
        assert all(("normal" in row["clip"]) == (row["label"] == "normal") for row in client_rows)
    page = (folder / "report.html").read_text()
    assert "Clips with the highest scores" in page
    assert "normal scores over rounds" in page
    result = raydfl("predict", folder, "x.wav", "--test")
    assert result.code == 2
    assert "Name recordings (FILE...), or use --test" in result.err
