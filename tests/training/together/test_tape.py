"""A tape does the operations of a computation again: to the same bits as the code, or it is not made at all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raydfl.engine.config import Config
from raydfl.models.crnn import CRNN
from raydfl.training.tape import TapeError, form, record


def known(*tensors: Tensor) -> dict[int, int]:
    return {id(tensor): place for place, tensor in enumerate(tensors)}


def test_other_values_of_the_same_form() -> None:
    """Forward, backward, a random mask and a bound convolution: what the code computes for other values, bit by bit."""
    network = CRNN(6, 3, filters=(16,), kernel=3, hidden=5, dropout=0.0)
    parameters = list(network.parameters())

    def computation(x: Tensor, y: Tensor) -> Callable[[], list[Tensor | None]]:
        def run() -> list[Tensor | None]:
            value = F.cross_entropy(F.dropout(network(x), 0.3), y)
            return [value.detach(), *torch.autograd.grad(value, parameters)]

        return run

    x, y = torch.randn(4, 12, 6), torch.tensor([0, 1, 2, 0])
    tape = record(computation(x, y), known(x, y, *parameters))
    assert set(tape.inputs) == set(range(2 + len(parameters)))
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        other = [torch.randn(4, 12, 6), torch.randint(0, 3, (4,)), *parameters]
        assert [form(tensor) for tensor in other] == [tape.inputs[place] for place in range(len(other))]
        state = torch.get_rng_state()
        expected = computation(other[0], other[1])()
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        with torch.no_grad():
            found = tape.run(*[other[place] for place in tape.inputs])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]
        assert torch.equal(torch.get_rng_state(), after)
    assert expected[0] != 0


def test_what_it_writes_into_its_inputs() -> None:
    """Operations in place, on a view and on several tensors at once, change what is given to the tape as they changed the first."""

    def computation(a: Tensor, b: Tensor) -> list[Tensor | None]:
        a[1:].mul_(2).add_(b[0])
        torch._foreach_add_([a, b], 1.0)
        return [(a * b).sum(), None]

    a, b = torch.arange(3.0), torch.ones(3)
    tape = record(lambda: computation(a, b), known(a, b))
    one, other = (torch.tensor([5.0, 6.0, 7.0]), torch.tensor([2.0, 3.0, 4.0])), (torch.empty(3), torch.empty(3))
    for target, source in zip(other, one, strict=True):
        target.copy_(source)
    expected = computation(*one)
    found = tape.run(*[other[place] for place in tape.inputs])  # type: ignore[index]
    assert found == (expected[0], None)
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_outputs_are_tensors_of_their_own() -> None:
    x = torch.ones(2, 3)
    tape = record(lambda: [x, x.t(), (y := x * 2), y[0], y.detach()], known(x))
    found = tape.run(x)
    assert [tensor.tolist() for tensor in found if tensor is not None][1] == [[1.0, 1.0]] * 3
    storages = {tensor.untyped_storage().data_ptr() for tensor in (x, *found) if tensor is not None}
    assert len(storages) == 6
    assert all(tensor.is_contiguous() for tensor in found if tensor is not None)


MASK = torch.tensor([True, False, True])
POSITIONS = torch.tensor([2, 0])


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x * float(x.sum()), "looks at the value"),
        (lambda x: x if x.sum() > 0 else -x, "looks at the value"),
        (lambda x: x * torch.equal(x, x), "looks at the value"),
        (lambda x: x[x > 0], "depends on values"),
        (lambda x: x.nonzero(), "depends on values"),
        (lambda x: x * torch.tensor(2.0), "neither its models' nor"),
        (lambda x: x + MASK, "neither its models' nor"),
        (lambda x: torch.rand(3, generator=torch.Generator()) * x, "Generator"),
    ],
    ids=["item", "branch", "equal", "mask", "nonzero", "constant", "captured", "generator"],
)
def test_refused(function: Callable[[Tensor], Tensor], why: str) -> None:
    x = torch.ones(3)
    with pytest.raises(TapeError, match=why):
        record(lambda: [function(x)], known(x))


def test_positions_as_an_index() -> None:
    """Unlike a mask they leave the shape to be known."""
    x, other = torch.arange(3.0), torch.tensor([5.0, 6.0, 7.0])
    tape = record(lambda: [x[POSITIONS]], known(x, POSITIONS))
    found = tape.run(*[(other, POSITIONS)[place] for place in tape.inputs])  # type: ignore[index]
    assert found[0] is not None
    assert found[0].tolist() == [7.0, 5.0]


def test_training_brings_in_neither_pytorchs_compiler_nor_mlflow(tiny: Callable[..., Config]) -> None:
    """It would take 1 s and 66 MB in every client actor; torch.optim would do it, and most ways to record. MLflow takes seconds."""
    config = tiny("train.rounds=3", "run.name=light", method="fedmlac")
    program = f"""
import json, sys
from raydfl.testing import train_federation
from raydfl import make_config
from raydfl.training import tape
tapes, tape.FIRST, record = [], 1, tape.record
tape.record = lambda *given: tapes.append(record(*given)) or tapes[-1]
train_federation(make_config(json.loads({config.model_dump_json()!r})))
print(len(tapes))
print(*(name in sys.modules for name in ("torch._dynamo", "sympy", "mlflow", "raydfl.engine.storage.record")))
"""
    here = Path(__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=here, check=True)
    taped, imported = found.stdout.splitlines()
    assert int(taped) > 0
    assert imported == "False False False True"
