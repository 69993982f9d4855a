"""MultiFL, UniFL, Harmony and ModalityMirror against FedAvg's bits and the closed forms of their papers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import differ, known
from PIL import Image
from seen_and_heard import OF_KIND, TESTS, federation, write

from raydfl.core.errors import ConfigError, InputError
from raydfl.core.types import Update
from raydfl.data import Population
from raydfl.data.audio import read_audio
from raydfl.engine import Clients
from raydfl.engine.config import Config, make_config
from raydfl.engine.overrides import apply_overrides
from raydfl.engine.storage import record
from raydfl.methods.harmony import Harmony, cluster_biases
from raydfl.runs import load_result
from raydfl.runs.folder import create
from raydfl.runs.inference import classify
from raydfl.runs.inference.model import load_model
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, start_server, train_federation

Tiny = Callable[..., Config]
MIRROR = ["train.rounds=3", "train.phases.multimodal.rounds=2", "evaluate.every=9"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("views"))


def select_audio(tensors: Mapping[str, bytes], model: str = "audio") -> dict[str, bytes]:
    prefix = f"server global {model}/"
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def make_fedavg_config(tiny: Tiny, folder: Path, *overrides: str, method: str = "fedavg") -> Config:
    """Return the configuration of a federation with only the audio network."""
    general = [override for override in overrides if not override.startswith("method.")]
    settings = federation(tiny, folder, "harmony", *general).model_dump(mode="json")
    settings["method"], settings["models"] = {"name": method}, {"model": settings["models"]["audio"]}
    if method == "fedavg":
        settings["data"]["views"], settings["data"]["missing"] = {}, {}
    settings["train"]["phases"] = {}
    return make_config(apply_overrides(settings, overrides))


@pytest.mark.parametrize("rule", ["uniform_mean", "weighted_mean"])
def test_harmonys_audio_network_equals_fedavg_over_all_clients(tiny: Tiny, folder: Path, rule: str) -> None:
    """Compare bit for bit, with and without clients lacking video."""
    same_for = ["train.rounds=2", "train.cohort=4", "train.optimiser.clip_norm=0.5", f"method.rule={rule}"]
    reference = select_audio(train_federation(make_fedavg_config(tiny, folder, *same_for)), "model")
    for share in (0.0, 0.5):
        config = federation(
            tiny,
            folder,
            "harmony",
            *same_for,
            f"data.missing={{video: {share}}}",
            "train.phases.unimodal.rounds=2",
            f"run.name=h{share}",
        )
        assert_same_bits(select_audio(train_federation(config)), reference)


def test_unifls_audio_network_equals_fedavg_over_the_clients_without_video(tiny: Tiny, folder: Path) -> None:
    """Compare bit for bit. If no client has video, FedAvg runs over all clients."""
    rounds = ["train.rounds=2", "train.cohort=2", "method.rule=uniform_mean"]
    lacking = [*rounds, "data.missing={video: 0.5}"]
    reference = select_audio(
        train_federation(make_fedavg_config(tiny, folder, *lacking, "method.views=[]", method=OF_KIND)), "model"
    )
    assert_same_bits(
        select_audio(train_federation(federation(tiny, folder, "unifl", *lacking, "run.name=u"))), reference
    )
    without_video = select_audio(train_federation(make_fedavg_config(tiny, folder, *rounds, "run.name=all")), "model")
    config = federation(tiny, folder, "unifl", *rounds, "data.missing={video: 1.0}", "run.name=n")
    assert_same_bits(select_audio(train_federation(config)), without_video)


def test_a_shared_cohort_of_unifl_equals_a_cohort_of_multifl(tiny: Tiny, folder: Path) -> None:
    """Compare the sampled clients. With all clients in every round, both kinds of cohort give the same bits."""
    lacking = ["data.missing={video: 0.5}", "train.rounds=2"]
    drawn: dict[str, list[set[str]]] = {}
    for name, method, option in (
        ("each", "unifl", "method.cohort=each"),
        ("shared", "unifl", "method.cohort=shared"),
        ("multifl", "multifl", "method.heads=alone"),
    ):
        server = start_server(federation(tiny, folder, method, *lacking, "train.cohort=2", option, f"run.name={name}"))
        drawn[name] = []
        for _ in range(2):
            drawn[name].append({order.task.client_id for order in server._federation.plan()})
            server._federation.round()
        server.close()
    assert drawn["shared"] == drawn["multifl"]
    assert [len(cohort) for cohort in drawn["each"]] == [4, 4]
    each, shared = (
        known(federation(tiny, folder, "unifl", *lacking, f"method.cohort={cohort}")) for cohort in ("each", "shared")
    )
    assert_same_bits(each, shared)


def test_clients_with_all_views_train_the_heads_with_heads_all(tiny: Tiny, tmp_path: Path) -> None:
    """Compare the joint loss with PyTorch's functions. A clip of the batch lacks the image."""
    bare = write(tmp_path / "bare", bare=(0,))
    server = start_server(federation(tiny, bare, "multifl", "method.heads=all"))
    inner = server._federation
    initial = {name: value.clone() for name, value in inner.state.tensors["global"].items()}
    step = inner.pool.workers[""].prepare(inner.plan()[0], inner.broadcast({"global"}))
    step.models = {name: network.eval() for name, network in step.models.items()}
    batch = step.data.train.batch(np.arange(4))
    present = batch.present["video"]
    assert 0 < int(present.sum()) < 4
    audio, video = step.models["audio"], step.models["video"]
    image = batch.views["video"]
    features = torch.cat([audio.embed(batch.x), video.embed(image) * present[:, None]], dim=1)
    expected = (
        F.cross_entropy(step.models["fusion"](features), batch.y)
        + F.cross_entropy(audio(batch.x), batch.y)
        + F.cross_entropy(video(image)[present], batch.y[present])
    )
    torch.testing.assert_close(inner.method.joint_loss(step, batch), expected)
    inner.round()
    assert all(not torch.equal(value, initial[name]) for name, value in inner.state.tensors["global"].items())
    server.close()


