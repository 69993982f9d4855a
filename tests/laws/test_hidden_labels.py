"""Law 1 for examples: hidden labels and test-only clips influence no model. The method is a user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from helpers import differ, final_state, finish_in
from pydantic.dataclasses import dataclass
from tones import Tones
from torch import Tensor

from raydfl import Batch, Config, Method, Plan, Step, Update, fit, make_manifest, read_rows, run
from raydfl.core.errors import ConfigError
from raydfl.data.client_ids import to_numbers
from raydfl.data.population import Population
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, start_server, train_federation

Tiny = Callable[..., Config]
POOLS = ("data.unlabelled={keep: 0.5}", "train.rounds=2")


@dataclass(frozen=True, kw_only=True)
class PseudoLabels(Method):
    """FedAvg with pseudo-labels: an unlabelled clip gets the network's most probable class."""

    cheats: bool = False

    def loss(self, step: Step, batch: Batch) -> Tensor:
        logits = step.forward("model", batch)
        guess = batch.columns["hidden_label"] if self.cheats else logits.detach().argmax(dim=1)
        labels = torch.where(batch.columns["pool"] == 0, batch.y, guess)
        return batch.mean(F.cross_entropy(logits, labels, reduction="none"))

    def local(self, step: Step) -> Update:
        return step.update(fit(step, self.loss, batches=Plan({"labelled": 4, "unlabelled": 4}, leads="unlabelled")))


def train_with_hidden_labels(config: Config, change: Callable[[np.ndarray], np.ndarray]) -> dict[str, bytes]:
    """Train a whole run after changing the hidden labels before the first round."""
    run_dir = create(config, Progress("quiet"))
    population = Population.load(run_dir / "population")
    clips, column = population._tables.clips, "column:hidden_label"
    hidden = to_numbers(clips.column(column)).copy()
    assert len(set(hidden[hidden >= 0].tolist())) == 3
    hidden[hidden >= 0] = change(hidden[hidden >= 0])
    index = clips.schema.get_field_index(column)
    population._tables.clips = clips.set_column(index, column, pa.array(hidden))
    population.save(run_dir / "population")
    return finish_in(run_dir, config)


@pytest.mark.parametrize("together", [1, 3])
def test_permuted_hidden_labels_give_the_same_bits(tiny: Tiny, together: int) -> None:
    def train_twice(**options: Any) -> tuple[dict[str, bytes], dict[str, bytes]]:
        settings = [*POOLS, f"train.together={together}", *(f"method.{key}={value}" for key, value in options.items())]
        name = f"{__file__}:PseudoLabels"
        return (
            train_with_hidden_labels(
                tiny(*settings, f"run.name=a{options}".translate(_PLAIN), method=name), lambda hidden: hidden
            ),
            train_with_hidden_labels(
                tiny(*settings, f"run.name=b{options}".translate(_PLAIN), method=name),
                np.random.default_rng(0).permutation,
            ),
        )

    assert_same_bits(*train_twice())
    assert differ(*train_twice(cheats=True)), "reading hidden labels must change the model"


def test_fedstar_reads_hidden_labels_only_to_measure_its_pseudo_labels(tiny: Tiny) -> None:
    models, metrics = [], []
    for name, change in {"a": lambda hidden: hidden, "b": np.random.default_rng(0).permutation}.items():
        config = tiny(*POOLS, f"run.name={name}", "method.threshold=[0.0, 0.0]", method="fedstar")
        models.append(train_with_hidden_labels(config, change))
        rows = [row for row in read_rows(run_folder(config)).to_pylist() if row["split"] == "train"]
        metrics.append(
            {(row["round"], row["client"], row["metric"]): row["value"] for row in rows if row["array"] is None}
        )
    assert_same_bits(*models)
    changed = {
        metric for (number, client, metric), value in metrics[0].items() if value != metrics[1][number, client, metric]
    }
    assert changed & {"accepted", "pseudo_label_accuracy", "loss", "steps"} == {"pseudo_label_accuracy"}
    assert {number for number, client, metric in metrics[0] if metric == "accepted" and not client} == {1, 2}


@dataclass(frozen=True, kw_only=True)
class Machines(Tones):
    """Tones with anomalous takes. Their labels are wrong where ``mislabelled`` is not 0."""

    anomalous: int = 1
    mislabelled: int = 0

    def manifest(self) -> pa.Table:
        rows = [{**row, "split": None, "condition": "normal"} for row in super().manifest().to_pylist()]
        for row in rows[:: self.takes]:
            label = f"tone{(int(row['label'][4:]) + self.mislabelled) % self.classes}"
            extra = {**row, "label": label, "condition": "anomalous"}
            rows += [{**extra, "clip": f"{row['clip']}/{number}"} for number in range(self.anomalous)]
        return make_manifest(sorted(rows, key=lambda row: str(row["clip"])), "Machines")


