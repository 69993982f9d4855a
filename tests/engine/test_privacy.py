"""Private runs. Oracles: the run without noise, the accounting, equal bits, and the bytes of all files."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from helpers import finish_in, stop_after

from raydfl.core.errors import ConfigError, RunDirectoryError
from raydfl.core.noise_key import KEY_FILE, NoiseKey
from raydfl.core.types import Client, State, Task
from raydfl.data import build_population
from raydfl.engine.accounting import Mechanism
from raydfl.engine.banded_noise import BandedNoise
from raydfl.engine.clients import Clients
from raydfl.engine.config import Config
from raydfl.engine.storage import read_about, read_rows, to_rows
from raydfl.engine.storage.folder import final_state
from raydfl.engine.storage.mirror import RunMirror
from raydfl.methods.fedavg import FedAvg
from raydfl.runs import Progress, replay, resume, run
from raydfl.runs.folder import create
from raydfl.testing import assert_same_bits, read_tensors, start_server, train_federation

pytest.importorskip("dp_accounting")
Tiny = Callable[..., Config]
NOISY = ("method.rule={name: gaussian, clip: 0.5, noise: 2.0}", "evaluate.clients=none")
POISSON = "train.clients={draw: poisson}"
SEED = "privacy.key=seed"


def folder_of(config: Config) -> Path:
    return Path(config.run.dir) / str(config.run.name)


def server_rows(run_dir: Path, metric: str) -> dict[int, float]:
    rows = to_rows(read_rows(run_dir, 10**6, where=(pc.field("metric") == metric) & (pc.field("client") == "")))
    return {row.round: row.value for row in rows}


def test_without_clipping_and_noise_a_run_equals_the_uniform_mean_to_the_bit(tiny: Tiny) -> None:
    exact = tiny("method.rule={name: gaussian, clip: .inf, noise: 0}", "evaluate.clients=none", SEED, method="fedadam")
    plain = tiny("method.rule=uniform_mean", "evaluate.clients=none", "run.name=plain", method="fedadam")
    assert_same_bits(train_federation(exact), train_federation(plain))


ADAPTIVE = "method.rule.clip={start: 0.5, noise: 1.5}"
BANDED = ("method.rule.bands=2", "train.clients.rest=2", "method.rule.groups=tensors")


@pytest.mark.parametrize("rest", [(), (POISSON, "train.cohort=1"), (ADAPTIVE,), BANDED])
def test_a_resumed_run_draws_the_same_noise_and_cohorts(tiny: Tiny, rest: tuple[str, ...]) -> None:
    config = tiny(*NOISY, *rest)
    stop_after(config, 1)
    run_dir = folder_of(config)
    before = (run_dir / KEY_FILE).read_bytes()
    copy = run_dir.with_name("copy")
    create(tiny(*NOISY, *rest, "run.name=copy"), Progress("quiet"))
    (copy / KEY_FILE).write_bytes(before)
    about = json.loads((copy / "run.json").read_text())
    about["privacy"]["key"] = NoiseKey(before).fingerprint
    (copy / "run.json").write_text(json.dumps(about))
    assert_same_bits(finish_in(run_dir, config), finish_in(copy, tiny(*NOISY, *rest, "run.name=copy")))
    assert (run_dir / KEY_FILE).read_bytes() == before


def test_two_runs_have_different_keys_unless_the_seed_is_the_key(tiny: Tiny) -> None:
    first, second = (train_federation(tiny(*NOISY, "train.rounds=1", f"run.name={name}")) for name in "ab")
    assert first != second
    first, second = (train_federation(tiny(*NOISY, SEED, "train.rounds=1", f"run.name={name}")) for name in "cd")
    assert_same_bits(first, second)


@pytest.mark.parametrize(("actors", "more"), [(1, ()), (2, ()), (4, ()), (2, BANDED)])
def test_actors_give_the_same_bits(tiny: Tiny, ray_session: None, actors: int, more: tuple[str, ...]) -> None:
    common = (*NOISY, SEED, POISSON, "train.cohort=2", *more)
    serial = train_federation(tiny(*common, "run.name=serial"))
    config = tiny(*common, f"ray.actors={actors}", "ray.cpus=0.5", "run.name=parallel")
    run(config, Progress("quiet"))
    assert_same_bits(serial, read_tensors(folder_of(config)))


def test_a_round_without_clients_is_noise_alone(tiny: Tiny) -> None:
    """With one of six clients expected, a third of the rounds are empty."""
    settings = (*NOISY, SEED, POISSON, "train.cohort=1", "train.rounds=8", "evaluate.every=8", "run.keep=20")
    config = tiny(*settings)
    train_federation(config)
    clients = server_rows(folder_of(config), "clients")
    empty = next(number for number, count in clients.items() if count == 0)
    states = []
    for rounds in (empty - 1, empty):
        part = tiny(*settings, f"run.name=until{rounds}")
        stop_after(part, rounds)
        states.append(final_state(folder_of(part)).tensors["global"])
    changes = torch.cat([(states[1][name] - states[0][name]).flatten() for name in states[0]])
    noise = NoiseKey.from_seed(1).normals(empty - 1, "noise", len(changes)) * 2.0 * 0.5
    np.testing.assert_allclose(changes.numpy(), noise, atol=1e-5)


def test_poisson_sampling_without_privacy_keeps_the_models_of_an_empty_round(tiny: Tiny) -> None:
    config = tiny(POISSON, "train.cohort=1", "train.rounds=8", "run.seed=3")
    result = run(config, Progress("quiet"))
    clients = server_rows(result.run_dir, "clients")
    loss = {
        row.round: row.value
        for row in to_rows(read_rows(result.run_dir, 10**6, where=pc.field("split") == "test"))
        if row.metric == "model/loss"
    }
    empty = [number for number, count in clients.items() if count == 0]
    assert empty
    assert all(loss[number] == loss[number - 1] for number in empty if number > 1)


@pytest.mark.slow
def test_poisson_cohorts_are_binomial(tiny: Tiny) -> None:
    """Over 60 rounds, 6 clients take part with probability 1/3 each: 2 a round, standard error 0.15."""
    config = tiny(
        *NOISY, SEED, POISSON, "train.cohort=2", "train.rounds=60", "evaluate.every=60", "run.commit_every=60"
    )
    train_federation(config)
    counts = np.array(list(server_rows(folder_of(config), "clients").values()))
    assert counts.mean() == pytest.approx(2, abs=0.6)
    assert counts.std() == pytest.approx(math.sqrt(6 / 3 * 2 / 3), abs=0.35)


def test_epsilon_is_in_the_table_the_description_and_the_report(tiny: Tiny) -> None:
    shown = io.StringIO()
    result = run(tiny(*NOISY, SEED), Progress("lines", shown))
    expected = [Mechanism(6, 3, "fixed", 2.0, 6**-1.1).compute_epsilon(rounds) for rounds in (1, 2, 3)]
    assert [*server_rows(result.run_dir, "privacy/epsilon").values()] == expected
    privacy = read_about(result.run_dir)["privacy"]
    assert (privacy["epsilon"], privacy["rounds"]) == (expected[-1], 3)
    assert (privacy["key"], privacy["neighbours"]) == (None, "replacing the data of one client")
    line = next(line for line in shown.getvalue().splitlines() if line.startswith("round 3/3"))
    assert f"epsilon {expected[-1]:.3g} (for study: anyone who knows the seed can subtract the noise)" in line
    assert "loss" not in line
    page = (result.run_dir / "report.html").read_text()
    assert (
        f"epsilon {expected[-1]:.3g} (delta 0.139, replacing the data of one client) after 3 rounds with noise 2"
        in page
    )
    assert "anyone who knows the seed can subtract the noise" in page


STILL = ("train.optimiser.lr=1e-30", "train.cohort=2", "run.keep=9")
"""Clients without a change, so the models move by their noise alone."""


def measure_moves(tiny: Tiny, name: str, rounds: int, *settings: str) -> list[np.ndarray]:
    """Return the change of the global model in each round after the first, float32 [elements]."""
    states = []
    for number in range(1, rounds + 1):
        config = tiny(*NOISY, SEED, *STILL, *settings, f"train.rounds={rounds}", f"run.name={name}{number}")
        stop_after(config, number)
        tensors = final_state(folder_of(config)).tensors["global"]
        states.append(torch.cat([tensor.flatten() for tensor in tensors.values()]).numpy())
    return [after - before for before, after in itertools.pairwise(states)]


def test_the_models_move_by_correlated_noise(tiny: Tiny) -> None:
    """Also after a resumed run, whose earlier noise is drawn again."""
    settings = ("method.rule.bands=2", "train.clients.rest=2")
    moves, noise = measure_moves(tiny, "banded", 3, *settings), BandedNoise(NoiseKey.from_seed(1), 2)
    for number, move in enumerate(moves, 1):
        np.testing.assert_allclose(move, noise.draw(number, len(move)) * 2.0 * 0.5 / 2, atol=1e-5)
    resumed = tiny(*NOISY, SEED, *STILL, *settings, "train.rounds=3", "run.name=banded2")
    whole = tiny(*NOISY, SEED, *STILL, *settings, "train.rounds=3", "run.name=whole")
    assert_same_bits(finish_in(folder_of(resumed), resumed), train_federation(whole))


def test_a_simulation_has_the_noise_and_the_epsilon_of_the_stated_clients(tiny: Tiny) -> None:
    """100 of 5,000 clients: the noise of the mean is 2 x 0.5 / 100 instead of 2 x 0.5 / 2."""
    settings = ("privacy.as_if={clients: 5000, cohort: 100}",)
    moves, key = measure_moves(tiny, "stated", 3, *settings), NoiseKey.from_seed(1)
    for number, move in enumerate(moves, 1):
        np.testing.assert_allclose(move, key.normals(number, "noise", len(move)) * 2.0 * 0.5 / 100, atol=1e-6)
    shown = io.StringIO()
    result = run(tiny(*NOISY, *STILL, *settings, "run.name=shown"), Progress("lines", shown))
    mechanism = Mechanism(5000, 100, "fixed", 2.0, 5000**-1.1)
    expected = {rounds: mechanism.compute_epsilon(rounds) for rounds in (1, 2, 3)}
    assert server_rows(result.run_dir, "privacy/epsilon_as_if") == expected
    assert not server_rows(result.run_dir, "privacy/epsilon")
    mark = "as if 100 of 5,000 clients took part in a round"
    line = next(line for line in shown.getvalue().splitlines() if line.startswith("round 3/3"))
    assert f"epsilon {expected[3]:.3g} ({mark})" in line
    privacy = read_about(result.run_dir)["privacy"]
    assert (privacy["epsilon_as_if"], privacy["warning"], privacy["simulated"]) == (expected[3], mark, 2)
    page = (result.run_dir / "report.html").read_text()
    assert "epsilon, as if more clients took part" in page
    assert f"after 3 rounds with noise 2; {mark}" in page


@pytest.mark.parametrize("draw", ["fixed", "poisson"])
def test_clients_rest_between_two_rounds(tiny: Tiny, draw: str) -> None:
    config = tiny(
        *NOISY,
        SEED,  # a secret key draws other clients in each run
        "privacy.metrics=outside",
        f"train.clients={{draw: {draw}, rest: 3}}",
        "train.cohort=1",
        "train.rounds=12",
        "evaluate.every=12",
    )
    train_federation(config)
    rows = to_rows(
        read_rows(folder_of(config), 10**6, where=(pc.field("metric") == "loss") & (pc.field("client") != ""))
    )
    rounds: dict[str, set[int]] = {}
    for row in rows:
        rounds.setdefault(row.client, set()).add(row.round)
    assert len(rounds) > 3
    assert all(len({number % 3 for number in numbers}) == 1 for numbers in rounds.values())
    mechanism = Mechanism(6, 1, draw, 2.0, 6**-1.1, rest=3)
    assert read_about(folder_of(config))["privacy"]["rest"] == 3
    assert [*server_rows(folder_of(config), "privacy/epsilon").values()] == [mechanism.compute_epsilon(12)]


def test_a_method_that_plans_a_resting_client_is_rejected(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(
        self: FedAvg, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int
    ) -> list[Task]:
        return [Task(known[number].id) for number in range(cohort)]

    config = tiny(*NOISY, "train.clients={rest: 2}", "train.cohort=3")
    known = Clients(build_population(config.data, config.run.seed), config)
    monkeypatch.setattr(FedAvg, "plan", plan)
    with pytest.raises(
        ConfigError, match="train.clients.rest: method 'fedavg' plans client .*, which rests in round 1"
    ):
        run(config, Progress("quiet"))


def test_metrics_of_clients_are_recorded_only_outside_the_guarantee(tiny: Tiny) -> None:
    rows = {}
    for name, settings in {"none": (), "outside": ("privacy.metrics=outside",)}.items():
        config = tiny(*NOISY, *settings, f"run.name={name}", "train.rounds=1")
        result = run(config, Progress("quiet"))
        rows[name] = to_rows(read_rows(result.run_dir, 10**6))
        assert ("outside this guarantee" in (result.run_dir / "report.html").read_text()) == (name == "outside")
    assert not [row for row in rows["none"] if row.client or row.split == "train" or row.metric == "timeline"]
    assert [row for row in rows["outside"] if row.client and row.metric == "loss"]
    assert "gaussian/clipped" in {row.metric for row in rows["outside"]} - {row.metric for row in rows["none"]}


@pytest.mark.slow
def test_the_epsilon_limit_ends_the_training_before_it_is_exceeded(tiny: Tiny) -> None:
    mechanism = Mechanism(6, 3, "fixed", 2.0, 6**-1.1)
    limit = (mechanism.compute_epsilon(2) + mechanism.compute_epsilon(3)) / 2
    config = tiny(*NOISY, "train.rounds=9", f"run.stop={{epsilon: {limit}}}")
    result = run(config, Progress("quiet"))
    assert (result.round, result.finished) == (2, True)
    assert result.ended.startswith("another round would exceed run.stop.epsilon")
    assert resume(result.run_dir).round == 2
    within = run(tiny(*NOISY, "train.rounds=2", f"run.stop={{epsilon: {limit}}}", "run.name=within"), Progress("quiet"))
    assert (within.round, within.ended) == (2, "")
    assert resume(result.run_dir, ["run.stop=null", "train.rounds=4"]).round == 4
    assert read_about(result.run_dir)["privacy"]["epsilon"] == mechanism.compute_epsilon(4)


@pytest.mark.slow
def test_noise_is_calibrated_once_and_kept_when_rounds_are_added(tiny: Tiny) -> None:
    config = tiny("method.rule={name: gaussian, epsilon: 6}", "evaluate.clients=none", "train.rounds=2")
    result = run(config, Progress("quiet"))
    before = read_about(result.run_dir)["privacy"]
    assert 5.9 < before["epsilon"] <= 6
    resume(result.run_dir, ["train.rounds=4"])
    after = read_about(result.run_dir)["privacy"]
    assert after["noise"] == before["noise"]
    assert after["epsilon"] > 6


@pytest.mark.slow
def test_the_key_is_in_no_other_file_and_in_no_mirror(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(*NOISY, "track={mlflow: true, also: [tensorboard]}")
    result = run(config, Progress("quiet"))
    key = (result.run_dir / KEY_FILE).read_bytes()
    assert (result.run_dir / KEY_FILE).stat().st_mode & 0o777 == 0o600
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != KEY_FILE]
    assert any(path.suffix == ".db" for path in files)
    for path in files:
        content = path.read_bytes()
        assert key not in content, path
        assert key.hex().encode() not in content, path
    mirror = RunMirror(result.run_dir, (tmp_path / "mirror").as_uri())
    mirror.sync()
    mirrored = [path.name for path in (tmp_path / "mirror").rglob("*")]
    assert "run.json" in mirrored
    assert KEY_FILE not in mirrored


def test_a_run_resumes_only_with_its_own_key(tiny: Tiny) -> None:
    config = tiny(*NOISY)
    stop_after(config, 1)
    path = folder_of(config) / KEY_FILE
    key = path.read_bytes()
    path.write_bytes(bytes(32))
    with pytest.raises(RunDirectoryError, match="is the key of another run"):
        resume(path.parent)
    path.unlink()
    with pytest.raises(RunDirectoryError, match=r"private.key cannot be read: .* Restore the file"):
        resume(path.parent)
    path.write_bytes(key)
    path.chmod(0o600)
    assert resume(path.parent).round == 3


@pytest.mark.parametrize(
    "change",
    [
        "method.rule.clip=0.6",
        "method.rule.noise=1.0",
        "privacy.key=seed",
        "privacy.delta=0.01",
        "train.clients.draw=poisson",
        "train.clients.rest=2",
        "privacy.as_if={clients: 99, cohort: 5}",
        "method.rule.groups=tensors",
    ],
)
def test_a_resumed_run_keeps_its_mechanism(tiny: Tiny, change: str) -> None:
    config = tiny(*NOISY, "train.clients={draw: fixed}")
    stop_after(config, 1)
    with pytest.raises(RunDirectoryError, match=change.partition("=")[0].rpartition(".")[2]):
        resume(folder_of(config), [change])


def test_a_client_is_replayed_with_the_secret_cohorts(tiny: Tiny) -> None:
    config = tiny(*NOISY, "privacy.metrics=outside")
    result = run(config, Progress("quiet"))
    trained = to_rows(read_rows(result.run_dir, 10**6, where=(pc.field("round") == 3) & (pc.field("split") == "train")))
    client = next(row for row in trained if row.client and row.metric == "loss")
    assert replay(result.run_dir, 3, client.client).metrics["loss"] == client.value


def test_with_a_deadline_clients_are_trained_alone(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU auto would measure the fastest number of clients in a batch."""
    monkeypatch.setattr("raydfl.engine.federation.ask_width", lambda pool, orders, broadcast: 4 if orders else 1)
    widths = []
    for settings in (("train.deadline=5",), ("run.name=free",)):
        server = start_server(tiny(*NOISY, *settings))
        widths.append(server._federation.store.together)
        server.close()
    assert widths == [1, 4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["method.rule=gaussian"], "gaussian needs noise or epsilon"),
        ([*NOISY, "evaluate.clients=cohort"], "evaluate.clients: cohort measures models on the clients' clips"),
        ([*NOISY, "method.name=fedkad"], "uses more of the updates than their sum"),
        ([*NOISY, "method.name=scaffold"], "scaffold"),
        ([*NOISY, "train.groups=ifca"], "the groups of clients depend on single updates"),
        ([*NOISY, "train.clients={weight: examples}"], "train.clients.weight: rule gaussian needs clients with equal"),
        ([*NOISY, "run.reference={pooled: true}"], "run.reference: reference runs train on the clients' data"),
        (["privacy.delta=0.1"], "privacy: rule WeightedMean gives no differential privacy"),
        (
            ["method.rule=median", "run.stop={epsilon: 1}"],
            "run.stop.epsilon: rule Median gives no differential privacy",
        ),
        ([*NOISY, "privacy.delta=1"], "privacy.delta"),
        ([*NOISY, "privacy.delta=0"], "privacy.delta"),
        ([*NOISY, "run.stop={epsilon: 0}"], "run.stop.epsilon"),
        ([*NOISY, "method.rule.noise=0", "run.stop={epsilon: 1}"], "with method.rule.noise=0 epsilon is infinite"),
        (["train.clients={draw: poisson, weight: examples}"], "poisson gives all clients equal chances, so weight"),
        (
            [*NOISY, "method.rule.bands=2"],
            r"method.rule.bands: 2 exceeds train.clients.rest \(1\). Lower bands, or raise",
        ),
        ([*NOISY, "method.rule.bands=4", "train.clients={rest: 5}"], r"bands: 4 exceeds train.rounds \(3\)"),
        (["privacy.as_if={clients: 9, cohort: 3}"], "privacy: rule WeightedMean gives no differential privacy"),
        ([*NOISY, "privacy.as_if={clients: 3, cohort: 9}"], r"as_if.*cohort \(9\) exceeds clients \(3\)"),
        (
            [*NOISY, "privacy.as_if={clients: 9, cohort: 5}", "train.clients={rest: 2}"],
            "privacy.as_if: train.clients.rest=2 divides the 9 clients into groups of 4, fewer than its cohort of 5",
        ),
        (
            [*NOISY, ADAPTIVE, "privacy.as_if={clients: 99, cohort: 5}"],
            "method.rule.clip.noise: with privacy.as_if the noise in the count of clients follows from the cohorts",
        ),
        (["train.fleet.buffer=2", "train.clients={rest: 2}"], "train.clients.rest counts rounds"),
        (
            [*NOISY, "train.deadline=5", "train.together=2"],
            "train.together: 2 with train.deadline lets the time of one",
        ),
    ],
)
def test_settings_outside_the_guarantee_are_rejected(tiny: Tiny, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(*settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.cohort=7"], "train.cohort: 7 clients a round, but the population has 6"),
        (
            ["train.cohort=3", "train.clients={rest: 3}"],
            "train.cohort: 3 clients a round, but train.clients.rest=3 divides the 6 clients into groups of 2",
        ),
        (
            ["run.stop={epsilon: 0.001}"],
            r"run.stop.epsilon: the first round already has epsilon [\d.]+, more than 0.001",
        ),
        (
            ["run.stop={epsilon: 0.001}", "privacy.key=seed", "privacy.as_if={clients: 5000, cohort: 100}"],
            r"already has epsilon [\d.]+ \(as if 100 of 5,000 clients.*; for study: .*\), more than 0.001",
        ),
    ],
)
def test_impossible_runs_are_rejected_before_the_first_round(tiny: Tiny, settings: list[str], message: str) -> None:
    config = tiny(*NOISY, *settings)
    with pytest.raises(ConfigError, match=message):
        run(config, Progress("quiet"))
    assert not folder_of(config).exists()


def test_a_missing_library_is_named(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"needs the package dp-accounting. Install it: pip install 'raydfl\[privacy\]'"
    ):
        Mechanism(6, 3, "fixed", 2.0, 0.1).compute_epsilon(1)


@pytest.mark.slow
def test_mlflow_marks_runs_without_a_guarantee(tiny: Tiny, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    store = f"sqlite:///{tmp_path}/mlflow.db"
    stated = (*NOISY, SEED, "privacy.as_if={clients: 5000, cohort: 100}")
    run(tiny(*stated, "track.mlflow=true", f"track.uri={store}", "track.experiment=marks"), Progress("quiet"))
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("marks")
    assert experiment is not None
    (logged,) = client.search_runs([experiment.experiment_id])
    assert logged.data.tags["raydfl.privacy"] == (
        "as if 100 of 5,000 clients took part in a round; for study: anyone who knows the seed can subtract the noise"
    )
    epsilons = {name: value for name, value in logged.data.metrics.items() if "epsilon" in name}
    assert epsilons == {"work/privacy/epsilon_as_if": Mechanism(5000, 100, "fixed", 2.0, 5000**-1.1).compute_epsilon(3)}
