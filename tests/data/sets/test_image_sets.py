"""Sets of images in their published layouts: tiny files written here, read back pixel by pixel, and damaged."""

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


def batch(count: int) -> dict[bytes, Any]:
    """As Python 2 wrote it: rows of 3,072 bytes, all red before all green before all blue."""
    data = RNG.integers(0, 256, (count, 3072)).astype(np.uint8)
    names = [b"image.png"] * count
    labels = [number % 10 for number in range(count)]
    return {b"batch_label": b"one of five", b"labels": labels, b"data": data, b"filenames": names}


def write_cifar(folder: Path) -> dict[str, dict[bytes, Any]]:
    folder.mkdir(parents=True)
    batches = {name: batch(4) for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")}
    for name, content in batches.items():
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return batches


def write_idx(folder: Path, prefix: str, labels: list[int]) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    images = RNG.integers(0, 256, (len(labels), 3, 2)).astype(np.uint8)
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx(images))
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(np.array(labels, np.uint8)))
    return images


def write_mat(folder: Path, split: str, labels: list[int], **more: Any) -> np.ndarray:
    images = RNG.integers(0, 256, (32, 32, 3, len(labels))).astype(np.uint8)
    content = {"X": images, "y": np.array(labels, np.uint8)[:, None], **more}
    scipy.io.savemat(
        folder / f"{split}_32x32.mat", {name: value for name, value in content.items() if value is not None}
    )
    return images


def rows_of(dataset: ArraySet) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = dataset.manifest().to_pylist()
    return rows


def test_cifar_10(tmp_path: Path) -> None:
    """The red of the first row comes first; torchvision's folder is found below the root; labels have the published names."""
    batches = write_cifar(tmp_path / "cifar-10-batches-py")
    dataset = CIFAR10(root=tmp_path)
    rows = rows_of(dataset)
    assert [row["split"] for row in rows] == ["train"] * 20 + ["test"] * 4
    assert [row["label"] for row in rows[:4]] == ["airplane", "automobile", "bird", "cat"]
    assert rows[6]["clip"] == "data_batch_2/00002"
    pixels = batches["data_batch_2"][b"data"][2]
    np.testing.assert_array_equal(dataset.image(rows[6]), np.stack(np.split(pixels, 3), axis=1).reshape(32, 32, 3))
    assert dataset.part(rows[6]) == "2"
    (tmp_path / "cifar-10-batches-py" / "test_batch").unlink()
    assert {row["split"] for row in rows_of(dataset)} == {None}
    assert dataset.manifest().num_rows == 20


def test_svhn(tmp_path: Path) -> None:
    """The last axis of X counts images, and a 0 is called 10; of one split alone none is official."""
    images = write_mat(tmp_path, "train", [1, 10, 9])
    dataset = SVHN(root=tmp_path)
    assert [(row["label"], row["split"]) for row in rows_of(dataset)] == [("1", None), ("0", None), ("9", None)]
    np.testing.assert_array_equal(dataset.image(rows_of(dataset)[1]), images[:, :, :, 1])
    write_mat(tmp_path, "test", [2])
    assert [row["split"] for row in rows_of(dataset)] == ["train", "train", "train", "test"]


def test_fashion_mnist_and_emnist(tmp_path: Path) -> None:
    """The published names of the classes, torchvision's folders, and images as they lie in the file."""
    write_idx(tmp_path / "FashionMNIST" / "raw", "train", [0, 9])
    assert [row["label"] for row in rows_of(FashionMNIST(root=tmp_path))] == ["T-shirt/top", "Ankle boot"]
    folder = tmp_path / "EMNIST" / "raw"
    images = write_idx(folder, "emnist-byclass-train", [0, 10, 35, 36, 61])
    write_idx(folder, "emnist-byclass-test", [1])
    write_idx(folder, "emnist-letters-test", [1, 26])
    write_idx(folder, "emnist-balanced-test", [35, 36, 46])
    rows = rows_of(EMNIST(root=tmp_path))
    assert [(row["label"], row["split"]) for row in rows] == [
        *(("0", "train"), ("A", "train"), ("Z", "train"), ("a", "train"), ("z", "train"), ("1", "test"))
    ]
    np.testing.assert_array_equal(EMNIST(root=tmp_path).image(rows[3]), images[3])  # transposed, as it was published
    assert [row["label"] for row in rows_of(EMNIST(root=tmp_path, variant="letters"))] == ["a", "z"]
    assert [row["label"] for row in rows_of(EMNIST(root=folder, variant="balanced"))] == ["Z", "a", "t"]
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
"""A batch of two images as Python 2 pickled it."""


@pytest.mark.parametrize("protocol", [0, 3, 4])
def test_a_batch_of_another_version_of_python_is_read_as_pickle_reads_it(tmp_path: Path, protocol: int) -> None:
    content = pickle.dumps(batch(4), protocol) if protocol else PYTHON_2
    (tmp_path / "test_batch").write_bytes(content)
    expected = pickle.loads(content, encoding="bytes")
    dataset = CIFAR10(root=tmp_path)
    rows = rows_of(dataset)
    assert [dataset.published.index(row["label"]) for row in rows] == expected[b"labels"]
    for row, data in zip(rows, expected[b"data"], strict=True):
        np.testing.assert_array_equal(dataset.image(row), data.reshape(3, 32, 32).transpose(1, 2, 0))


