"""Predictions of recordings. Oracles: the engine's evaluation of the same clips, and closed forms for printed values."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from commands import Raydfl
from films import block_module
from used_runs import LABELS, RATE, Finished, execute_run, make_run_config, make_wave, write_recordings

from raydfl import classify, load_model, load_result
from raydfl.core.errors import InputError, RaydflError, RunDirectoryError
from raydfl.data.audio import read_audio
from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.features.wave import EPSILON
from raydfl.data.population import Population
from raydfl.engine.storage.record import read_rows, to_rows
from raydfl.engine.storage.store import RunStore
from raydfl.runs.folder import create
from raydfl.runs.inference.recordings import Prediction, Recording, predictions, recordings
from raydfl.runs.progress import Progress


def predict_probabilities(run: Finished, **chosen: Any) -> np.ndarray:
    results = classify(run.folder, run.test_files, **chosen)
    assert [prediction.file for prediction in results] == run.test_files
    assert [prediction.error for prediction in results] == [""] * len(results)
    return np.stack([prediction.probabilities for prediction in results])


def read_accuracy(run: Finished, model: str) -> float:
    rows = [row for row in to_rows(read_rows(run.folder)) if row.metric == f"{model}/accuracy" and not row.client]
    return next(row.value for row in rows if row.round == 2 and row.split == "test")


def assert_agrees(run: Finished, *, model: str = "plugin", client: str | None = None) -> None:
    np.testing.assert_allclose(
        predict_probabilities(run, model=model, client=client), run.evaluate_model(model, client), atol=1e-6
    )


@pytest.mark.parametrize("name", ["mutual", "segmented"])
def test_the_shared_model_predicts_like_the_engine(name: str, request: pytest.FixtureRequest) -> None:
    run: Finished = request.getfixturevalue(name)
    assert_agrees(run)
    results = classify(run.folder, run.test_files)
    right = [prediction.label == label for prediction, label in zip(results, run.labels, strict=True)]
    assert np.mean(right) == pytest.approx(read_accuracy(run, "plugin"))


@pytest.mark.parametrize("name", ["mutual", "segmented"])
def test_a_clients_model_predicts_like_the_engine(name: str, request: pytest.FixtureRequest) -> None:
    run: Finished = request.getfixturevalue(name)
    for client in run.list_trained():
        expected = run.make_step(client).models
        for model in ("plugin", "local"):
            loaded = load_model(run.folder, model, client)
            assert (loaded.name, loaded.client, loaded.round) == (model, client, 2)
            mine, expected_rows = loaded.network.state_dict(), expected[model].state_dict()
            assert mine.keys() == expected_rows.keys()
            assert all(torch.equal(mine[key], expected_rows[key]) for key in mine)
        assert_agrees(run, model="local", client=client)
    own = [load_model(run.folder, client=client) for client in run.list_trained()]
    assert [model.name for model in own] == ["local"] * len(own)


def test_segments_affect_predictions(segmented: Finished) -> None:
    """The first segment alone gives different predictions."""
    longest = max(segmented.test_files, key=lambda file: soundfile.info(file).frames)
    assert soundfile.info(longest).duration > 0.5
    samples, _ = soundfile.read(longest, dtype="float32")
    short = segmented.recordings.parent / "short.wav"
    soundfile.write(short, samples[: RATE * 29 // 100], RATE, subtype="PCM_16")
    whole, part = classify(segmented.folder, [longest, short])
    assert np.abs(whole.probabilities - part.probabilities).max() > 1e-5


@pytest.mark.parametrize(
    ("features", "data"),
    [
        ({"seconds": 0.25, "normalise": "none"}, {}),
        ({"seconds": 0.4, "dtype": "float16"}, {}),
        ({"normalise": "none"}, {"segment": {"frames": 25, "stride": 20, "keep_last": False}}),
        ({"normalise": "none"}, {"transforms": [{"name": "random_crop", "size": 15, "test": "segments"}]}),
    ],
    ids=["decibels", "padded-float16", "fedaudio-segments", "logits"],
)
def test_every_front_end_agrees_with_the_engine(
    request: pytest.FixtureRequest, tmp_path: Path, features: dict[str, Any], data: dict[str, Any]
) -> None:
    logits = request.node.callspec.id == "logits"
    run = execute_run(
        tmp_path,
        uneven=True,
        features=features,
        data=data,
        method={"name": "fedavg"},
        models={"model": {"name": "mlp", "hidden": 5}},
        **({"objective": {"name": "classify", "average": "logits"}} if logits else {}),
    )
    assert_agrees(run, model="model")


def test_group_normalisation_uses_statistics_of_training_clips(tmp_path: Path) -> None:
    """Test speakers without training clips get the statistics of all training clips, like new recordings."""
    run = execute_run(
        tmp_path,
        uneven=True,
        features={"normalise": "group"},
        method={"name": "fedavg"},
        models={"model": {"name": "mlp", "hidden": 5}},
    )
    assert_agrees(run, model="model")
    together = predict_probabilities(run, model="model")
    alone = classify(run.folder, run.test_files[:1])[0]
    np.testing.assert_array_equal(alone.probabilities, together[0])  # other recordings have no influence
    population = Population.load(run.folder / "population")
    client = "speaker1"
    shared, own = load_model(run.folder), load_model(run.folder, client=client)
    np.testing.assert_array_equal(shared.statistics, population.statistics())
    np.testing.assert_array_equal(own.statistics, population.statistics(population.index(client)))
    assert not np.array_equal(shared.statistics, own.statistics)


def test_without_statistics_each_folder_counts_as_a_speaker(tmp_path: Path) -> None:
    """Runs of earlier versions, and runs with sites, have no statistics."""
    run = execute_run(
        tmp_path,
        uneven=True,
        features={"normalise": "group"},
        method={"name": "fedavg"},
        models={"model": {"name": "mlp", "hidden": 5}},
    )
    model = dataclasses.replace(load_model(run.folder), statistics=None)
    speaker = [file for file in run.test_files if file.name.startswith("speaker4_")]
    for file in speaker:
        (tmp_path / "speaker").mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / "speaker" / f"{file.parent.name}_{file.name}")
    results = {item.file.name: item.probabilities for item in predictions(model, [tmp_path / "speaker"])}
    extractor = FeatureExtractor(model.data.features)
    matrices = {file: extractor(*read_audio(file)) for file in speaker}
    frames = np.concatenate(list(matrices.values())).astype(np.float64)
    for file, matrix in matrices.items():
        x = torch.from_numpy((matrix - frames.mean(axis=0)) / (frames.std(axis=0) + EPSILON)).float()[None]
        logits = model.logits(torch.nn.functional.pad(x, (0, 0, 0, 64 - x.shape[1])), torch.tensor([x.shape[1]]))
        expected = logits.double().softmax(dim=1)[0].numpy()
        np.testing.assert_allclose(results[f"{file.parent.name}_{file.name}"], expected, atol=1e-6)
    arrays = [Recording(Path(str(number)), *read_audio(file)) for number, file in enumerate(sorted(matrices))]
    for here, (_, there) in zip(predictions(model, arrays), sorted(results.items()), strict=True):
        np.testing.assert_array_equal(here.probabilities, there)  # arrays of one call count as a folder


def test_recordings_may_have_any_rate_channels_and_format(mutual: Finished, tmp_path: Path) -> None:
    """Only the first channel counts, resampling from an exact multiple changes little, and FLAC is lossless."""
    tone = make_wave(4, "low", 0, 0.25)
    soundfile.write(tmp_path / "a.wav", tone, RATE, subtype="FLOAT")
    soundfile.write(tmp_path / "b.wav", np.stack([tone, tone[::-1]], axis=1), RATE, subtype="FLOAT")
    soundfile.write(tmp_path / "c.flac", tone, RATE, subtype="PCM_24")
    soundfile.write(tmp_path / "d.ogg", np.repeat(tone, 2), 2 * RATE)
    first, stereo, flac, ogg = (p.probabilities for p in classify(mutual.folder, [tmp_path]))
    np.testing.assert_array_equal(stereo, first)
    np.testing.assert_allclose(flac, first, atol=1e-3)
    np.testing.assert_allclose(ogg, first, atol=0.1)


def test_prediction_needs_neither_recordings_nor_features_of_the_run(mutual: Finished, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(mutual.folder, moved)
    text = (moved / "config.yaml").read_text().replace(str(mutual.recordings), str(tmp_path / "gone"))
    (moved / "config.yaml").write_text(text)
    file = tmp_path / "x.wav"
    shutil.copy(mutual.test_files[0], file)
    client = mutual.list_trained()[0]
    expected = [classify(mutual.folder, [file], client=who)[0].probabilities for who in (None, client)]
    cache = mutual.folder.parent.parent / "cache"
    hidden = cache.rename(cache.with_name("hidden"))
    try:
        results = [classify(moved, [file], client=who)[0].probabilities for who in (None, client)]
    finally:
        hidden.rename(cache)
    np.testing.assert_array_equal(results, expected)


def test_very_short_recordings_are_classified_with_known_lengths(segmented: Finished, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "click.wav", np.full(10, 0.5, np.float32), RATE)
    results = classify(segmented.folder, [tmp_path / "click.wav"])[0]
    assert results.error == ""
    assert results.probabilities.sum() == pytest.approx(1)


def test_a_partly_shared_network_predicts_like_the_engine(tmp_path: Path) -> None:
    """FedPer takes the base from the server and the last layer from the client."""
    run = execute_run(
        tmp_path, method={"name": "fedper"}, models={"model": {"name": "crnn_tiny", "hidden": 6, "filters": [4]}}
    )
    client = run.list_trained()[0]
    assert_agrees(run, model="model", client=client)
    with pytest.raises(
        InputError, match=rf"no model of this run is shared as a whole.*--client; clients with a model: .*{client}"
    ):
        load_model(run.folder)


def test_any_of_several_shared_models_can_predict(tmp_path: Path) -> None:
    method = Path(__file__).with_name("two_states.py")
    run = execute_run(
        tmp_path,
        features={"seconds": 0.25, "normalise": "none"},
        method={"name": f"{method}:TwoStates"},
        models={"model": {"name": "linear"}},
    )
    with pytest.raises(InputError, match=r"several shared models\. Choose one with --model: even:model, odd:model"):
        load_model(run.folder)
    networks = {name: load_model(run.folder, name).network for name in ("even:model", "odd:model")}
    for name, network in networks.items():
        stored = run.state.state.tensors[name.partition(":")[0]]["model/output.weight"]
        assert torch.equal(network.state_dict()["output.weight"], stored)
    weights = [network.state_dict()["output.weight"] for network in networks.values()]
    assert not torch.equal(*weights)
    # A client uses the model that it receives.
    for client in ("speaker0", "speaker1"):
        own = load_model(run.folder, client=client).network.state_dict()["output.weight"]
        assert torch.equal(own, weights[int(client[-1])])


def test_an_unfinished_run_can_predict(mutual: Finished, tmp_path: Path) -> None:
    config = make_run_config(tmp_path, mutual.recordings)
    run_dir = create(config, Progress("quiet"))
    for at in ("before", "round 0"):
        with pytest.raises(RunDirectoryError, match=r"has no completed round.*raydfl resume"):
            load_model(run_dir)
        if at == "before":
            RunStore(run_dir).commit(*_load_first_state(mutual))


def _load_first_state(run: Finished) -> tuple[Any, Any]:
    commit = run.state
    return dataclasses.replace(commit.state, round_index=0), type(commit.private)()


# -- files and output -------------------------------------------------------------------------------------------------


def test_folders_are_searched_without_duplicates(mutual: Finished, tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/2.wav", "a/b/1.FLAC", "a/notes.txt", "a/.hidden.wav", "3.ogg"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "empty").mkdir()
    listed, failures = recordings([tmp_path / "a", tmp_path / "a" / "2.wav", tmp_path / "3.ogg", tmp_path / "empty"])
    assert [file.relative_to(tmp_path).as_posix() for file in listed] == ["a/2.wav", "a/b/1.FLAC", "3.ogg"]
    assert failures == {tmp_path / "empty": "the folder has no recording in a supported format"}


def test_top_classes_are_ordered_and_ties_go_to_the_first_class() -> None:
    results = Prediction(Path("x"), ("a", "b", "c"), np.array([0.25, 0.5, 0.25]))
    assert results.top(3) == [("b", 0.5), ("a", 0.25), ("c", 0.25)]
    assert (results.label, results.probability) == ("b", 0.5)
    nothing = Prediction(Path("x"), ("a", "b"), np.zeros(0), "broken")
    assert nothing.label == ""
    assert math.isnan(nothing.probability)


def test_predictions_are_printed_as_json_csv_and_table(raydfl: Raydfl, mutual: Finished) -> None:
    files = mutual.test_files[:4]
    results = classify(mutual.folder, files)
    output = raydfl("predict", mutual.folder, *files, "--json", "--top", 2)
    assert output.code == 0
    assert output.events == [
        {
            "file": str(prediction.file),
            "label": prediction.label,
            "probability": prediction.probability,
            "top": [{"label": label, "probability": value} for label, value in prediction.top(2)],
        }
        for prediction in results
    ]
    rows = list(csv.DictReader(io.StringIO(raydfl("predict", mutual.folder, *files, "--csv", "--top", 9).out)))
    assert list(rows[0]) == ["file", *(f"{n}{r}" for r in ("", "_2", "_3") for n in ("label", "probability")), "error"]
    for row, prediction in zip(rows, results, strict=True):
        assert [row["label"], row["label_2"], row["label_3"]] == [label for label, _ in prediction.top(3)]
        assert float(row["probability"]) == prediction.probability
    client = mutual.list_trained()[0]
    table = raydfl("predict", mutual.folder, mutual.recordings / "test", "--client", client, "--top", 2).out
    assert table.startswith(f"local (crnn_tiny) of {mutual.folder}, round 2, of client '{client}'\n")
    (folder,) = re.findall(r"^folder: (.*)$", table, re.MULTILINE)
    own = classify(mutual.folder, [mutual.recordings / "test"], client=client)
    assert len(own) == len(mutual.test_files)
    for prediction in own:
        name = str(prediction.file).removeprefix(folder)
        (line,) = [line for line in table.splitlines() if line.startswith(f"{name} ")]
        second = "{} {:.3f}".format(*prediction.top(2)[1])
        assert line.split(maxsplit=3)[1:] == [prediction.label, f"{prediction.probability:.3f}", second]


def test_unreadable_recordings_are_reported_and_others_classified(
    raydfl: Raydfl, mutual: Finished, tmp_path: Path
) -> None:
    (tmp_path / "noise.wav").write_bytes(b"this is no audio")
    (tmp_path / "nothing").mkdir()
    good = mutual.test_files[0]
    missing = tmp_path / "a[bold].wav"
    output = raydfl("predict", mutual.folder, tmp_path / "noise.wav", good, missing, tmp_path / "nothing", "--json")
    output.refuses(
        "3 of 4 could not be classified",
        r"noise\.wav: cannot be read as audio",
        r"a\[bold\]\.wav: there is no such file",
        "nothing: the folder has no recording in a supported format",
    )
    assert {event["file"]: event.get("label", "") for event in output.events} == {
        str(tmp_path / "noise.wav"): "",
        str(missing): "",
        str(tmp_path / "nothing"): "",
        str(good): classify(mutual.folder, [good])[0].label,
    }
    table = raydfl("predict", mutual.folder, good, missing)
    table.refuses("1 of 2 could not be classified")
    assert "a[bold].wav" in table.out
    rows = list(csv.DictReader(io.StringIO(raydfl("predict", mutual.folder, missing, good, "--csv").out)))
    assert rows[0]["error"] == "there is no such file"
    assert rows[1]["error"] == ""


def test_every_kind_of_recording_in_a_folder_is_classified(
    raydfl: Raydfl,
    mutual: Finished,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block_module("av", tmp_path.parent / f"{tmp_path.name}-modules", monkeypatch)  # as without the extra video
    tone, rate = soundfile.read(mutual.test_files[0], dtype="float32")
    for name in ("a.aiff", "b.au", "c.MP3"):
        soundfile.write(tmp_path / name, tone, rate, format="MP3" if name == "c.MP3" else None)
    (tmp_path / "d.m4a").write_bytes(b"no sound" * 20)
    output = raydfl("predict", mutual.folder, tmp_path, "--json")
    assert output.code == 0
    assert [Path(event["file"]).name for event in output.events] == ["a.aiff", "b.au", "c.MP3"]
    assert f"left out of {tmp_path} (no recordings of a supported type): 1 .m4a (1 in all: d.m4a)" in caplog.text
    raydfl("predict", mutual.folder, tmp_path / "d.m4a").refuses(
        r"d\.m4a: cannot be read as audio: libsndfile does not decode .*raydfl\[video\].*: ffmpeg -i \S+/d\.m4a \S+/d\.wav"
    )


def test_unreadable_folders_and_files_are_reported(raydfl: Raydfl, mutual: Finished, tmp_path: Path) -> None:
    """Unreadable files are reported, the others are classified, and pipes do not block."""
    good = mutual.test_files[0]
    for name in ("loop", "strange"):
        (tmp_path / name).mkdir()
    (tmp_path / "loop/again").symlink_to(tmp_path / "loop")
    (tmp_path / "self").symlink_to("self")
    os.mkfifo(tmp_path / "strange/pipe.wav")
    name = os.fsdecode(b"caf\xe9.wav")
    shutil.copy(good, tmp_path / "strange" / name)
    for form in ("--json", "--csv", "--top=1"):
        output = raydfl(
            "predict", mutual.folder, *(tmp_path / place for place in ("loop", "strange", "self")), good, form
        )
        output.refuses(
            "4 of 5 could not be classified",
            "loop/again is a link to one of its parent folders",
            r"strange/caf\\xe9\.wav: the file's name is not UTF-8. Rename",
            r"strange/pipe\.wav: cannot be read: it is a pipe, a socket or a device, not a file",
            "self: cannot be read: Too many levels of symbolic links",
        )
        folder = re.findall(r"^folder: (.*)$", output.out, re.MULTILINE)
        assert str(good).removeprefix("".join(folder)) in output.out
        assert "caf\\xe9.wav" in output.out.replace("\\\\", "\\")


# -- errors ------------------------------------------------------------------------------------------------------------


def test_missing_models_and_clients_are_reported(raydfl: Raydfl, mutual: Finished, tmp_path: Path) -> None:
    file = mutual.test_files[0]
    raydfl("predict", tmp_path / "no", file).refuses("there is no run directory")
    raydfl("predict", tmp_path, file).refuses("is not a run directory")
    raydfl("predict", mutual.folder, file, "--model", "plugn").refuses("no model 'plugn'. Did you mean 'plugin'")
    raydfl("predict", mutual.folder, file, "--model", "zzz").refuses("no model 'zzz'. Choose one of local, plugin.$")
    trained, untrained = mutual.list_trained(), mutual.list_untrained()
    assert trained
    raydfl("predict", mutual.folder, file, "--model", "local").refuses(
        "model 'local' of this run is not shared as a whole", f"--client; clients with a model: {trained[0]}"
    )
    raydfl("predict", mutual.folder, file, "--client", "speaker01").refuses("no client 'speaker01'.*Did you mean")
    raydfl("predict", mutual.folder, file, "--client", trained[0], "--model", "locl").refuses("Did you mean 'local'")
    raydfl("predict", mutual.folder, file, "--json", "--csv").refuses("--csv and --json exclude each other")
    for client in untrained:
        raydfl("predict", mutual.folder, file, "--client", client).refuses(
            f"client '{client}' has no model 'local' yet, because it took part in none of the 2 completed rounds",
            trained[0],
        )
        assert load_model(mutual.folder, "plugin", client).round == 2  # the model that it would receive


def test_a_client_without_a_private_model_is_rejected(tmp_path: Path) -> None:
    train = {"rounds": 1, "cohort": 1, "batch_size": 4, "optimiser": {"lr": 0.1}}
    run = execute_run(tmp_path, train=train)
    assert len(run.list_untrained()) == 2
    with pytest.raises(
        InputError,
        match=rf"took part in none of the 1 completed rounds.*clients with a model: {run.list_trained()[0]}\.$",
    ):
        load_model(run.folder, client=run.list_untrained()[0])


def test_a_damaged_population_is_reported(mutual: Finished, tmp_path: Path) -> None:
    shutil.copytree(mutual.folder, tmp_path / "run")
    (tmp_path / "run" / "population" / "clients.arrow").write_bytes(b"12345678")
    with pytest.raises(RunDirectoryError, match="clients.arrow has 8 bytes instead of .* restart the run"):
        load_model(tmp_path / "run")


def test_a_changed_population_is_reported(mutual: Finished, tmp_path: Path) -> None:
    """Arrow files hold offsets, and a wrong offset may end the process."""
    shutil.copytree(mutual.folder, tmp_path / "run")
    path = tmp_path / "run" / "population" / "clips.arrow"
    content = path.read_bytes()
    path.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    with pytest.raises(RunDirectoryError, match=r"damaged \(the content of clips.arrow has changed\)"):
        load_model(tmp_path / "run")


def test_a_diverged_model_is_reported(mutual: Finished) -> None:
    model = load_model(mutual.folder)
    with torch.no_grad():
        next(model.network.parameters()).fill_(float("nan"))
    (results,) = predictions(model, mutual.test_files[:1])
    assert results.error == "the model's output is not finite: its training diverged"


def test_a_network_without_classes_is_rejected(mutual: Finished) -> None:
    model = load_model(mutual.folder)
    model.network.output = torch.nn.Linear(6, 7)
    with pytest.raises(RaydflError, match=r"output of shape \[1, 7\] for 1 examples and 3 classes"):
        model.logits(torch.zeros(1, 26, 16), None)


def test_the_generated_recordings_have_known_properties(tmp_path: Path) -> None:
    root = write_recordings(tmp_path, uneven=True)
    assert len(list(root.rglob("*.wav"))) == 5 * 3 * 3
    assert sorted(path.name for path in (root / "test").iterdir()) == sorted(LABELS)


def test_arrays_and_files_give_equal_predictions(mutual: Finished) -> None:
    result = load_result(mutual.folder)
    sounds = [read_audio(file)[0] for file in mutual.test_files]
    for chosen in ({}, {"client": mutual.list_trained()[0]}):
        results = result.predict(sounds, RATE, **chosen)
        expected = classify(mutual.folder, mutual.test_files, **chosen)
        for here, there in zip(results, expected, strict=True):
            np.testing.assert_array_equal(here.probabilities, there.probabilities)
    assert [str(item.file) for item in results[:2]] == ["array-0", "array-1"]
    of_one = result.predict(sounds[0][:, 0].astype(np.float64), RATE, client=mutual.list_trained()[0])
    np.testing.assert_array_equal(of_one.probabilities, results[0].probabilities)
    of_tensor = result.predict(torch.from_numpy(sounds[0]), RATE, client=mutual.list_trained()[0])
    assert of_tensor.label == results[0].label
    silent, heard = result.predict([np.full(800, np.nan, np.float32), sounds[0]], RATE)
    assert "800 samples are NaN" in silent.error
    assert heard.error == ""
    with pytest.raises(InputError, match="800 samples are NaN"):
        result.predict(np.full(800, np.nan, np.float32), RATE)
    for given, rate, output in [
        (sounds[0], None, "rate of the recordings is missing"),
        ((sounds[0] * 2**15).astype(np.int16), RATE, r"not int16 \[2000, 1\]. Divide integers"),
        (np.zeros((3, 2000), np.float32), RATE, r"\[3, 2000\] would be 3 samples of 2000 channels"),
        (np.zeros((3, 2000, 1), np.float32), RATE, "several recordings as a list"),
        ([0.1, 0.2], RATE, r"not float64 \[\]"),
    ]:
        with pytest.raises(InputError, match=output):
            result.predict(given, rate)
    with pytest.raises(InputError, match="needs a model of several views"):
        result.predict(sounds[0], RATE, views={"image": np.zeros((8, 8), np.uint8)})
