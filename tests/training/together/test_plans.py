"""Plans: the examples of each batch, and equal training unbatched, batched and replayed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic.dataclasses import dataclass
from several_clients import BANDS, CLASSES, both, make_examples, make_steps
from torch import Tensor

from raydfl.core.errors import ConfigError
from raydfl.core.types import Batch, Update
from raydfl.data.examples import ClientData
from raydfl.methods._method import Method
from raydfl.methods.fedstar import FedSTAR
from raydfl.models.crnn import CRNN
from raydfl.models.dense import MeanLinear
from raydfl.training import fit
from raydfl.training.plan import POOL, Plan
from raydfl.training.step import Step


def make_pooled_data(labelled: int, unlabelled: int, seed: int = 0) -> ClientData:
    nothing = make_examples(1, 0).take(np.zeros(0, np.int64))
    first = make_examples(labelled, seed) if labelled else nothing
    whole = make_examples(labelled + unlabelled, seed)  # both pools share a store
    first, further = whole.take(np.arange(labelled)), whole.take(np.arange(labelled, len(whole)))
    return ClientData({"labelled": first, "unlabelled": further}, nothing, nothing)


def list_batches(data: ClientData, plan: Plan, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Return each batch's positions in the two pools."""
    examples = plan.examples(data)
    names = [*plan.rows]
    split = np.cumsum([0, *[len(data.pools[name]) for name in names]])
    batches = []
    for index in plan.order(examples, np.random.default_rng(seed)):
        pool = examples.columns[POOL][index]
        batches.append(tuple((index[pool == n] - split[n]).tolist() for n in range(len(names))))
    return batches  # type: ignore[return-value]


def test_an_epoch_uses_the_leading_pool_once_and_repeats_the_other() -> None:
    batches = list_batches(make_pooled_data(3, 10), Plan({"labelled": 2, "unlabelled": 4}, leads="unlabelled"))
    assert [len(b) for _, b in batches] == [4, 4, 2]
    assert sorted(i for _, b in batches for i in b) == list(range(10))
    assert [len(a) for a, _ in batches] == [2, 2, 2]
    assert set(Counter(i for a, _ in batches for i in a).values()) == {2}, "6 draws of 3 examples: each twice"


def test_a_pool_smaller_than_its_rows_may_fill_them() -> None:
    batches = list_batches(make_pooled_data(3, 5), Plan({"labelled": 7}, steps=3, repeats=True))
    assert [len(b[0]) for b in batches] == [7, 7, 7]
    assert set(Counter(i for b in batches for i in b[0]).values()) == {7}, "21 draws of 3 examples"


def test_a_number_of_steps_may_replace_the_leading_pool() -> None:
    batches = list_batches(make_pooled_data(3, 5), Plan({"labelled": 2, "unlabelled": 2}, steps=6))
    assert [(len(a), len(b)) for a, b in batches] == [(2, 2)] * 6
    assert set(Counter(i for a, _ in batches for i in a).values()) == {4}
    assert set(Counter(i for _, b in batches for i in b).values()) <= {2, 3}


def test_a_batch_has_no_duplicates_where_a_pool_restarts() -> None:
    """Each pass also has every example once: the first five batches of 4 are four passes over 5 examples."""
    for seed in range(20):
        batches = [
            b for _, b in list_batches(make_pooled_data(3, 5), Plan({"labelled": 2, "unlabelled": 4}, steps=5), seed)
        ]
        assert [len(set(batch)) for batch in batches] == [4] * 5
        draws = [i for batch in batches for i in batch]
        assert all(sorted(draws[start : start + 5]) == list(range(5)) for start in range(0, 20, 5))


@pytest.mark.parametrize(("labelled", "unlabelled", "steps"), [(0, 10, 3), (7, 0, 4), (0, 0, 0)])
def test_an_empty_pool_gives_no_examples_and_the_other_leads(labelled: int, unlabelled: int, steps: int) -> None:
    batches = list_batches(
        make_pooled_data(labelled, unlabelled), Plan({"labelled": 2, "unlabelled": 4}, leads="unlabelled")
    )
    assert len(batches) == steps
    assert sorted(i for a, _ in batches for i in a) == list(range(labelled))
    assert sorted(i for _, b in batches for i in b) == list(range(unlabelled))


def test_the_leading_pool_has_the_order_of_training_without_a_plan() -> None:
    data, plan = make_pooled_data(10, 6), Plan({"labelled": 4})
    order = [index.tolist() for index in plan.order(plan.examples(data), np.random.default_rng(7))]
    assert order == [index.tolist() for index in data.train.order(4, np.random.default_rng(7))]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda: Plan({}), "at least one pool"),
        (lambda: Plan({"labelled": 0}), "at least 1 example"),
        (lambda: Plan({"labelled": 1}, leads="labeled"), "Did you mean 'labelled'"),
        (lambda: Plan({"labelled": 1}, leads="labelled", steps=3), "either steps or leads"),
        (lambda: Plan({"labeled": 1}).examples(make_pooled_data(2, 2)), "data.unlabelled. Did you mean 'labelled'"),
    ],
)
def test_an_invalid_plan_is_rejected(plan: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan()  # type: ignore[operator]


@dataclass(frozen=True, kw_only=True)
class EntropyOnUnlabelled(Method):
    """Method with half a loss on labels, and half on the entropy of unlabelled clips."""

    def loss(self, step: Step, batch: Batch) -> Tensor:
        logits = step.forward("model", batch)
        is_labelled = (batch.columns[POOL] == 0).float()
        supervised = F.cross_entropy(logits, batch.y, reduction="none")
        entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1)
        return batch.mean(is_labelled * supervised + (1 - is_labelled) * entropy)

    def local(self, step: Step) -> Update:
        return step.update(fit(step, self.loss, batches=Plan({"labelled": 2, "unlabelled": 3}, leads="unlabelled")))


def make_linear() -> dict[str, torch.nn.Module]:
    return {"model": MeanLinear(BANDS, CLASSES)}


SIZES = ((2, 9), (5, 4), (0, 7), (3, 0))


def make_convolutional() -> dict[str, torch.nn.Module]:
    return {"model": CRNN(BANDS, CLASSES, filters=(4,), hidden=5)}


@pytest.mark.parametrize("method", [EntropyOnUnlabelled(), FedSTAR(threshold=(0.35, 0.35))], ids=["own", "fedstar"])
def test_batched_clients_with_plans_equal_unbatched_clients(monkeypatch: pytest.MonkeyPatch, method: Method) -> None:
    data = [make_pooled_data(*sizes, seed) for seed, sizes in enumerate(SIZES)]

    def steps_with_pools(*arguments: object, **settings: object) -> list[Step]:
        steps = make_steps(*arguments, **settings)  # type: ignore[arg-type]
        for step, client_data in zip(steps, data, strict=True):
            step.data = client_data
        return steps

    monkeypatch.setattr("several_clients.make_steps", steps_with_pools)
    both(method, make_linear if isinstance(method, EntropyOnUnlabelled) else make_convolutional)
