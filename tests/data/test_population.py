from __future__ import annotations

import shutil
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tiny_sets import Made, write_folder

from raydfl.core import files as files_module
from raydfl.core.errors import DataError, ResourcesError, RunDirectoryError
from raydfl.core.settings import FIRST_VIEW
from raydfl.data.build import build_population
from raydfl.data.client_ids import ClientIds
from raydfl.data.examples import Examples
from raydfl.data.features.cache import FeatureStore
from raydfl.data.features.extractor import FeatureExtractor
from raydfl.data.noise import add_noise, seed_noise
from raydfl.data.part import Part, StoredView
from raydfl.data.population import Population
from raydfl.data.settings import DataSettings
from raydfl.data.steps.corrupt import draw_labels
from raydfl.data.tables import Tables, clips_table

Make = Callable[..., DataSettings]
SETS = Path(__file__).parent / "tiny_sets.py"


def list_columns(examples: Examples) -> tuple[list[int], ...]:
    view = examples.first_view
    return tuple(c.tolist() for c in (view.starts, view.counts, examples.labels, examples.clips))


def describe(population: Population) -> list[Any]:
    """Return the complete content of a population for comparisons."""
    clients = [
        (
            population.ids[i],
            population.profile(i),
            population.num_examples(i),
            list_columns(data.train),
            list_columns(data.validation),
        )
        for i in range(len(population))
        for data in [population.data(i)]
    ]
    length = population.views[FIRST_VIEW].length
    return [population.classes, length, clients, list_columns(population.test), list_columns(population.validation)]


@pytest.mark.parametrize(
    "options",
    [
        {"split": {"validation": 0.25}},
        {"corrupt": {"noise": {"snr_db": 10.0, "clients": 2}}, "unlabelled": {"keep": 0.5}},
        {"segment": {"frames": 10, "stride": 5}},
        {"partition": {"by": "iid", "clients": 3}},
    ],
)
def test_a_role_has_the_examples_of_all_clients_and_pools(make_data: Make, options: dict[str, Any]) -> None:
    population = build_population(make_data(**options), 1)

    def list_rows(parts: Sequence[Examples]) -> list[tuple[Any, ...]]:
        return sorted(
            (part.first_view.store.folder, *row) for part in parts for row in zip(*list_columns(part), strict=True)
        )

    clients = [population.data(i) for i in range(len(population))]
    train = list_rows([pool for client in clients for pool in client.pools.values()])
    assert list_rows(population.read_role("train")) == train
    assert len(train) > 50
    assert len(population.read_role("train")) == len(population.stores)
    assert list_rows(population.read_role("validation")) == list_rows([client.validation for client in clients])
    assert list_rows(population.read_role("test")) == list_rows([population.test])
    assert population.read_role("client_test") == []


def test_groups_become_clients_with_their_clips(make_data: Make) -> None:
    population = build_population(make_data(split={"validation": 0.25}), 1)
    manifest = Made().manifest()
    rows = manifest.to_pylist()
    assert list(population.ids) == [f"g{i}" for i in range(6)]
    assert population.classes == ("w0", "w1", "w2", "w3")
    assert population.views[FIRST_VIEW].bands == 16
    assert population.views[FIRST_VIEW].length == 21
    all_clips = []
    for i in range(6):
        data = population.data(i)
        assert population.num_examples(i) == len(data.train) == 12  # of 16: take 0 is the test set
        assert len(data.validation) == 4
        assert len(data.test) == 0
        assert population.profile(i) == {"group": f"g{i}", "noisy": False, "label_errors": False}
        for part in (data.train, data.validation):
            for position, (clip, label) in enumerate(zip(part.clips, part.labels, strict=True)):
                assert rows[clip]["group"] == f"g{i}"
                assert rows[clip]["label"] == population.classes[label]
                assert rows[clip]["split"] != "test"
                batch = part.batch(np.array([position]))
                np.testing.assert_array_equal(batch.x[0].numpy(), population.stores[0].clip(clip))
                assert batch.lengths is None
            all_clips += part.clips.tolist()
    all_clips += population.test.clips.tolist()
    assert sorted(all_clips) == list(range(120))
    assert {rows[clip]["split"] for clip in population.test.clips} == {"test"}
    assert (np.diff(population.test.clips) > 0).all()
    counts = population.label_counts()
    assert counts.shape == (6, 4)
    for i in range(6):
        np.testing.assert_array_equal(counts[i], np.bincount(population.data(i).train.labels, minlength=4))


