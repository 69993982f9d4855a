"""FedSTAR's formulas repeated in NumPy, and the effects of its settings."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from helpers import differ, stop_after
from torch import Tensor, nn

from raydfl import read_rows, run
from raydfl.core.errors import ConfigError
from raydfl.core.types import Batch, Ratio
from raydfl.data.population import Population
from raydfl.engine.config import Config
from raydfl.methods.fedstar import FedSTAR
from raydfl.models.split_cnn import SplitCNN
from raydfl.runs.report import draw_figures, read_run
from raydfl.testing import assert_same_bits, make_batch, train_federation

Tiny = Callable[..., Config]
CLASSES = 3


def make_pooled_batch(labelled: int, unlabelled: int) -> Batch:
    random = torch.Generator().manual_seed(labelled)
    rows = labelled + unlabelled
    pool = torch.tensor([0] * labelled + [1] * unlabelled)
    truth = torch.randint(CLASSES, (rows,), generator=random)
    hidden = torch.where((pool == 1) & (torch.arange(rows) != rows - 1), truth, -1)  # the last clip has no hidden label
    columns = {"pool": pool, "hidden_label": hidden}
    x = 3 * torch.randn(rows, 8, 6, generator=random)
    return make_batch(x, torch.where(pool == 0, truth, -100), columns=columns)


def make_step(network: nn.Module, threshold: Tensor) -> Any:
    parameters = {f"model/{name}": parameter for name, parameter in network.named_parameters()}
    return SimpleNamespace(
        models={"model": network},
        forward=lambda name, batch: network(batch.x, batch.lengths),
        parameters=lambda *names: parameters,
        state={"threshold": threshold},
        device=torch.device("cpu"),
    )


def compute_loss(method: FedSTAR, network: nn.Module, batch: Batch, tau: np.ndarray) -> tuple[float, int, int, int]:
    """Compute the loss, and count accepted, checkable and correct pseudo-labels, clip by clip in float64."""
    supervised, pseudo_loss, accepted, checkable, correct = [], 0.0, 0, 0, 0
    logits = network(batch.x).detach().double().numpy()
    for z, pool, label, hidden in zip(
        logits, batch.columns["pool"], batch.y, batch.columns["hidden_label"], strict=True
    ):
        log_p = z - np.log(np.exp(z).sum())
        if pool == 0:
            supervised.append(-log_p[int(label)])
            continue
        soft = np.exp(z / method.temperature) / np.exp(z / method.temperature).sum()
        guess = int(soft.argmax())
        if soft[guess] >= tau[guess]:
            pseudo_loss, accepted = pseudo_loss - log_p[guess], accepted + 1
            checkable, correct = checkable + int(hidden >= 0), correct + int(hidden == guess)
    n_unlabelled = int((batch.columns["pool"] == 1).sum())
    loss = (1 - method.beta if method.mix == "weighted" else 1) * float(np.mean(supervised or [0]))
    loss += method.beta * pseudo_loss / max(n_unlabelled, 1)
    if not supervised and (not accepted or method.beta == 0):
        return 0.0, accepted, checkable, correct
    kernels = [p for p in network.parameters() if p.dim() == 4]
    return (
        loss + method.kernel_decay * sum(float(k.detach().square().sum()) for k in kernels),
        accepted,
        checkable,
        correct,
    )


@pytest.mark.parametrize(
    ("labelled", "unlabelled"), [(4, 12), (0, 9), (5, 0)], ids=["both", "no labels", "labels only"]
)
@pytest.mark.parametrize(
    "method",
    [
        FedSTAR(kernel_decay=0.01),
        FedSTAR(beta=0.3, mix="added", temperature=2.0, kernel_decay=0.0),
        FedSTAR(beta=0.0),
    ],
    ids=["code", "paper", "labels"],
)
def test_the_loss_and_its_metrics_follow_the_formulas(method: FedSTAR, labelled: int, unlabelled: int) -> None:
    torch.manual_seed(3)
    network = SplitCNN(6, CLASSES, filters=(4,), dropout=0.0)
    with torch.no_grad():  # All classes are predicted, some with high confidence.
        network.output.weight.mul_(1.5)
        network.output.bias.sub_(network(make_pooled_batch(4, 12).x).mean(dim=0))
    tau = np.array([0.415, 0.39, 0.42], np.float32)
    batch = make_pooled_batch(labelled, unlabelled)
    loss, accepted, checkable, correct = compute_loss(method, network, batch, tau)
    value, reports = method.self_training(make_step(network, torch.from_numpy(tau)), batch)
    assert float(value.detach()) == pytest.approx(loss, rel=1e-5)
    assert [float(n) for n in reports["accepted"]] == [accepted, unlabelled]
    assert [float(n) for n in reports["pseudo_label_accuracy"]] == [correct, checkable]
    assert not unlabelled or 0 < accepted < unlabelled, "the threshold must accept some clips and reject others"
    padding = dataclasses.replace(batch, weight=torch.ones(labelled + unlabelled))
    assert float(method.self_training(make_step(network, torch.from_numpy(tau)), padding)[0].detach()) == float(
        value.detach()
    )


def test_pseudo_labels_get_no_gradient_and_a_threshold_above_1_rejects_all() -> None:
    """A threshold above 1 leaves the labelled loss with its weight, so beta 0 gives twice the gradient."""
    network, batch = SplitCNN(6, CLASSES, filters=(4,), dropout=0.0), make_pooled_batch(4, 12)

    def gradients(method: FedSTAR, tau: float) -> list[Tensor]:
        value, _ = method.self_training(make_step(network, torch.full((CLASSES,), tau)), batch)
        return list(torch.autograd.grad(value, list(network.parameters())))

    none_accepted = gradients(FedSTAR(beta=0.5, kernel_decay=0.0), 1.01)
    labels = gradients(FedSTAR(beta=0.0, kernel_decay=0.0), 0.0)
    for gradient, expected_gradient in zip(none_accepted, labels, strict=True):
        torch.testing.assert_close(2 * gradient, expected_gradient)
    everything = gradients(FedSTAR(beta=1.0, kernel_decay=0.0), 0.0)
    logits = network(batch.x)
    expected = nn.functional.cross_entropy(logits[4:], logits[4:].argmax(dim=1))
    for gradient, expected_gradient in zip(
        everything, torch.autograd.grad(expected, list(network.parameters())), strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient)


def test_a_batch_without_labels_and_pseudo_labels_changes_nothing() -> None:
    """Adam would take full steps from the gradient of the decay alone, as large as from labels."""
    network = SplitCNN(6, CLASSES, filters=(4,), dropout=0.0)
    for labelled, tau, zero in ((0, 1.01, True), (0, 0.0, False), (1, 1.01, False)):
        step = make_step(network, torch.full((CLASSES,), tau))
        value, _ = FedSTAR(kernel_decay=0.01).self_training(step, make_pooled_batch(labelled, 9))
        gradients = torch.autograd.grad(value, list(network.parameters()))
        assert all(not gradient.any() for gradient in gradients) is zero


def test_the_threshold_rises_with_the_round_counted_from_1() -> None:
    method = FedSTAR(threshold=(0.5, 0.9), rising_rounds=4)
    thresholds = [method.threshold_in(round_index) for round_index in range(6)]
    quarter = 0.9 - 0.2 * (1 + 2**-0.5)
    np.testing.assert_allclose(thresholds, [quarter, 0.7, 0.7 + (0.7 - quarter), 0.9, 0.9, 0.9])


def test_flexmatchs_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check 5 confident clips of 8: 4 of class 0, 1 of class 1. By equations 7 and 11: progress 1, 1/4, 0; by 6: 1, 1/7, 0."""
    sure = torch.tensor([[9.0, 0, 0]] * 4 + [[0, 9.0, 0]] + [[0, 0, 0.1]] * 3)
    monkeypatch.setattr("raydfl.methods.fedstar.predict", lambda step, model, clips: sure)
    spec = SimpleNamespace(name="model", width=3)
    step: Any = SimpleNamespace(
        client=SimpleNamespace(models=(spec,)),
        round_index=9,
        data=SimpleNamespace(pools={"unlabelled": range(8)}),
        device=torch.device("cpu"),
    )
    method = FedSTAR(threshold=(0.5, 0.8), rising_rounds=10, per_class=True)
    torch.testing.assert_close(method._thresholds(step), 0.8 * torch.tensor([1.0, 1 / 7, 0.0]))
    torch.testing.assert_close(FedSTAR(threshold=(0.5, 0.8), rising_rounds=10)._thresholds(step), torch.full((3,), 0.8))


