"""Canary clips. Oracles: the clips without canaries, independent draws from the seed, and the binomial distribution."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from raydfl.core.errors import DataError
from raydfl.core.seeds import generator
from raydfl.data import Examples, Population, assign_clips, build_population, list_clips
from raydfl.engine.config import Config

Tiny = Callable[..., Config]


def list_labels(examples: Examples) -> dict[int, int]:
    return dict(zip(examples.clips.tolist(), examples.labels.tolist(), strict=True))


@pytest.mark.parametrize("noise", [(), ("data.corrupt.noise={snr_db: 5, clients: [s1, s3]}",)])
def test_half_of_the_canaries_trains_on_wrong_labels_and_the_rest_is_left_out(
    tiny: Tiny, noise: tuple[str, ...]
) -> None:
    data = tiny("data.takes=6", "data.corrupt.canaries={clips: 30, clients: [s1, s3, s4]}", *noise).data
    population, clean = (build_population(settings, 1) for settings in (data, tiny("data.takes=6", *noise).data))
    trained: dict[int, bool] = {}
    for index in range(len(population)):
        before, train = list_labels(clean.data(index).train), list_labels(population.data(index).train)
        canaries = list_labels(population.read_canaries(index))
        assert bool(canaries) is (population.ids[index] in ("s1", "s3", "s4"))
        assert all(label != before[clip] for clip, label in canaries.items())
        assert before.items() - train.items() == {(clip, before[clip]) for clip in canaries}
        assert train.items() - before.items() <= canaries.items()
        assert before.keys() - canaries.keys()  # a clip that is no canary
        trained |= {clip: clip in train for clip in canaries}
        assert population.sizes()[index] == len(train) == sum(population.label_counts()[index])
        assert list_labels(population.data(index).validation) == list_labels(clean.data(index).validation)
        x, stored = (
            {int(clip): row.tobytes() for clip, row in zip(e.clips, e.batch(np.arange(len(e))).x.numpy(), strict=True)}
            for e in (population.read_canaries(index), clean.data(index).train)
        )
        assert x.items() <= stored.items()
    assert list_labels(population.test) == list_labels(clean.test)
    coins = generator(1, 0, "", "canary coins").integers(2, size=30)
    owners = [population.ids[i] for i in range(6) for _ in population.read_canaries(i).clips]
    assert sorted(owners) == owners  # the coins are in the order of clients and clips
    assert [int(coin) for coin in trained.values()] == coins.tolist()


def test_coins_are_fair_and_independent_of_the_drawn_clips(tiny: Tiny) -> None:
    """Over seeds, the number of trained canaries is binomial, and single clips are included half of the time."""
    data = tiny("data.takes=6", "data.corrupt.canaries={clips: 20}").data
    manifest, classes = list_clips(data, 0)
    counts: list[int] = []
    included: list[bool] = []
    for seed in range(40):
        tables = assign_clips(manifest, classes, data, seed)
        clip = tables.codes("clip")
        is_trained = np.isin(clip[tables.has_role("canary")], clip[tables.has_role("train")])
        counts.append(int(is_trained.sum()))
        included.extend(is_trained)
    assert len(set(counts)) > 3
    assert stats.binomtest(sum(included), len(included)).pvalue > 1e-3
    assert 1e-3 < stats.chi2.cdf(4 * np.square(np.array(counts) - 10).sum() / 20, 40) < 1 - 1e-3


def test_a_saved_population_has_the_same_canaries(tiny: Tiny, tmp_path: Path) -> None:
    data = tiny("data.corrupt.canaries={clips: 10}").data
    population = build_population(data, 1)
    population.save(tmp_path)
    assert build_population(data, 1).is_saved_in(tmp_path)
    loaded = Population.load(tmp_path).use(data)
    for index in range(len(population)):
        assert list_labels(loaded.read_canaries(index)) == list_labels(population.read_canaries(index))
        assert list_labels(loaded.data(index).train) == list_labels(population.data(index).train)
    assert not build_population(tiny().data, 1).is_saved_in(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "data.corrupt.canaries={clips: 10, clients: [s1]}",
            "10 canaries are too many. Each client keeps one labelled training clip, and 9 others",
        ),
        ("data.corrupt.canaries={clips: 10, clients: 7}", "data.corrupt.canaries: 7 clients are to be with canaries"),
        ("data.classes=1", "data.corrupt.canaries needs at least 2 classes"),
    ],
)
def test_impossible_canaries_are_rejected(tiny: Tiny, settings: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_population(tiny("data.corrupt.canaries={clips: 10}", settings).data, 1)