class Opens:
    """Names a function of the operating system in its pickle."""

    def __reduce__(self) -> Any:
        return open, ("/dev/null",)


class Builds:
    """Is unpickled by a call and a state."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts


LONG = "x" * 2_000
"""Encoded 99 times it is longer than its file."""


def crashing(dtype: str) -> Builds:
    """An array of objects without the flag of objects: its bytes are addresses, which NumPy follows."""
    state = (3, "|", None, None, None, -1, -1, 0 if dtype == "O8" else 63)
    built = Builds(np.dtype, (dtype, False, True), state)
    return Builds(_reconstruct, (np.ndarray, (0,), b"b"), (1, (4,), built, False, b"A" * 32))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def rewritten(**change: Any) -> Callable[[Path], None]:
    """Writes a batch with other values; ``None``: without."""

    def write(file: Path) -> None:
        content = {**batch(4), **{name.encode(): value for name, value in change.items()}}
        file.write_bytes(pickle.dumps({name: value for name, value in content.items() if value is not None}, 2))

    return write


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (cut, "data_batch_3: truncated, damaged, or not a pickle"),
        (lambda file: file.write_bytes(b""), "data_batch_3: truncated, damaged, or not a pickle"),
        (rewritten(labels=None), "data_batch_3: the batch has no 'labels'"),
        (rewritten(labels=[1, 2]), "data_batch_3 has 4 images, but 2 labels"),
        (rewritten(labels=[1, 2, 3, 10]), "data_batch_3 has the label 10, but the set has 10 names"),
        (rewritten(labels="abcd"), "data_batch_3: its labels are not a list of integers"),
        (
            rewritten(data=np.zeros((4, 3071), np.uint8)),
            r"its images are uint8 \[4, 3071\], not bytes \[images, 3072\]",
        ),
        (
            rewritten(batch_label=Opens()),
            r"data_batch_3: the pickle contains more than arrays, numbers and texts: it names \w*io.open",
        ),
        (rewritten(batch_label=Builds(np.dtype, ("O8", False, True))), "an array of an unsupported data type"),
        (rewritten(labels=[crashing("O8")]), "an array of an unsupported data type"),
        (rewritten(labels=[crashing("u8")]), "it changes the state of an object"),
        (rewritten(labels=np.array([None])), "an array of an unsupported data type"),
        (rewritten(labels=[[1, 2]] * 4), "its labels are not a list of integers"),
        (rewritten(data=Builds(_reconstruct, (np.ndarray, (0,), b"b"))), "its images are NoneType, not bytes"),
        (rewritten(labels=[1, 2, 3, 2**40]), "it has the opcode 0x8a"),
        (
            rewritten(labels=[Builds(codecs.encode, (LONG, "latin1")) for _ in range(99)]),
            "bytes in an unknown encoding",
        ),
        (
            lambda file: file.write_bytes(b"\x80\x02X\x10\x00\x00\x00" + b"\xff" * 16),
            r"not a pickle \(UnicodeDecodeError: .{0,200}\)",
        ),
        (rewritten(labels=["x"] * 4), "its labels are not a list of integers"),
        (lambda file: file.unlink(), "there is no data_batch_3 in"),
    ],
)
def test_damaged_batches(tmp_path: Path, change: Callable[[Path], None], says: str) -> None:
    write_cifar(tmp_path / "set")
    change(tmp_path / "set" / "data_batch_3")
    with pytest.raises(DataError, match=says):
        CIFAR10(root=tmp_path / "set").manifest()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"X": None}, "train_32x32.mat: the file has no 'X'"),
        ({"y": None}, "train_32x32.mat: the file has no 'y'"),
        ({"y": np.zeros((2, 1), np.uint8)}, "train_32x32.mat has 3 images, but 2 labels"),
        ({"y": np.array([[1.5], [2], [3]])}, "its labels are not a list of integers"),
        ({"X": np.zeros((32, 32, 3, 3))}, r"its images are float64 \[3, 32, 32, 3\], not bytes \[images, 32, 32, 3\]"),
        (cut, "train_32x32.mat: truncated, damaged, or not a MATLAB file of version 4 to 7"),
        (
            lambda file: file.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(600)),
            "train_32x32.mat: truncated, damaged, or not a MATLAB file",
        ),
    ],
)
def test_damaged_mat_files(tmp_path: Path, change: Any, says: str) -> None:
    write_mat(tmp_path, "train", [1, 2, 3], **(change if isinstance(change, dict) else {}))
    if callable(change):
        change(tmp_path / "train_32x32.mat")
    with pytest.raises(DataError, match=says):
        SVHN(root=tmp_path).manifest()
