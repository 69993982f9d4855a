"""Formulas of the attacks, each compared with a literal computation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from raydfl.attacks import Attack, Cohort, ColludingAttack, HonestUpdates
from raydfl.attacks.alie import ALIE, largest_z
from raydfl.attacks.backdoor import Backdoor
from raydfl.attacks.canary import Canary, draw_direction
from raydfl.attacks.free_rider import FreeRider
from raydfl.attacks.gaussian_noise import GaussianNoise
from raydfl.attacks.ipm import IPM
from raydfl.attacks.label_flip import LabelFlip
from raydfl.attacks.min_max import MinMax
from raydfl.attacks.min_sum import MinSum
from raydfl.attacks.scaling import Scaling
from raydfl.attacks.sign_flip import SignFlip
from raydfl.core.seeds import generator
from raydfl.core.types import Update
from raydfl.engine.adversary import Adversary
from raydfl.rules import WeightedMean

NONE = np.random.default_rng(0)
COHORT = Cohort(clients=10, attackers=3, share=0.25)
IDS = tuple("abcdefgh")


def draw_changes(clients: int = 7, elements: int = 50, seed: int = 0, offset: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(0.2, 1.0, (clients, elements)) * rng.uniform(0.1, 3, elements) + offset).astype(np.float32)


def make_known(rows: np.ndarray, reference: float = 0.0) -> HonestUpdates:
    return HonestUpdates(list(rows), np.full(rows.shape[1], reference, np.float32))


def make_federation(attack: Attack, seed: int = 1, prefixes: tuple[str, ...] = ()) -> Adversary:
    return Adversary(attack, prefixes, IDS, seed)


def send_updates(
    attack: Attack, values: np.ndarray, attacking: str, current: np.ndarray, round_index: int = 0
) -> np.ndarray:
    """Return the server's view of clients a, b, c ... with updates float32 [clients, elements] of weight 2."""
    updates = [
        Update({"model/w": torch.from_numpy(row)}, 2.0, client_id=name) for name, row in zip(IDS, values, strict=False)
    ]
    examples = {update.client_id: 2.0 for update in updates}
    state = {"global": {"model/w": torch.from_numpy(current)}}
    got = list(
        make_federation(attack).replace_updates(iter(updates), examples, frozenset(attacking), state, round_index)
    )
    assert [update.client_id for update in got] == list(examples)
    assert all(update.weight == 2.0 for update in got)
    return np.stack([update.tensors["model/w"].numpy() for update in got])


