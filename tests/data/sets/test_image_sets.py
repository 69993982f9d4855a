"""Image data sets in their published layouts: small valid files are read pixel by pixel, damaged files are rejected."""

from __future__ import annotations

import codecs
import pickle
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
from digits import idx
from numpy._core.multiarray import _reconstruct

from raydfl.core.errors import DataError
from raydfl.data.sets._arrays import ArraySet
from raydfl.data.sets.cifar10 import CIFAR10
from raydfl.data.sets.emnist import EMNIST
from raydfl.data.sets.fashion_mnist import FashionMNIST
from raydfl.data.sets.svhn import SVHN

RNG = np.random.default_rng(0)


def make_batch(count: int) -> dict[bytes, Any]:
    """Make a batch in the published format: rows of 3,072 bytes, all red, then all green, then all blue."""
    data = RNG.integers(0, 256, (count, 3072)).astype(np.uint8)
    names = [b"image.png"] * count
    labels = [number % 10 for number in range(count)]
    return {b"batch_label": b"one of five", b"labels": labels, b"data": data, b"filenames": names}


def write_cifar(folder: Path) -> dict[str, dict[bytes, Any]]:
    folder.mkdir(parents=True)
    batches = {name: make_batch(4) for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")}
    for name, content in batches.items():
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return batches


def write_idx(folder: Path, prefix: str, labels: list[int]) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    images = RNG.integers(0, 256, (len(labels), 3, 2)).astype(np.uint8)
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx(images))
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(np.array(labels, np.uint8)))
    return images


def write_mat(folder: Path, split: str, labels: list[int], **extra: Any) -> np.ndarray:
    images = RNG.integers(0, 256, (32, 32, 3, len(labels))).astype(np.uint8)
    content = {"X": images, "y": np.array(labels, np.uint8)[:, None], **extra}
    scipy.io.savemat(
        folder / f"{split}_32x32.mat", {name: value for name, value in content.items() if value is not None}
    )
    return images


def list_rows(dataset: ArraySet) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = dataset.manifest().to_pylist()
    return rows


def test_cifar_10_is_read_in_its_published_layout(tmp_path: Path) -> None:
    """Channels are planar, the root may contain torchvision's folder, and labels have the published names."""
    batches = write_cifar(tmp_path / "cifar-10-batches-py")
    dataset = CIFAR10(root=tmp_path)
    rows = list_rows(dataset)
    assert [row["split"] for row in rows] == ["train"] * 20 + ["test"] * 4
    assert [row["label"] for row in rows[:4]] == ["airplane", "automobile", "bird", "cat"]
    assert rows[6]["clip"] == "data_batch_2/00002"
    pixels = batches["data_batch_2"][b"data"][2]
    np.testing.assert_array_equal(dataset.image(rows[6]), np.stack(np.split(pixels, 3), axis=1).reshape(32, 32, 3))
    assert dataset.part(rows[6]) == "2"
    (tmp_path / "cifar-10-batches-py" / "test_batch").unlink()
    assert {row["split"] for row in list_rows(dataset)} == {None}
    assert dataset.manifest().num_rows == 20


def test_svhn_is_read_in_its_published_layout(tmp_path: Path) -> None:
    """The last axis of X counts images, and the digit 0 has the label 10. A single split is not official."""
    images = write_mat(tmp_path, "train", [1, 10, 9])
    dataset = SVHN(root=tmp_path)
    assert [(row["label"], row["split"]) for row in list_rows(dataset)] == [("1", None), ("0", None), ("9", None)]
    np.testing.assert_array_equal(dataset.image(list_rows(dataset)[1]), images[:, :, :, 1])
    write_mat(tmp_path, "test", [2])
    assert [row["split"] for row in list_rows(dataset)] == ["train", "train", "train", "test"]