def test_a_strong_view_learns_the_pseudo_labels_of_the_plain_view() -> None:
    network, batch = SplitCNN(6, CLASSES, filters=(4,), dropout=0.0), make_pooled_batch(2, 6)
    step, strong = make_step(network, torch.zeros(CLASSES)), torch.randn_like(batch.x)
    method = FedSTAR(beta=1.0, kernel_decay=0.0, strong="loud")
    value, _ = method.self_training(step, dataclasses.replace(batch, views={**batch.views, "loud": strong}))
    guess = network(batch.x).argmax(dim=1)
    expected = nn.functional.cross_entropy(network(strong)[2:], guess[2:])
    torch.testing.assert_close(value, expected)


def test_a_strong_view_changes_the_model(tiny: Tiny, tmp_path: Path) -> None:
    for speaker, label, take in itertools.product(range(3), range(3), range(4)):
        wave = 0.2 * np.sin(np.arange(2000) * (label + 1) * (0.2 + 0.01 * take + 0.001 * speaker))
        file = tmp_path / "files" / ("test" if take == 0 else "train") / f"tone{label}" / f"s{speaker}_{take}.wav"
        file.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(file, wave, 8000)
    features = "{sample_rate: 8000, bands: 16, seconds: 0.25}"
    view = f"loud: {{column: path, features: {features}, transforms: [{{name: spec_augment, frames: 9}}]}}"
    source = f"{{name: folder, root: {tmp_path / 'files'}, group_pattern: '(?P<group>s[0-9])_', features: {features}"
    data = f"data={source}, unlabelled: {{keep: 0.4}}, partition: {{by: group}}"
    common = ("train.rounds=1", "method.threshold=[0.0, 0.0]", "evaluate.server=false", "evaluate.clients=none")
    weak = train_federation(tiny(f"{data}}}", *common, "run.name=weak", method="fedstar"))
    settings = (f"{data}, views: {{{view}}}}}", "method.strong=loud", *common)
    assert differ(weak, train_federation(tiny(*settings, "run.name=strong", method="fedstar")))


