"""Several data sets in one federation: all parts share a trunk, and each has separate classes, heads and test sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from helpers import each_method

from raydfl import Config, final_state, load_model, make_config, read_rows, read_run, resume
from raydfl.core import registry
from raydfl.core.errors import ConfigError
from raydfl.core.part_names import mark_names, select_part
from raydfl.core.settings import FIRST_VIEW
from raydfl.core.types import State
from raydfl.core.yaml import parse_yaml
from raydfl.data.build import build_population
from raydfl.data.client_ids import ClientIds
from raydfl.data.population import Population
from raydfl.data.tables import Tables, encode, join_tables, make_empty_clips
from raydfl.engine.clients import Clients
from raydfl.engine.initial_state import join_states
from raydfl.methods import Method
from raydfl.runs._run import run
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, read_tensors, start_server, train_federation

Tiny = Callable[..., Config]
PARTS = "data.parts={low: {speakers: 4}, high: {classes: 5, first: 10, speakers: 3}}"
METHODS = [
    name
    for name in registry.names("raydfl.methods")
    if not registry.find("raydfl.methods", name, Method, "method")().needs.one_class_list  # type: ignore[type-abstract]
    and not name.startswith("profila")  # ProFiLA does not classify
]


def test_a_client_has_the_examples_and_classes_of_its_part(tiny: Tiny) -> None:
    config = tiny(PARTS)
    whole = build_population(config.data, 1)
    single = {name: build_population(part, 1) for name, part in config.data.each.items()}
    assert [*whole.ids] == [f"{name}/{client}" for name, part in single.items() for client in part.ids]
    assert [*whole.parts] == ["low", "high"]
    place = 0
    for name, part in single.items():
        for i in range(len(part)):
            joint, expected = whole.data(place), part.data(i)
            assert joint.train.labels.tolist() == expected.train.labels.tolist()
            assert np.array_equal(joint.train.batch(np.arange(3)).x, expected.train.batch(np.arange(3)).x)
            assert whole.profile(place) == {"part": name, **part.profile(i)}
            assert whole.num_examples(place) == part.num_examples(i)
            place += 1
        assert whole.parts[name].test.labels.tolist() == part.test.labels.tolist()
    counts = whole.label_counts()
    assert counts[:4, :3].tolist() == single["low"].label_counts().tolist()
    assert counts[4:, 3:].tolist() == single["high"].label_counts().tolist()
    assert not counts[:4, 3:].any()
    assert not counts[4:, :3].any()
    assert [specs[0].classes for specs in Clients(whole, config).variants()] == [3, 5]


def test_a_population_of_parts_survives_saving_and_loading(tiny: Tiny, tmp_path: Any) -> None:
    config = tiny(PARTS)
    population = build_population(config.data, 1)
    population.save(tmp_path)
    loaded = Population.load(tmp_path, verify=True, verify_features=True)
    assert loaded.classes == population.classes
    assert loaded.data(5).train.labels.tolist() == population.data(5).train.labels.tolist()
    assert population.is_saved_in(tmp_path)
    assert not build_population(tiny(PARTS.replace("speakers: 3", "speakers: 2")).data, 1).is_saved_in(tmp_path)
    unread = Population.load(tmp_path, features=False).parts.values()
    assert [(part.views[FIRST_VIEW].bands, part.stores) for part in unread] == [(16, ()), (16, ())]


def test_all_parts_share_one_clip_table_and_one_client_table(tiny: Tiny, tmp_path: Any) -> None:
    read = "profile: {power: {column: group}}"
    population = build_population(tiny(PARTS.replace("speakers: 4", f"speakers: 4, {read}")).data, 1)
    population.save(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    clips, clients = (pa.ipc.open_file(tmp_path / f"{name}.arrow").read_all() for name in ("clips", "clients"))
    assert clients["part"].to_pylist() == ["low"] * 4 + ["high"] * 3
    assert clients["client"].to_pylist() == [*population.ids]
    assert [population.index(client) for client in population.ids] == [*range(7)], "high is before low in the alphabet"
    owned = clips.filter(pc.greater_equal(clips["client"], 0))
    assert clients["part"].take(owned["client"]).to_pylist() == owned["part"].to_pylist()
    assert clients["profile:power"].null_count == 3
    assert "power" in population.profile(0)
    assert "power" not in population.profile(4)


def test_a_profile_column_of_numbers_and_text_becomes_text() -> None:
    def make_tables(*values: Any) -> Tables:
        codes = np.arange(len(values), dtype=np.int32)
        ids = ClientIds.from_strings(f"c{code}" for code in codes)
        return Tables(make_empty_clips(), pa.record_batch({**ids.columns(), "profile:room": encode(codes, values)}))

    joined = join_tables({"a": make_tables(1, 2), "b": make_tables("hall", "2")})
    assert joined.clients["profile:room"].to_pylist() == ["1", "2", "hall", "2"]


def test_the_trunk_averages_all_clients_and_a_head_those_of_its_part(tiny: Tiny) -> None:
    """The oracle computes FedAvg over both parts by hand from the clients' updates."""
    server = start_server(tiny(PARTS, "train.cohort=1.0", "train.rounds=1"))
    federation = server._federation
    first = {name: tensor.clone() for name, tensor in federation.state.tensors["global"].items()}
    heads = {name for name in first if "@" in name}
    assert {name.partition("@")[0].rpartition(".")[0] for name in heads} == {"model/output"}
    assert {name.partition("@")[2] for name in heads} == {"low", "high"}
    sent: list[tuple[str, float, dict[str, torch.Tensor]]] = []
    orders = federation.plan()
    for order, result in zip(orders, federation._send(orders), strict=True):
        assert result.update is not None
        assert isinstance(result.update.weight, float)
        assert {name.partition("@")[2] for name in result.update.tensors} == {"", order.part}
        sent.append((order.part, result.update.weight, {n: t.clone() for n, t in result.update.tensors.items()}))
        head = [name for name in first if name.endswith(f"@{order.part}")]
        trunk = [name for name in first if "@" not in name]
        elements = sum(first[name].numel() for name in [*head, *trunk])
        assert result.bytes_down == 4 * elements, "the other parts' heads are not counted"
    server.round()
    for name, tensor in federation.state.tensors["global"].items():
        updates = [(weight, tensors[name].double()) for _, weight, tensors in sent if name in tensors]
        assert len(updates) == (7 if "@" not in name else 4 if name.endswith("@low") else 3)
        expected = sum(weight * value for weight, value in updates) / sum(weight for weight, _ in updates)
        assert torch.allclose(tensor.double(), expected, atol=1e-6), name
        assert not torch.equal(tensor, first[name])
    server.close()