def test_fashion_mnist_and_emnist_are_read_in_their_published_layouts(tmp_path: Path) -> None:
    """Classes have the published names, the root may contain torchvision's folders, and images are unchanged."""
    write_idx(tmp_path / "FashionMNIST" / "raw", "train", [0, 9])
    assert [row["label"] for row in list_rows(FashionMNIST(root=tmp_path))] == ["T-shirt/top", "Ankle boot"]
    folder = tmp_path / "EMNIST" / "raw"
    images = write_idx(folder, "emnist-byclass-train", [0, 10, 35, 36, 61])
    write_idx(folder, "emnist-byclass-test", [1])
    write_idx(folder, "emnist-letters-test", [1, 26])
    write_idx(folder, "emnist-balanced-test", [35, 36, 46])
    rows = list_rows(EMNIST(root=tmp_path))
    assert [(row["label"], row["split"]) for row in rows] == [
        *(("0", "train"), ("A", "train"), ("Z", "train"), ("a", "train"), ("z", "train"), ("1", "test"))
    ]
    np.testing.assert_array_equal(EMNIST(root=tmp_path).image(rows[3]), images[3])  # transposed, as published
    assert [row["label"] for row in list_rows(EMNIST(root=tmp_path, variant="letters"))] == ["a", "z"]
    assert [row["label"] for row in list_rows(EMNIST(root=folder, variant="balanced"))] == ["Z", "a", "t"]
    counts = {
        name: len(EMNIST(root=tmp_path, variant=name).class_names()) for name in ("byclass", "bymerge", "balanced")
    }
    assert counts == {"byclass": 62, "bymerge": 47, "balanced": 47}
    merged = set(EMNIST(root=tmp_path).class_names()) - set(EMNIST(root=tmp_path, variant="bymerge").class_names())
    assert merged == set("cijklmopsuvwxyz") < set(string.ascii_lowercase)