def test_heads_of_single_views_are_trained_by_clients_without_all_views(tiny: Tiny, folder: Path) -> None:
    """Without video at any client, both readings are equal. With video at all clients, ``alone`` freezes the heads."""
    alone, everyone = (
        known(federation(tiny, folder, "multifl", "data.missing={video: 1.0}", f"method.heads={heads}"))
        for heads in ("alone", "all")
    )
    assert_same_bits(alone, everyone)
    server = start_server(federation(tiny, folder, "multifl", "run.name=alone"))
    inner = server._federation
    initial = {name: value.clone() for name, value in inner.state.tensors["global"].items()}
    inner.round()
    kept = {name for name, value in inner.state.tensors["global"].items() if torch.equal(value, initial[name])}
    server.close()
    assert kept == {f"{view}/output.{kind}" for view in ("audio", "video") for kind in ("weight", "bias")}


def test_the_first_phase_equals_multifl_and_the_teacher_is_frozen(tiny: Tiny, folder: Path) -> None:
    lacking = [*MIRROR, "data.missing={video: 0.5}"]
    first = known(federation(tiny, folder, "multifl", *lacking[2:], "train.rounds=2"))
    mirror = known(federation(tiny, folder, "modality_mirror", *lacking))
    teacher = {n.removeprefix("server teacher "): v for n, v in mirror.items() if n.startswith("server teacher ")}
    assert_same_bits(
        teacher, {n.removeprefix("server global "): v for n, v in first.items() if n.startswith("server global ")}
    )
    assert {name.split()[-1].partition("/")[0] for name in mirror if name.startswith("server global ")} == {"audio"}
    assert differ(select_audio(mirror), select_audio(first))  # the student changes


def test_without_distillation_the_student_equals_fedavg_from_the_first_phase(tiny: Tiny, folder: Path) -> None:
    """Compare bit for bit over the clients with all views."""
    plain = ["train.rounds=3", "method.rule=uniform_mean", "evaluate.every=9"]
    config = federation(tiny, folder, "modality_mirror", *MIRROR, "data.missing={video: 0.5}", "method.kd_weight=0.0")
    server = start_server(config)
    for _ in range(2):
        server._federation.round()
    initial = server._federation.state
    server._federation.round()
    after = server._federation.state.tensors["global"]
    server.close()
    reference = start_server(
        make_fedavg_config(
            tiny, folder, *plain, "data.missing={video: 0.5}", "method.phase=distil", "run.name=r", method=OF_KIND
        )
    )
    inner = reference._federation
    tensors = {name.replace("audio/", "model/"): value.clone() for name, value in initial.tensors["global"].items()}
    state = dataclasses.replace(inner.state, round_index=2, tensors={"global": tensors})
    inner.checkpoint = inner.checkpoint.replace_state(state)
    inner.round()
    for name, value in after.items():
        assert torch.equal(inner.state.tensors["global"][name.replace("audio/", "model/")], value), name
    reference.close()


