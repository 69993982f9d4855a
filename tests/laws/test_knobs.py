"""Law 7: every hyperparameter changes the result, and its neutral value equals the simpler method bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from helpers import differ, known, marks_of

from raydfl.core import registry
from raydfl.core.options import options_of
from raydfl.engine.config import Config
from raydfl.methods import Method
from raydfl.rules.uniform_mean import UniformMean
from raydfl.testing import assert_same_bits, train_federation

Tiny = Callable[..., Config]


ALL = {
    name: registry.find("raydfl.methods", name, Method, "method")  # type: ignore[type-abstract]
    for name in registry.names("raydfl.methods")
}

SPREAD = ["method.vh=0.2", "method.vl=0.2", "train.optimiser.lr=1.0", "train.local_epochs=3", "data.speakers=6"]
"""Settings under which clients differ in a weight and in its bias in different ways."""

SKEWED = ["data.partition={by: dirichlet, clients: 5, alpha: 0.1}"]
"""A partition where clients lack classes."""

SURE, RISING = ["method.threshold=[0.4, 0.4]"], ["method.threshold=[0.34, 0.9]"]

UNEQUAL = ["data.profile={share: {values: [0.0, 0.5]}}", "method.ratio_from=share"]

WIDE = "models.model={name: crnn_tiny, hidden: 2, filters: [16]}"
"""A network whose convolution has more and smaller weights than its GRU."""

SPLIT = "models.model={name: split_cnn, filters: [4], groups: 2}"

TRIED = ["method.ratios=[0.0, 0.5]", "train.rounds=5"]

HALF = "method.share=0.5"

READY = ["method.threshold=0.0"]

STEERED = ["train.optimiser.lr=0.0005"]
"""A learning rate between the limits of equation 6."""

WELL = [
    "method.auc_threshold=0.0",
    "train.rounds=4",
    "method.shrink=0.2",
    "method.beta=0.0",
    "method.lr_max=1.0",
    "data.speakers=6",
    "data.takes=6",
]
"""Learning rates fall after a best performance. Some of six clients with six takes reach it."""

POOLED = ["data.pools={normal: {column: label, values: [tone0]}, anomalous: {column: label, values: [tone1, tone2]}}"]
AS_RUN = [*POOLED, "method.anomalous_share=0.25"]
"""Batches of normal and anomalous clips."""

OF_PROFILA: dict[str, tuple[list[str], list[str]]] = {
    "personal": (["method.personal=[]"], []),
    "memory": (["method.memory=0.5"], []),
    "renewal": (["method.renewal=0.0", "train.local_epochs=2"], ["train.local_epochs=2"]),
    "lam": (["method.lam=[0.0, 0.0]"], []),
    "warm_rounds": (["method.warm_rounds=1"], []),
    "total_rounds": (["method.total_rounds=2", "method.warm_rounds=0"], ["method.warm_rounds=0"]),
    "prototype_momentum": (["method.prototype_momentum=0.2"], []),
    "alpha": (["method.alpha=0.1"], []),
    "beta": (["method.beta=0.0"], []),
    "adaptive_lr": (["method.adaptive_lr=false", *STEERED], STEERED),
    "lr_min": ([*WELL, "method.lr_min=0.05"], WELL),
    "lr_max": (["method.lr_max=0.00055", *STEERED], STEERED),
}
"""Of both methods of Fed-ProFiLA-AD."""

EFFECTIVE: dict[tuple[str, str], tuple[list[str], list[str]]] = {
    # (method, field): overrides of two runs that must differ
    ("fedprox", "mu"): (["method.mu=0.5"], ["method.mu=0.0"]),
    ("fedprox", "squared"): (["method.mu=1.0", "method.squared=false"], ["method.mu=1.0"]),
    ("fedadam", "server_lr"): (["method.server_lr=0.02"], []),
    ("fedadam", "beta1"): (["method.beta1=0.5"], []),
    ("fedadam", "beta2"): (["method.beta2=0.5"], []),
    ("fedadam", "tau"): (["method.tau=0.1"], []),
    ("fedyogi", "server_lr"): (["method.server_lr=0.02"], []),
    ("fedyogi", "beta1"): (["method.beta1=0.5"], []),
    ("fedyogi", "beta2"): (["method.beta2=0.5"], []),
    ("fedyogi", "tau"): (["method.tau=0.1"], []),
    ("fedadagrad", "server_lr"): (["method.server_lr=0.02"], []),
    ("fedadagrad", "beta1"): (["method.beta1=0.5"], []),
    ("fedadagrad", "tau"): (["method.tau=0.1"], []),
    ("fedavgm", "server_lr"): (["method.server_lr=0.5"], []),
    ("fedavgm", "momentum"): (["method.momentum=0.5"], []),
    ("fedopt", "server_lr"): (["method.server_lr=0.02"], []),
    ("fedopt", "beta1"): (["method.beta1=0.5"], []),
    ("fedopt", "beta2"): (["method.beta2=0.5"], []),
    ("fedopt", "eps"): (["method.eps=0.1"], []),
    ("fedkad", "lam"): (["method.lam=0.2"], []),
    ("fedkad", "size"): (["method.size=7"], []),
    ("fedkad", "weights"): (["method.weights=true"], []),
    ("profila_as_run", "task"): (["method.task=compact"], []),
    ("profila_as_run", "schedule"): (["method.schedule=literal", "method.warm_rounds=0"], ["method.warm_rounds=0"]),
    ("profila_as_run", "first_round"): (["method.first_round=0"], []),
    ("profila_as_run", "ramp"): (["method.ramp=true", "train.local_epochs=2"], ["train.local_epochs=2"]),
    ("profila_as_run", "align"): (["method.align=smoothed"], []),
    ("profila_as_run", "temperature"): (["method.temperature=0.1"], []),
    ("profila_as_run", "history"): (["method.history=2"], []),
    ("profila_as_run", "auc_threshold"): (["method.auc_threshold=0.0", *STEERED], STEERED),
    ("profila_as_run", "eta"): (["method.eta=1.5", *STEERED], STEERED),
    ("profila_as_run", "shrink"): ([*WELL, "method.shrink=0.5"], WELL),
    ("profila_as_run", "steer"): (["method.steer=off"], []),
    **{(name, field): knob for name in ("profila", "profila_as_run") for field, knob in OF_PROFILA.items()},
    ("profila_as_run", "centre_of"): ([*AS_RUN, "method.centre_of=all"], AS_RUN),
    ("profila_as_run", "anomalous_share"): (AS_RUN, POOLED),
    ("profila_as_run", "push"): ([*AS_RUN, "method.push=[0.0, 0.5]"], AS_RUN),
    ("profila_as_run", "margin"): ([*AS_RUN, "method.margin=[1.0, 1.5]"], AS_RUN),
    ("profila_as_run", "contrast"): ([*AS_RUN, "method.contrast=0.0"], AS_RUN),
    ("profila_as_run", "contrast_temperature"): ([*AS_RUN, "method.contrast_temperature=1.0"], AS_RUN),
    ("scaffold", "server_lr"): (["method.server_lr=0.5"], []),
    ("fedper", "personal"): (["method.personal=[]"], []),
    ("feddrop", "share"): (["method.share=0.5"], []),
    **{(name, "share_of"): ([HALF, "method.share_of=weights"], [HALF]) for name in ("feddrop", "fedrolex", "heterofl")},
    ("fedrolex", "share"): (["method.share=0.25"], []),
    ("fedrolex", "stride"): (["method.stride=3"], []),
    ("fedrolex", "scaled"): (["method.scaled=false"], []),
    ("fedrolex", "masked"): (["method.masked=false", *SKEWED], SKEWED),
    ("fedstar", "beta"): (["method.beta=0.9"], []),
    ("fedstar", "mix"): (["method.mix=added"], []),
    ("fedstar", "temperature"): (["method.temperature=0.01"], []),
    ("fedstar", "threshold"): (["method.threshold=[0.0, 0.0]"], []),
    ("fedstar", "rising_rounds"): (["method.rising_rounds=1", *RISING], RISING),
    ("fedstar", "kernel_decay"): (["method.kernel_decay=0.1"], []),
    ("fedstar", "weight"): (["method.weight=batches"], []),
    ("fedstar", "learn_from"): (["method.learn_from=labelled"], ["method.learn_from=labelled_as_often"]),
    ("fedstar", "per_class"): (["method.per_class=true", *SURE], SURE),
    ("fedntd", "beta"): (["method.beta=0.3"], []),
    ("fedntd", "tau"): (["method.tau=3.0"], []),
    ("fedlc", "tau"): (["method.tau=0.3"], []),
    ("fedlc", "denominator"): (["method.denominator=others"], []),
    ("ditto", "lam"): (["method.lam=0.2"], []),
    ("ditto", "personal_epochs"): (["method.personal_epochs=2"], []),
    ("fedbabu", "head"): (["method.head=[]"], []),
    ("feddyn", "alpha"): (["method.alpha=1.0"], []),
    ("feddc", "alpha"): (["method.alpha=1.0"], []),
    ("fedrep", "personal"): (["method.personal=[]"], []),
    ("fedrep", "head_epochs"): (["method.head_epochs=1"], []),
    ("fedbn", "layers"): (["method.layers=[]"], []),
    ("pfedme", "lam"): (["method.lam=0.5"], []),
    ("pfedme", "personal_steps"): (["method.personal_steps=1"], []),
    ("pfedme", "personal_lr"): (["method.personal_lr=0.02"], []),
    ("pfedme", "beta"): (["method.beta=0.5"], []),
    ("perfedavg", "alpha"): (["method.alpha=0.2"], []),
    ("fedala", "layers"): (["method.layers=[]"], []),
    ("fedala", "eta"): (["method.eta=0.1"], []),
    ("fedala", "start_epochs"): (["method.start_epochs=1"], []),
    ("fedproto", "lam"): (["method.lam=0.2"], []),
    ("heterofl", "share"): (["method.share=0.25"], []),
    ("heterofl", "scaled"): (["method.scaled=false"], []),
    ("heterofl", "masked"): (["method.masked=false", *SKEWED], SKEWED),
    ("moon", "mu"): (["method.mu=5.0"], []),
    ("moon", "temperature"): (["method.temperature=0.1"], []),
    ("moon", "projection"): (["method.projection=8"], ["method.projection=null"]),
    ("fedgen", "alpha"): (["method.alpha=1.0"], []),
    ("fedgen", "beta"): (["method.beta=1.0"], []),
    ("fedgen", "decay"): (["method.decay=0.5"], []),
    ("fedgen", "generated"): (["method.generated=8"], []),
    ("fedgen", "generated_epochs"): (["method.generated_epochs=1", "train.local_epochs=2"], ["train.local_epochs=2"]),
    ("fedgen", "noise"): (["method.noise=8"], []),
    ("fedgen", "hidden"): (["method.hidden=4"], []),
    ("fedgen", "server_steps"): (["method.server_steps=3"], []),
    ("fedgen", "server_batch"): (["method.server_batch=16"], []),
    ("fedgen", "server_lr"): (["method.server_lr=0.01"], []),
    ("fedgen", "weight_decay"): (["method.weight_decay=0.5"], []),
    ("fedgen", "diversity"): (["method.diversity=0.0"], []),
    ("fedmlac", "alpha"): (["method.alpha=0.9"], []),
    ("fedmlac", "temperature"): (["method.temperature=3.0"], []),
    ("fedmlac", "vl"): (["method.vl=0.4"], []),
    ("fedmlac", "vh"): (["method.vh=0.4"], []),
    ("fedmlac", "layer"): (["method.layer=tensor", *SPREAD], SPREAD),
    ("fedmlac", "form"): (["method.form=supervised"], ["method.form=literal"]),
    ("fedmlac", "warm_epochs"): (["method.warm_epochs=1"], []),
    ("fedmlac", "sequential"): (["method.sequential=true"], []),
    ("fedmlac", "lpa"): (["method.vh=0.4", "method.lpa=false"], ["method.vh=0.4"]),
    ("fedmlac", "mutual"): (["method.mutual=false"], []),
    ("fedapta", "ratio"): (["method.ratio=0.8"], []),
    ("fedapta", "ratio_from"): (UNEQUAL, []),
    ("fedapta", "ratio_of"): (["method.ratio=0.6", "method.ratio_of=all"], ["method.ratio=0.6"]),
    ("fedapta", "prune"): (["method.prune=[recurrent]"], []),
    ("fedapta", "solver"): (["method.solver=uniform"], []),
    ("fedapta", "importance"): (["method.importance=sum", WIDE], [WIDE]),
    ("fedapta", "recover"): (["method.recover=false", *UNEQUAL], UNEQUAL),
    ("fedapta", "drift"): (["method.drift=server"], []),
    ("fedapta", "alpha"): (["method.alpha=1.0"], []),
    ("modality_mirror", "temperature"): (["method.temperature=0.5"], []),
    ("modality_mirror", "kd_weight"): (["method.kd_weight=0.0"], []),
    ("modality_mirror", "divergence"): (["method.divergence=literal"], []),
    ("modality_mirror", "heads"): (["method.heads=all"], []),
    ("multifl", "heads"): (["method.heads=all"], []),
    ("harmony", "groups"): (["method.groups=1"], []),
    **{
        (name, "student"): (["method.student=video"], []) for name in ("multifl", "unifl", "harmony", "modality_mirror")
    },
    ("fedlps", "ratio"): (["method.ratio=0.25"], []),
    ("fedlps", "ratio_from"): (UNEQUAL, []),
    ("fedlps", "inputs"): (["method.inputs=false"], []),
    ("fedlps", "norms"): (["method.norms=false", SPLIT], [SPLIT]),
    ("fedmp", "ratios"): (["method.ratios=[0.5]"], []),
    ("fedmp", "exploration"): ([*TRIED, "method.exploration=1000"], [*TRIED, "method.exploration=0"]),
    ("fedmp", "discount"): (["method.discount=0.5", "train.rounds=4"], ["train.rounds=4"]),
    ("fedmp", "speed_from"): (["data.profile={speed: {values: [1, 4]}}", "method.speed_from=speed"], []),
    ("fedmp", "prune"): (["method.ratios=[0.5]", "method.prune=[recurrent]"], ["method.ratios=[0.5]"]),
    ("hermes", "target"): ([*READY, "method.target=0.25", "method.step=0.5"], [*READY, "method.step=0.5"]),
    ("hermes", "step"): ([*READY, "method.step=0.5"], READY),
    ("hermes", "threshold"): (READY, ["method.threshold=1.0"]),
    ("hermes", "prune"): ([*READY, "method.prune=[recurrent]"], READY),
}
# Compare with the default, whose run most other cases share.
_UNIFORM = {name for name, cls in ALL.items() if isinstance(cls.default_rule, UniformMean)}
EFFECTIVE.update(
    {(name, "rule"): ([f"method.rule={'weighted' if name in _UNIFORM else 'uniform'}_mean"], []) for name in ALL}
)


def test_every_hyperparameter_is_listed() -> None:
    fields = {(name, field.name) for name, cls in ALL.items() for field in dataclasses.fields(cls) if field.init}
    # Views need files: tests/methods/test_fedstar.py, tests/methods/test_several_views.py.
    assert fields == {*EFFECTIVE, ("fedstar", "strong"), ("unifl", "cohort")}
    assert len(ALL) >= 11


@pytest.mark.parametrize("method", sorted(ALL))
def test_every_default_has_a_source(method: str) -> None:
    sources = {option.name: option.source for option in options_of(ALL[method])}
    assert set(sources.values()) <= {"paper", "release", "ours"}, sources
    assert sources["rule"] == "ours"


STATED: dict[str, dict[str, object]] = {
    "fedmlac": {"form": "literal", "warm_epochs": 0, "lpa": True, "mutual": True},
    "fedstar": {
        "beta": 0.5,
        "threshold": [0.5, 0.9],
        "rising_rounds": 100,
        "kernel_decay": 1e-4,
        "weight": "clips",
        "learn_from": "all",
    },
    "fedapta": {"ratio_of": "prunable", "recover": True},
    "profila": {"lam": [0.001, 0.01], "warm_rounds": 5, "total_rounds": 100, "alpha": 0.5, "adaptive_lr": True},
    "modality_mirror": {},
}
"""All defaults stated in the five papers: numbers, and options for printed equations."""


@pytest.mark.parametrize("method", STATED)
def test_defaults_with_the_source_paper_have_the_stated_values(method: str) -> None:
    options = options_of(ALL[method])
    assert {option.name: option.default for option in options if option.source == "paper"} == STATED[method]


@pytest.mark.parametrize(
    ("method", "field"), [pytest.param(*case, marks=marks_of(case[0])) for case in sorted(EFFECTIVE)]
)
def test_each_hyperparameter_changes_the_result(tiny: Tiny, method: str, field: str) -> None:
    overrides, reference = EFFECTIVE[method, field]
    # Four clients and two rounds are the fewest at which every hyperparameter matters.
    common = [
        "data.speakers=4",
        "train.cohort=1.0",
        "train.rounds=2",
        "evaluate.every=9",
        "evaluate.server=false",
        "evaluate.clients=none",
    ]
    a = train_federation(tiny(*common, *overrides, "run.name=a", method=method))
    b = known(tiny(*common, *reference, method=method))
    assert differ(a, b)


COMPACT = "objective={name: compact, size: 4, normal: [tone0]}"

PLAIN = ["method.task=compact", "method.lam=[0.0, 0.0]", "method.prototype_momentum=1.0", "method.steer=off"]
"""ProFiLA with all of its extensions disabled."""

NEUTRAL: list[tuple[str, list[str], str, list[str]]] = [
    # method, its neutral values, the simpler method, its settings
    ("fedprox", ["method.mu=0.0"], "fedavg", []),
    ("fedprox", ["method.mu=0.0", "method.squared=false"], "fedavg", []),
    ("fedper", ["method.personal=[]"], "fedavg", []),
    (
        "profila_as_run",
        [*PLAIN, "method.personal=[]", "models.model=film_cnn_tiny"],
        "fedavg",
        [COMPACT, "models.model=film_cnn_tiny"],
    ),
    (
        "profila_as_run",
        [*PLAIN, "models.model=film_cnn_tiny", "train.local_epochs=2"],
        "fedper",
        [
            COMPACT,
            "models.model=film_cnn_tiny",
            "train.local_epochs=2",
            "method.personal=[model/adapter, model/output, model/objective]",
        ],
    ),
    ("profila_as_run", [], "profila", []),
    ("profila", ["method.alpha=1.0", "method.beta=0.0"], "profila", ["method.beta=0.0"]),
    ("profila_as_run", ["method.steer=off"], "profila", ["method.beta=0.0", "method.adaptive_lr=false"]),
    ("feddrop", ["method.share=1.0"], "fedavg", []),
    ("fedrolex", ["method.share=1.0", "method.masked=false"], "fedavg", []),
    ("heterofl", ["method.masked=false"], "fedrolex", ["method.masked=false", "method.stride=0"]),
    ("fedrep", ["method.personal=[]"], "fedavg", []),
    ("fedbn", ["method.layers=[]"], "fedavg", [SPLIT]),
    ("fedntd", ["method.beta=0.0"], "fedavg", []),
    ("fedlc", ["method.tau=0.0"], "fedavg", []),
    ("fedbabu", ["method.head=[]"], "fedavg", []),
    ("fedapta", ["method.ratio=0.0", "method.drift=off", "train.groups=none"], "fedavg", []),
    ("fedlps", ["method.ratio=0.0"], "fedavg", []),
    ("fedmp", ["method.ratios=[0.0]"], "fedavg", []),
    ("hermes", ["method.target=0.0"], "fedavg", []),
    ("fedmlac", ["method.form=0"], "fedmlac", ["method.form=literal"]),
    ("fedmlac", ["method.form=1.0"], "fedmlac", ["method.form=supervised"]),
    ("fedmlac", ["method.vl=0.0", "method.vh=0.0"], "fedmlac", ["method.lpa=false"]),
    ("fedmlac", ["method.rule=weighted_mean"], "fedmlac", ["method.lpa=false"]),
    ("fedmlac", ["method.mutual=false", "method.alpha=0.2"], "fedmlac", ["method.mutual=false"]),
    ("fedavg", ["method.rule={name: lpa, vl: 0.0, vh: 0.0}"], "fedavg", []),
]


@pytest.mark.parametrize(
    ("method", "neutral", "simpler", "settings"), [pytest.param(*case, marks=marks_of(case[0])) for case in NEUTRAL]
)
def test_a_neutral_value_equals_the_simpler_method(
    tiny: Tiny, method: str, neutral: list[str], simpler: str, settings: list[str]
) -> None:
    common = ["data.speakers=4", "train.cohort=1.0", "train.rounds=2", "evaluate.every=9"]
    a = train_federation(tiny(*common, *neutral, "run.name=a", method=method))
    b = known(tiny(*common, *settings, method=simpler))
    assert_same_bits(a, b)


@pytest.mark.parametrize(
    ("method", "neutral"),
    [
        ("fedavgm", ["method.momentum=0.0"]),  # the server keeps the velocity
        ("ditto", ["method.rule=weighted_mean"]),  # a client keeps its personal model
        ("feddyn", ["method.alpha=0.0", "method.rule=weighted_mean"]),  # both sides keep gradients
        ("fedala", ["method.layers=[]"]),  # a client keeps its last model
        ("perfedavg", ["method.alpha=0.0"]),  # a client has an adapted model
        ("moon", ["method.mu=0.0", "method.projection=null"]),  # a client keeps its previous model
        ("fedgen", ["method.alpha=0.0", "method.beta=0.0"]),  # the server keeps a generator
    ],
)
def test_additional_state_leaves_the_model_of_fedavg_unchanged(tiny: Tiny, method: str, neutral: list[str]) -> None:
    common = ["train.cohort=1.0", "train.rounds=3", "evaluate.every=9"]
    a = train_federation(tiny(*common, *neutral, "run.name=a", method=method))
    b = known(tiny(*common))
    models = [name for name in b if name.startswith("server global model/")]
    assert models
    assert_same_bits({name: a[name] for name in models}, {name: b[name] for name in models})


def test_the_first_round_of_scaffold_equals_fedavg_with_a_uniform_mean(tiny: Tiny) -> None:
    """Compare one and two rounds. All control variates are zero in the first round, so only the second can differ."""
    for rounds, equal in ((1, True), (2, False)):
        common = [f"train.rounds={rounds}", "train.cohort=1.0", "evaluate.every=9"]
        a = train_federation(tiny(*common, f"run.name=a{rounds}", method="scaffold"))
        b = known(tiny(*common, "method.rule=uniform_mean"))
        models = [name for name in b if name.startswith("server global model/")]
        assert models
        close = all(_is_close(a[name], b[name]) for name in models)
        assert close is equal


def _is_close(a: bytes, b: bytes) -> bool:
    import numpy as np

    return bool(np.allclose(np.frombuffer(a, np.float32), np.frombuffer(b, np.float32), rtol=1e-5, atol=1e-6))


@pytest.mark.parametrize(
    "override",
    [
        "train.optimiser.lr=0.2",
        "train.optimiser.momentum=0.5",
        "train.optimiser.weight_decay=0.1",
        "train.optimiser.decay=0.5",
        "train.optimiser.clip_norm=0.01",
        "train.optimiser.models={model: 0.01}",
        "train.optimiser.name=adam",
        "train.optimiser.name=adamw",
        "train.local_epochs=2",
        "train.batch_size=4",
        "train.together=3",
        "train.cohort=2",
        "train.groups={name: known, by: group}",
        "run.seed=2",
        "models.model={name: crnn_tiny, hidden: 8, filters: [4], kernel: 5}",
        "data.split.validation=0.4",
        "data.features.bands=8",
        "data.corrupt={labels: {rate: 0.5, clients: 0.5}}",
        "data.corrupt={noise: {snr_db: 0, clients: 0.5}}",
        "data.corrupt={canaries: {clips: 10, clients: 0.5}}",
        "data.partition.shards=2",
    ],
)
def test_each_setting_changes_the_result(tiny: Tiny, override: str) -> None:
    common = ["train.rounds=2", "evaluate.every=9"]
    assert differ(train_federation(tiny(*common, override, "run.name=a")), known(tiny(*common)))


@pytest.mark.parametrize(
    ("override", "base"),
    [
        ("train.optimiser.betas=[0.5, 0.999]", "train.optimiser.name=adam"),
        ("train.optimiser.eps=0.1", "train.optimiser.name=adam"),
    ],
)
def test_each_setting_of_adam_changes_the_result(tiny: Tiny, override: str, base: str) -> None:
    common = ["train.rounds=2", "evaluate.every=9", base]
    assert differ(train_federation(tiny(*common, override, "run.name=a")), known(tiny(*common)))


@pytest.mark.parametrize(
    "override",
    ["evaluate.every=1", "evaluate.clients=all", "evaluate.batch_size=3", "run.commit_every=2", "run.keep=1"],
)
def test_evaluation_and_commits_leave_the_result_unchanged(tiny: Tiny, override: str) -> None:
    common = ["train.rounds=3", "evaluate.every=9"]
    for method in ("fedavg", "fedmlac"):
        a = train_federation(tiny(*common, override, f"run.name=a-{method}", method=method))
        b = known(tiny(*common, method=method))
        assert_same_bits(a, b)
