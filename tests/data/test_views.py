"""Several views of an example: recordings, some with an image, and a network for each view."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from raydfl import classify, export_model
from raydfl.core.errors import ConfigError, DataError
from raydfl.core.types import Batch
from raydfl.data.population import Population
from raydfl.engine.config import Config
from raydfl.engine.storage import record
from raydfl.runs.folder import create
from raydfl.runs.inference.model import load_model
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, start_server, train_federation

Tiny = Callable[..., Config]
RATE, CLIPS = 8000, 48
METHOD = '''
import torch.nn.functional as F
from raydfl import Method


class TwoViews(Method):
    """Train an audio and an image network jointly on the sum of their logits. Missing images count as 0."""

    models = {"ear": "crnn_tiny", "eye": "cnn_small"}

    def loss(self, step, batch):
        seen = step.forward("eye", batch) * batch.present["picture"].unsqueeze(1)
        return batch.mean(F.cross_entropy(step.forward("ear", batch) + seen, batch.y, reduction="none"))
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write tones of two pitches. Three of four have an image of one of two brightness levels."""
    rng = np.random.default_rng(0)
    rows = ["path,label,group,split,frame"]
    for number in range(CLIPS):
        label = number % 2
        time = np.arange(2000) / RATE
        soundfile.write(tmp_path / f"{number}.wav", 0.3 * np.sin(2 * np.pi * 400 * (1 + label) * time), RATE)
        image = ""
        if number % 4 != 3:
            image = f"{number}.png"
            Image.fromarray((100 * label + rng.integers(0, 50, (8, 9))).astype(np.uint8)).save(tmp_path / image)
        rows.append(f"{number}.wav,{'ab'[label]},g{number % 6},{'test' if number < 12 else 'train'},{image}")
    (tmp_path / "list.csv").write_text("\n".join(rows))
    (tmp_path / "two.py").write_text(METHOD)
    return tmp_path


IMAGES = "{column: frame, features: {kind: image, size: [8, 9]}}"


def make_federation(tiny: Tiny, folder: Path, *overrides: str, view: str = IMAGES) -> Config:
    features = "features: {sample_rate: 8000, bands: 16, seconds: 0.25}"
    data = f"data={{name: manifest, file: {folder / 'list.csv'}, {features}, partition: {{by: group}}, views: {{picture: {view}}}}}"
    models = "models={ear: {name: crnn_tiny, hidden: 8, filters: [4]}, eye: {name: cnn_small, view: picture}}"
    return tiny(data, f"method.name={folder / 'two.py'}:TwoViews", models, *overrides)


def test_a_batch_has_the_images_of_the_column(tiny: Tiny, folder: Path) -> None:
    config = make_federation(tiny, folder)
    population = Population.load(create(config, Progress("quiet")) / "population").use(config.data)
    train = population.data(1).train
    batch = train.batch(np.arange(len(train)))
    assert batch.x.shape[1:] == (26, 16)
    assert batch.views["picture"].shape[1:] == (1, 8, 9)
    for row, clip in enumerate(train.clips):
        has_image = clip % 4 != 3
        assert bool(batch.present["picture"][row]) == has_image
        expected = np.asarray(Image.open(folder / f"{clip}.png")) / 255 if has_image else np.zeros((8, 9))
        np.testing.assert_allclose(batch.views["picture"][row, 0].numpy(), expected, atol=1e-6)
    again = Batch.from_tensors(batch.tensors())
    assert set(again.tensors()) == set(batch.tensors()) == {"views/", "y", "views/picture", "present/picture"}
    part = train.take(np.array([2, 0])).batch(np.arange(2))
    torch.testing.assert_close(part.views["picture"], batch.views["picture"][[2, 0]])


@pytest.mark.slow
def test_batched_and_unbatched_training_agree_and_both_networks_learn(tiny: Tiny, folder: Path) -> None:
    transforms = "data.views.picture.transforms=[{name: random_crop, size: 8, pad: 1}, flip]"
    models = {}
    for group_size in (1, 3):
        overrides = [f"train.together={group_size}", f"run.name=w{group_size}"]
        config = make_federation(tiny, folder, transforms, *overrides, "train.cohort=6", "train.rounds=2")
        train_federation(config)
        run_dir = Path(config.run.dir) / f"w{group_size}"
        models[group_size] = {name: load_model(run_dir, name).network.state_dict() for name in ("ear", "eye")}
        rows = record.read_rows(run_dir).to_pylist()
        assert [row["value"] for row in rows if row["metric"] == "vectorised"] == ([] if group_size == 1 else [1.0] * 2)
        assert {row["metric"] for row in rows} >= {"ear/accuracy", "eye/accuracy"}
    for name, tensors in models[1].items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(models[3][name][key], tensor, rtol=1e-4, atol=1e-5)
    other = train_federation(make_federation(tiny, folder, "run.name=other", "train.cohort=6", "train.rounds=2"))
    config = make_federation(tiny, folder, transforms, "run.name=again", "train.cohort=6", "train.rounds=2")
    server = start_server(config)
    server.round()
    server.close()
    again = train_federation(config)
    assert_same_bits(
        again,
        train_federation(
            make_federation(tiny, folder, transforms, "run.name=third", "train.cohort=6", "train.rounds=2")
        ),
    )
    assert any(again[name] != other[name] for name in again if "eye" in name)


