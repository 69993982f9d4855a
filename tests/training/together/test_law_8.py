"""Law 8: batched clients end as unbatched clients, for every method and family of models."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import extra_methods
import numpy as np
import pytest
import torch
from several_clients import BANDS, CLASSES, assert_same_clients, both, close, jointly, looped, make_examples, make_steps
from torch import Tensor, nn

from raydfl.core import ops, registry
from raydfl.core.types import Batch, Client, ModelSpec, State, Update
from raydfl.methods._layers import last_layer
from raydfl.methods._method import Method
from raydfl.methods._prototypes import COUNTS, MEANS
from raydfl.methods._server_optimiser import ServerOptimiser
from raydfl.methods._views import WithViews
from raydfl.methods.ditto import Ditto
from raydfl.methods.fedadagrad import FedAdagrad
from raydfl.methods.fedadam import FedAdam
from raydfl.methods.fedala import FedALA
from raydfl.methods.fedapta import FedAPTA
from raydfl.methods.fedavg import FedAvg
from raydfl.methods.fedavgm import FedAvgM
from raydfl.methods.fedbabu import FedBABU
from raydfl.methods.fedbn import FedBN
from raydfl.methods.feddc import FedDC
from raydfl.methods.feddrop import FedDrop
from raydfl.methods.feddyn import FedDyn
from raydfl.methods.fedgen import FedGen
from raydfl.methods.fedkad import FedKAD
from raydfl.methods.fedlc import FedLC
from raydfl.methods.fedlps import FedLPS
from raydfl.methods.fedmlac import FedMLAC
from raydfl.methods.fedmp import FedMP
from raydfl.methods.fednova import FedNova
from raydfl.methods.fedntd import FedNTD
from raydfl.methods.fedopt import FedOpt
from raydfl.methods.fedper import FedPer
from raydfl.methods.fedproto import FedProto
from raydfl.methods.fedprox import FedProx
from raydfl.methods.fedrep import FedRep
from raydfl.methods.fedrolex import FedRolex
from raydfl.methods.fedstar import FedSTAR
from raydfl.methods.fedyogi import FedYogi
from raydfl.methods.harmony import Harmony
from raydfl.methods.hermes import Hermes
from raydfl.methods.heterofl import HeteroFL
from raydfl.methods.modality_mirror import ModalityMirror
from raydfl.methods.moon import Moon, add_projection
from raydfl.methods.multifl import MultiFL
from raydfl.methods.perfedavg import PerFedAvg
from raydfl.methods.pfedme import PFedMe
from raydfl.methods.profila import ProFiLA, add_prototype
from raydfl.methods.profila_as_run import ProFiLAAsRun
from raydfl.methods.scaffold import Scaffold
from raydfl.methods.unifl import UniFL
from raydfl.models.crnn import CRNN
from raydfl.models.dense import MeanLinear, MeanMLP
from raydfl.models.fusion import Fusion
from raydfl.models.resnet18 import ResNet18
from raydfl.models.shufflenet_v2 import ShuffleNetV2
from raydfl.models.split_cnn import SplitCNN
from raydfl.objectives.compact import Compact
from raydfl.training._fit import fit, predict
from raydfl.training.step import Step
from raydfl.training.together import lockstep as together


def make_crnn(dropout: float = 0.0, bidirectional: bool = False, hidden: int = 5) -> nn.Module:
    return CRNN(BANDS, CLASSES, filters=(4,), hidden=hidden, bidirectional=bidirectional, dropout=dropout)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: MeanLinear(BANDS, CLASSES),
    "mlp": lambda: MeanMLP(BANDS, CLASSES),
    "crnn": make_crnn,
    "bidirectional": lambda: make_crnn(bidirectional=True),
}

PRUNING = ("fedapta", "fedmp", "hermes")
EVERY_KIND = ("convolution", "recurrent", "linear")


def make_profila(cls: type[ProFiLA] = ProFiLA, **options: Any) -> ProFiLA:
    method = cls(lam=(0.5, 1.0), **options)
    object.__setattr__(method, "objective", Compact(size=CLASSES))
    return method


METHODS: dict[str, list[Method]] = {
    "fedavg": [FedAvg()],
    "fedadam": [FedAdam()],
    "fedyogi": [FedYogi()],
    "fedadagrad": [FedAdagrad()],
    "fedavgm": [FedAvgM()],
    "fedopt": [FedOpt()],
    "fedkad": [FedKAD(size=8), FedKAD(size=8, weights=True)],
    "fedprox": [FedProx(mu=1.0), FedProx(mu=1.0, squared=False)],
    "fedper": [FedPer()],
    "fedstar": [FedSTAR(learn_from="labelled", kernel_decay=0.01)],  # tests with pools are in test_plans.py
    "profila": [make_profila()],
    "profila_as_run": [make_profila(ProFiLAAsRun, anomalous_share=0.0, task="compact", align="smoothed", ramp=True)],
    "scaffold": [Scaffold()],
    "ditto": [Ditto()],
    "fedbabu": [FedBABU()],
    "fedala": [FedALA(start_epochs=2)],
    "fedbn": [FedBN(layers=("output",))],
    "feddc": [FedDC()],
    "feddyn": [FedDyn()],
    "fednova": [FedNova()],
    "fedproto": [FedProto()],
    "fedrep": [FedRep(head_epochs=1)],
    "heterofl": [HeteroFL(share=1.0)],
    "perfedavg": [PerFedAvg(alpha=0.1)],
    "pfedme": [PFedMe(lam=1.0, personal_steps=2)],
    "fedgen": [FedGen(generated=6, noise=4, hidden=8)],
    "fedlc": [FedLC(), FedLC(denominator="others")],
    "fedntd": [FedNTD(tau=2.0)],
    "moon": [Moon(projection=4), Moon(projection=None)],
    "feddrop": [FedDrop()],
    "fedrolex": [FedRolex(share=1.0)],
    "fedapta": [FedAPTA(prune=EVERY_KIND)],
    "fedlps": [FedLPS()],
    "fedmp": [FedMP(prune=EVERY_KIND)],
    "hermes": [Hermes(prune=EVERY_KIND, threshold=0.0)],
    "multifl": [MultiFL(), MultiFL(heads="all")],
    "unifl": [UniFL()],
    "harmony": [Harmony()],
    "modality_mirror": [ModalityMirror()],  # tests of its second phase are in tests/laws
    "fedmlac": [
        FedMLAC(),
        FedMLAC(sequential=True),
        FedMLAC(mutual=False),
        FedMLAC(form=0.5, temperature=2.0),
        FedMLAC(sequential=True, alpha=1.0),
        FedMLAC(form="supervised", warm_epochs=1),
    ],
}


AT_CLIENTS = {name: methods for name, methods in METHODS.items() if not isinstance(methods[0], ServerOptimiser)}
"""Methods with client training of their own. Clients of pure server optimisers train as in FedAvg."""


def make_builder(method: Method, family: str = "mlp") -> Callable[[], dict[str, nn.Module]]:
    names = ("plugin", "local") if isinstance(method, FedMLAC) else ("model",)

    def build() -> dict[str, nn.Module]:
        models = {name: FAMILIES[family]() for name in names}
        if isinstance(method, WithViews):
            models = {"audio": FAMILIES[family](), "video": FAMILIES[family]()}
            width = sum(last_layer(network, "").in_features for network in models.values())
            return {**models, "fusion": Fusion(width, CLASSES, hidden=4)}
        if isinstance(method, Moon) and method.projection:
            add_projection(models["model"], method.projection)
        if isinstance(method, ProFiLA):
            add_prototype(models["model"], CLASSES)
            method.objective.extend(models["model"], ModelSpec("model", "made by the test", BANDS, CLASSES))
        return {**models, **{name: copy.deepcopy(models[source]) for name, source in type(method).copies.items()}}

    return build


def test_every_method_is_covered() -> None:
    assert sorted(METHODS) == registry.names("raydfl.methods")


def test_server_optimisers_keep_fedavgs_client_training() -> None:
    only_at_the_server = {name: methods[0] for name, methods in METHODS.items() if name not in AT_CLIENTS}
    assert only_at_the_server
    for method in only_at_the_server.values():
        for part in ("build", "shared", "loss", "local", "evaluate"):
            assert getattr(type(method), part) is getattr(FedAvg, part)


def make_cases(method: str, *, first: bool) -> list[Any]:
    """Combine a method with every family and length. All cases of a first variant are fast, and only the hardest of the rest."""
    cases = []
    families = [
        family for family in FAMILIES if family != "linear" or not method.lower().startswith(PRUNING)
    ]  # a linear network has nothing to prune
    for family in families:
        for lengths in (False, True):
            slow = not first and (family, lengths) != ("crnn", True)
            marks = [pytest.mark.slow] if slow else []
            case = f"{method}-{'lengths' if lengths else 'fixed'}-{family}"
            cases.append((family, lengths, case, marks))
    return cases


@pytest.mark.parametrize(
    ("name", "family", "lengths"),
    [
        pytest.param(name, family, lengths, id=place, marks=marks)
        for name in AT_CLIENTS
        for family, lengths, place, marks in make_cases(name, first=name == "fedavg")
    ],
)
def test_every_method_and_family(name: str, family: str, lengths: bool) -> None:
    for method in METHODS[name]:
        both(method, make_builder(method, family), lengths=lengths)


@pytest.mark.parametrize("lengths", [False, True], ids=["fixed", "lengths"])
def test_split_cnn_with_dropout_of_maps(lengths: bool) -> None:
    both(FedAvg(), lambda: {"model": SplitCNN(BANDS, CLASSES, filters=(4,), groups=2, dropout=0.3)}, lengths=lengths)


@pytest.mark.parametrize(
    ("network", "lengths"),
    [
        (ShuffleNetV2, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((ShuffleNetV2, False), (ResNet18, True), (partial(ResNet18, norm="frozen_batch"), True))
        ),
    ],
)
def test_torchvisions_networks_with_a_frozen_stem(network: Callable[..., nn.Module], lengths: bool) -> None:
    few: dict[str, Any] = {"sizes": (3, 5), "epochs": 1, "optimiser": {"lr": 0.01}}
    both(FedAvg(), lambda: {"model": network(BANDS, CLASSES, freeze=True)}, lengths=lengths, **few)


@pytest.mark.parametrize(
    "optimiser",
    [
        {"momentum": 0.9, "weight_decay": 0.1},
        # With its usual eps, Adam turns the rounding of a gradient near 0 into a whole step.
        {"name": "adam", "lr": 0.01, "weight_decay": 0.1, "eps": 1e-3},
        {"name": "adamw", "lr": 0.01, "clip_norm": 0.05, "eps": 1e-3},
        {"clip_norm": 0.05},
        {"models": {"plugin": 0.3}, "decay": 0.5},
    ],
    ids=str,
)
def test_every_optimiser(optimiser: dict[str, Any]) -> None:
    method = FedMLAC()
    for family in ("mlp", "crnn"):
        both(method, make_builder(method, family), optimiser=optimiser, round_index=2)


def test_scaffold_batches_old_and_new_clients() -> None:
    """Earlier participants have a control variate, and new clients have none."""
    method, generator = Scaffold(), torch.Generator().manual_seed(5)
    build = make_builder(method, "crnn")
    torch.manual_seed(0)
    start = method.init([Client("a", 0, 1)], [build()], np.random.default_rng(0))
    tensors = {n: torch.randn(t.shape, generator=generator) * 0.1 for n, t in start.tensors["global"].items()}
    controls = {n: t for n, t in tensors.items() if n.startswith("control/")}
    states = [{n: t * k for n, t in controls.items()} if k else {} for k in (0, 1, 2, 0)]
    steps = both(method, build, states=states, initial=State(0, {"global": tensors}, start.extra))
    assert all(set(step.state) == set(controls) for step in steps)


@pytest.mark.parametrize("family", ["mlp", "crnn"])
def test_fedkad_batches_clients_with_some_class_means(family: str) -> None:
    """Give clients different classes. The server sends the known class means."""
    means = torch.randn(CLASSES, 8, generator=torch.Generator().manual_seed(5))
    state = State(3, {"global": {MEANS: means, COUNTS: torch.tensor([2.0, 0.0, 5.0])}})
    both(FedKAD(size=8), make_builder(FedKAD(), family), initial=state)


def test_fedmlac_batches_old_and_new_clients() -> None:
    """New clients warm up while the old clients wait. Then all train batched."""
    method = FedMLAC(warm_epochs=2)
    states = [{"warm": torch.ones(())} if old else {} for old in (True, False, False, True)]
    steps = both(method, make_builder(method), states=states, expect_together=False)
    assert [step.execution.together for step in steps] == [2, 2, 2, 2], steps[0].execution.looped_because
    assert all("warm" in step.state for step in steps)


def test_methods_of_users_are_batched() -> None:
    several = extra_methods.SeveralGlobals()
    steps = both(several, make_builder(several, "crnn"))  # predict() before fit()
    assert len(steps[0].received) == 2
    both(extra_methods.Vandal(), make_builder(several))
    phases = extra_methods.TwoPhases()
    torch.manual_seed(0)
    build = make_builder(phases)
    tensors = phases.init([Client("a", 0, 1)], [build()], np.random.default_rng(0)).tensors["global"]
    teacher = {n: t + 0.3 for n, t in tensors.items()}
    both(phases, build, initial=State(3, {"global": tensors, "teacher": teacher}), phase="distil")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads(Method):
    """A user's method with two successive fits of parts of the models, a frozen layer, and per-client targets as state."""

    def local(self, step: Step) -> Update:
        step.state["target"] = torch.full((CLASSES,), float(step.client.num_examples))
        step.models["a"].hidden.weight.requires_grad_(False)
        first = fit(step, self.loss, models=("a",), epochs=1)

        def pull(step: Step, batch: Batch) -> Tensor:
            logits = step.models["b"].output(step.models["b"].embed(batch.x, batch.lengths))
            return batch.mean((logits - step.state["target"]).square().sum(1)) + sum(
                value.square().sum() for value in step.floating_state("a").values()
            )

        fit(step, pull, models=("b",), epochs=2)
        return step.update(first)


