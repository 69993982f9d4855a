from __future__ import annotations

import numpy as np
import pytest

from raydfl.data.names import Names


def test_like_a_list() -> None:
    strings = [f"{word}/{i}" for word in ("theo", "änne", "", "日本", "a") for i in (10, 9, 1)]
    names = Names.of(strings)
    assert list(names) == strings
    assert names[2:5] == strings[2:5]
    assert names[-1] == strings[-1]
    assert [names.index(name) for name in strings] == list(range(15))
    assert all(name in names for name in strings)
    for absent in ("theo", "theo/11", "z", "theo/1 "):
        assert absent not in names
        with pytest.raises(ValueError, match="is not among these 15 names"):
            names.index(absent)
    assert 3 not in names
    with pytest.raises(IndexError):
        names[15]


def test_arrays_make_the_same_names() -> None:
    names = Names.of(["b", "a", "c"])
    assert list(Names(**names.arrays)) == ["b", "a", "c"]
    assert names.arrays["order"].tolist() == [1, 0, 2]
    assert len(Names.of([])) == 0
    assert "a" not in Names.of([])


def test_look_up_among_many_is_fast() -> None:
    names = Names.of(f"speaker-{i}" for i in range(100_000))
    wanted = np.random.default_rng(0).integers(100_000, size=2000).tolist()
    assert [names.index(f"speaker-{i}") for i in wanted] == wanted