PYTHON_2 = (
    b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03(K\x07K\x01eU\x04datacnumpy.core.multiarray\n_reconstruct\nq\x04cnumpy\nndarray\nq\x05"
    b"K\x00\x85U\x01b\x87Rq\x06(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nq\x07U\x02u1K\x00K\x01\x87Rq\x08(K\x03U\x01|NNN"
    b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x18\x00\x00" + bytes(range(256)) * 24 + b"tbu."
)
"""A batch of two images, pickled by Python 2."""


@pytest.mark.parametrize("protocol", [0, 3, 4])
def test_batches_of_all_python_versions_match_pickle(tmp_path: Path, protocol: int) -> None:
    content = pickle.dumps(make_batch(4), protocol) if protocol else PYTHON_2
    (tmp_path / "test_batch").write_bytes(content)
    expected = pickle.loads(content, encoding="bytes")
    dataset = CIFAR10(root=tmp_path)
    rows = list_rows(dataset)
    assert [dataset.published.index(row["label"]) for row in rows] == expected[b"labels"]
    for row, data in zip(rows, expected[b"data"], strict=True):
        np.testing.assert_array_equal(dataset.image(row), data.reshape(3, 32, 32).transpose(1, 2, 0))


class OpenCall:
    """An object with a pickle that calls ``open``."""

    def __reduce__(self) -> Any:
        return open, ("/dev/null",)


class Reduction:
    """An object with an arbitrary pickle: a call and a state."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts


LONG = "x" * 2_000
"""A text that exceeds the size of its file if it is encoded 99 times."""


def make_crashing_array(dtype: str) -> Reduction:
    """Make an object array without the object flag. NumPy would follow its bytes as addresses and crash."""
    state = (3, "|", None, None, None, -1, -1, 0 if dtype == "O8" else 63)
    data_type = Reduction(np.dtype, (dtype, False, True), state)
    return Reduction(_reconstruct, (np.ndarray, (0,), b"b"), (1, (4,), data_type, False, b"A" * 32))


def truncate_file(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def rewrite_batch(**change: Any) -> Callable[[Path], None]:
    """Return a writer of a batch with changed values. ``None`` removes a value."""

    def write(file: Path) -> None:
        content = {**make_batch(4), **{name.encode(): value for name, value in change.items()}}
        file.write_bytes(pickle.dumps({name: value for name, value in content.items() if value is not None}, 2))

    return write


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (truncate_file, "data_batch_3: truncated, damaged, or not a pickle"),
        (lambda file: file.write_bytes(b""), "data_batch_3: truncated, damaged, or not a pickle"),
        (rewrite_batch(labels=None), "data_batch_3: the batch has no 'labels'"),
        (rewrite_batch(labels=[1, 2]), "data_batch_3 has 4 images, but 2 labels"),
        (rewrite_batch(labels=[1, 2, 3, 10]), "data_batch_3 has the label 10, but the set has 10 names"),
        (rewrite_batch(labels="abcd"), "data_batch_3: its labels are not a list of integers"),
        (
            rewrite_batch(data=np.zeros((4, 3071), np.uint8)),
            r"its images are uint8 \[4, 3071\], not bytes \[images, 3072\]",
        ),
        (
            rewrite_batch(batch_label=OpenCall()),
            r"data_batch_3: the pickle contains more than arrays, numbers and texts: it names \w*io.open",
        ),
        (rewrite_batch(batch_label=Reduction(np.dtype, ("O8", False, True))), "an array of an unsupported data type"),
        (rewrite_batch(labels=[make_crashing_array("O8")]), "an array of an unsupported data type"),
        (rewrite_batch(labels=[make_crashing_array("u8")]), "it changes the state of an object"),
        (rewrite_batch(labels=np.array([None])), "an array of an unsupported data type"),
        (rewrite_batch(labels=[[1, 2]] * 4), "its labels are not a list of integers"),
        (rewrite_batch(data=Reduction(_reconstruct, (np.ndarray, (0,), b"b"))), "its images are NoneType, not bytes"),
        (rewrite_batch(labels=[1, 2, 3, 2**40]), "it has the opcode 0x8a"),
        (
            rewrite_batch(labels=[Reduction(codecs.encode, (LONG, "latin1")) for _ in range(99)]),
            "bytes in an unknown encoding",
        ),
        (
            lambda file: file.write_bytes(b"\x80\x02X\x10\x00\x00\x00" + b"\xff" * 16),
            r"not a pickle: .{0,500}\. Download the file again$",
        ),
        (rewrite_batch(labels=["x"] * 4), "its labels are not a list of integers"),
        (lambda file: file.unlink(), "there is no data_batch_3 in"),
    ],
)
def test_damaged_batches_are_rejected(tmp_path: Path, change: Callable[[Path], None], message: str) -> None:
    write_cifar(tmp_path / "set")
    change(tmp_path / "set" / "data_batch_3")
    with pytest.raises(DataError, match=message):
        CIFAR10(root=tmp_path / "set").manifest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"X": None}, "train_32x32.mat: the file has no 'X'"),
        ({"y": None}, "train_32x32.mat: the file has no 'y'"),
        ({"y": np.zeros((2, 1), np.uint8)}, "train_32x32.mat has 3 images, but 2 labels"),
        ({"y": np.array([[1.5], [2], [3]])}, "its labels are not a list of integers"),
        ({"X": np.zeros((32, 32, 3, 3))}, r"its images are float64 \[3, 32, 32, 3\], not bytes \[images, 32, 32, 3\]"),
        (truncate_file, "train_32x32.mat: truncated, damaged, or not a MATLAB file of version 4 to 7"),
        (
            lambda file: file.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(600)),
            "train_32x32.mat: truncated, damaged, or not a MATLAB file",
        ),
    ],
)
def test_damaged_mat_files_are_rejected(tmp_path: Path, change: Any, message: str) -> None:
    write_mat(tmp_path, "train", [1, 2, 3], **(change if isinstance(change, dict) else {}))
    if callable(change):
        change(tmp_path / "train_32x32.mat")
    with pytest.raises(DataError, match=message):
        SVHN(root=tmp_path).manifest()
