"""Events as labels: lists of events, batches, crops and segments, partitions, and errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import beeps
import numpy as np
import pytest
from beeps import BEEPS

from raydfl.cli.describe import describe_data
from raydfl.core.errors import ConfigError, DataError
from raydfl.data.build import build_population, list_clips
from raydfl.data.population import Population
from raydfl.data.steps.events import parse_events, split_events, write_events
from raydfl.engine.config import Config

Tiny = Callable[..., Config]
HOP = 0.01


def build(config: Config) -> Population:
    return build_population(config.data, config.run.seed, labels_needed=config.labels_needed)


def test_labels_list_events_in_the_order_of_time() -> None:
    events = [(3.0, 4.0, "rain"), (0.5, 1.25, "dog, far")]
    assert write_events(events) == "0.5-1.25 dog, far|3-4 rain"
    assert parse_events(write_events(events)) == sorted(events)
    assert write_events([]) == "|"
    assert parse_events("|") == []
    assert parse_events(" b | a") == [(-np.inf, np.inf, "b"), (-np.inf, np.inf, "a")]
    for text in ("0.5-1.25dog", ".5-1 dog", "0.5 - 1.0 dog", "1e-1-2 dog"):
        with pytest.raises(DataError, match=r"has no valid times. Write onset, hyphen, offset, space, class"):
            parse_events(f"0-1 rain|{text}")
    assert parse_events("dog-2-3") == [(-np.inf, np.inf, "dog-2-3")]
    classes, table = split_events(["1-2 b|2-3 b", "c10", "|", "0-1 c9"])
    assert classes == ["b", "c9", "c10"]
    assert table.tolist() == [
        [[1, 2, 0], [2, 3, 0]],
        [[-np.inf, np.inf, 2], [0, 0, -1]],
        [[0, 0, -1], [0, 0, -1]],
        [[0, 1, 1], [0, 0, -1]],
    ]


def test_lists_in_deseds_formats_replace_labels(tiny: Tiny, tmp_path: Path) -> None:
    """Names may lack folders. Clips without a line are left out."""
    file = tmp_path / "events.tsv"
    lines = [
        "filename\tonset\toffset\tevent_label",
        "g0/0.wav\t0.1\t0.5\tdog",
        "g0/0.wav\t0.50\t0.75\tdog",
        "g0/1.wav\t\t\t",
    ]
    file.write_text("\n".join([*lines, "g1/1.wav\t\t\tcat"]) + "\n")
    config = tiny(*BEEPS, f"data.events.file={file}")
    manifest, _ = list_clips(config.data, 1)
    labels = dict(zip(*(manifest.column(name).to_pylist() for name in ("clip", "label")), strict=True))
    assert labels == {"g0/0.wav": "0.1-0.5 dog|0.5-0.75 dog", "g0/1.wav": "|", "g1/1.wav": "cat"}
    text = " ".join(" ".join(describe_data(config.data, 1)).split())
    assert "classes (2) cat, dog" in text
    assert "events 2 with times, in 1 of 2 clips with events" in text
    assert "9 of 12 clips have no line in" in text
    file.write_text("filename\tevent_labels\n0.wav\tdog,cat\n")
    one = tiny(*BEEPS, "data.groups=1", f"data.events.file={file}", "run.name=one")
    assert list_clips(one.data, 1)[0].column("label").to_pylist() == ["cat|dog"]
    with pytest.raises(DataError, match=r"line 2 of .*events.tsv: the clip '0.wav' is not on the list"):
        list_clips(config.data, 1)  # two clips have this name


def test_batches_have_events_in_frames(tiny: Tiny) -> None:
    population = build(tiny(*BEEPS, "data.weak=2"))
    assert population.classes == ("high", "low", "middle")
    examples = population.data(0).train  # takes 1, 3 and 5, the last without times
    batch = examples.batch(np.arange(3))
    manifest = beeps.Beeps(weak=2).manifest().to_pylist()
    for row, clip in zip(batch.y.numpy(), examples.clips.tolist(), strict=True):
        expected = [
            (onset / HOP, offset / HOP, population.classes.index(label))
            for onset, offset, label in parse_events(manifest[clip]["label"])
        ]
        np.testing.assert_allclose(row[: len(expected)], expected, rtol=1e-6)
        assert (row[len(expected) :] == (0, 0, -1)).all()
    assert batch.y[2, :, :2].isinf().all()
    counts = sum(
        np.array([name in row["label"] for name in population.classes]) for row in manifest if row["split"] == "train"
    )
    assert population.class_counts().tolist() == counts.tolist()


def test_the_saved_population_has_equal_events(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(*BEEPS)
    population = build(config)
    population.save(tmp_path / "population")
    loaded = Population.load(tmp_path / "population").use(config.data)
    assert (loaded.classes, loaded.test.frame_seconds) == (population.classes, HOP)
    np.testing.assert_array_equal(loaded.test.events, population.test.events)  # type: ignore[arg-type]


def test_segments_shift_the_events(tiny: Tiny) -> None:
    whole = build(tiny(*BEEPS, "run.name=whole")).data(0).train
    segments = build(tiny(*BEEPS, "data.segment={frames: 40, stride: 30}", "run.name=segments")).data(0).train
    number = np.concatenate([np.arange(count) for count in np.unique(segments.clips, return_counts=True)[1]])
    assert number.max() > 1
    y, expected = segments.batch(np.arange(len(segments))).y, whole.batch(np.arange(len(whole))).y.numpy()
    for row, clip, place in zip(y.numpy(), segments.clips, number, strict=True):
        source = expected[whole.clips == clip][0]
        np.testing.assert_allclose(row[:, 0], np.where(source[:, 2] < 0, 0, source[:, 0]) - 30 * place, atol=1e-4)
        np.testing.assert_array_equal(row[:, 2], source[:, 2])


def test_a_random_crop_shifts_the_events(tiny: Tiny) -> None:
    config = tiny(*BEEPS, "data.transforms=[{name: random_crop, size: 50, test: segments}]")
    examples = build(config).data(0).train
    index = np.arange(len(examples))
    drawn = examples.draw(index, 7, 0)
    batch, centre = examples.batch(index, drawn=drawn), dataclasses.replace(examples)
    assert batch.x.shape[1] == 50
    store = centre.first_view.store
    for row, x, example in zip(batch.y.numpy(), batch.x.numpy(), index.tolist(), strict=True):
        # Find the crop by its content.
        frames = np.asarray(store.frames)[centre.first_view.starts[example] :][: centre.first_view.counts[example]]
        start = next(place for place in range(len(frames) - 49) if np.array_equal(frames[place : place + 50], x))
        events = centre.events[centre.labels[example]]  # type: ignore[index]
        real = events[:, 2] >= 0
        np.testing.assert_allclose(row[real, :2], events[real, :2] / HOP - start, atol=1e-3)


def test_partitions_by_label_use_the_rarest_class(tiny: Tiny) -> None:
    """Labels are unique to a clip, so no partition by whole labels exists."""
    config = tiny(*BEEPS, "data.groups=8", "data.partition={by: classes, clients: 3, classes: 1}")
    population = build(config)
    sets = [
        examples.targets(examples.labels)[:, :, 2] for examples in (population.data(index).train for index in range(3))
    ]
    common = [set.intersection(*({*row[row >= 0].tolist()} for row in rows)) for rows in sets]
    assert sorted(common, key=sorted) == [{0}, {1}, {2}]


@pytest.mark.parametrize(
    ("setting", "place"),
    [
        ("data.label_sets={}", "data.label_sets"),
        ("data.label_sequences={}", "data.label_sequences"),
        ("data.unlabelled={keep: 0.5}", "data.unlabelled"),
        ("data.corrupt={labels: {clients: 1, rate: 0.5}}", "data.corrupt.labels"),
        ("data.transforms=[{name: shift}]", "the transform shift"),
    ],
)
def test_settings_for_labels_without_times_are_rejected(tiny: Tiny, setting: str, place: str) -> None:
    with pytest.raises(ConfigError, match=rf"data.events: a label lists events with their times, so {place} is not"):
        tiny(*BEEPS, setting)


def test_features_without_known_times_are_rejected(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"data.events needs frames at known times, but data.features.kind logmel"):
        tiny(*BEEPS, "data.features.trim_db=30")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"has no lines after the header"),
        (
            ["g0/1.wav\t0.5\t0.5\tdog"],
            r"line 2 of .*: clip 'g0/1.wav': event 'dog' from 0.5 s to 0.5 s has no length",
        ),
        (["g0/1.wav\t0.6\t0.5\tdog"], r"event 'dog' from 0.6 s to 0.5 s has no length"),
        (
            ["g0/1.wav\t0.1\t0.5\tdog", "g0/1.wav\t0.4\t0.6\tdog"],
            r"line 3 of .*'dog' overlaps with itself \(0.1 s to 0.5 s\)",
        ),
        (["g0/1.wav\t\t\tdog", "g0/1.wav\t\t\tdog"], r"line 3 of .*'dog' overlaps with itself \(without times\)"),
        (["g0/1.wav\t\t\tdog", "g0/1.wav\t0.1\t0.2\tcat"], r"only some events have times"),
        (["g0/1.wav\t0.1\tsoon\tdog"], r"line 2 of .*: 'soon' is not a time"),
        (["g0/1.wav\t-1\t1\tdog"], r"'-1' is not a time"),
        (["g0/1.wav\t0.1\t\tdog"], r"'' is not a time"),
        (["g0/1.wav\t0.1\t0.2\t"], r"the label '' is empty or has a \|"),
        (["g0/1.wav\t0.1\t0.2\ta|b"], r"the label 'a\|b' is empty or has a \|"),
        (["other.wav\t0.1\t0.2\tdog"], r"line 2 of .*: the clip 'other.wav' is not on the list of clips"),
        (
            ["g0/0.wav\t0.1\t0.2\tdog", "g0/1.wav\t0.1\t5.0\tdog"],
            r"clip 'g0/1.wav' has an event until 5 s, but it is only 1.\d+ s long",
        ),
        (["g0/1.wav\t\t\t", "g1/1.wav\t\t\t"], r"data.events: no clip has an event"),
    ],
)
def test_invalid_events_are_rejected(tiny: Tiny, tmp_path: Path, lines: list[str], message: str) -> None:
    file = tmp_path / "events.tsv"
    file.write_text("\n".join(["clip\tonset\toffset\tlabel", *lines]) + "\n")
    with pytest.raises(DataError, match=message):
        build(tiny(*BEEPS, f"data.events.file={file}"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"clip,onset,offset,label\n",
            r"has no column clip or filename. Its columns, separated by tabs: clip,onset,offset,label",
        ),
        (b"clip\tonset\toffset\n", r"has no column label or event_label or event_labels"),
        (b"clip\tlabel\n\xff\n", r"events.tsv: cannot be read as text"),
        (None, r"events.tsv: cannot be read as text: .*No such file"),
    ],
)
def test_unusable_files_are_named(tiny: Tiny, tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "events.tsv"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=message):
        build(tiny(*BEEPS, f"data.events.file={file}"))


def test_invalid_labels_of_a_data_set_are_quoted() -> None:
    with pytest.raises(DataError, match=r'data.events: the label "2-1 dog": event .dog. from 2 s to 1 s'):
        split_events(["2-1 dog"])


def test_a_relative_path_is_of_the_working_folder(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = tiny(*BEEPS, "data.events.file=events.tsv")
    assert config.data.events is not None
    assert config.data.events.file == tmp_path / "events.tsv"
