"""Transcripts as labels: units, batches, partitions by units, wrong transcripts and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import transcripts
from transcripts import TEXTS

from raydfl.cli.describe import describe_data
from raydfl.core.errors import ConfigError, DataError
from raydfl.data.build import build_population
from raydfl.data.population import Population
from raydfl.data.steps.label_sequences import (
    LabelSequenceSettings,
    contains_units,
    find_rarest_units,
    split_sequences,
)
from raydfl.engine.config import Config

Tiny = Callable[..., Config]
SPEECH = f"data.name={transcripts.__file__}:Spoken"


def build(config: Config) -> Population:
    return build_population(config.data, config.run.seed, labels_needed=config.labels_needed)


@pytest.mark.parametrize(
    ("units", "keep", "names", "first"),
    [
        ("characters", "", [" ", "a", "b", "c"], [1, 2, 0, 2]),
        ("characters", "'", [" ", "'", "a", "b", "c"], [2, 3, 0, 3]),
        ("words", "", ["a", "ab", "abc", "b", "cb"], [1, 3, -1, -1]),
    ],
)
def test_units_are_lower_case_in_natural_order_without_punctuation(
    units: str, keep: str, names: list[str], first: list[int]
) -> None:
    settings = LabelSequenceSettings(units=units, keep=keep)  # type: ignore[arg-type]
    found, sequences = split_sequences(TEXTS, settings)
    assert found == names
    assert sequences.dtype == np.int32
    assert sequences[0, : len(first)].tolist() == first[: sequences.shape[1]]
    assert (sequences[TEXTS.index("-")] == -1).all()  # silence
    joined = [settings.joint.join(found[unit] for unit in row if unit >= 0) for row in sequences]
    assert joined[:4] == ["ab b", "b a", "a", "b"]


def test_natural_order_compares_numbers_and_letters_keep_their_marks() -> None:
    assert split_sequences(["10 9 2"], LabelSequenceSettings(units="words"))[0] == ["2", "9", "10"]
    assert split_sequences(["Ma\u0303"], LabelSequenceSettings())[0] == ["m", "\u00e3"]  # NFC
    assert split_sequences(["\u0939\u0940"], LabelSequenceSettings())[0] == [
        "\u0939",
        "\u0940",
    ]  # a vowel sign is a mark
    assert split_sequences(["a|b c"], LabelSequenceSettings(units="words", separator="|"))[0] == ["a", "bc"]
    assert split_sequences(["aXb"], LabelSequenceSettings(units="words", separator="X"))[0] == ["a", "b"]
    assert split_sequences(["a\tb\nc"], LabelSequenceSettings(units="words"))[0] == ["a", "b", "c"]


def test_all_transcripts_empty_is_an_error() -> None:
    with pytest.raises(DataError, match="data.label_sequences: all 2 transcripts are empty"):
        split_sequences(["-", "?!"], LabelSequenceSettings())


def test_the_rarest_unit_represents_a_clip() -> None:
    sequences = np.array([[0, 1, -1], [0, -1, -1], [0, 1, 2], [-1, -1, -1]], np.int32)
    labels = np.array([0, 0, 1, 2, 3, -1])
    # Clips with unit 0: 4, unit 1: 3, unit 2: 1.
    assert find_rarest_units(labels, contains_units(sequences, 3)).tolist() == [1, 1, 0, 2, -1, -1]


def test_batches_have_sequences_and_counts_are_of_units(tiny: Tiny) -> None:
    config = tiny(
        SPEECH,
        "data.label_sequences={units: words}",
        "objective=transcribe",
        "data.split={}",
        "data.partition={by: group}",
    )
    population = build(config)
    assert population.classes == ("a", "ab", "abc", "b", "cb")
    examples = population.data(0).train
    batch = examples.batch(np.arange(len(examples)))
    assert batch.y.dtype.is_signed
    assert batch.y.shape == (len(examples), 2)
    texts = [examples.joint.join(examples.classes[unit] for unit in row if unit >= 0) for row in batch.y.tolist()]
    assert sorted(set(texts)) == ["", "a", "ab b", "abc", "b", "b a", "cb"]
    # Training clips with each word, of 3 takes: "a" in 2 texts, "b" in 3.
    assert population.class_counts().tolist() == [6, 3, 3, 9, 3]


def test_the_saved_population_has_equal_sequences(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(
        SPEECH,
        'data.label_sequences={keep: "\'"}',
        "objective=transcribe",
        "data.split={}",
        "data.partition={by: group}",
    )
    population = build(config)
    population.save(tmp_path / "population")
    loaded = Population.load(tmp_path / "population").use(config.data)
    assert loaded.classes == population.classes
    np.testing.assert_array_equal(loaded.test.sequences, population.test.sequences)  # type: ignore[arg-type]
    assert loaded.test.joint == ""


def test_partitions_and_splits_by_label_use_the_rarest_unit(tiny: Tiny) -> None:
    """Every text is unique, so no partition by whole labels exists."""
    unique = [f"{a} {'e' * (n + 1)}" for a in "abcd" for n in range(6)]
    config = tiny(
        SPEECH,
        f"data.texts={unique}",
        "data.takes=2",
        "data.label_sequences={units: characters}",
        "objective=transcribe",
        "data.split={test: {by: clip, fraction: 0.25}}",
        "data.partition={by: classes, clients: 4, classes: 1}",
    )
    population = build(config)
    owned = [population.data(index).train for index in range(4)]
    letters = [
        {examples.classes[unit] for row in examples.targets(examples.labels) for unit in row if unit >= 0}
        for examples in owned
    ]
    assert sorted("".join(sorted(found - {"e", " "})) for found in letters) == ["a", "b", "c", "d"]
    assert len(population.test) == 12  # a quarter of the 12 clips of each letter


@pytest.mark.parametrize("units", ["words", "characters"])
def test_wrong_transcripts_replace_units_of_the_chosen_clients(tiny: Tiny, units: str) -> None:
    base = (
        SPEECH,
        f"data.label_sequences={{units: {units}}}",
        "objective=transcribe",
        "data.split={}",
        "data.partition={by: group}",
    )
    clean = build(tiny(*base))
    config = tiny(*base, "data.corrupt={labels: {clients: [g1], rate: 0.5}}")
    wrong = build(config)
    assert wrong.classes == clean.classes
    for index, name in enumerate(clean.ids):
        before, after = (population.data(index).train for population in (clean, wrong))
        y, z = (examples.targets(examples.labels) for examples in (before, after))
        np.testing.assert_array_equal(y < 0, z < 0)  # lengths stay
        if units == "characters":
            space = clean.classes.index(" ")
            assert (y == space).any()
            np.testing.assert_array_equal(y == space, z == space)  # words keep their lengths, too
        share = (y != z)[y >= 0].mean()
        assert (share == 0) if name == "g0" else 0.2 < share < 0.8
    np.testing.assert_array_equal(*(p.test.targets(p.test.labels) for p in (clean, wrong)))
    again = build(config)
    np.testing.assert_array_equal(again.data(1).train.labels, wrong.data(1).train.labels)


@pytest.mark.parametrize(
    "setting",
    [
        "data.label_sets={}",
        "data.unlabelled={keep: 0.5}",
        "data.segment={frames: 4, stride: 4}",
        "data.transforms=[{name: random_crop, size: 4}]",
    ],
)
def test_settings_for_one_class_per_clip_are_rejected(tiny: Tiny, setting: str) -> None:
    with pytest.raises(ConfigError, match=r"data.label_sequences: a label is the transcript of a whole clip"):
        tiny("data.features.seconds=null", "data.label_sequences={}", setting)


def test_data_info_lists_units_in_place_of_classes(tiny: Tiny) -> None:
    config = tiny(
        SPEECH, "data.label_sequences={}", "objective=transcribe", "data.split={}", "data.partition={by: group}"
    )
    text = " ".join(" ".join(describe_data(config.data, config.run.seed)).split())
    assert "transcripts 7 different" in text
    assert "characters (4) ' ', 'a', 'b', 'c'" in text
    assert "7 clips of 7 of the 7 labels" in text
    assert "classes" not in text
