"""Tables of predictions. Oracle: the files' names below their common folder."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from raydfl.cli.predictions import Form, show
from raydfl.runs.inference import Prediction

FILES = ["/data/a long folder/yes/1.wav", "/data/a long folder/no/1.wav"]


def print_predictions(files: list[str], form: Form) -> list[str]:
    out = io.StringIO()
    show([Prediction(Path(file), ("no", "yes"), np.array([0.25, 0.75])) for file in files], 1, form, "model", out)
    return out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("files", "folder", "names"),
    [
        (FILES, "folder: /data/a long folder/", ["yes/1.wav", "no/1.wav"]),
        (FILES[:1], "folder: /data/a long folder/yes/", ["1.wav"]),
        (["x/ab.wav", "x/abc.wav"], "folder: x/", ["ab.wav", "abc.wav"]),
        (["ab.wav", "/x/ab.wav"], None, ["ab.wav", "/x/ab.wav"]),
    ],
)
def test_tables_name_files_below_their_common_folder(files: list[str], folder: str | None, names: list[str]) -> None:
    heading, *lines = print_predictions(files, "table")
    assert heading == "model"
    if folder is not None:
        assert lines.pop(0) == folder
    assert [line.split()[0] for line in lines[1:]] == names


def test_csv_and_json_contain_whole_paths() -> None:
    assert [line.split(",")[0] for line in print_predictions(FILES, "csv")[1:]] == FILES
    assert [json.loads(line)["file"] for line in print_predictions(FILES, "json")] == FILES