def test_official_validation_clips_are_assigned_as_configured(make_data: Make) -> None:
    for role, train, server in (("train", 96, 0), ("validation", 72, 24), ("drop", 72, 0)):
        population = build_population(make_data(split={"official_validation": role}), 1)
        assert sum(population.num_examples(i) for i in range(6)) == train
        assert len(population.validation) == server
        assert len(population.test) == 24


@pytest.mark.parametrize(
    "options",
    [
        {"partition": {"shards": 2}, "split": {"validation": 0.2}},
        {
            "partition": {"by": "dirichlet", "clients": 5, "alpha": 0.5},
            "corrupt": {"labels": {"rate": 0.5, "clients": 0.5}},
        },
        {"partition": {"by": "iid", "clients": 5}, "corrupt": {"noise": {"snr_db": 10, "clients": 2}}, "uneven": True},
        {
            "segment": {"frames": 8, "stride": 4, "test_stride": 8},
            "uneven": True,
            "split": {"test": {"by": "take", "values": [2]}, "validation": 0.2},
        },
    ],
)
def test_a_population_survives_a_round_trip(make_data: Make, tmp_path: Path, options: dict[str, Any]) -> None:
    population = build_population(make_data(**options), 1)
    population.save(tmp_path / "population")
    opened = Population.load(tmp_path / "population", verify=True)
    assert describe(opened) == describe(population)
    assert describe(build_population(make_data(**options), 1)) == describe(population)  # the seed determines all draws
    assert describe(build_population(make_data(**options), 2)) != describe(population)
    for i in range(len(population)):
        for original, changed in zip(
            population.data(i).train.batches(7, None), opened.data(i).train.batches(7, None), strict=True
        ):
            np.testing.assert_array_equal(original.x.numpy(), changed.x.numpy())


def test_clips_of_unequal_length_have_lengths_in_batches(make_data: Make) -> None:
    population = build_population(make_data(uneven=True), 1)
    assert population.views[FIRST_VIEW].length is None
    batch = population.test.batch(np.arange(3))
    assert batch.lengths is not None
    assert batch.lengths.tolist() == [21] * 3