def test_two_fits_frozen_layers_and_embeddings_are_batched() -> None:
    steps = both(Heads(), lambda: {"a": MeanMLP(BANDS, CLASSES), "b": MeanMLP(BANDS, CLASSES)}, optimiser={"lr": 1e-3})
    assert not steps[0].models["a"].hidden.weight.requires_grad


class Tied(nn.Module):
    """Network with two layers of a shared weight, a scalar parameter, and counters updated in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(BANDS, BANDS)
        self.second = nn.Linear(BANDS, BANDS)
        self.second.weight = self.first.weight
        self.output = nn.Linear(BANDS, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("steady", torch.full((BANDS,), 0.5))

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        if self.training:
            self.calls.add_(1)
        x = self.second(self.first(x.mean(dim=1)).relu()) + self.steady
        return self.output(x) * self.scale


def test_tied_weights_scalar_parameters_and_counters_are_batched() -> None:
    steps = both(FedAvg(), lambda: {"model": Tied()}, optimiser={"momentum": 0.5, "clip_norm": 0.1})
    # Two epochs of batches of 4: each client counts its own steps. The trial leaves no trace.
    assert [int(step.models["model"].calls) for step in steps] == [4, 8, 6, 2]
    assert steps[0].models["model"].first.weight is steps[0].models["model"].second.weight


@pytest.mark.parametrize("family", ["crnn", "mlp"])
def test_dropout_uses_each_clients_own_seed(family: str) -> None:
    def build() -> dict[str, nn.Module]:
        return {"model": make_crnn(dropout=0.5) if family == "crnn" else WithMiddle(ops.Dropout(0.5))}

    with_dropout = both(FedAvg(), build)
    plain = make_steps(FedAvg(), lambda: {"model": make_crnn() if family == "crnn" else WithMiddle(nn.Identity())})
    looped(FedAvg(), plain)
    with pytest.raises(AssertionError):
        close(with_dropout[0].floating_state(), plain[0].floating_state())


class WithMiddle(nn.Module):
    """Network with a given layer in the middle."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.hidden = nn.Linear(BANDS, 16)
        self.middle = middle
        self.output = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.output(self.middle(self.hidden(x.mean(dim=1)).relu()))