# -- knowledge of attackers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [1, 50, 70_000])
def test_statistics_of_known_updates_equal_numpy(elements: int) -> None:
    """The reference is NumPy without blocks. A large common offset must not reduce the precision."""
    rows, direction = draw_changes(5, elements, offset=1000.0), np.random.default_rng(1).normal(size=elements)
    known = make_known(rows, 999.0)
    wide = rows.astype(np.float64)
    np.testing.assert_allclose(known.mean, wide.mean(axis=0) - 999, rtol=1e-10)
    np.testing.assert_allclose(known.deviation, wide.std(axis=0), rtol=1e-10, atol=1e-12)
    gram, along = known.products(direction)
    centred = wide - wide.mean(axis=0)
    np.testing.assert_allclose(gram, centred @ centred.T, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(along, centred @ direction, rtol=1e-9, atol=1e-9)


class Spy(ColludingAttack):
    seen: int = 0

    def together(self, known: HonestUpdates, cohort: Cohort) -> np.ndarray:
        return np.full(len(known.reference), float(sum(row[0] for row in known.rows)))


@pytest.mark.parametrize(
    ("knowledge", "attacking", "seen"), [("all", "bd", 0 + 2), ("own", "bd", 1 + 3), ("all", "abcd", 6)]
)
def test_the_option_knowledge_selects_the_known_updates(knowledge: str, attacking: str, seen: int) -> None:
    """Client i sends i, so the sum identifies the known updates. Without honest clients attackers know their own updates."""
    values = np.arange(4, dtype=np.float32)[:, None]
    got = send_updates(Spy(knowledge=knowledge), values, attacking, np.zeros(1, np.float32))  # type: ignore[arg-type]
    expected = [float(seen) if name in attacking else float(i) for i, name in enumerate("abcd")]
    assert got[:, 0].tolist() == expected


def test_attackers_know_only_updates_of_their_key_and_layout() -> None:
    """Updates under another key, or with different tensors, are unknown to the attackers."""
    updates = [
        Update({"model/w": torch.tensor([1.0])}, 1.0, client_id="a"),
        Update({"model/w": torch.tensor([5.0])}, 1.0, client_id="b", key="other"),
        Update({"model/w": torch.tensor([5.0]), "model/v": torch.tensor([7.0])}, 1.0, client_id="c"),
        Update({"model/w": torch.tensor([3.0])}, 1.0, client_id="d"),
        Update({"model/v": torch.tensor([9.0])}, 1.0, client_id="e"),
    ]
    state = {"global": {"model/w": torch.tensor([0.0])}}
    got = list(
        make_federation(IPM(epsilon=1.0)).replace_updates(
            updates, dict.fromkeys("abcde", 1.0), frozenset("de"), state, 0
        )
    )
    assert got[:3] == updates[:3]
    assert got[3].tensors["model/w"].tolist() == [-1.0]
    assert got[4].tensors["model/v"].tolist() == [-9.0]  # the only update of this layout: it knows itself


# -- attacks on the attacker's own update ----------------------------------------------------------------------------


def test_sign_flip_mirrors_the_update_at_the_received_model() -> None:
    values, current = draw_changes(4), np.full(50, 0.5, np.float32)
    got = send_updates(SignFlip(scale=2.0), values, "c", current)
    np.testing.assert_allclose(got[2], 0.5 - 2 * (values[2] - 0.5), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(values, 2, 0))


def test_sign_flip_mirrors_differences_at_zero() -> None:
    update = Update({"model/w": torch.tensor([3.0]), "control/w": torch.tensor([3.0])}, 1.0, client_id="a")
    state = {"global": {"model/w": torch.tensor([1.0]), "control/w": torch.tensor([1.0])}}
    (got,) = make_federation(SignFlip(), prefixes=("control/",)).replace_updates(
        [update], {"a": 1.0}, frozenset("a"), state, 0
    )
    assert got.tensors["model/w"].tolist() == [-1.0]
    assert got.tensors["control/w"].tolist() == [-3.0]


def test_scaling_and_its_neutral_value() -> None:
    values, current = draw_changes(4), np.full(50, 0.5, np.float32)
    got = send_updates(Scaling(boost=4.0), values, "b", current)
    np.testing.assert_allclose(got[1], 0.5 + 4 * (values[1] - 0.5), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(send_updates(Scaling(boost=1.0), values, "b", current), values)


@pytest.mark.parametrize("attacking", ["b", "bd"])
def test_model_replacement_makes_the_mean_the_model_of_the_attackers(attacking: str) -> None:
    """Honest clients return the received model. The mean is then the attackers' model for any weights."""
    current = draw_changes(1)[0]
    values = np.tile(current, (5, 1))
    rows = [IDS.index(name) for name in attacking]
    values[rows] = draw_changes(len(rows), seed=3)
    weights = np.array([3.0, 1.0, 5.0, 2.0, 7.0])
    updates = [
        Update({"model/w": torch.from_numpy(v)}, float(w), client_id=i)
        for v, w, i in zip(values, weights, IDS, strict=False)
    ]
    examples = {update.client_id: float(update.weight) for update in updates}  # type: ignore[arg-type]
    state = {"global": {"model/w": torch.from_numpy(current)}}
    got = make_federation(Scaling(boost=None)).replace_updates(updates, examples, frozenset(attacking), state, 0)
    mean = WeightedMean()(got, state).tensors["global"]["model/w"].numpy()
    np.testing.assert_allclose(mean, np.average(values[rows], axis=0, weights=weights[rows]), rtol=1e-4, atol=1e-5)


def test_a_backdoor_boosts_like_scaling() -> None:
    change = draw_changes(1)[0].astype(np.float64)
    for boost in (1.0, 3.0, None):
        backdoor = Backdoor(target="x", boost=boost).change(change, COHORT, NONE)
        np.testing.assert_array_equal(backdoor, Scaling(boost=boost).change(change, COHORT, NONE))


def test_noise_is_normal_and_scaled_by_the_change() -> None:
    change = np.random.default_rng(1).normal(size=20_000) * 3
    size = np.sqrt(np.mean(change**2))
    for keep in (True, False):
        attack = GaussianNoise(std=0.5, keep=keep)
        noise = attack.change(change, COHORT, np.random.default_rng(2)) - (change if keep else 0)
        assert stats.kstest(noise / (0.5 * size), "norm").pvalue > 0.01
    assert GaussianNoise(std=0.0).change(change, COHORT, NONE) is change
    assert not GaussianNoise(std=0.0, keep=False).change(change, COHORT, NONE).any()


def test_noise_differs_between_clients_and_rounds_and_is_reproducible() -> None:
    values, current = np.ones((4, 8), np.float32), np.zeros(8, np.float32)
    first = send_updates(GaussianNoise(), values, "ab", current)
    np.testing.assert_array_equal(first, send_updates(GaussianNoise(), values, "ab", current))
    assert (first[0] != first[1]).all()
    assert (first[0] != send_updates(GaussianNoise(), values, "ab", current, round_index=1)[0]).all()


def test_a_canary_sends_the_same_direction_in_every_round() -> None:
    values, current = np.ones((2, 3000), np.float32), np.full(3000, 7, np.float32)
    first, later = (send_updates(Canary(length=0.5), values, "ab", current, round_index=index) for index in (0, 5))
    np.testing.assert_array_equal(first, later)
    np.testing.assert_allclose(np.linalg.norm(first - current, axis=1), 0.5, rtol=1e-4)
    np.testing.assert_allclose(first[0] - 7, 0.5 * draw_direction(3000, generator(1, 0, "a", "attack")), atol=1e-6)


def test_free_rider_noise_is_normal() -> None:
    change = np.zeros(20_000)
    assert FreeRider().change(change, COHORT, NONE) is change
    noise = FreeRider(std=0.1).change(change, COHORT, np.random.default_rng(2))
    assert stats.kstest(noise / 0.1, "norm").pvalue > 0.01


def test_replaced_updates_are_finite() -> None:
    got = send_updates(Scaling(boost=1e30), np.full((2, 1), 1e20, np.float32), "a", np.zeros(1, np.float32))
    assert np.isfinite(got).all()
    assert got[0, 0] == np.finfo(np.float32).max


def test_updates_are_streamed_without_collusion() -> None:
    """Without collusion each update is returned before the next is read. With collusion all are read first."""
    read: list[str] = []

    def updates() -> Iterator[Update]:
        for name in "abc":
            read.append(name)
            yield Update({"model/w": torch.ones(1)}, 1.0, client_id=name)

    for attack, before in ((SignFlip(), ["a"]), (FreeRider(), ["a"]), (LabelFlip(), ["a"]), (IPM(), ["a", "b", "c"])):
        read.clear()
        stream = make_federation(attack).replace_updates(
            updates(), dict.fromkeys("abc", 1.0), frozenset("b"), {"global": {}}, 0
        )
        assert next(stream).client_id == "a"
        assert read == before


# -- colluding attacks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clients", "attackers"), [(50, 12), (50, 24), (10, 2), (10, 4), (9, 3), (3, 1)])
def test_z_of_alie_follows_the_paper(clients: int, attackers: int) -> None:
    supporters = clients // 2 + 1 - attackers
    bound = (clients - attackers - supporters) / (clients - attackers)
    z = largest_z(clients, attackers)
    assert z == pytest.approx(max(0.0, stats.norm.ppf(bound)), abs=1e-12)
    assert stats.norm.cdf(z) == pytest.approx(max(0.5, bound))


def test_z_of_alie_outside_the_range_of_the_formula() -> None:
    assert largest_z(2, 1) == 0.0
    assert largest_z(4, 4) == 0.0
    assert largest_z(10, 6) == pytest.approx(stats.norm.ppf(3 / 4))  # one supporter of four honest clients
    assert largest_z(50, 12) < largest_z(50, 18) < largest_z(50, 24)


def test_alie_sends_the_mean_minus_z_deviations() -> None:
    rows = draw_changes(7)
    for z in (None, 0.0, 1.5):
        expected_z = stats.norm.ppf((10 - 3 - 3) / (10 - 3)) if z is None else z  # s = 6 - 3
        literal = rows.astype(np.float64).mean(axis=0) - expected_z * rows.astype(np.float64).std(axis=0)
        np.testing.assert_allclose(ALIE(z=z).together(make_known(rows), COHORT), literal, rtol=1e-9)
    # The server's model has no effect: only differences between clients count.
    shifted = ALIE(z=1.0).together(make_known(rows, 4.0), COHORT)
    np.testing.assert_allclose(shifted + 4, ALIE(z=1.0).together(make_known(rows), COHORT), rtol=1e-9)


def test_ipm_has_a_negative_inner_product_with_the_honest_mean() -> None:
    rows = draw_changes(7)
    for epsilon in (0.1, 2.0):
        change = IPM(epsilon=epsilon).together(make_known(rows), COHORT)
        mean = rows.astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(change, -epsilon * mean, rtol=1e-9)
        assert change @ mean == pytest.approx(-epsilon * (mean @ mean))


def compute_directions(rows: np.ndarray) -> dict[str, np.ndarray]:
    mean = rows.mean(axis=0)
    return {"std": -rows.std(axis=0), "sign": -np.sign(mean), "unit": -mean / np.linalg.norm(mean)}


@pytest.mark.parametrize("direction", ["std", "sign", "unit"])
@pytest.mark.parametrize("clients", [2, 3, 8])
def test_min_max_and_min_sum_reach_their_bounds(direction: str, clients: int) -> None:
    """The test computes the bounds literally and finds the largest gamma by root finding."""
    rows = draw_changes(clients, 30, seed=clients).astype(np.float64)
    mean, p = rows.mean(axis=0), compute_directions(rows)[direction]
    pairs = [np.linalg.norm(a - b) for a, b in itertools.permutations(rows, 2)]
    sums = [sum(np.linalg.norm(a - b) ** 2 for b in rows) for a in rows]

    def compute_max_excess(gamma: float) -> float:
        return max(np.linalg.norm(mean + gamma * p - row) for row in rows) - max(pairs)

    def compute_sum_excess(gamma: float) -> float:
        return float(sum(np.linalg.norm(mean + gamma * p - row) ** 2 for row in rows) - max(sums))

    for attack, bound in (
        (MinMax(direction=direction), compute_max_excess),
        (MinSum(direction=direction), compute_sum_excess),
    ):  # type: ignore[arg-type]
        gamma = optimize.brentq(bound, 0.0, 1e4, xtol=1e-12)
        got = attack.together(make_known(rows.astype(np.float32)), COHORT)
        np.testing.assert_allclose(got, mean + gamma * p, rtol=1e-4, atol=1e-5)
        reached = float((got - mean) @ p / (p @ p))
        assert bound(reached * 0.999) <= 0 < bound(reached * 1.001)


@pytest.mark.parametrize("attack", [MinMax(), MinSum(), ALIE(), MinMax(direction="unit")])
def test_with_equal_updates_the_attack_sends_the_mean(attack: ColludingAttack) -> None:
    rows = np.tile(draw_changes(1), (4, 1))
    np.testing.assert_allclose(attack.together(make_known(rows), COHORT), rows[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(attack.together(make_known(rows[:1]), COHORT), rows[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attack", [MinMax(direction="unit"), MinSum(direction="sign")])
def test_without_a_mean_change_the_attack_sends_no_change(attack: ColludingAttack) -> None:
    assert not attack.together(make_known(np.zeros((3, 5), np.float32)), COHORT).any()


# -- labels ----------------------------------------------------------------------------------------------------------


def test_label_flips_follow_their_mapping() -> None:
    classes, labels = ["no", "stop", "yes"], np.tile(np.arange(3), 2000)
    none = np.zeros(len(labels), bool)
    rng = np.random.default_rng(0)
    assert LabelFlip().labels(labels, none, classes, rng)[:3].tolist() == [1, 2, 0]
    assert LabelFlip(to={"yes": "no"}).labels(labels, none, classes, rng)[:3].tolist() == [0, 1, 0]
    assert LabelFlip(to={"yes": "no", "no": "yes"}).labels(labels, none, classes, rng)[:3].tolist() == [2, 1, 0]
    drawn = LabelFlip(to="random").labels(labels, none, classes, rng)
    assert (drawn != labels).all()
    table = np.zeros((3, 3))
    np.add.at(table, (labels, drawn), 1)
    for row in table:
        assert stats.chisquare(row[row > 0]).pvalue > 0.001
        assert (row > 0).sum() == 2


def test_a_backdoor_labels_altered_clips() -> None:
    labels, altered = np.array([0, 1, 2, 1]), np.array([True, False, False, True])
    attack = Backdoor(target="yes", share=0.5)
    assert attack.labels(labels, altered, ["no", "stop", "yes"], NONE).tolist() == [2, 1, 2, 2]
    counts = [Backdoor(target="yes", share=share).altered(10, NONE).sum() for share in (0.0, 0.25, 0.5, 1.0)]
    assert counts == [0, 3, 5, 10]