def test_scaffolds_control_averages_the_clients_with_the_tensor(tiny: Tiny) -> None:
    """c = sum_k c_k / N in every round, over all clients for the trunk, and over the part's clients for its head."""
    folder = run(tiny(PARTS, "train.rounds=2", "evaluate.clients=none", method="scaffold")).run_dir
    population, stored = Population.load(folder / "population"), read_tensors(folder)
    heads = 0
    for name, control in final_state(folder).tensors["global"].items():
        plain, _, part = name.partition("@")
        if plain.startswith("control/"):
            clients = [i for i in range(len(population)) if part in ("", population.part_of(i))]
            controls = [stored.get(f"client {i} state:{plain}", bytes(4 * control.numel())) for i in clients]
            mean = np.mean([np.frombuffer(control_bytes, np.float32) for control_bytes in controls], axis=0)
            assert control.flatten().numpy() == pytest.approx(mean, abs=1e-6), name
            heads += bool(part)
    assert heads == 4


def test_clients_that_share_nothing_train_alone(tiny: Tiny) -> None:
    """After one round, the mean of the personal models, weighted by examples, is FedAvg's model."""
    one = (PARTS, "train.cohort=1.0", "train.rounds=1", "evaluate.clients=all")
    folder = run(tiny(*one, "method=local")).run_dir
    assert final_state(folder).tensors == {"global": {}}
    population, stored = Population.load(folder / "population"), read_tensors(folder)
    average = final_state(run(tiny(*one, "run.name=average")).run_dir).tensors["global"]
    for name, tensor in average.items():
        plain, _, part = name.partition("@")
        clients = [i for i in range(len(population)) if part in ("", population.part_of(i))]
        models = [np.frombuffer(stored[f"client {i} model:{plain}"], np.float32) for i in clients]
        mean = np.average(models, axis=0, weights=[population.num_examples(i) for i in clients])
        assert tensor.flatten().numpy() == pytest.approx(mean, abs=1e-6), name