def test_torchs_dropout_is_batched_and_repeatable() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(7)
        steps = make_steps(FedAvg(), lambda: {"model": WithMiddle(nn.Dropout(0.5))})
        jointly(FedAvg(), steps)
        assert steps[0].execution.together == 4, steps[0].execution.looped_because
        states.append([step.floating_state() for step in steps])
    for first, second in zip(*states, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)
    masks = {float(state["model/hidden.weight"].sum()) for state in states[0]}
    assert len(masks) == 4


def test_batched_training_is_repeatable_and_independent_of_the_group() -> None:
    states = []
    for clients in (4, 4, 2):
        steps = make_steps(FedAvg(), lambda: {"model": make_crnn(dropout=0.2)}, sizes=(5, 16, 9, 1)[:clients])
        jointly(FedAvg(), steps)
        states.append([step.floating_state() for step in steps])
    for first, second in zip(states[0], states[1], strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)
    for first, second in zip(states[0], states[2], strict=False):
        close(first, second)


def test_groups_may_have_empty_clients_and_different_architectures() -> None:
    def make_mixed_steps() -> list[Step]:
        steps = make_steps(FedAvg(), make_builder(FedAvg()), sizes=(5, 0, 9, 8, 3))
        for index in (2, 4):
            torch.manual_seed(index)
            steps[index].models = {"model": MeanMLP(BANDS, CLASSES, hidden=5)}
        return steps

    alone, joint = make_mixed_steps(), make_mixed_steps()
    expected, updates = looped(FedAvg(), alone), jointly(FedAvg(), joint)
    assert [step.execution.together for step in joint] == [2, 1, 2, 2, 2]
    assert_same_clients(joint, updates, alone, expected)


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_batched_predictions_equal_unbatched_predictions(shared: bool, lengths: bool) -> None:
    steps = make_steps(FedAvg(), lambda: {"model": make_crnn(dropout=0.5, bidirectional=True)}, sizes=(5, 16, 0, 9))
    for index, step in enumerate(steps):
        step.models["model"].output.weight.data.add_(0.1 * index)
    common_examples = make_examples(11, 3, lengths)
    examples_of = [
        common_examples if shared else make_examples(len(step.data.train), 7 + i, lengths)
        for i, step in enumerate(steps)
    ]
    if not shared:
        examples_of[2] = examples_of[2].take(np.zeros(0, np.int64))
        steps = [step for i, step in enumerate(steps) if i != 2]
        examples_of = [examples for i, examples in enumerate(examples_of) if i != 2]
    calls = [lambda s=s, e=e: predict(s, "model", e, 4) for s, e in zip(steps, examples_of, strict=True)]
    for logits, call, examples in zip(together.run_in_lockstep(calls), calls, examples_of, strict=True):
        assert isinstance(logits, Tensor), logits
        assert logits.shape == (len(examples), CLASSES)
        torch.testing.assert_close(logits, call(), rtol=1e-5, atol=1e-6)
    assert not steps[0].models["model"].training


def test_batched_predictions_use_each_clients_batch_normalisation() -> None:
    steps = make_steps(FedAvg(), lambda: {"model": extra_methods.WithBuffers(BANDS, CLASSES)})
    for index, step in enumerate(steps):
        step.models["model"].normalise.running_mean.fill_(index)
    calls = [lambda s=s: predict(s, "model", s.data.train, 4) for s in steps]
    for logits, call in zip(together.run_in_lockstep(calls), calls, strict=True):
        torch.testing.assert_close(logits, call(), rtol=1e-5, atol=1e-6)
