"""Images: the idx format, pixels in batches, transforms and runs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digits import idx
from PIL import Image

from raydfl import classify
from raydfl.core.errors import ConfigError, DataError
from raydfl.core.settings import FIRST_VIEW
from raydfl.core.types import ModelSpec
from raydfl.data.build import build_population
from raydfl.data.features.image import ImageFeatures
from raydfl.data.population import Population
from raydfl.data.sets.mnist import MNIST
from raydfl.data.settings import DataSettings
from raydfl.engine.config import Config
from raydfl.models import build_model
from raydfl.runs.folder import create
from raydfl.runs.inference.model import load_model
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, train_federation

Tiny = Callable[..., Config]
ROWS, COLUMNS, COUNT = 6, 5, 60


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write images of three brightness classes. Only the training files are compressed."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "idx"
    folder.mkdir()
    for prefix, count in (("train", COUNT), ("t10k", 12)):
        labels = (np.arange(count) % 3).astype(np.uint8)
        images = (60 * labels[:, None, None] + rng.integers(0, 60, (count, ROWS, COLUMNS))).astype(np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            compressed = prefix == "train"
            content = gzip.compress(idx(array)) if compressed else idx(array)
            (folder / f"{prefix}-{name}-ubyte{'.gz' if compressed else ''}").write_bytes(content)
    return folder


def make_settings(root: Path, cache: Path, **options: Any) -> DataSettings:
    features = {"kind": "image", "size": [ROWS, COLUMNS], **options.pop("features", {})}
    partition = {"by": "iid", "clients": 4}
    values = {"name": "mnist", "root": root, "features": features, "partition": partition, "cache": cache, **options}
    return DataSettings.model_validate(values)


def read_pixels(root: Path) -> np.ndarray:
    return np.frombuffer(gzip.decompress((root / "train-images-idx3-ubyte.gz").read_bytes())[16:], np.uint8).reshape(
        COUNT, ROWS, COLUMNS
    )


def test_the_manifest_has_labels_and_the_official_split(root: Path) -> None:
    rows = MNIST(root=root).manifest().to_pylist()
    assert len(rows) == COUNT + 12
    assert [row["label"] for row in rows[:4]] == ["0", "1", "2", "0"]
    assert [row["split"] for row in rows].count("test") == 12
    np.testing.assert_array_equal(MNIST(root=root).image(rows[7]), read_pixels(root)[7])
    assert MNIST(root=root, names=("a", "b", "c")).manifest().column("label")[2].as_py() == "c"


def test_the_cache_stores_bytes_and_batches_have_scaled_images(root: Path, tmp_path: Path) -> None:
    data = make_settings(root, tmp_path / "cache", features={"mean": 0.25, "deviation": 0.5})
    population = build_population(data, 1)
    population.save(tmp_path)
    population = Population.load(tmp_path).use(data)
    assert population.stores[0].frames.dtype == np.uint8
    assert population.stores[0].frames.shape == ((COUNT + 12) * ROWS, COLUMNS)
    train = population.data(0).train
    batch = train.batch(np.arange(5))
    assert batch.lengths is None
    expected = (read_pixels(root)[train.clips[:5]].astype(np.float64) / 255 - 0.25) / 0.5
    np.testing.assert_allclose(batch.x.numpy(), expected[:, None], atol=1e-6)


def transform_images(
    root: Path, cache: Path, *transforms: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Return stored images, transformed training images, and the drawn parameters."""
    population = build_population(
        make_settings(root, cache, transforms=list(transforms), partition={"by": "iid", "clients": 1}), 1
    )
    train = population.data(0).train
    index = np.arange(len(train))
    drawn = train.draw(index, 3, 0)
    return read_pixels(root)[train.clips] / 255, train.batch(index, drawn=drawn).x[:, 0].numpy(), drawn[FIRST_VIEW]


def test_random_crop_selects_parts_of_padded_images(root: Path, tmp_path: Path) -> None:
    before, after, drawn = transform_images(root, tmp_path, {"name": "random_crop", "size": 6, "pad": 2})
    assert after.shape == (COUNT, 6, 6)
    padded = np.pad(before, ((0, 0), (2, 2), (2, 2)))
    for row in range(COUNT):
        top, left = drawn["crop/top"][row], drawn["crop/left"][row]
        np.testing.assert_allclose(after[row], padded[row, top : top + 6, left : left + 6], atol=1e-6)
    assert set(drawn["crop/top"]) == set(range(5))
    assert set(drawn["crop/left"]) == set(range(4))


