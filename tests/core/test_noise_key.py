"""Keys of noise. Oracles: the normal distribution by scipy, and the bytes of all files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import kstest

from raydfl.core.errors import RunDirectoryError
from raydfl.core.noise_key import KEY_FILE, NoiseKey


def test_a_million_numbers_are_standard_normal() -> None:
    numbers = NoiseKey(bytes(32)).normals(3, "noise", 1_200_000)  # more than a block
    assert kstest(numbers, "norm").pvalue > 1e-3
    assert numbers.std() == pytest.approx(1, rel=3e-3)
    assert np.isfinite(numbers).all()
    assert len(np.unique(numbers)) == len(numbers)


def test_rounds_purposes_and_keys_have_independent_streams() -> None:
    key, other = NoiseKey(bytes(32)), NoiseKey(bytes(31) + b"x")
    draws = [key.normals(r, p, 100_000) for r in (0, 1) for p in ("noise", "draw")] + [
        other.normals(0, "noise", 100_000)
    ]
    correlations = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(correlations).max() < 5 / np.sqrt(100_000)


def test_equal_arguments_give_equal_numbers_and_longer_draws_begin_equally() -> None:
    key = NoiseKey.from_seed(1)
    assert (key.normals(2, "noise", 10) == key.normals(2, "noise", 5_000)[:10]).all()
    assert key.generator(2, "plan").random() == NoiseKey.from_seed(1).generator(2, "plan").random()
    assert key.generator(2, "plan").random() != key.generator(3, "plan").random()


def test_a_created_key_is_readable_by_its_owner_only_and_kept(tmp_path: Path) -> None:
    key = NoiseKey.create(tmp_path)
    path = tmp_path / KEY_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_bytes()) == 32
    assert [file.name for file in tmp_path.iterdir()] == [KEY_FILE]
    again = NoiseKey.create(tmp_path)
    assert again.fingerprint == key.fingerprint
    assert NoiseKey.read(tmp_path, key.fingerprint).fingerprint == key.fingerprint
    assert path.read_bytes().hex() not in repr(key) + key.fingerprint


def test_unusable_keys_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"private.key cannot be read: No such file"):
        NoiseKey.read(tmp_path)
    key = NoiseKey.create(tmp_path)
    path = tmp_path / KEY_FILE
    with pytest.raises(RunDirectoryError, match="is the key of another run"):
        NoiseKey.read(tmp_path, "0" * 16)
    path.chmod(0o640)
    with pytest.raises(RunDirectoryError, match="can be read or changed by further users"):
        NoiseKey.read(tmp_path, key.fingerprint)
    path.chmod(0o600)
    path.write_bytes(bytes(31))
    with pytest.raises(RunDirectoryError, match="has 31 bytes instead of 32"):
        NoiseKey.read(tmp_path)


def test_derived_keys_depend_on_the_key_the_round_and_the_part() -> None:
    key = NoiseKey(bytes(32))
    derived = [
        key,
        key.derive(0, "a"),
        key.derive(1, "a"),
        key.derive(0, "b"),
        NoiseKey(bytes([1] * 32)).derive(0, "a"),
    ]
    assert len({found.fingerprint for found in derived}) == len(derived)
    assert key.derive(0, "a").fingerprint == NoiseKey(bytes(32)).derive(0, "a").fingerprint
    first, second = (found.normals(0, "noise", 10_000) for found in derived[1:3])
    assert abs(float(np.corrcoef(first, second)[0, 1])) < 0.05