def train_one_round(config: Config) -> tuple[dict[str, list[int]], dict[str, dict[str, float]]]:
    """Return clips by client and pool, and each client's metrics of the first round."""
    stop_after(config, 1)
    folder = Path(config.run.dir) / str(config.run.name)
    population = Population.load(folder / "population")
    sizes = {
        population.ids[i]: [len(pool) for pool in population.data(i).pools.values()] for i in range(len(population))
    }
    metrics: dict[str, dict[str, float]] = {}
    for row in read_rows(folder).to_pylist():
        if row["client"] and row["split"] == "train":
            metrics.setdefault(row["client"], {})[row["metric"]] = row["value"]
    return sizes, metrics


def test_steps_of_fedstar_and_of_its_baselines(tiny: Tiny) -> None:
    """Half of a batch of 8 is unlabelled and determines the steps. The supervised baseline takes 8 labelled clips."""
    common = ("train.rounds=1", "train.cohort=1.0", "evaluate.server=false", "evaluate.clients=none")
    step_counts = {
        "all": lambda labelled, unlabelled: -(-unlabelled // 4),
        "labelled": lambda labelled, unlabelled: -(-labelled // 8),
        "labelled_as_often": lambda labelled, unlabelled: -(-unlabelled // 4),
    }
    for name, steps in step_counts.items():
        settings = (*common, f"method.learn_from={name}", f"run.name={name}")
        sizes, metrics = train_one_round(tiny(*settings, method="fedstar"))
        assert len(metrics) == 6
        for client, client_metrics in metrics.items():
            assert client_metrics["steps"] == steps(*sizes[client])
            assert ("accepted" in client_metrics) is (name == "all")


@pytest.mark.slow
def test_the_report_draws_the_metrics_of_a_loss(tiny: Tiny) -> None:
    for name, reports in (("all", ["accepted", "pseudo_label_accuracy"]), ("labelled", [])):
        config = tiny("train.rounds=2", f"method.learn_from={name}", f"run.name={name}", method="fedstar")
        figures = draw_figures(read_run(run(config).run_dir))
        assert [title for title in figures if title in {"accepted", "pseudo_label_accuracy"}] == reports


def test_the_weight_of_a_client_follows_paper_or_code() -> None:
    """Check the paper's weight n_l + n_u, and the code's weight: batches of 32 unlabelled clips times 64."""
    pools = {"labelled": range(5), "unlabelled": range(70)}
    weights: list[float] = []
    step: Any = SimpleNamespace(
        data=SimpleNamespace(pools=pools, train=pools["labelled"]),
        training=SimpleNamespace(batch_size=64),
        state={},
        round_index=0,
        client=SimpleNamespace(models=(SimpleNamespace(name="model", width=3),)),
        device=torch.device("cpu"),
        update=lambda metrics, weight: weights.append(weight),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raydfl.methods.fedstar.fit", lambda *args, **options: {"loss": Ratio(0, 0)})
        for weight in ("clips", "batches"):
            for learn_from in ("all", "labelled"):
                FedSTAR(weight=weight, learn_from=learn_from).local(step)  # type: ignore[arg-type]
    assert weights == [75, 5, 3 * 64, 64]


def test_fully_labelled_data_run_and_unusable_settings_are_rejected(tiny: Tiny) -> None:
    """At L = 1 only the labelled loss remains, in half batches of 4: FedAvg's steps, up to the factor of the loss."""
    common = ("train.rounds=1", "data.unlabelled={keep: 1.0}", "train.cohort=1.0", "evaluate.server=false")
    options = ("method.kernel_decay=0.0", "method.mix=added", "train.batch_size=8")
    all_labelled = train_federation(tiny(*common, *options, "run.name=all", method="fedstar"))
    fedavg = train_federation(tiny(*common, "train.batch_size=4", "run.name=fedavg"))
    assert {name for name in all_labelled if name.startswith("server")} == {
        name for name in fedavg if name.startswith("server")
    }
    for name, tensor in fedavg.items():
        if name.startswith("server"):
            np.testing.assert_allclose(
                np.frombuffer(all_labelled[name], np.float32), np.frombuffer(tensor, np.float32), rtol=1e-4, atol=1e-5
            )
    with pytest.raises(
        ConfigError,
        match=r"data.unlabelled.use: method 'fedstar' needs clips without labels, but it is 0. Set it above 0",
    ):
        tiny("data.unlabelled.use=0", method="fedstar")
    with pytest.raises(ConfigError, match=r"'fedstar' needs the pool 'labelled', but data has none. Hide labels"):
        tiny("data.unlabelled=null", method="fedstar")
    with pytest.raises(
        ConfigError, match="train.batch_size: method 'fedstar' needs batches of at least 2 clips, but it is 1"
    ):
        tiny("train.batch_size=1", method="fedstar")
    with pytest.raises(ConfigError, match="data.views: method 'fedstar' needs the view 'loud', but it is not defined"):
        tiny("method.strong=loud", method="fedstar")


def test_beta_0_equals_the_labelled_loss_under_the_same_plan(tiny: Tiny) -> None:
    """Pseudo-labels have no effect at beta 0, and an effect at beta 0.7."""
    common = ("train.rounds=1", "method.mix=added", "evaluate.server=false", "evaluate.clients=none")
    settings = {
        "labels": ("method.beta=0.0",),
        "cold": ("method.beta=0.0", "method.temperature=4.0", "method.threshold=[0.0, 0.0]"),
        "none": ("method.beta=0.7", "method.threshold=[1.5, 1.5]"),
        "guesses": ("method.beta=0.7", "method.threshold=[0.0, 0.0]"),
    }
    labels, cold, rejected, guesses = (
        train_federation(tiny(*common, *options, f"run.name={name}", method="fedstar"))
        for name, options in settings.items()
    )
    assert_same_bits(labels, cold)
    assert_same_bits(labels, rejected)
    assert differ(labels, guesses)
