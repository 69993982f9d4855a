"""Lengths and balance in ``raydfl data info``. Oracle: the generated files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from raydfl.cli.describe import describe_data
from raydfl.data import DataSettings

SPLIT = {"test": {"by": "clip", "fraction": 0.5}}


def describe(root: Path, counts: dict[str, int], seconds: list[float]) -> str:
    """Write empty recordings, the lengths by turns, and return the description as a line."""
    for label, count in counts.items():
        (root / label).mkdir()
        for take in range(count):
            length = round(8000 * seconds[take % len(seconds)])
            soundfile.write(root / label / f"{take}.wav", np.zeros(length, np.float32), 8000)
    values = {"name": "folder", "root": root, "split": SPLIT, "partition": {"by": "iid", "clients": 2}}
    return " ".join(" ".join(describe_data(DataSettings(**values), 1)).split())


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({"no": 6, "yes": 4}, "even: no has 6 clips, yes has 4; always answering 'no' is right for 60% of the clips"),
        ({"no": 4, "yes": 7}, "slightly uneven: yes has 7 clips, no has 4"),
        ({"no": 20, "yes": 4}, "balance uneven: no has 20 clips, yes has 4"),
        ({"no": 44, "yes": 4}, "very uneven: no has 44 clips, yes has 4; always answering 'no' is right for 92%"),
        ({"no": 5, "yes": 5}, "even: each class has 5 clips; a constant answer is right for 50% of the clips"),
        ({"no": 8}, "balance a single class"),
    ],
)
def test_the_balance_of_classes_is_described(tmp_path: Path, counts: dict[str, int], text: str) -> None:
    assert text in describe(tmp_path, counts, [0.25])


def test_lengths_come_from_headers(tmp_path: Path) -> None:
    text = describe(tmp_path, {"no": 6, "yes": 6}, [0.25, 0.5, 2.0])
    assert "length 0.25 to 2.00 s, median 0.50 s, in a sample of 12 clips" in text


def test_at_most_200_headers_are_read(tmp_path: Path) -> None:
    assert "in a sample of 200 clips" in describe(tmp_path, {"no": 110, "yes": 110}, [0.25])