def test_flip_and_cutout_follow_their_draws(root: Path, tmp_path: Path) -> None:
    before, after, drawn = transform_images(
        root, tmp_path, {"name": "flip", "share": 0.3}, {"name": "cutout", "size": 2}
    )
    flipped = drawn["0/flipped"]
    assert 8 < flipped.sum() < 30
    for row in range(COUNT):
        expected = (before[row][:, ::-1] if flipped[row] else before[row]).copy()
        top, left = drawn["1/row"][row] - 1, drawn["1/column"][row] - 1
        expected[max(top, 0) : top + 2, max(left, 0) : left + 2] = 0
        np.testing.assert_allclose(after[row], expected, atol=1e-6)


def test_evaluation_uses_the_centre_crop(root: Path, tmp_path: Path) -> None:
    crop = {"name": "random_crop", "size": 8, "pad": 2}
    population = build_population(make_settings(root, tmp_path, transforms=[crop, {"name": "flip", "share": 1.0}]), 1)
    train = population.data(0).train
    actual = train.batch(np.arange(3)).x[:, 0].numpy()
    expected = np.pad(read_pixels(root)[train.clips[:3]] / 255, ((0, 0), (1, 1), (2, 2)))[:, :, :8]
    assert actual.shape == (3, 8, 8)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_transforms_of_fedapta_match_torchvision(root: Path, tmp_path: Path) -> None:
    """Oracle: torchvision's order in NumPy: pad with black, crop, flip, scale, then cut out a square of zeros."""
    crop = {"name": "random_crop", "size": 8, "pad": 2, "pad_with": "black"}
    scale = {"mean": [0.1, 0.2, 0.3], "deviation": [0.5, 0.6, 0.7], "channels": 3}
    data = make_settings(root, tmp_path, features=scale, transforms=[crop, "flip", {"name": "cutout", "size": 4}])
    train = build_population(data, 1).data(0).train
    index = np.arange(len(train))
    drawn = train.draw(index, 3, 0)
    actual, drawn = train.batch(index, drawn=drawn).x.numpy(), drawn[FIRST_VIEW]
    padded = np.pad(read_pixels(root)[train.clips] / 255, ((0, 0), (2, 2), (2, 2)))
    mean, deviation = (np.array(scale[name])[:, None, None] for name in ("mean", "deviation"))
    for row in range(len(index)):
        top, left = drawn["crop/top"][row], drawn["crop/left"][row]
        part = padded[row, top : top + 8, left : left + 8]
        scaled = ((part[:, ::-1] if drawn["0/flipped"][row] else part)[None] - mean) / deviation
        above, left_of = drawn["1/row"][row] - 2, drawn["1/column"][row] - 2
        scaled[:, max(above, 0) : max(above + 4, 0), max(left_of, 0) : max(left_of + 4, 0)] = 0
        np.testing.assert_allclose(actual[row], scaled, atol=1e-5)


def make_federation(tiny: Tiny, root: Path, *overrides: str) -> Config:
    features = f"{{kind: image, size: [{ROWS}, {COLUMNS}]}}"
    dataset = f"name: mnist, root: {root}, partition: {{by: iid, clients: 6}}, split: {{validation: 0.2}}"
    data = f"data={{{dataset}, features: {features}}}"
    return tiny(data, "models={model: cnn_small}", "train.optimiser.lr=0.1", *overrides)


TRANSFORMS: list[Any] = [{"name": "random_crop", "size": 6, "pad": 1}, "flip", {"name": "cutout", "size": 2}]
ON = f"data.transforms={json.dumps(TRANSFORMS)}"


def test_batched_and_unbatched_training_on_images_agree(tiny: Tiny, root: Path) -> None:
    models = {}
    for group_size in (1, 3):
        config = make_federation(tiny, root, f"train.together={group_size}", f"run.name=w{group_size}", ON)
        train_federation(config)
        models[group_size] = load_model(Path(config.run.dir) / f"w{group_size}").network.state_dict()
    for name, tensor in models[1].items():
        torch.testing.assert_close(models[3][name], tensor, rtol=1e-4, atol=1e-5)
    assert_same_bits(
        train_federation(make_federation(tiny, root, "run.name=a", ON)),
        train_federation(make_federation(tiny, root, "run.name=b", ON)),
    )


def test_classified_image_files_match_the_network(tiny: Tiny, root: Path, tmp_path: Path) -> None:
    config = make_federation(tiny, root, "train.rounds=4", "run.name=seen")
    train_federation(config)
    run_dir = Path(config.run.dir) / "seen"
    Image.fromarray(read_pixels(root)[2]).save(tmp_path / "two.png")
    (prediction,) = classify(run_dir, [tmp_path / "two.png"])
    x = torch.from_numpy(read_pixels(root)[2] / np.float32(255))[None, None]
    expected = load_model(run_dir).logits(x, None).double().softmax(dim=1)[0]
    torch.testing.assert_close(torch.from_numpy(prediction.probabilities), expected, rtol=1e-5, atol=1e-6)