def test_the_divergence_follows_the_paper(tiny: Tiny, folder: Path) -> None:
    """Compare with PyTorch's own functions, with the student as first argument, on logits of each network."""
    server = start_server(federation(tiny, folder, "modality_mirror", *MIRROR))
    inner = server._federation
    for _ in range(2):
        inner.round()
    order = inner.plan()[0]
    worker = inner.pool.workers[""]
    for setting, first_is_student in (("standard", False), ("literal", True)):
        step = worker.prepare(order, inner.broadcast({"global", "teacher"}))
        step.models = {name: network.eval() for name, network in step.models.items()}
        batch = step.data.train.batch(np.arange(4))
        distil = dataclasses.replace(inner.method, kd_weight=3.0, temperature=4.0, divergence=setting)
        loss = distil.distil(step, batch)
        student = step.models["audio"](batch.x)
        features = torch.cat(
            [step.models["audio"].embed(batch.x), step.models["video"].embed(batch.views["video"])], dim=1
        )
        teacher = step.models["fusion"](features)  # Before its first step the student has the teacher's encoders.
        a, b = (
            F.log_softmax(logits / 4.0, dim=1)
            for logits in ((student, teacher) if first_is_student else (teacher, student))
        )
        divergence = F.kl_div(b, a, reduction="batchmean", log_target=True)
        torch.testing.assert_close(loss, F.cross_entropy(student, batch.y) + 3.0 * 16.0 * divergence)
        loss.backward()
        assert all(p.grad is None for name in ("video", "fusion") for p in step.models[name].parameters())
    server.close()


def test_the_teacher_is_sent_once_to_each_client(tiny: Tiny, folder: Path) -> None:
    """Compare with the bytes of the tensors, also after resuming in the second phase."""
    config = federation(tiny, folder, "modality_mirror", *MIRROR, "train.rounds=5", "data.missing={video: 0.5}")
    down = []
    for rounds in (3, 5):
        server = start_server(config)
        while server.round_index < rounds:
            report = server._federation.round()
            down.append(report.bytes_down)
        state = server._federation.state
        server._federation.finish(report)
        server.close()
    student, teacher = (4 * sum(t.numel() for t in state.tensors[key].values()) for key in ("global", "teacher"))
    assert down[2:] == [3 * (student + teacher), 3 * student, 3 * student]


def test_a_round_without_one_kind_of_client_keeps_its_networks(tiny: Tiny, folder: Path) -> None:
    config = federation(tiny, folder, "multifl", "train.rounds=1", "data.missing={video: 1.0}")
    server = start_server(config)
    before = {name: value.clone() for name, value in server._federation.state.tensors["global"].items()}
    server.close()
    train_federation(config)
    server = start_server(config)
    for name, value in server._federation.state.tensors["global"].items():
        assert torch.equal(value, before[name]) is not name.startswith("audio/")
    server.close()
    rows = record.read_rows(Path(config.run.dir) / "tiny").to_pylist()
    assert {row["metric"]: row["value"] for row in rows if row["metric"].startswith("clients/")} == {
        "clients/fused": 0.0,
        "clients/apart": 6.0,
    }


def test_harmony_counts_trained_networks_and_groups_only(tiny: Tiny, folder: Path) -> None:
    """Its second phase adds each update to the classifier of the group and to the common classifier."""
    config = federation(tiny, folder, "harmony", "train.rounds=2", "train.phases={unimodal: {rounds: 1}}")
    train_federation(config)
    rows = record.read_rows(Path(config.run.dir) / "tiny").to_pylist()
    counts = {(row["round"], row["metric"]): row["value"] for row in rows if row["metric"].startswith("clients/")}
    assert counts == {(1, "clients/trained"): 6.0}


@pytest.mark.parametrize("leaves_none", ["data.missing={video: 1.0}", "{ids: [LACKING]}"])
def test_a_second_phase_without_clients_with_all_views_is_rejected_before_the_first_round(
    leaves_none: str, tiny: Tiny, folder: Path
) -> None:
    """Check a population and a cohort where every client lacks a view."""
    settings = [leaves_none]
    if "ids" in leaves_none:
        config = federation(tiny, folder, "multifl", "data.missing={video: 0.5}", "run.name=some")
        clients = Clients(Population.load(create(config, Progress("quiet")) / "population"), config)
        lacking = next(client.id for client in clients if not client.profile["views"])
        settings = ["data.missing={video: 0.5}", "train.cohort=1.0", f"train.clients={{ids: [{lacking}]}}"]
    with pytest.raises(ConfigError, match="no client has all views"):
        start_server(federation(tiny, folder, "modality_mirror", *MIRROR, *settings))


