"""Scores of the controls by hand and by scikit-learn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import beeps
import numpy as np
import pyarrow as pa
import pytest
from given import Row, configure, configure_data
from sklearn.covariance import LedoitWolf
from sklearn.linear_model import Ridge, RidgeClassifier
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from raydfl.controls import Control, from_json, measure_controls, to_json
from raydfl.core.psds import compute_psds, count_detections
from raydfl.data import Examples, Part, Population, StoredView, Tables, build_population, make_empty_clips
from raydfl.engine.config import Config

OWN_TEST = {"test": None, "client_test": {"by": "split", "values": ["test"]}}
NORMAL = {"name": "reconstruct", "normal": ["normal"]}
LINEAR, NEAREST = "raw features: linear model", "raw features: nearest neighbour"
MAHALANOBIS, LOUDNESS = "raw features: Mahalanobis distance", "raw features: loudness"
RHYTHM = "raw features: rhythm"


def measure(config: Config) -> tuple[list[Control], str]:
    population = build_population(config.data, config.run.seed, labels_needed=config.labels_needed).use(config.data)
    return measure_controls(population, config.components.method.objective, config.run.seed)


def measure_values(config: Config) -> dict[str, float]:
    controls, note = measure(config)
    assert note == ""
    return {control.name: control.value for control in controls}


def make_rows(label: str, owner: str, split: str, *values: float) -> list[Row]:
    """Return clips with one frame of one feature."""
    return [(label, owner, split, [[value]]) for value in values]


# Training: a at 0 and 2, b at 6. Test: a at 1 and 4.1, b at 5, 3.9 and 7.
WORDS = [
    *make_rows("a", "anna", "train", 0, 2),
    *make_rows("b", "bert", "train", 6),
    *make_rows("a", "anna", "test", 1, 4.1),
    *make_rows("b", "bert", "test", 5, 3.9, 7),
]


def test_classification_by_hand(tmp_path: Path) -> None:
    """The linear model decides at 3.64, and the nearest neighbour at 4.

    The eight intervals of a single frame have the same mean, and constant deviations do not count. With z = (x - 8/3) / 2.494, the
    slope of class b is 8 sum(z y) / (8 sum(z^2) + 1) = 8 * 2.6726 / 25, and its intercept -1/3. Both are equal at z = 0.3898.
    """
    controls, note = measure(configure(tmp_path, WORDS))
    assert note == ""
    expected = {"chance": 1 / 2, "majority": 2 / 5, LINEAR: 4 / 5, NEAREST: 3 / 5}
    assert controls == [
        Control(name, "test", "accuracy", value, 5, math.sqrt(value * (1 - value) / 5))
        for name, value in expected.items()
    ]
    moved = [row if row[3] != [[3.9]] else ("b", "bert", "test", [[x]]) for row in WORDS for x in [3.6]]
    assert measure_values(configure(tmp_path, moved))[LINEAR] == 3 / 5


@pytest.mark.parametrize("split", ["client_test", "validation", "server_validation"])
def test_each_test_and_held_out_set_has_its_controls(tmp_path: Path, split: str) -> None:
    # WORDS with the test clips at the clients or in the server's held-out set, and one more clip in the server's test: b at 8.
    rows = [*WORDS, *make_rows("b", "bert", "validation", 8)]
    held = {split: {"by": "split", "values": ["test"]}, "test": {"by": "split", "values": ["validation"]}}
    measured = {
        (control.split, control.name): control.value
        for control in measure(configure(tmp_path, rows, data={"split": held}))[0]
    }
    by_hand = {
        split: {"chance": 1 / 2, "majority": 2 / 5, LINEAR: 4 / 5, NEAREST: 3 / 5},
        "test": {"chance": 1 / 2, "majority": 0, LINEAR: 1, NEAREST: 1},
    }
    assert measured == {(split, name): value for split, values in by_hand.items() for name, value in values.items()}


def test_detection_by_hand(tmp_path: Path) -> None:
    """One machine: normal training clips at 0 and 2, normal test clips at 1 and 4, anomalies at 3 and -4.

    Distances from the mean are 0 and 3, and 2 and 5: three of four pairs are ordered. The nearest training clips have the
    distances 1 and 2, and 1 and 4: two pairs and a tie.
    """
    rows = [
        *make_rows("normal", "fan", "train", 0, 2),
        *make_rows("normal", "fan", "test", 1, 4),
        *make_rows("anomaly", "fan", "test", 3, -4),
    ]
    controls, note = measure(configure(tmp_path, rows, objective=NORMAL, data={"split": OWN_TEST}))
    assert note == ""
    expected = {"chance": 0.5, MAHALANOBIS: 0.75, NEAREST: 0.625, LOUDNESS: 0.75}
    error = math.sqrt(5 / 48)
    assert controls == [Control(name, "client_test", "auc", value, 4, error, 2) for name, value in expected.items()]


TRANSCRIBE: dict[str, Any] = {
    "objective": {"name": "transcribe"},
    "models": {"model": {"name": "crnn_tiny"}},
    "data": {"label_sequences": {"units": "characters"}, "unseen": "keep"},
}


@pytest.mark.parametrize("split", ["test", "client_test", "validation", "server_validation"])
def test_transcription_by_hand(tmp_path: Path, split: str) -> None:
    """The answer ab has 0, 0, 1 and 1 edits in training. In the test it has 0, 1 and 1 for 6 characters."""
    rows = [
        *(row for text in ("ab", "ab", "aab", "b") for row in make_rows(text, "anna", "train", 0)),
        *(row for text in ("ab", "bb", "aa") for row in make_rows(text, "anna", "test", 0)),
    ]
    data = {**TRANSCRIBE["data"], "split": {"test": None, split: {"by": "split", "values": ["test"]}}}
    controls = measure(configure(tmp_path, rows, **{**TRANSCRIBE, "data": data}))
    assert controls == ([Control("majority", split, "cer", 2 / 6, 3)], "")


@pytest.mark.parametrize("seed", range(3))
def test_transcription_agrees_with_jiwer(tmp_path: Path, seed: int) -> None:
    jiwer = pytest.importorskip("jiwer")
    rng = np.random.default_rng(seed)
    answer, *texts = ("".join(rng.choice([*"abc"], rng.integers(1, 9))) for _ in range(40))
    rows = [
        *make_rows(answer, "anna", "train", 0),
        *(row for text in texts for row in make_rows(text, "bert", "test", 0)),
    ]
    [control], _ = measure(configure(tmp_path, rows, **TRANSCRIBE))
    assert control.value == pytest.approx(jiwer.cer(texts, [answer] * len(texts)))


@pytest.mark.parametrize("split", ["test", "server_validation"])
def test_verification_by_hand(tmp_path: Path, split: str) -> None:
    """A clip is a direction in degrees: a at 0 and 40, b at 90 and 100, c at 180 and 300.

    Own trials differ by 40, 10 and 120. Four of the twelve others differ by at most 80: 50, 60, 60 and 80. So with 80 as the
    limit, a third of the own trials is rejected, and a third of the others is accepted.
    """
    corners = [("a", [1, 1]), ("b", [-1, -1]), ("c", [1, -1]), ("a", [-1, 1])]
    angles = [("a", 0), ("a", 40), ("b", 90), ("b", 100), ("c", 180), ("c", 300)]
    rows = [
        *((label, "anna", "train", [corner]) for label, corner in corners),
        *((label, "bert", "test", [[math.cos(math.radians(x)), math.sin(math.radians(x))]]) for label, x in angles),
    ]
    held = {"test": None, split: {"by": "split", "values": ["test"]}}
    settings = {"objective": {"name": "verify"}, "models": {"model": {"name": "linear"}}, "data": {"split": held}}
    controls, note = measure(configure(tmp_path, rows, **settings))
    assert note == ""
    assert [(control.name, control.split, control.value) for control in controls] == [
        ("chance", split, 0.5),
        ("raw features: cosine", split, pytest.approx(1 / 3)),
    ]


def test_texts_that_are_no_transcripts_have_no_control(tmp_path: Path) -> None:
    config = configure(tmp_path, WORDS)
    population = build_population(config.data, 1).use(config.data)
    controls, note = measure_controls(population, cast(Any, SimpleNamespace(answers="text")), 1)
    assert controls == []
    assert note.startswith("No raw-feature control for the objective")


@pytest.mark.parametrize("split", ["test", "validation"])
def test_the_frame_model_of_events_agrees_with_scikit_learn(tmp_path: Path, split: str) -> None:
    own = {} if split == "test" else {"test": None, split: {"by": "split", "values": ["test"]}}
    data = {"name": f"{beeps.__file__}:Beeps", "takes": 150, "weak": 1, "events": {}, "split": own}
    features = {"sample_rate": 8000, "bands": 16, "window_ms": 25, "hop_ms": 10}
    config = configure_data(tmp_path, {**data, "features": features}, objective="events")
    population = build_population(config.data, 1).use(config.data)
    controls, note = measure_controls(population, config.components.method.objective, 1)

    def describe_frames(clip: Examples) -> np.ndarray:
        frames = clip.first_view.batch(np.zeros(1, int))[0][0].numpy().astype(float)
        padded = np.pad(frames, ((25, 25), (0, 0)), mode="edge")  # a quarter of a second before and after the frame
        around = [padded[start : start + 51] for start in range(len(frames))]
        return np.hstack([frames, np.mean(around, axis=1), np.std(around, axis=1)])

    def list_clips(split: str) -> Iterator[tuple[Examples, np.ndarray]]:
        for part in population.parts[""].read_role(split):
            for row in range(len(part)):
                events = part.events[part.labels[row]]  # type: ignore[index]
                if not np.isinf(events).any():
                    yield part.take(np.array([row])), events[events[:, 2] >= 0]

    values, active = [], []
    for clip, events in list_clips("train"):
        values.append(describe_frames(clip))
        centres = (np.arange(len(values[-1])) + 0.5) * 0.01
        active.append(np.zeros((len(centres), 3)))
        for onset, offset, label in events:
            active[-1][(onset <= centres) & (centres < offset), int(label)] = 1
    scaler = StandardScaler().fit(np.concatenate(values))
    model = Ridge(alpha=1).fit(scaler.transform(np.concatenate(values)), np.concatenate(active))
    counts = sum(
        count_detections(np.clip(model.predict(scaler.transform(describe_frames(clip))), 0, 1), 0.01, events)
        for clip, events in list_clips(split)
    )
    assert (note, [(control.split, control.name) for control in controls]) == ("", [(split, LINEAR)])
    assert controls[0].value == pytest.approx(compute_psds(counts, "psds1"))  # type: ignore[arg-type]
    assert 0 < controls[0].value < 1


def test_events_without_times_have_no_control(tmp_path: Path) -> None:
    data = {"name": f"{beeps.__file__}:Beeps", "weak": 6, "events": {}, "split": {}}
    features = {"sample_rate": 8000, "bands": 16, "window_ms": 25, "hop_ms": 10}
    controls, note = measure(configure_data(tmp_path, {**data, "features": features}, objective="events"))
    assert controls == []
    assert note == "Raw features have no score, because no training clip has the times of events."


def draw_rows(
    rng: np.random.Generator, labels: Sequence[str], split: str, clips: int, bands: int = 3, owners: int = 4
) -> list[Row]:
    """Draw clips of different lengths. The labels have different means in the second half of a clip."""
    rows = []
    for number in range(clips):
        label = int(rng.integers(len(labels)))
        frames = rng.normal(size=(int(rng.choice([8, 16, 40])), bands)) * [1, 10, 0.1][:bands] + 3
        frames[len(frames) // 2 :, label % bands] += 0.6 * frames.std(axis=0)[label % bands]
        rows.append((labels[label], f"p{number % owners}", split, frames))
    return rows


def describe(rows: Sequence[Row]) -> np.ndarray:
    """Return the means and deviations of eight intervals with NumPy."""
    intervals = [np.split(np.float32(row[3]).astype(float), 8) for row in rows]
    return np.array(
        [[part.mean(axis=0) for part in parts] + [part.std(axis=0) for part in parts] for parts in intervals]
    )


@pytest.mark.parametrize("clips", [30, 150])  # fewer and more than the 48 values of a clip
def test_classifiers_agree_with_scikit_learn(tmp_path: Path, clips: int) -> None:
    rng = np.random.default_rng(clips)
    train, test = (draw_rows(rng, "xyz", split, n) for split, n in (("train", clips), ("test", 200)))
    x, x_test = (describe(rows).reshape(len(rows), -1) for rows in (train, test))
    y, y_test = ([row[0] for row in rows] for rows in (train, test))
    expected = {
        name: make_pipeline(StandardScaler(), model).fit(x, y).score(x_test, y_test)
        for name, model in ((LINEAR, RidgeClassifier()), (NEAREST, KNeighborsClassifier(1)))
    }
    measured = measure_values(configure(tmp_path, [*train, *test]))
    assert {name: measured[name] for name in expected} == pytest.approx(expected)
    assert min(expected.values()) > 0.4


def test_sets_of_classes_agree_with_scikit_learn(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    labels = ["u", "u|v", "v|w", "w"]
    train, test = (draw_rows(rng, labels, split, n) for split, n in (("train", 90), ("test", 120)))
    x, x_test = (describe(rows).reshape(len(rows), -1) for rows in (train, test))
    y, y_test = (np.array([[c in row[0] for c in "uvw"] for row in rows]) for rows in (train, test))
    scores = make_pipeline(StandardScaler(), Ridge(1.0)).fit(x, 2.0 * y - 1).predict(x_test)
    config = configure(
        tmp_path, [*train, *test], objective={"name": "multi_label"}, data={"label_sets": {"separator": "|"}}
    )
    expected = {"chance": y_test.mean(), LINEAR: average_precision_score(y_test, scores, average="macro")}
    assert measure_values(config) == pytest.approx(expected)


def compute_rhythm(frames: np.ndarray, size: int) -> np.ndarray:
    """Return the logarithm of the modulation spectrum of a clip, float64 [size // 2]."""
    spectra = []
    for start in range(0, len(frames) - size + 1, max(1, size // 2)):
        window = frames[start : start + size].astype(np.float64)
        spectrum = np.fft.rfft((window - window.mean(axis=0)) * np.hanning(size)[:, None], axis=0)
        spectra.append(np.abs(spectrum)[1:].mean(axis=1))
    return np.asarray(np.log(np.mean(spectra, axis=0) + 1e-3))


def test_a_changed_rhythm_is_detected_by_hand(tmp_path: Path) -> None:
    """A Hann window of four frames is 0, 3/4, 3/4, 0. Without its mean, the normal clip 0 0 2 2 is -1 -1 1 1.

    So the window of a normal clip has 0, -3/4, 3/4, 0 and the spectrum sqrt(9/8), 3/2. The anomaly 0 2 2 0 has 0, 3/4, 3/4, 0 and
    the spectrum sqrt(9/8), 0. The mean frames of both are equal.
    """
    normal, anomaly = np.array([[0.0], [0], [2], [2]]), np.array([[0.0], [2], [2], [0]])
    rows: list[Row] = [("normal", "fan", "train", normal + shift) for shift in (0.0, 0.1)]
    rows += [("normal", "fan", "test", normal), ("anomaly", "fan", "test", anomaly)]
    measured = measure_values(configure(tmp_path, rows, objective=NORMAL, data={"split": OWN_TEST}))
    assert measured == {"chance": 0.5, MAHALANOBIS: 0.5, NEAREST: 0.5, LOUDNESS: 0.5, RHYTHM: 1.0}


def test_detectors_agree_with_scikit_learn(tmp_path: Path) -> None:
    """Two machines with different numbers of test clips. The run weights the AUC of a client by its test clips."""
    rng = np.random.default_rng(3)
    train = draw_rows(rng, ["normal"], "train", 60, owners=2)
    test = [row for row in draw_rows(rng, ["normal", "anomaly"], "test", 90, owners=3) if row[1] != "p2"]
    test = test[: -len(test) // 3] + [row for row in test[-len(test) // 3 :] if row[1] == "p0"]
    expected: dict[str, float] = {}
    counts = []
    for owner in ("p0", "p1"):
        normal, own = (
            np.array([np.float32(row[3]).mean(axis=0) for row in rows if row[1] == owner]) for rows in (train, test)
        )
        truth = [row[0] == "anomaly" for row in test if row[1] == owner]
        window = min(len(row[3]) for row in [*train, *test] if row[1] == owner)
        rhythms, of_own = (
            np.array([compute_rhythm(np.float32(row[3]), window) for row in rows if row[1] == owner])
            for rows in (train, test)
        )
        scores = {
            MAHALANOBIS: LedoitWolf().fit(normal).mahalanobis(own),
            NEAREST: np.linalg.norm(own[:, None] - normal[None], axis=2).min(axis=1),
            LOUDNESS: np.abs(own.mean(axis=1) - normal.mean()),
            RHYTHM: LedoitWolf().fit(rhythms).mahalanobis(of_own),
        }
        for name, values in scores.items():
            expected[name] = expected.get(name, 0) + roc_auc_score(truth, values) * len(own)
        counts.append((len(own), sum(truth)))
    clips = sum(count for count, _ in counts)
    controls, _ = measure(configure(tmp_path, [*train, *test], objective=NORMAL, data={"split": OWN_TEST}))
    measured = {control.name: control.value for control in controls}
    assert measured == pytest.approx({"chance": 0.5, **{name: value / clips for name, value in expected.items()}})
    squares = [(n * math.sqrt((n + 1) / (12 * k * (n - k)))) ** 2 for n, k in counts]
    assert [control.standard_error for control in controls] == [pytest.approx(math.sqrt(sum(squares)) / clips)] * 5
    assert {control.count for control in controls} == {clips}
    assert counts[0][0] != counts[1][0]


def test_the_server_compares_a_machine_with_its_own_training_clips(tmp_path: Path) -> None:
    """Machine q hums 100 louder. Against the clips of both machines its anomaly would seem normal."""
    rows = [
        *make_rows("normal", "p", "train", 0, 1, 2),
        *make_rows("normal", "q", "train", 100, 101, 102),
        *make_rows("normal", "p", "test", 1.5),
        *make_rows("normal", "q", "test", 101.5),
        *make_rows("anomaly", "p", "test", 51),
        *make_rows("anomaly", "q", "test", 51),
    ]
    without = measure_values(configure(tmp_path, rows, objective=NORMAL))
    columns = measure_values(configure(tmp_path, rows, objective=NORMAL, data={"columns": ["id"]}))
    assert (without[MAHALANOBIS], columns[MAHALANOBIS]) == (0.0, 1.0)


def test_generated_machines_agree_with_scikit_learn(tmp_path: Path) -> None:
    """Mahalanobis distance of the mean log-mel frame, by client."""
    data = {
        "name": "machines",
        "kinds": ["fan"],
        "ids": 2,
        "clips": 12,
        "test_clips": 6,
        "seconds": 0.5,
        "features": {"bands": 16, "window_ms": 64, "hop_ms": 32, "normalise": "client"},
        "split": OWN_TEST,
    }
    config = configure_data(tmp_path, data, objective=NORMAL)
    population = build_population(config.data, 1).use(config.data)
    areas = []
    for client in range(len(population)):
        own = population.data(client)
        normal, test = (
            part.batch(np.arange(len(part))).x.double().mean(dim=1).numpy() for part in (own.train, own.test)
        )
        truth = [population.classes[label] != "normal" for label in own.test.labels]
        areas.append(roc_auc_score(truth, LedoitWolf().fit(normal).mahalanobis(test)))
    assert measure_values(config)[MAHALANOBIS] == pytest.approx(np.mean(areas))


def test_features_normalised_by_clip_have_no_mean_frame(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [*draw_rows(rng, ["normal"], "train", 12), *draw_rows(rng, ["normal", "anomaly"], "test", 24)]
    rows = [(*row[:3], (row[3] - row[3].mean(axis=0)) / row[3].std(axis=0)) for row in rows]
    controls, note = measure(configure(tmp_path, rows, objective=NORMAL))
    assert controls == []
    assert "Set data.features.normalise to client" in note


def test_noise_of_rounding_is_not_amplified(tmp_path: Path) -> None:
    """A feature that differs by rounding errors only does not count."""
    rng = np.random.default_rng(0)
    rows = [*draw_rows(rng, "xyz", "train", 60), *draw_rows(rng, "xyz", "test", 90)]
    constant = [(*row[:3], np.hstack([row[3], 1 + 1e-7 * rng.normal(size=(len(row[3]), 1))])) for row in rows]
    assert measure_values(configure(tmp_path, constant)) == measure_values(configure(tmp_path, rows))


@pytest.mark.parametrize("split", ["test", "validation", "server_validation"])
def test_each_set_with_anomalies_has_its_controls(tmp_path: Path, split: str) -> None:
    """The set of :func:`test_detection_by_hand`, as the server's test and as held-out clips."""
    rows = [
        *make_rows("normal", "fan", "train", 0, 2),
        *make_rows("normal", "fan", "test", 1, 4),
        *make_rows("anomaly", "fan", "test", 3, -4),
    ]
    data = {"split": {"test": None} | {split: {"by": "split", "values": ["test"]}}}
    controls, _ = measure(configure(tmp_path, rows, objective=NORMAL, data=data))
    expected = {"chance": 0.5, MAHALANOBIS: 0.75, NEAREST: 0.625, LOUDNESS: 0.75}
    assert {(control.split, control.name): control.value for control in controls} == {
        (split, name): value for name, value in expected.items()
    }


def test_held_out_clips_without_anomalies_do_not_prevent_the_controls_of_the_test(tmp_path: Path) -> None:
    """A client with one training clip has no spread, but nothing is compared with it: its held-out clip is normal."""
    rows = [
        *make_rows("normal", "fan", "train", 0, 2),
        *make_rows("normal", "pump", "train", 1),
        *make_rows("normal", "pump", "validation", 1),
        *make_rows("normal", "fan", "test", 1, 4),
        *make_rows("anomaly", "fan", "test", 3, -4),
    ]
    data = {
        "split": {"test": {"by": "split", "values": ["test"]}, "validation": {"by": "split", "values": ["validation"]}}
    }
    controls, note = measure(configure(tmp_path, rows, objective=NORMAL, data=data))
    assert note == ""
    assert {control.split for control in controls} == {"test"}


@pytest.mark.parametrize(
    ("objective", "note"),
    [
        ({"name": "contrast", "frames": 4}, "No raw-feature control for the objective contrast."),
        ({"name": "reconstruct"}, "Raw features have no score, because no test has known anomalous clips."),
    ],
)
def test_missing_controls_have_a_reason(tmp_path: Path, objective: dict[str, Any], note: str) -> None:
    rng = np.random.default_rng(0)
    rows = [*draw_rows(rng, "xyz", "train", 8), *draw_rows(rng, "xyz", "test", 4)]
    assert measure(configure(tmp_path, rows, objective=objective)) == ([], note)


def test_clips_at_sites_are_not_read(tmp_path: Path) -> None:
    config = configure(tmp_path, WORDS)
    clients = build_population(config.data, 1).parts[""]
    table = pa.record_batch({"client": pa.array(list(clients.ids), pa.large_string())})
    population = Population({"": Part(Tables(make_empty_clips(), table), clients.classes, {"": StoredView(None)})})
    controls, note = measure_controls(population, config.components.method.objective, 1)
    assert controls == []
    assert note == "Raw features have no score, because the server does not read clips at sites."


def test_labels_are_those_of_the_clients(tmp_path: Path) -> None:
    """With all training labels changed among two classes, right predictions become wrong."""
    rng = np.random.default_rng(1)
    rows = [*draw_rows(rng, "xy", "train", 60, owners=2), *draw_rows(rng, "xy", "test", 90, owners=2)]
    clean = measure_values(configure(tmp_path, rows))
    wrong = measure_values(configure(tmp_path, rows, data={"corrupt": {"labels": {"rate": 1.0, "clients": 1.0}}}))
    for name in (LINEAR, NEAREST):
        assert wrong[name] == pytest.approx(1 - clean[name])


def test_at_most_20_000_training_clips_are_drawn_with_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    rows = [*draw_rows(rng, "xyz", "train", 60), *draw_rows(rng, "xyz", "test", 90)]
    config = configure(tmp_path, rows)
    population = build_population(config.data, 1).use(config.data)
    objective = config.components.method.objective
    monkeypatch.setattr("raydfl.controls._classification.LIMIT", 9)
    drawn = [measure_controls(population, objective, seed) for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len({tuple(controls) for controls, _ in drawn}) > 1
    monkeypatch.setattr("raydfl.controls._classification.LIMIT", 60)
    assert measure_controls(population, objective, 1) == measure_controls(population, objective, 2)


def test_json(tmp_path: Path) -> None:
    measured = measure(configure(tmp_path, WORDS))
    assert from_json(to_json(*measured)) == measured