def test_segments_share_the_index_and_label_of_their_clip(make_data: Make) -> None:
    population = build_population(make_data(uneven=True, segment={"frames": 20, "stride": 5, "test_stride": 10}), 1)
    store = population.stores[0]
    assert population.views[FIRST_VIEW].length == 20  # every clip is longer, so all examples have the same length
    train = population.data(2).train
    for clip in np.unique(train.clips):
        original = train.take(np.flatnonzero(train.clips == clip))
        frames = len(store.clip(clip))
        assert len(original) == 1 + (frames - 20) // 5
        assert len(set(original.labels)) == 1
        for number in range(len(original)):
            np.testing.assert_array_equal(
                original.batch(np.array([number])).x[0].numpy(), store.clip(clip)[5 * number : 5 * number + 20]
            )
    frames_of_test = [len(store.clip(clip)) for clip in np.unique(population.test.clips)]
    assert len(population.test) == sum(1 + (frames - 20) // 10 for frames in frames_of_test)
    assert population.label_counts().sum() == 96  # clips, not segments


def test_only_training_clips_of_chosen_clients_are_noisy(make_data: Make) -> None:
    clean = build_population(make_data(split={"validation": 0.25}), 1)
    settings = make_data(split={"validation": 0.25}, corrupt={"noise": {"snr_db": 5.0, "clients": ["g1", "g4"]}})
    noisy = build_population(settings, 1)
    extractor, dataset = FeatureExtractor(settings.features), Made()
    rows = dataset.manifest().to_pylist()
    for i in range(6):
        original, changed = clean.data(i), noisy.data(i)
        assert noisy.profile(i)["noisy"] == (i in (1, 4))
        assert original.train.clips.tolist() == changed.train.clips.tolist()
        assert original.train.labels.tolist() == changed.train.labels.tolist()
        assert list_columns(original.validation) == list_columns(changed.validation)
        for position, clip in enumerate(changed.train.clips):
            x = changed.train.batch(np.array([position])).x[0].numpy()
            if i in (1, 4):
                seed = seed_noise([rows[clip]["clip"]], 5.0, 1).seeds[0]
                wave = add_noise(extractor.wave(*dataset.read(rows[clip])), 5.0, seed)
                np.testing.assert_array_equal(x, extractor.features(wave))
            else:
                np.testing.assert_array_equal(x, clean.stores[0].clip(clip))
    assert list_columns(clean.test) == list_columns(noisy.test)
    assert noisy.test.first_view.store.folder == clean.stores[0].folder
    assert len(noisy.stores[1]) == 24  # 2 clients x 12: only the noisy clips
    none = build_population(make_data(corrupt={"noise": {"snr_db": 5.0, "clients": 0}}), 1)
    assert len(none.stores) == 1


def test_only_training_clips_of_chosen_clients_have_wrong_labels(make_data: Make) -> None:
    options = {"split": {"validation": 0.25}}
    clean = build_population(make_data(**options), 1)
    wrong = build_population(make_data(**options, corrupt={"labels": {"rate": 0.8, "clients": 2}}), 1)
    chosen = [i for i in range(6) if wrong.profile(i)["label_errors"]]
    assert len(chosen) == 2
    for i in range(6):
        original, changed = clean.data(i), wrong.data(i)
        assert original.train.clips.tolist() == changed.train.clips.tolist()
        expected = original.train.labels
        if i in chosen:
            expected = draw_labels(expected, 4, 0.8, 1, wrong.ids[i])
            assert (expected != original.train.labels).any()
        assert changed.train.labels.tolist() == expected.tolist()
        assert list_columns(original.validation) == list_columns(changed.validation)
    assert list_columns(clean.test) == list_columns(wrong.test)
    neutral = build_population(make_data(**options, corrupt={"labels": {"rate": 0.0}}), 1)
    assert [list_columns(neutral.data(i).train) for i in range(6)] == [
        list_columns(clean.data(i).train) for i in range(6)
    ]


def make_folder_settings(root: Path, cache: Path, **options: Any) -> DataSettings:
    return DataSettings(
        **{
            "name": f"{SETS}:Folder",
            "root": root,
            "cache": cache,
            "features": {"sample_rate": 8000, "bands": 16},
            **options,
        }
    )


def test_unreadable_clips_are_skipped_counted_and_listed(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data", takes=4)
    for name in ("w0_g0_0.wav", "w1_g1_2.wav"):  # one of the test set, one of a client
        (root / name).write_bytes(b"")
    with pytest.raises(DataError, match="2 of 24 clips cannot be read"):
        build_population(make_folder_settings(root, tmp_path / "cache"), 1)
    population = build_population(make_folder_settings(root, tmp_path / "cache", unreadable="skip"), 1)
    assert [clip for clip, _ in population.skipped] == ["w0_g0_0.wav", "w1_g1_2.wav"]
    assert all("empty" in reason for _, reason in population.skipped)
    assert population.messages == ("2 of 24 clips cannot be read and are left out, the first w0_g0_0.wav",)
    assert len(population.test) == 5
    assert [population.num_examples(i) for i in range(2)] == [9, 8]
    # Numbers of clips are still those of the manifest.
    clips = [*population.data(0).train.clips, *population.data(1).train.clips, *population.test.clips]
    assert sorted(clips) == sorted(set(range(24)) - {0, 14})
    population.save(tmp_path / "population")
    assert Population.load(tmp_path / "population").skipped == population.skipped


def test_a_label_that_no_client_has(tmp_path: Path, make_data: Make) -> None:
    root = write_folder(tmp_path / "data")
    for take in (1, 2):
        for group in (0, 1):
            (root / f"w1_g{group}_{take}.wav").write_bytes(b"")
    message = (
        r"no client has a clip of label 'w1': of its 6 clips 2 can be read, 2 are in the test set and 0 in the server's "
        r"validation set. Change data.split"
    )
    with pytest.raises(DataError, match=message):
        build_population(make_folder_settings(root, tmp_path / "cache", unreadable="skip"), 1)
    with pytest.raises(
        DataError, match=r"no client has a clip of label 'w0': of its 30 clips 30 can be read, 30 are in the test"
    ):
        build_population(make_data(split={"test": {"by": "label", "values": ["w0"]}}), 1)


def test_no_clip_can_be_read(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data")
    for path in root.iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"none of 18 clips is readable. The first is w0_g0_0.wav: .*empty"):
        build_population(make_folder_settings(root, tmp_path / "cache", unreadable="skip"), 1)


def test_impossible_partitions_fail_before_features_are_computed(make_data: Make, tmp_path: Path) -> None:
    settings = make_data(partition={"by": "iid", "clients": 500}, cache=tmp_path / "cache")
    with pytest.raises(DataError, match="96 clips cannot give 500 clients 1 each"):
        build_population(settings, 1)
    assert not (tmp_path / "cache").exists()


def test_dropped_clients_are_mentioned(make_data: Make) -> None:
    population = build_population(make_data(partition={"shards": 10, "minimum": 2, "smaller": "drop"}), 1)
    assert len(population) == 36  # 16 clips in 10 shards: 6 of them have 2
    assert population.messages == (
        "24 training clips belong to no client: their clients would have fewer than 2 clips",
    )


def test_unknown_clients_are_rejected(make_data: Make) -> None:
    population = build_population(make_data(), 1)
    assert population.index("g3") == 3
    with pytest.raises(DataError, match="there is no client 'g33' among 6 clients. Did you mean 'g3'"):
        population.index("g33")


@pytest.mark.parametrize("name", ["clips.arrow", "clients.arrow", "statistics.npy", "population.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "garbage", "header"])
def test_damaged_files_are_reported(make_data: Make, tmp_path: Path, name: str, damage: str) -> None:
    folder = tmp_path / "population"
    features = {"sample_rate": 8000, "bands": 16, "normalise": "group"}
    build_population(make_data(features=features), 1).save(folder)
    path = folder / name
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-10])
    elif damage == "garbage":
        path.write_bytes(b"garbage")
    else:
        content[20 if damage == "header" else -10] ^= 1
        path.write_bytes(content)
    message = r"the population in .* is missing or damaged \(.*restart the run"
    with pytest.raises(RunDirectoryError, match=message):
        Population.load(folder, verify=damage in ("flipped", "header"))


def test_a_newer_format_is_rejected(make_data: Make, tmp_path: Path) -> None:
    build_population(make_data(), 1).save(tmp_path)
    path = tmp_path / "population.json"
    path.write_text(path.read_text().replace('\\"format\\": 3', '\\"format\\": 9'))
    with pytest.raises(RunDirectoryError, match="its format is 9, but this version of raydfl reads format 3"):
        Population.load(tmp_path)


def test_missing_features_are_reported_and_can_be_rebuilt(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "data")
    settings = make_folder_settings(root, tmp_path / "cache")
    population = build_population(settings, 1)
    population.save(tmp_path / "population")
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(DataError, match="cached features in .* cannot be used .*raydfl data prepare"):
        Population.load(tmp_path / "population")
    build_population(settings, 1)  # the work of raydfl data prepare
    assert describe(Population.load(tmp_path / "population")) == describe(population)


def test_a_full_disk_is_reported(make_data: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    population = build_population(make_data(), 1)

    def raise_disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("raydfl.data.population_folder.write_table", raise_disk_full)
    monkeypatch.setattr(files_module, "free_bytes", lambda folder: 17)
    with pytest.raises(ResourcesError, match=r"has 17 bytes free and the files of the population need about [\d,]+"):
        population.save(tmp_path / "population")
    assert not list((tmp_path / "population").iterdir())


def make_many_clients(clients: int, store: FeatureStore) -> Population:
    """Make a population of clients with 1 to 19 clips each."""
    owner = np.repeat(np.arange(clients, dtype=np.int32), np.arange(clients) % 19 + 1)
    numbers, none = np.arange(len(owner)), np.zeros(len(owner), np.int8)
    columns = {
        "role": none,
        "pool": none,
        "client": owner,
        "store": none,
        "clip": (numbers % 100).astype(np.int32),
        "label": (numbers % 4).astype(np.int32),
        "start": numbers % 100 * 21,
        "frames": np.full(len(owner), 21, np.int32),
    }
    ids = ClientIds.from_strings(f"speaker-{i}" for i in range(clients))
    tables = Tables(clips_table(columns), pa.record_batch(ids.columns()))
    return Population({"": Part(tables, ["w0", "w1", "w2", "w3"], {FIRST_VIEW: StoredView(21, (store,))})})


def test_loading_100000_clients_is_fast_and_small(make_data: Make, tmp_path: Path) -> None:
    store = build_population(make_data(), 1).stores[0]
    make_many_clients(100_000, store).save(tmp_path)
    Population.load(tmp_path)
    tracemalloc.start()
    started = time.perf_counter()
    population = Population.load(tmp_path)
    for i in (0, 77_777, 99_999):
        assert population.index(f"speaker-{i}") == i
        assert population.num_examples(i) == len(population.data(i).train) == i % 19 + 1
        assert population.profile(i) == {"noisy": False, "label_errors": False}
    seconds = time.perf_counter() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(population) == 100_000
    assert seconds < 1.0  # a few milliseconds on an idle machine
    assert peak < 1_000_000  # the arrays have 20 MB, but they are memory-mapped