def test_test_only_clips_change_no_model_and_no_feature(tiny: Tiny) -> None:
    """Add or relabel anomalous test clips, with features normalised by statistics of each speaker's clips."""

    def train(name: str, normalise: str, **options: int) -> tuple[dict[str, bytes], list[bytes]]:
        config = tiny(
            f"run.name={name}-{normalise}",
            "train.rounds=2",
            f"data.name={__file__}:Machines",
            *(f"data.{key}={value}" for key, value in options.items()),
            "data.split={test: null, client_test: {by: condition, values: [anomalous]}}",
            f"data.features.normalise={normalise}",
        )
        models = train_federation(config)
        population = Population.load(run_folder(config) / "population")
        data = [population.data(i) for i in range(len(population))]
        assert all(len(client_data.test) for client_data in data)
        return models, [
            client_data.train.batch(np.arange(len(client_data.train))).x.numpy().tobytes() for client_data in data
        ]

    for normalise in ("clip", "group"):
        reference, features = train("plain", normalise)
        for name, options in {"more": {"anomalous": 3}, "relabelled": {"mislabelled": 1}}.items():
            models, new_features = train(name, normalise, **options)
            assert_same_bits(reference, models)
            assert new_features == features


@pytest.mark.parametrize("objective", ["compact", "reconstruct", "identify"])
def test_a_machine_detector_does_not_depend_on_its_test_anomalies(tiny: Tiny, objective: str) -> None:
    """Vary the number, the loudness and the kind of anomalies. All models, also private models, and the thresholds stay equal."""

    def train(number: int, **options: Any) -> tuple[dict[str, bytes], list[float]]:
        config = tiny(
            f"run.name=run{number}",
            "train.rounds=1",
            "evaluate.clients=all",
            "data={name: machines, kinds: [fan], ids: 2, clips: 6, seconds: 0.25, columns: [group], partition: {by: group},"
            " features: {bands: 8, window_ms: 64, hop_ms: 32, normalise: client},"
            " split: {test: null, client_test: {by: split, values: [test]}, validation: 0.2}}",
            *(f"data.{name}={value}" for name, value in options.items()),
            f"objective={{name: {objective}, size: 4, normal: [normal]}}",
            method="fedper",
        )
        models = train_federation(config)
        rows = read_rows(run_folder(config)).to_pylist()
        return models, [row["value"] for row in rows if row["metric"] == "model/threshold" and row["client"]]

    models, thresholds = train(0, test_clips=4)
    assert len(thresholds) >= 2
    changes = ({"test_clips": 6}, {"test_clips": 1}, {"anomalies": "[rub]"}, {"strength_db": 10})
    for number, change in enumerate(changes, 1):
        changed_models, changed_thresholds = train(number, **{"test_clips": 4, **change})
        assert_same_bits(models, changed_models)
        assert changed_thresholds == thresholds


def run_folder(config: Config) -> Path:
    return Path(config.run.dir) / str(config.run.name)


def test_every_model_is_evaluated_on_the_clients_own_test_clips(tiny: Tiny) -> None:
    outcome = run(tiny("train.rounds=1", "data.split.client_test={fraction: 0.2, stratify: true}", method="fedmlac"))
    assert {"client_test plugin/accuracy", "client_test local/accuracy"} <= outcome.scores.keys()
    clients = set(read_rows(outcome.run_dir, 1, where=None)["client"].to_pylist())
    assert len(clients) > 2


_PLAIN = str.maketrans("", "", "{}' :")


def test_only_the_plan_trains_on_the_unlabelled_pool(tiny: Tiny) -> None:
    """FedAvg trains only on the labelled pool. The plan's method trains on both pools."""
    by_plan = train_federation(tiny(*POOLS, "run.name=plan", method=f"{__file__}:PseudoLabels"))
    labelled_only = train_federation(tiny(*POOLS, "run.name=labelled"))
    everything = train_federation(tiny("train.rounds=2", "run.name=everything"))
    assert differ(by_plan, labelled_only)
    assert differ(labelled_only, everything)


def test_a_missing_pool_ends_the_run_before_training(tiny: Tiny) -> None:
    """``run.on_error=drop`` does not apply, because the error is no client's failure."""
    config = tiny("run.on_error=drop", method=f"{__file__}:PseudoLabels")
    server = start_server(config)
    with pytest.raises(
        ConfigError,
        match="names the pool 'labelled', but the run has no such pool. Create pools with data.pools or data.unlabelled",
    ):
        server.round()
    server.close()
    assert final_state(Path(config.run.dir, "tiny")).round_index == 0
