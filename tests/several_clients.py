"""Clients of unequal sizes with data in memory, to compare batched with sequential training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raydfl import testing
from raydfl.core.types import Client, ModelSpec, Ratio, Update
from raydfl.data.examples import ClientData, Examples
from raydfl.data.features.cache import FeatureStore
from raydfl.methods._cutting import CuttingMethod
from raydfl.methods._method import Method
from raydfl.training.settings import OptimiserSettings, TrainSettings
from raydfl.training.step import Step
from raydfl.training.together import lockstep as together

CLASSES, BANDS, FRAMES = 3, 6, 12
SIZES = (5, 16, 9, 1)
"""Training examples of each client; with batches of 4 no two clients have the same steps and last batch."""

Networks = Callable[[], dict[str, nn.Module]]


def make_examples(count: int, seed: int, lengths: bool = False) -> Examples:
    rng = np.random.default_rng(seed)
    counts = rng.integers(4, FRAMES + 1, count) if lengths else np.full(count, FRAMES)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    frames = rng.normal(size=(int(offsets[-1]), BANDS)).astype(np.float32)
    length = None if lengths else FRAMES
    store = FeatureStore(Path("memory"), frames, offsets, counts.astype(np.int32), length, {})
    labels = rng.integers(0, CLASSES, count)
    return testing.make_examples(labels, store, offsets[:-1], counts, length)


def make_steps(
    method: Method,
    networks: Networks,
    *,
    sizes: Sequence[int] = SIZES,
    lengths: bool = False,
    optimiser: dict[str, Any] | None = None,
    epochs: int = 2,
    states: Sequence[dict[str, Tensor]] | None = None,
    **fields: Any,
) -> list[Step]:
    """Make a step for each client, with the same method and different private models."""
    torch.manual_seed(0)
    first = networks()
    specs = tuple(ModelSpec(name, "made by the test", BANDS, CLASSES) for name in first)
    clients = [Client(f"c{i}", i, n, specs) for i, n in enumerate(sizes)]
    own_state = "initial" not in fields
    initial = fields.pop("initial", None) or method.init(clients, [first], np.random.default_rng(0))
    training = TrainSettings(
        batch_size=4, local_epochs=epochs, optimiser=OptimiserSettings(**{"lr": 0.1, **(optimiser or {})})
    )
    # Plans that cut networks need architectures with channels(), and made-up states may lack what a plan looks at.
    plans = own_state and not isinstance(method, CuttingMethod)
    planned = method.plan(initial, clients, np.random.default_rng(1), len(clients)) if plans else []
    options = {task.client_id: task.options for task in planned}
    steps = []
    nothing = make_examples(1, 0, lengths).take(np.zeros(0, np.int64))
    for index, size in enumerate(sizes):
        models = copy.deepcopy(first)
        step = Step(
            client=clients[index],
            models=models,
            received={key: {n: t.clone() for n, t in ts.items()} for key, ts in initial.tensors.items()},
            data=ClientData({"train": make_examples(size, index, lengths)}, nothing, nothing),
            state=dict(states[index]) if states else {},
            rng=np.random.default_rng(100 + index),
            device=torch.device("cpu"),
            training=training,
            phase="train",
            round_index=initial.round_index,
            options=options.get(clients[index].id, {}),
            shared=method.shared,
        )
        for name, value in fields.items():
            setattr(step, name, value)
        generator = torch.Generator().manual_seed(index)
        for name, value in step.floating_state().items():
            if not method.shared(name):
                value.add_(torch.randn(value.shape, generator=generator), alpha=0.05)
        step.load(next(iter(step.received)))
        steps.append(step)
    return steps


def looped(method: Method, steps: Sequence[Step]) -> list[Update]:
    return [method.local(step) for step in steps]


def jointly(method: Method, steps: Sequence[Step]) -> list[Update]:
    found = together.run_in_lockstep([lambda step=step: method.local(step) for step in steps])
    for update in found:
        if isinstance(update, Exception):
            raise update
    return found  # type: ignore[return-value]


def assert_same_clients(
    one: Sequence[Step], one_updates: Sequence[Update], other: Sequence[Step], other_updates: Sequence[Update]
) -> None:
    """Assert equal updates, models, client states and generators after training."""
    for a, x, b, y in zip(one, one_updates, other, other_updates, strict=True):
        close(dict(x.tensors), dict(y.tensors))
        close(a.floating_state(), b.floating_state())
        close(a.state, b.state)
        assert (x.key, x.weight, set(x.metrics)) == (y.key, y.weight, set(y.metrics))
        for name, value in x.metrics.items():
            assert isinstance(value, Ratio)
            expected = y.metrics[name]
            assert isinstance(expected, Ratio)
            assert value.count == expected.count
            np.testing.assert_allclose(value.total, expected.total, rtol=1e-4)
        assert a.rng.bit_generator.state == b.rng.bit_generator.state


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert set(a) == set(b)
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def both(method: Method, networks: Networks, *, expect_together: bool = True, **settings: Any) -> list[Step]:
    """Train the same clients both ways, compare them (law 8), and return the batched steps."""
    alone, joint = make_steps(method, networks, **settings), make_steps(method, networks, **settings)
    before = alone[0].floating_state()
    before = {name: value.clone() for name, value in before.items()}
    expected = looped(method, alone)
    found = jointly(method, joint)
    if expect_together:
        assert [step.execution.together for step in joint] == [len(joint)] * len(joint), joint[
            0
        ].execution.looped_because
    assert_same_clients(joint, found, alone, expected)
    after = joint[0].floating_state()
    assert any(not torch.equal(before[name], after[name]) for name in before), "nothing was trained"
    return joint
