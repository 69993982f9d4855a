"""Strings of spoken digits, on small files of FSDD's layout. The constant value of each take identifies it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from raydfl.core.errors import ConfigError, DataError
from raydfl.data.sets.fsdd_strings import FSDDStrings

RATE, TAKES = 8000, 7
SPEAKERS = ("anna", "bob")


def get_value(speaker: str, digit: int, take: int) -> float:
    """Return the sample value of a take, an exact 16-bit number."""
    return (1 + SPEAKERS.index(speaker) * 100 + digit * 10 + take) / 1024


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdd")
    (folder / "recordings").mkdir()
    for speaker in SPEAKERS:
        for digit in range(3):
            for take in range(TAKES):
                samples = np.full(200 + 10 * digit, get_value(speaker, digit, take))
                soundfile.write(folder / f"recordings/{digit}_{speaker}_{take}.wav", samples, RATE, subtype="PCM_16")
    return folder


@pytest.fixture
def draw(root: Path) -> Callable[..., tuple[FSDDStrings, list[dict[str, Any]]]]:
    def make(**options: Any) -> tuple[FSDDStrings, list[dict[str, Any]]]:
        small = {"clients": 2, "strings": 40, "test_strings": 20, "test_takes": 3}
        strings = FSDDStrings(root=root, **{**small, **options})
        return strings, strings.manifest().to_pylist()

    return make


def test_strings_have_pauses_between_the_takes_of_their_digits(draw: Any) -> None:
    strings, rows = draw(digits=(1, 4))
    lengths = set()
    for row in rows:
        samples, rate = strings.read(row)
        pauses = [float(ms) for ms in row["pauses"].split()]
        takes = [Path(path).stem.split("_") for path in row["takes"].split("\n")]
        lengths.add(len(takes))
        assert rate == RATE
        assert "".join(digit for digit, _, _ in takes) == row["label"]
        assert all(25 <= ms <= 150 for ms in pauses)
        expected = [np.zeros(round(pauses[0] * 8))]
        for (digit, speaker, take), ms in zip(takes, pauses[1:], strict=True):
            assert speaker == row["speaker"]
            value = get_value(speaker, int(digit), int(take))
            expected += [np.full(200 + 10 * int(digit), value), np.zeros(round(ms * 8))]
        np.testing.assert_array_equal(samples[:, 0], np.concatenate(expected))
    assert lengths == {1, 2, 3, 4}


def list_takes(rows: list[dict[str, Any]]) -> set[str]:
    return {take for row in rows for take in row["takes"].split("\n")}


def test_neither_test_and_training_nor_two_clients_share_a_take(draw: Any) -> None:
    _, rows = draw()
    by_group: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_group.setdefault(row["group"], []).append(row)
    assert {group: len(clips) for group, clips in by_group.items()} == {
        **{f"{speaker}-{number}": 40 for speaker in SPEAKERS for number in (0, 1)},
        **{f"{speaker}-test": 20 for speaker in SPEAKERS},
    }
    takes = [list_takes(clips) for clips in by_group.values()]
    assert sum(map(len, takes)) == len(set.union(*takes)) == 2 * 3 * TAKES
    for group, clips in by_group.items():
        is_test = group.endswith("-test")
        assert {row["split"] for row in clips} == {"test" if is_test else "train"}
        assert all((int(Path(take).stem.split("_")[2]) < 3) == is_test for take in list_takes(clips))
        owners = Counter(row["client"] for row in clips)
        speaker = group.partition("-")[0]
        assert owners == ({f"{speaker}-0": 10, f"{speaker}-1": 10} if is_test else {group: 40})


def test_test_speakers_are_in_the_test_only(draw: Any) -> None:
    _, rows = draw(test_speakers=("bob",))
    assert {(row["speaker"], row["split"]) for row in rows} == {("anna", "train"), ("bob", "test")}
    assert len(list_takes([row for row in rows if row["split"] == "test"])) > 3 * 3  # all takes, not the first ones


def test_the_seed_decides_everything(draw: Any, root: Path) -> None:
    strings, rows = draw()
    assert draw()[1] == rows
    assert draw(seed=1)[1] != rows
    assert [row["split"] for row in draw(test_strings=0)[1]] == [None] * 160
    keys = {strings.identity(row) for row in rows}
    assert len(keys) == len({(row["takes"], row["pauses"]) for row in rows})
    path = Path(rows[0]["takes"].split("\n")[0])
    content = path.read_bytes()
    before = strings.identity(rows[0])
    try:
        path.write_bytes(content[:-2] + b"\x01\x00")
        assert strings.identity(rows[0]) != before
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"digits": (3, 2)}, ConfigError, "data.digits: the largest number, 2, is below the least, 3"),
        ({"test_speakers": ("ana",)}, ConfigError, "data.test_speakers: unknown speaker 'ana'. Did you mean 'anna'"),
        ({"clients": 5}, DataError, "anna-4 has no take of digit 0 in .* Lower data.clients"),
        ({"test_takes": 0}, DataError, "anna-test has no take of digit 0 in .* Raise data.test_takes"),
    ],
)
def test_errors_name_the_option(draw: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        draw(**options)