def test_the_cnn_has_the_parameter_count_of_the_paper() -> None:
    network = build_model(ModelSpec("model", "cnn", (1, 28, 28), 10))
    assert sum(parameter.numel() for parameter in network.parameters()) == 1_663_370
    x = torch.randn(2, 1, 28, 28)
    torch.testing.assert_close(network(x), network.output(network.embed(x)))  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("train-images-idx3-ubyte.gz", lambda content: content[:-20], "the gzip file is truncated or damaged"),
        ("t10k-images-idx3-ubyte", lambda content: content[:-20], "bytes, but 340 follow"),
        ("t10k-images-idx3-ubyte", lambda content: content[:9], "9 bytes are too few for an idx header of 16"),
        (
            "t10k-images-idx3-ubyte",
            lambda content: b"\0\0\x0d\x03" + content[4:],
            "starts with 00000d03, not 00000803",
        ),
        ("t10k-labels-idx1-ubyte", lambda _: idx(np.zeros((3, 3, 3), np.uint8)), "images and labels are exchanged"),
        (
            "t10k-labels-idx1-ubyte",
            lambda _: idx(np.zeros(7, np.uint8)),
            "12 images, but 7 labels",
        ),
        ("t10k-labels-idx1-ubyte", None, "there is no t10k-labels-idx1-ubyte next to the images"),
    ],
)
def test_damaged_idx_files_are_rejected(
    root: Path, file: str, change: Callable[[bytes], bytes] | None, message: str
) -> None:
    path = root / file
    content = path.read_bytes()
    path.unlink()
    if change is not None:
        path.write_bytes(change(content))
    with pytest.raises(DataError, match=message):
        MNIST(root=root).manifest()


def test_image_files_of_several_sizes_and_colours_are_converted(tmp_path: Path, tiny: Tiny) -> None:
    rng = np.random.default_rng(0)
    rows = ["path,label,split"]
    for number in range(24):
        shape = (8, 8 + number % 2, 3) if number % 3 else (8, 8 + number % 2)
        Image.fromarray(rng.integers(0, 255, shape).astype(np.uint8)).save(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,{'ab'[number % 2]},{'test' if number % 4 == 0 else 'train'}")
    (tmp_path / "list.csv").write_text("\n".join(rows))
    dataset = f"name: manifest, file: {tmp_path / 'list.csv'}, partition: {{by: iid, clients: 2}}"

    def configure(features: str) -> Config:
        return tiny(
            f"data={{{dataset}, features: {{kind: image, {features}}}}}", "models={model: cnn_small}", "train.cohort=2"
        )

    with pytest.raises(
        DataError, match="8 rows and 9 columns, not 8 and 8. Set resize: true for images of several sizes"
    ):
        create(configure("size: 8"), Progress("quiet"))
    population = Population.load(
        create(configure("size: 8, resize: true, channels: 3"), Progress("quiet")) / "population"
    )
    assert population.views[FIRST_VIEW].bands == 24
    (tmp_path / "5.png").write_text("no image")
    with pytest.raises(DataError, match="the image cannot be read: cannot identify image file"):
        create(configure("size: 8, resize: true"), Progress("quiet"))


def test_unsuitable_settings_for_images_are_rejected(tiny: Tiny, root: Path) -> None:
    with pytest.raises(
        ConfigError, match="crnn_base reads features, but the data are images. Set models.model to one of cnn"
    ):
        make_federation(tiny, root, "models={}")
    with pytest.raises(ConfigError, match="cnn reads images, but the data are features"):
        tiny("models={model: cnn}")
    with pytest.raises(ConfigError, match="contains images, but data.features.kind is logmel"):
        tiny(f"data={{name: mnist, root: {root}}}")
    with pytest.raises(ConfigError, match="at least 12 rows, but the longest has 6"):
        make_federation(tiny, root, "data.transforms=[{name: random_crop, size: 12}]")
    with pytest.raises(ConfigError, match="too small for 2 times 2 x 2 pooling"):
        make_federation(tiny, root, "data.transforms=[{name: random_crop, size: 3}]")
    with pytest.raises(ConfigError, match="noise supports features of the kind logmel, not image"):
        make_federation(tiny, root, "data.transforms=[noise]")
    with pytest.raises(ConfigError, match="data.corrupt.noise needs recordings"):
        make_federation(tiny, root, "data.corrupt={noise: {snr_db: 3, clients: 1}}")
    with pytest.raises(ConfigError, match="needs recordings"):
        make_federation(tiny, root, "attack={name: corrupt_recordings, clients: 1}")
    with pytest.raises(ValueError, match="2 numbers for 1 channels"):
        ImageFeatures(kind="image", size=(8, 8), mean=(0.1, 0.2))