@pytest.mark.parametrize("parts", [(), (PARTS,)])
def test_a_state_without_keys_is_rejected(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, parts: tuple[str, ...]) -> None:
    monkeypatch.setattr(Method, "init", lambda *_: State(0, {}))
    with pytest.raises(ConfigError, match="'fedavg': init\\(\\) returned a state without keys. Return one key or more"):
        run(tiny(*parts))


def test_parts_with_the_same_classes_have_separate_heads(tiny: Tiny) -> None:
    config = tiny("data.parts={a: {}, b: {first: 20}}", "train.rounds=1")
    names = final_state(run(config).run_dir).tensors["global"]
    assert {name for name in names if "@" in name} == {
        f"model/output.{kind}@{part}" for kind in ("weight", "bias") for part in "ab"
    }


@pytest.mark.parametrize("method", each_method(METHODS))
def test_every_method_trains_over_parts_and_each_part_is_measured(tiny: Tiny, method: str) -> None:
    config = tiny(PARTS, "train.rounds=2", "evaluate.clients=all", method=method)
    outcome = run(config)
    model = next(iter(type(config.components.method).models))
    scores = set(outcome.scores)
    if method != "fedper":
        assert {f"test low:{model}/accuracy", f"test high:{model}/accuracy"} <= scores
    assert {f"validation {part}:{model}/accuracy" for part in ("low", "high")} <= scores
    rows = read_rows(outcome.run_dir, 2)
    shapes = {
        (row["metric"], tuple(row["shape"]))
        for row in rows.to_pylist()
        if row["metric"].endswith(f"{model}/confusion") and row["shape"] and row["metric"].count(":") == 1
    }
    assert shapes == {(f"low:{model}/confusion", (3, 3)), (f"high:{model}/confusion", (5, 5))}


@pytest.mark.slow
def test_batched_training_gives_the_same_models_and_a_resumed_run_the_same_bits(tiny: Tiny) -> None:
    whole = train_federation(tiny(PARTS, "run.name=whole", "train.cohort=1.0"))
    batched = train_federation(tiny(PARTS, "run.name=stacked", "train.cohort=1.0", "train.together=4"))
    assert whole.keys() == batched.keys()
    for name in whole:
        if name.startswith("server"):
            looped_value, batched_value = (np.frombuffer(tensors[name], np.float32) for tensors in (whole, batched))
            assert np.allclose(looped_value, batched_value, atol=1e-5), name
    config = tiny(PARTS, "run.name=resumed", "train.cohort=1.0", "train.rounds=1")
    folder = run(config).run_dir
    resume(folder, ["train.rounds=3"])
    assert_same_bits(whole, read_tensors(folder))


def test_each_parts_model_is_loaded_and_exported_separately(tiny: Tiny) -> None:
    config = tiny(PARTS, "train.rounds=1")
    folder = run(config).run_dir
    low, high = load_model(folder, "low:model"), load_model(folder, "high:model")
    assert (len(low.classes), len(high.classes)) == (3, 5)
    assert low.logits(torch.zeros(2, 26, 16), None).shape == (2, 3)
    assert {file.name for file in folder.glob("*.safetensors")} == {"model-low.safetensors", "model-high.safetensors"}
    state = final_state(folder).tensors["global"]
    assert torch.equal(dict(low.network.named_parameters())["output.weight"], state["model/output.weight@low"])
    assert load_model(folder, client="high/s11").classes == high.classes


def test_the_report_names_the_classes_of_each_part(tiny: Tiny) -> None:
    record = read_run(run(tiny(PARTS, "train.rounds=1")).run_dir)
    assert record.data == "low+high"
    assert record.classes_of("high:model/confusion") == [f"tone{i}" for i in range(5)]
    assert record.classes_of("low:model/confusion") == ["tone0", "tone1", "tone2"]
    assert {metric for split, metric in record.confusions if split == "test"} == {
        "low:model/confusion",
        "high:model/confusion",
    }


