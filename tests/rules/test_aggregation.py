"""The means and the common code of all rules, compared with NumPy sums."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.dataclasses import dataclass
from threadpoolctl import threadpool_limits
from torch import Tensor

from raydfl.core.cuts import Cut
from raydfl.core.errors import ConfigError, RaydflError
from raydfl.core.tensors import FlatTensors
from raydfl.core.types import Update
from raydfl.rules import RULES, CollectingRule, Group, LayerwisePruning, Rule, UniformMean, WeightedMean, find_rule

pytestmark = pytest.mark.usefixtures("sums")
EVERY = [rule() for name, rule in RULES.items() if name != "gaussian"]  # needs the noise of a run
FEWER = settings(max_examples=40)
CURRENT = {"global": {"net/a.weight": torch.full((2, 2), 50.0), "net/a.bias": torch.tensor([60.0, 61.0])}}


def make_update(tensors: Mapping[str, Any], weight: Any = 1.0, **fields: Any) -> Update:
    return Update(
        {name: torch.as_tensor(value, dtype=torch.float32) for name, value in tensors.items()}, weight, **fields
    )


def mean_by_hand(
    updates: list[Update], current: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, np.ndarray]]:
    """Compute the weighted mean element by element, in Python floats."""
    result = {
        key: {name: tensor.numpy().copy() for name, tensor in tensors.items()} for key, tensors in current.items()
    }
    for key in {update.key for update in updates}:
        of_key = [update for update in updates if update.key == key]
        result.setdefault(key, {})
        for name in {name for update in of_key for name in update.tensors}:
            senders = [update for update in of_key if name in update.tensors]
            shape = tuple(senders[0].tensors[name].shape)
            target = result[key].setdefault(name, np.zeros(shape, np.float32))
            for index in np.ndindex(shape):
                total = weights = 0.0
                for update in senders:
                    weight = update.weight[name] if isinstance(update.weight, Mapping) else update.weight
                    weight = float(weight[index]) if isinstance(weight, Tensor) and weight.ndim else float(weight)
                    total += weight * float(update.tensors[name][index])
                    weights += weight
                if weights:
                    target[index] = total / weights
    return result


def assert_equal(result: Mapping[str, Mapping[str, Tensor]], expected: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    assert set(result) == set(expected)
    for key, tensors in expected.items():
        assert set(result[key]) == set(tensors)
        for name, values in tensors.items():
            assert result[key][name].dtype == torch.float32
            np.testing.assert_array_equal(result[key][name].numpy(), values)


NAMES = ("net/a.weight", "net/a.bias", "net/b.weight")
SHAPES = {"net/a.weight": (2, 2), "net/a.bias": (2,), "net/b.weight": ()}


@st.composite
def federations(draw: st.DrawFn) -> list[Update]:
    """Draw updates with any of three tensors under either of two keys, in any order, with any kind of weight."""
    values = st.floats(-100, 100, width=32)
    weights = st.one_of(st.just(0.0), st.floats(0.001, 1000))
    updates = []
    for index in range(draw(st.integers(0, 6))):
        names = draw(st.lists(st.sampled_from(NAMES), unique=True))

        def array(name: str, elements: st.SearchStrategy[float]) -> Tensor:
            count = int(np.prod(SHAPES[name]))
            flat = draw(st.lists(elements, min_size=count, max_size=count))
            return torch.tensor(flat, dtype=torch.float64).view(SHAPES[name])

        kind = draw(st.sampled_from(["number", "by name", "by element"]))
        weight: Any = draw(weights)
        if kind == "by name":
            weight = {name: draw(weights) for name in names}
        elif kind == "by element":
            weight = {name: array(name, weights) for name in names}
        tensors: Any = {name: array(name, values).float() for name in names}
        if draw(st.booleans()):
            tensors = FlatTensors.from_tensors(tensors)
        updates.append(Update(tensors, weight, key=draw(st.sampled_from(["global", "other"])), client_id=f"c{index}"))
    return updates


@FEWER
@given(updates=federations())
def test_the_weighted_mean_equals_the_mean_by_hand(updates: list[Update]) -> None:
    result = WeightedMean()(iter(updates), CURRENT)
    assert_equal(result.tensors, mean_by_hand(updates, CURRENT))
    assert not result.report


@FEWER
@given(updates=federations())
def test_a_collecting_rule_without_pruning_equals_the_weighted_mean_to_the_bit(updates: list[Update]) -> None:
    result = LayerwisePruning(vl=0, vh=0)(iter(updates), CURRENT)
    assert_equal(result.tensors, mean_by_hand(updates, CURRENT))


@FEWER
@given(updates=federations())
def test_the_uniform_mean_equals_the_mean_with_weights_of_1(updates: list[Update]) -> None:
    def flat(weight: Any) -> Any:
        if isinstance(weight, Mapping):
            return {name: flat(value) for name, value in weight.items()}
        return (weight > 0).double() if isinstance(weight, Tensor) else float(weight > 0)

    ones = [Update(update.tensors, flat(update.weight), key=update.key) for update in updates]
    assert_equal(UniformMean()(iter(updates), CURRENT).tensors, mean_by_hand(ones, CURRENT))


def test_the_storage_of_tensors_does_not_change_the_result() -> None:
    """Flat and separate tensors, in any order, give the same sums."""
    generator = torch.Generator().manual_seed(1)
    tensors = [
        {"net/a.weight": torch.randn(300, 200, generator=generator), "net/a.bias": torch.randn(7, generator=generator)}
        for _ in range(9)
    ]
    weights = [0.1 * index + 0.3 for index in range(9)]
    rule = WeightedMean()
    plain = rule([Update(t, w) for t, w in zip(tensors, weights, strict=True)], {}).tensors["global"]
    stored = [
        FlatTensors.from_tensors(t) if index % 2 else dict(reversed(t.items())) for index, t in enumerate(tensors)
    ]
    mixed = rule([Update(t, w) for t, w in zip(stored, weights, strict=True)], {}).tensors["global"]
    named = [Update(t, dict.fromkeys(t, w)) for t, w in zip(tensors, weights, strict=True)]
    for result in (
        mixed,
        rule(named, {}).tensors["global"],
        LayerwisePruning(vl=0, vh=0)(named, {}).tensors["global"],
    ):
        assert all(torch.equal(plain[name], result[name]) for name in plain)


def test_means_are_summed_in_float64() -> None:
    """In float32, adding 1 to 2**24 has no effect."""
    updates = [make_update({"x": [2.0**24]}), *(make_update({"x": [1.0]}) for _ in range(64))]
    assert WeightedMean()(updates, {}).tensors["global"]["x"].item() == np.float32((2**24 + 64) / 65)


@pytest.mark.parametrize(("sent", "most"), [(640, 4), (160, 16), (1, 64)])
def test_the_mean_stores_at_most_four_updates_or_as_many_elements_of_cut_updates(sent: int, most: int) -> None:
    alive: list[weakref.ref[np.ndarray]] = []
    stored_counts = []

    def stream() -> Iterator[Update]:
        for index in range(200):
            flat = FlatTensors.from_tensors({"x": torch.full((sent,), float(index))})
            alive.append(weakref.ref(flat.vector))
            stored_counts.append(sum(reference() is not None for reference in alive))
            yield Update(flat, 1.0, cuts={"x": Cut([np.arange(sent)])} if sent < 640 else {})

    result = WeightedMean()(stream(), {"global": {"x": torch.zeros(640)}}).tensors["global"]["x"]
    assert result.tolist() == [99.5] * sent + [0.0] * (640 - sent)
    assert max(stored_counts) == most


def test_partial_models_are_averaged_over_the_clients_with_the_tensor() -> None:
    updates = [make_update({"audio/w": [1.0], "video/w": [10.0]}, 1.0), make_update({"audio/w": [4.0]}, 2.0)]
    assert_equal(
        WeightedMean()(updates, {}).tensors, {"global": {"audio/w": np.array([3.0]), "video/w": np.array([10.0])}}
    )


def test_elements_masked_by_all_clients_keep_their_value() -> None:
    current = {"global": {"w": torch.tensor([5.0, 6.0, 7.0])}}
    updates = [
        make_update({"w": [1.0, 1.0, 1.0]}, {"w": torch.tensor([1.0, 0.0, 0.0])}),
        make_update({"w": [3.0, 3.0, 3.0]}, {"w": torch.tensor([1.0, 2.0, 0.0])}),
    ]
    for rule in (WeightedMean(), LayerwisePruning(vl=0, vh=0)):
        assert rule(updates, current).tensors["global"]["w"].tolist() == [2.0, 3.0, 7.0]


def test_without_any_weight_the_server_keeps_its_tensors() -> None:
    for rule in (*EVERY, LayerwisePruning(vl=0.4, vh=0.4)):
        updates = [
            make_update({"net/a.bias": [float(index), 1.0], "new": [3.0]}, 0.0, client_id=str(index))
            for index in range(3)
        ]
        tensors = rule(updates, CURRENT, np.random.default_rng(0)).tensors["global"]
        assert tensors["net/a.bias"].tolist() == [60.0, 61.0]
        assert tensors["new"].tolist() == [0.0]
    nobody = WeightedMean()([], CURRENT).tensors
    assert nobody["global"]["net/a.bias"] is CURRENT["global"]["net/a.bias"]


def test_names_keep_the_order_of_the_server_and_new_names_come_last() -> None:
    updates = [make_update({"z": [1.0], "net/a.bias": [1.0, 1.0]})]
    for rule in EVERY:
        assert list(rule(updates, CURRENT, np.random.default_rng(0)).tensors["global"]) == [
            "net/a.weight",
            "net/a.bias",
            "z",
        ]


def test_results_share_no_memory_with_each_other_or_with_the_updates() -> None:
    sent_tensors = FlatTensors.from_tensors({"a.w": torch.ones(3), "b.w": torch.ones(4)})
    for rule in EVERY:
        tensors = rule([Update(sent_tensors, 1.0)], {}, np.random.default_rng(0)).tensors["global"]
        tensors["a.w"].zero_()
        assert sent_tensors.vector.tolist() == [1.0] * 7
        assert tensors["a.w"].untyped_storage().nbytes() == 12


@pytest.mark.parametrize("rule", EVERY)
def test_updates_that_cannot_be_averaged_are_rejected(rule: Rule) -> None:
    other = make_update({"w": [1.0, 2.0]}, client_id="anna")
    cases: list[tuple[Update, str]] = [
        (
            make_update({"w": [1.0]}, client_id="ben"),
            r"client 'ben' sent 'w' with shape \(1,\), but .*'global'.* \(2,\)",
        ),
        (
            make_update({"w": [1.0, 2.0]}, -1.0, client_id="ben"),
            "client 'ben': the weight of its update is -1.0. It must be from 0 to",
        ),
        (make_update({"w": [1.0, 2.0]}, {"v": 1.0}, client_id="ben"), "client 'ben': the weight of 'w' is missing"),
        (
            make_update({"w": [1.0, 2.0]}, {"w": torch.ones(3)}),
            r"weight of 'w' has shape \(3,\), but the tensor has \(2,\)",
        ),
        (make_update({"w": [1.0, 2.0]}, {"w": torch.tensor([1.0, -1.0])}), "elements outside 0 to"),
    ]
    for bad, message in cases:
        with pytest.raises(RaydflError, match=message):
            rule([other, bad], {}, np.random.default_rng(0))
    with pytest.raises(RaydflError, match=r"'net/a.bias' with shape \(3,\), but under the key 'global' it has \(2,\)"):
        rule([make_update({"net/a.bias": [1.0, 2.0, 3.0]})], CURRENT, np.random.default_rng(0))


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 1e300])
def test_a_weight_out_of_range_is_an_error(weight: float) -> None:
    for value in (weight, {"w": weight}, {"w": torch.tensor([weight])}):
        with pytest.raises(RaydflError, match="outside 0 to|must be from 0 to"):
            WeightedMean()([make_update({"w": [1.0]}, value)], {})


# User-defined rules


@dataclass(frozen=True)
class Median(CollectingRule):
    def combine(self, group: Group) -> np.ndarray:
        return np.median(group.matrix(), axis=0)


def test_a_two_line_median_works_on_partial_models() -> None:
    generator = np.random.default_rng(0)
    audio, video = generator.normal(size=(5, 50)).astype(np.float32), generator.normal(size=(5, 7)).astype(np.float32)
    updates = [
        make_update({"audio/w": audio[index]} | ({"video/w": video[index]} if index > 1 else {}), client_id=str(index))
        for index in range(5)
    ]
    result = Median()(updates, {}).tensors["global"]
    np.testing.assert_array_equal(result["audio/w"].numpy(), np.median(audio, axis=0))
    np.testing.assert_array_equal(result["video/w"].numpy(), np.median(video[2:], axis=0))


def test_a_group_provides_rows_matrices_layers_and_means() -> None:
    generator = np.random.default_rng(0)
    sent_tensors = [
        {"a.w": generator.normal(size=(2, 3)), "b.w": generator.normal(size=4), "a.b": generator.normal(size=2)}
        for _ in range(4)
    ]
    updates = [make_update(tensors, index + 1.0, client_id=str(index)) for index, tensors in enumerate(sent_tensors)]
    checked = []

    class Look(CollectingRule):
        def combine(self, group: Group) -> np.ndarray:
            whole = np.stack(
                [np.concatenate([v.ravel() for v in tensors.values()]) for tensors in sent_tensors]
            ).astype(np.float32)
            np.testing.assert_array_equal(group.matrix(), whole)
            part = group.matrix(["a.b", "b.w"])
            np.testing.assert_array_equal(part, np.concatenate([whole[:, 10:], whole[:, 6:10]], axis=1))
            assert part.flags.c_contiguous
            part[:] = np.nan  # writing into the matrix must not change the rows
            np.testing.assert_array_equal(np.stack(group.rows), whole)
            assert group.layers("module") == {"a": ["a.w", "a.b"], "b": ["b.w"]}
            assert group.layers("tensor") == {name: [name] for name in ("a.w", "b.w", "a.b")}
            mean = (2 * whole[1, 6:10].astype(float) + 4 * whole[3, 6:10].astype(float)) / 6
            np.testing.assert_array_equal(group.mean("b.w", [1, 3]), mean.astype(np.float32))
            assert [sender.client_id for sender in group.updates] == ["0", "1", "2", "3"]
            checked.append(True)
            return whole[2]

    result = Look()(updates, {}).tensors["global"]
    assert checked == [True]
    for name, values in sent_tensors[2].items():
        np.testing.assert_array_equal(result[name].numpy(), values.astype(np.float32))


def test_reports_of_groups_and_keys_are_added_up() -> None:
    updates = [
        make_update({"a.w": [float(index)], **({"b.w": [1.0]} if index else {})}, key=key)
        for key in ("one", "two")
        for index in range(10)
    ]
    report = LayerwisePruning(vl=0.1, vh=0.2)(updates, {}).report
    assert {name: (ratio.total, ratio.count) for name, ratio in report.items()} == {
        "lpa/pruned/a": (6, 20),
        "lpa/pruned/b": (2, 18),  # nine clients of each key: floors of 0.9 and 1.8
    }


def test_the_number_of_threads_does_not_change_the_bits() -> None:
    generator = np.random.default_rng(3)
    updates = [make_update({"w": generator.normal(size=50_000)}, 0.1 + index / 7) for index in range(20)]
    results = []
    for threads in (1, 2):
        with threadpool_limits(limits=threads):
            results.append(LayerwisePruning()(updates, {}).tensors["global"]["w"])
    assert torch.equal(*results)


# Finding rules


def test_rules_are_found_by_name_with_their_options() -> None:
    default = LayerwisePruning(vl=0.3)
    assert find_rule(None, default) is default
    assert find_rule("weighted_mean", default) == WeightedMean()
    assert find_rule({"name": "uniform_mean"}, default) == UniformMean()
    setting = {"name": "lpa", "vl": 0.2, "by": "tensor"}
    assert find_rule(setting, WeightedMean()) == LayerwisePruning(vl=0.2, by="tensor")
    assert setting["name"] == "lpa"
    assert len(RULES) == 15
    for name, cls in RULES.items():
        assert find_rule(name, default) == cls()


def test_a_rule_from_a_file_is_found(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\n"
        "from pydantic.dataclasses import dataclass\n"
        "from raydfl.rules import CollectingRule\n"
        "@dataclass(frozen=True)\n"
        "class Largest(CollectingRule):\n"
        "    times: float = 1.0\n"
        "    def combine(self, group):\n"
        "        return self.times * np.max(group.rows, axis=0)\n"
        "class Other: pass\n"
    )
    rule = find_rule({"name": f"{file}:Largest", "times": 2}, WeightedMean())
    assert rule([make_update({"w": [1.0, 5.0]}), make_update({"w": [3.0, 2.0]})], {}).tensors["global"][
        "w"
    ].tolist() == [
        6.0,
        10.0,
    ]
    with pytest.raises(ConfigError, match="Other' is not a subclass of raydfl.Rule"):
        find_rule(f"{file}:Other", WeightedMean())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("weigthed_mean", "unknown rule 'weigthed_mean'. Did you mean 'weighted_mean'"),
        ({"name": "lpa", "vi": 0.1}, "rule: unknown key 'vi' for LayerwisePruning. Did you mean 'vl'"),
        ({"name": "lpa", "vl": 1.0}, "rule.vl: Input should be less than 1"),
        ({"name": "lpa", "by": "layer"}, "rule.by: Input should be 'module' or 'tensor'"),
        (
            {"vl": 0.1},
            "rule: the name of the rule is missing.* Choose one of bulyan, centred_clipping, dnc, .*, weighted_mean",
        ),
        ("nowhere.py:Rule", "there is no file"),
    ],
)
def test_settings_without_a_known_rule_are_errors(setting: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_rule(setting, WeightedMean())


def test_updates_may_come_from_any_iterable() -> None:
    def stream() -> Iterable[Update]:
        yield make_update({"w": [1.0]})
        yield make_update({"w": [3.0]})

    for rule in (WeightedMean(), LayerwisePruning()):
        assert rule(stream(), {}).tensors["global"]["w"].item() == 2.0