def test_the_fusion_predicts_clips_with_both_views_and_the_student_the_rest(
    tiny: Tiny, folder: Path, tmp_path: Path
) -> None:
    """Compare with the engine's evaluation of the fusion on test clips with both views, and with the student's predictions."""
    train_federation(federation(tiny, folder, "modality_mirror", *MIRROR, "run.name=used", "evaluate.every=1"))
    run_dir = Path(tiny().run.dir) / "used"
    for number in range(TESTS):
        (tmp_path / f"{number}.png").symlink_to(folder / f"video{number}.png")
    tests = [folder / f"{number}.wav" for number in range(TESTS)]
    predictions = classify(run_dir, [*tests, folder / f"{TESTS}.wav"], model="fusion", views={"video": tmp_path})
    assert [prediction.model for prediction in predictions] == ["teacher:fusion"] * TESTS + ["audio"]
    np.testing.assert_array_equal(
        predictions[-1].probabilities, classify(run_dir, [folder / f"{TESTS}.wav"])[0].probabilities
    )
    rows = {
        (row.round, row.metric): row.value for row in record.to_rows(record.read_rows(run_dir)) if row.split == "test"
    }
    accuracy = np.mean([prediction.label == "ab"[number % 2] for number, prediction in enumerate(predictions[:TESTS])])
    assert accuracy == pytest.approx(rows[2, "fusion/accuracy"])
    loss = -np.mean(
        [np.log(prediction.probabilities[number % 2]) for number, prediction in enumerate(predictions[:TESTS])]
    )
    assert loss == pytest.approx(rows[2, "fusion/loss"], rel=1e-5)
    sounds = [read_audio(folder / f"{number}.wav")[0] for number in range(TESTS + 1)]
    rate = read_audio(folder / "0.wav")[1]
    images = [np.asarray(Image.open(folder / f"video{number}.png")) for number in range(TESTS)]
    arrays = load_result(run_dir).predict(sounds, rate, model="fusion", views={"video": [*images, None]})
    for from_array, from_file in zip(arrays, predictions, strict=True):
        assert from_array.model == from_file.model
        np.testing.assert_array_equal(from_array.probabilities, from_file.probabilities)
    with pytest.raises(InputError, match=f"view 'video': {TESTS} arrays for {TESTS + 1} recordings"):
        load_result(run_dir).predict(sounds, rate, model="fusion", views={"video": images})
    from_array_alone = load_result(run_dir).predict(images[0], model="teacher:video")
    (file,) = classify(run_dir, [folder / "video0.png"], model="teacher:video")
    np.testing.assert_array_equal(from_array_alone.probabilities, file.probabilities)
    assert load_model(run_dir).name == "audio"
    assert load_model(run_dir, "teacher:video").spec.view == "video"
    with pytest.raises(
        InputError, match="model 'fusion' reads the outputs of other models.* choose one of audio, video"
    ):
        load_model(run_dir, "fusion")
    with pytest.raises(InputError, match="reads no view 'depth'; it reads video"):
        classify(run_dir, tests, model="fusion", views={"depth": tmp_path})
    with pytest.raises(InputError, match="needs a model of several views"):
        classify(run_dir, tests, views={"video": tmp_path})


def test_clients_with_similar_bias_are_grouped() -> None:
    """Group clients by the moved view, audio or video. Each view is scaled by its own maximum."""
    biases = np.array([[1e-6, 0.9], [9e-6, 0.1], [1.2e-6, 1.0], [8e-6, 0.05]])
    assert cluster_biases(biases, 2, 0) == [0, 1, 0, 1]
    assert cluster_biases(biases, 1, 0) == [0] * 4
    assert cluster_biases(np.zeros((3, 2)), 2, 0) == [0] * 3
    # A missing or non-scalar bias counts as 0.
    tensors_of_clients: list[dict[str, torch.Tensor]] = [{"bias/a": torch.tensor(0.5)}, {}, {"bias/a": torch.zeros(3)}]
    updates = [Update(tensors, 1.0) for tensors in tensors_of_clients]
    assert Harmony(groups=2)._cluster(updates, np.random.default_rng(0)) == [0, 1, 1]
    assert Harmony(groups=2)._cluster(updates[1:2] * 3, np.random.default_rng(0)) == [0] * 3


def test_each_group_of_harmony_has_a_classifier_and_encoders_are_frozen(tiny: Tiny, folder: Path) -> None:
    """The classifier of a single group is the mean over all clients, equal to the global classifier."""
    settings = [
        "train.rounds=3",
        "train.phases.unimodal.rounds=1",
        "train.phases.fusion.optimiser.models={audio: 0.05, video: 0.05, fusion: 0.1}",
    ]
    one = train_federation(federation(tiny, folder, "harmony", *settings, "method.groups=1", "run.name=one"))
    fusion = {n.removeprefix("server group1 "): v for n, v in one.items() if n.startswith("server group1 ")}
    assert_same_bits(
        fusion, {n.removeprefix("server global "): v for n, v in one.items() if n.startswith("server global fusion/")}
    )
    two = train_federation(federation(tiny, folder, "harmony", *settings, "run.name=two"))
    groups = {name.split()[1] for name in two if name.startswith("server group")}
    assert len(groups) >= 2
    audio = select_audio(
        train_federation(
            federation(tiny, folder, "harmony", "train.rounds=1", "train.phases.unimodal.rounds=1", "run.name=u")
        )
    )
    assert_same_bits(select_audio(two), audio)
    assert any("encoder/audio/" in name for name in two if name.startswith("client "))