def test_selecting_a_part_and_restoring_its_names() -> None:
    server = {"a": 1, "b@x": 2, "b@y": 3, "m/b@x": 4}
    assert select_part(server, "x") == {"a": 1, "b": 2, "m/b": 4}
    assert mark_names(select_part(server, "x"), "x", server) == {"a": 1, "b@x": 2, "m/b@x": 4}
    assert select_part(server, "") == server


def test_the_digest_depends_on_the_resolved_settings_of_each_part(tiny: Tiny) -> None:
    def compute_digest(*overrides: str) -> str:
        return tiny(*overrides).digest()

    plain = compute_digest(PARTS)
    assert (
        compute_digest(PARTS.replace("speakers: 4", "speakers: 4, unreadable: stop, split: {validation: 0.2}")) == plain
    )
    assert compute_digest(PARTS, "data.split.validation=0.3") != plain
    assert compute_digest(PARTS.replace("speakers: 3", "speakers: 2")) != plain
    assert compute_digest("data.parts={}") == compute_digest() != plain
    assert make_config(tiny(PARTS).model_dump(mode="json")).digest() == plain


@pytest.mark.parametrize(
    ("overrides", "method", "message"),
    [
        (["data.parts={a/b: {}}"], "fedavg", "the name 'a/b' is invalid. Use letters"),
        (["data.parts={a: {speakerz: 4}}"], "fedavg", "data.parts.a: .*unknown key 'speakerz'.*'speakers'"),
        (["data.parts={a: {speakers: many}}"], "fedavg", "data.parts.a: .*speakers"),
        (["data.parts={a: {cache: x}}"], "fedavg", "data.parts.a.cache is not supported, because all parts share it"),
        (["data.parts={a: {name: ''}}"], "fedavg", "data.parts.a.name is missing"),
        (["data.parts={a: {features: {kind: logmell}}}"], "fedavg", r"^data\.parts\.a\.features\.kind is 'logmell'"),
        (
            ["data.parts={a: {segment: {frames: 5, stride: 5}}}"],
            "fedavg",
            r"^data\.parts\.a\.segment needs clips of full length, but data\.parts\.a\.features\.seconds limits it",
        ),
        (
            ["data.parts={a: {views: {x: {column: c, features: {kind: 3}}}}}"],
            "fedavg",
            r"^data\.parts\.a\.views\.x\.features\.kind is 3",
        ),
        ([PARTS], "fedkad", "method 'fedkad' needs one list of classes"),
        (
            [PARTS, "attack=sign_flip"],
            "fedavg",
            "data.parts: attack 'sign_flip' needs one list of classes for all clients, but each part has its own. Remove",
        ),
    ],
)
def test_invalid_parts_are_rejected(tiny: Tiny, overrides: list[str], method: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(*overrides, method=method)


def test_a_configuration_without_data_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"data.name|data: .*name"):
        make_config({"method": "fedavg", "data": {"parts": {}}})


def test_duplicate_part_names_are_rejected() -> None:
    with pytest.raises(ConfigError, match="the key 'a' appears twice"):
        parse_yaml("data: {parts: {a: {name: fsdd}, a: {name: emodb}}}", "file")


def test_the_error_names_a_part_without_clips(tiny: Tiny) -> None:
    config = tiny("data.parts={a: {}, b: {leave_out: [tone0, tone1, tone2]}}")
    with pytest.raises(Exception, match="data.parts.b.leave_out names every label"):
        create(config, Progress("quiet"))


def test_tensor_names_with_an_at_sign_are_rejected() -> None:
    """Otherwise a client could change another part's head, and a network's tensor x@y would be lost."""
    with pytest.raises(
        ConfigError, match=r"the tensor name 'model/output.weight@high' contains '@', .*Rename the tensor"
    ):
        mark_names({"model/output.weight@high": torch.zeros(1)}, "low", {"model/output.weight@high"})
    state = State(0, {"global": {"model/x@y": torch.zeros(1)}})
    with pytest.raises(ConfigError, match="the tensor name 'model/x@y' contains '@'"):
        join_states({"low": state, "high": state}, state)
