"""Ray Data sets are written as Parquet files, and runs read these files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from raydfl import read_audio, write_recordings
from raydfl.cluster.datasets import _encode_audio
from raydfl.core.errors import ConfigError, DataError
from raydfl.data.sets.huggingface import HuggingFace

RATE = 8000
WAVE = (0.2 * np.sin(np.arange(400) * 0.3)).astype(np.float32)


def encode_wav(samples: np.ndarray, subtype: str = "FLOAT") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize(
    ("row", "rate", "expected"),
    [
        ({"audio": encode_wav(WAVE)}, None, WAVE),
        ({"audio": {"bytes": encode_wav(WAVE), "path": "a.wav"}}, None, WAVE),
        ({"audio": {"bytes": None, "array": WAVE, "sampling_rate": RATE}}, None, WAVE),
        ({"audio": WAVE, "hz": np.int64(RATE)}, "hz", WAVE),
        ({"audio": np.stack([WAVE, -WAVE]), "hz": RATE}, "hz", np.stack([WAVE, -WAVE], axis=1)),
        ({"audio": np.array([0, 16384], np.int16), "hz": RATE}, "hz", np.array([0.0, 0.5])),
    ],
)
def test_every_kind_of_row_becomes_a_recording(row: dict[str, Any], rate: str | None, expected: np.ndarray) -> None:
    """Oracle: the samples in the row."""
    encoded = _encode_audio({**row, "label": "hum"}, "audio", rate)
    assert set(encoded) == {"audio", "label"}
    samples, hz = soundfile.read(io.BytesIO(encoded["audio"]["bytes"]), dtype="float32")
    assert hz == RATE
    assert np.array_equal(samples, expected)


@pytest.mark.parametrize(
    ("row", "rate", "message"),
    [
        ({"audio": "a.wav"}, None, r"the row \{'label': 'hum'\} has str in column 'audio': neither bytes nor an array"),
        (
            {"audio": {"array": WAVE}},
            None,
            r"its array is float32 \[400\] and its sampling_rate None. A recording must be",
        ),
        ({"audio": np.zeros((2, 2, 2)), "hz": RATE}, "hz", r"its array is float64 \[2, 2, 2\]"),
        ({"audio": np.zeros(4, np.int64), "hz": RATE}, "hz", r"its array is int64 \[4\]"),
    ],
)
def test_a_row_without_a_recording_is_reported(row: dict[str, Any], rate: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        _encode_audio({**row, "label": "hum"}, "audio", rate)


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"exists already\. .*data=\{name: huggingface, root: "):
        write_recordings(None, tmp_path)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_dataset_is_written_in_order_and_read_unchanged(ray_session: None, tmp_path: Path) -> None:
    import ray.data

    def row(number: int) -> dict[str, Any]:
        return {
            "wave": WAVE * number / 8,
            "hz": RATE,
            "label": f"w{number % 2}",
            "client": f"c{number % 4}",
            "n": number,
        }

    dataset = ray.data.range(8, override_num_blocks=3).map(lambda stored_row: row(stored_row["id"]))
    settings = write_recordings(dataset, tmp_path / "kept", audio="wave", rate="hz", group="client")
    assert settings.pop("name") == "huggingface"
    rows = HuggingFace(**settings).manifest().to_pylist()
    assert [(stored_row["n"], stored_row["label"], stored_row["group"]) for stored_row in rows] == [
        (number, f"w{number % 2}", f"c{number % 4}") for number in range(8)
    ]
    for stored_row in rows:
        assert np.array_equal(read_audio(stored_row["path"])[0][:, 0], row(stored_row["n"])["wave"])
    with pytest.raises(DataError, match=r"^audio=wav: the dataset has no column of this name. Did you mean 'wave'\?"):
        write_recordings(dataset, tmp_path / "other", audio="wav")
    with pytest.raises(DataError, match=r"^the row \{.*'n': 0.*\} has str in column 'label': neither bytes"):
        write_recordings(dataset, tmp_path / "other", audio="label", label="client")
