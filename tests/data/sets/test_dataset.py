from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raydfl.core.errors import ConfigError, DataError
from raydfl.core.registry import build
from raydfl.data.dataset import Card, Dataset, dataset_names, find_dataset


@pytest.mark.parametrize("name", dataset_names())
def test_each_data_set_has_a_complete_card(name: str) -> None:
    dataset = find_dataset(name)
    assert issubclass(dataset, Dataset)
    assert dataset.__module__ == f"raydfl.data.sets.{name}"
    card = dataset.card
    assert isinstance(card, Card)
    assert card.title
    assert card.layout
    # Formats of the user's own recordings have no licence.
    if name not in {"folder", "huggingface", "lhotse", "manifest", "webdataset"}:
        assert card.licence
        assert card.url.startswith("http") or name == "machines", "only the generated set has no website"
    assert all(field.description for field in dataset.__pydantic_fields__.values())


def test_an_unknown_data_set_suggests_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown data set 'fsddd'. Did you mean 'fsdd'"):
        find_dataset("fsddd")


def test_an_unknown_option_suggests_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"data: unknown key 'test_take' for FSDD. Did you mean 'test_takes'\?"):
        build(find_dataset("fsdd"), {"root": "x", "test_take": 3}, "data")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fsdd", {}, "data.root: Field required"),
        (
            "fsdd",
            {"root": "x", "test_takes": -1},
            "data.test_takes: Input should be greater than or equal to 0",
        ),
        ("crema_d", {"root": "x", "emotions": ["anger", "joy"]}, r"data.emotions.1: Input should be .*"),
        ("ravdess", {"root": "x", "channel": "video"}, "data.channel: Input should be 'speech', 'song' or 'both'"),
        ("urbansound8k", {"root": "x", "test_folds": ["a"]}, "data.test_folds.0: Input should be a valid integer"),
        ("speech_commands", {"root": "x", "keywords": []}, r"data.keywords: .* should have at least 1 item"),
    ],
)
def test_messages_about_options_name_the_option(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(find_dataset(name), options, "data")


MODULE = """
from raydfl import FileDataset


class Moods(FileDataset):
    pattern = r"(?P<group>\\w+)/(?P<label>[AN])(?P<take>\\d+)[.]wav"
    codes = {"label": {"A": "anger", "N": "neutral"}, "take": int}
"""


def test_a_user_data_set_can_be_defined_by_a_file_name_pattern(
    tmp_path: Path, write_audio: Callable[..., Path]
) -> None:
    for name in ("joe/A1.wav", "sue/N12.wav"):
        write_audio(f"clips/{name}")
    (tmp_path / "clips/joe/notes.txt").touch()
    (tmp_path / "mine.py").write_text(MODULE)
    dataset = build(find_dataset(f"{tmp_path}/mine.py:Moods"), {"root": tmp_path / "clips"}, "data")
    rows = dataset.manifest().to_pylist()
    assert dataset.read(rows[0])[1] == 16000
    assert [(row["clip"], row["group"], row["label"], row["take"]) for row in rows] == [
        ("joe/A1.wav", "joe", "anger", 1),
        ("sue/N12.wav", "sue", "neutral", 12),
    ]
    write_audio("clips/joe/B1.flac")
    with pytest.raises(DataError, match="Moods: the file name 'joe/B1.flac' does not fit the layout files whose paths"):
        dataset.manifest()
    with pytest.raises(DataError, match="Moods: the root .*/none does not exist. Expected a folder with files whose"):
        build(type(dataset), {"root": tmp_path / "none"}, "data").manifest()
    (tmp_path / "bad.py").write_text(MODULE.replace("[AN]", "[AN"))
    with pytest.raises(ConfigError, match=r"bad.py:Moods' cannot be imported: .*: missing"):
        find_dataset(f"{tmp_path}/bad.py:Moods")


def test_the_base_class_requires_a_manifest() -> None:
    with pytest.raises(NotImplementedError, match=r"Dataset must implement manifest\(\)"):
        Dataset().manifest()