def test_views_change_the_digest(tiny: Tiny, folder: Path) -> None:
    digests = {
        make_federation(tiny, folder, view=view).digest()
        for view in (
            "{column: frame, features: {kind: image, size: [8, 9]}}",
            "{column: frame, features: {kind: image, size: [8, 9], mean: 0.5}}",
            "{column: other, features: {kind: image, size: [8, 9]}}",
        )
    }
    assert len(digests) == 3
    assert tiny("data.views={}").digest() == tiny().digest()


@pytest.mark.parametrize("runtime", ["PyTorch", pytest.param("ONNX Runtime", marks=pytest.mark.slow)])
def test_predict_and_export_read_the_view_of_the_model(
    tiny: Tiny, folder: Path, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the described front end applied to the image files, followed by the network or its graph."""
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    if runtime == "PyTorch":  # skip the export, since it takes seconds
        from raydfl.runs.inference.network import Graph

        sizes = {"x": ["batch", 1, 8, 8], "logits": ["batch", 2], "probabilities": ["batch", 2]}
        x, *outputs = (onnx.helper.make_tensor_value_info(name, 1, size) for name, size in sizes.items())
        proto = onnx.helper.make_model(onnx.helper.make_graph([], "none", [x], outputs))
        graph = Graph(proto.SerializeToString(), None, False, 0.0)
        monkeypatch.setattr("raydfl.runs.inference.network.to_onnx", lambda *_: graph)
    crop = "data.views.picture.transforms=[{name: random_crop, size: 8, pad: 1}, flip]"
    view = IMAGES.replace("[8, 9]", "[8, 9], mean: 0.25, deviation: 0.5, resize: true")
    config = make_federation(tiny, folder, crop, "train.rounds=1", view=view)
    train_federation(config)
    run_dir = Path(config.run.dir) / "tiny"
    assert classify(run_dir, [folder / "0.wav"], model="ear")[0].label in ("a", "b")
    predictions = classify(run_dir, [folder], model="eye")
    assert [prediction.file.suffix for prediction in predictions] == [".png"] * (CLIPS * 3 // 4)
    exported = export_model(run_dir, folder / "eye.onnx", model="eye")
    description = exported.description
    assert (description["view"], description["onnx"]["inputs"]["x"]["shape"]) == ("picture", ["batch", 1, 8, 8])
    front_end = description["front_end"]
    images = np.stack([np.asarray(Image.open(prediction.file)) for prediction in predictions])
    x = (images / 255 - front_end["scale"]["mean"][0]) / front_end["scale"]["deviation"][0]
    edge = front_end["pad"]["rows"]
    x = np.pad(x, ((0, 0), (edge, edge), (edge, edge)))
    top, left = (
        (size - front_end["crop"][name]) // 2 for size, name in zip(x.shape[1:], ("rows", "columns"), strict=True)
    )
    x = x[:, None, top : top + front_end["crop"]["rows"], left : left + front_end["crop"]["columns"]].astype(np.float32)
    if runtime == "PyTorch":
        probabilities = load_model(run_dir, "eye").logits(torch.from_numpy(x), None).softmax(1).numpy()
    else:
        (probabilities,) = onnxruntime.InferenceSession(exported.path).run(["probabilities"], {"x": x})
    np.testing.assert_allclose(
        probabilities, np.stack([prediction.probabilities for prediction in predictions]), atol=1e-4
    )
    assert np.ptp(probabilities[:, 0]) > 1e-3  # the images matter
    Image.fromarray(np.zeros((32, 36, 3), np.uint8)).save(folder / "large.png")
    assert classify(run_dir, [folder / "large.png"], model="eye")[0].label in ("a", "b")


@pytest.mark.parametrize(
    "cut",
    [
        "data.segment={frames: 10, stride: 8}",
        "data.transforms=[{name: random_crop, size: 10, test: segments, stride: 8}]",
    ],
)
def test_each_segment_has_the_whole_image_of_its_clip(tiny: Tiny, folder: Path, cut: str) -> None:
    seconds = "data.features.seconds=null"
    config = make_federation(tiny, folder, seconds, cut, "train.rounds=1", "train.cohort=6")
    train_federation(config)
    population = Population.load(Path(config.run.dir) / "tiny" / "population").use(config.data)
    test, whole = population.test, np.arange(len(population.test))
    assert np.bincount(test.clips)[:12].tolist() == [3] * 12  # (26 - 10) / 8 + 1
    batch = test.batch(whole)
    assert batch.x.shape == (36, 10, 16)
    for row, clip in enumerate(test.clips):
        expected = np.zeros((8, 9)) if clip % 4 == 3 else np.asarray(Image.open(folder / f"{clip}.png")) / 255
        np.testing.assert_allclose(batch.views["picture"][row, 0].numpy(), expected, atol=1e-6)
    ear = load_model(Path(config.run.dir) / "tiny", "ear").logits(batch.x, None).softmax(dim=1).numpy()
    right = ear.reshape(12, 3, 2).mean(axis=1).argmax(axis=1) == np.arange(12) % 2  # each clip counts once
    rows = record.read_rows(Path(config.run.dir) / "tiny").to_pylist()
    measured = [row for row in rows if row["metric"] == "ear/accuracy" and row["split"] == "test"]
    assert (measured[-1]["count"], measured[-1]["value"]) == (12, pytest.approx(right.mean()))


def test_sites_with_views_match_a_run_without_sites(tiny: Tiny, folder: Path) -> None:
    """Only the northern site has images. Its clients have the same batches as in a run without sites."""
    table = (folder / "list.csv").read_text().splitlines()
    for name, groups in (("north", "012"), ("south", "345")):
        rows = [row for row in table[1:] if row.split(",")[2][1] in groups]
        if name == "south":
            rows = [row.rpartition(",")[0] + "," for row in rows]
        (folder / f"{name}.csv").write_text("\n".join([table[0], *rows]))
    (folder / "list.csv").write_text("\n".join([table[0], *(folder / "north.csv").read_text().splitlines()[1:]]))
    sites = [f"{name}: {{file: {folder}/{name}.csv, folder: {folder}/nodes/{name}}}" for name in ("north", "south")]
    config = make_federation(tiny, folder, f"data.sites={{{', '.join(sites)}}}", "train.cohort=6", "train.rounds=1")
    train_federation(config)
    run_dir = Path(config.run.dir) / "tiny"
    parts = json.loads((run_dir / "sites.json").read_text())["parts"][""]["sites"]
    assert [site["views"]["picture"] for site in parts] == [
        {"examples": 15, "length": 8, "clients": [True] * 3},
        {"examples": 0, "length": None, "clients": [False] * 3},
    ]
    central = make_federation(tiny, folder, "run.name=alone", "train.cohort=3", "train.rounds=1")
    train_federation(central)
    at_site = Population.load(folder / "nodes/north/runs" / (run_dir / "sites.key").read_text() / "north/population")
    at_centre = Population.load(Path(central.run.dir) / "alone" / "population")
    for client in range(3):
        actual, expected = (p.use(central.data).data(client).train for p in (at_site, at_centre))
        for name, tensor in actual.batch(np.arange(len(actual))).tensors().items():
            torch.testing.assert_close(tensor, expected.batch(np.arange(len(expected))).tensors()[name], rtol=0, atol=0)


def test_unsuitable_views_are_rejected(tiny: Tiny, folder: Path) -> None:
    def assert_rejected(message: str, *overrides: str, error: type[Exception] = ConfigError, **options: Any) -> None:
        with pytest.raises(error, match=message):
            create(make_federation(tiny, folder, *overrides, **options), Progress("quiet"))

    image = "features: {kind: image, size: [8, 9]}"
    assert_rejected("unknown view 'film'. Choose one of data.views", "models.eye.view=film")
    assert_rejected("no model reads the view 'picture'", "models={eye: {name: crnn_tiny}}")
    assert_rejected("cnn_small reads images, but the data are features", "models={eye: cnn_small}")
    assert_rejected("no column 'fram'. Did you mean 'frame'", error=DataError, view=f"{{column: fram, {image}}}")
    assert_rejected("unknown key 'colum'", view=f"{{colum: frame, {image}}}")
    assert_rejected(
        "8 rows and 9 columns, not 8 and 8", error=DataError, view="{column: frame, features: {kind: image, size: 8}}"
    )
    place = r"^data\.views\.picture"
    for features, message in {
        "{kind: imag}": r"\.features\.kind is 'imag'. Did you mean 'image'",
        "{kind: image, size: many}": r"\.features\.size.*: Input should be ",
        "{kind: image, size: 8, bands: 4}": r"\.features: 'bands' is a setting of the kind .*data\.views\.picture\.features='",
        "5": r"\.features is 5. It must be a group",
        "{kind: file, path: x, bands: 4}": ": a view needs features of the kind logmel",
        f"{{kind: model, model: {folder}/none.py:Net, bands: 4}}": r"\.features\.model: .*there is no file",
    }.items():
        assert_rejected(
            place + message,
            "models.eye={name: crnn_tiny, view: picture}",
            view=f"{{column: frame, features: {features}}}",
        )
    (folder / "1.png").unlink()
    assert_rejected(place + r": 1 of \d+ clips cannot be read", error=DataError)
