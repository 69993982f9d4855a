"""Pretrained encoders in a federation: trained tensors, sent tensors, and cached outputs of frozen layers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from encoders import LAYERS, WIDTH, needs_transformers, write_encoder
from helpers import finish_in

from raydfl import classify, export_model, read_rows
from raydfl.core.errors import ConfigError, RunDirectoryError
from raydfl.core.types import ModelSpec
from raydfl.engine.config import Config
from raydfl.engine.storage.folder import final_state
from raydfl.engine.storage.private import PrivateStore
from raydfl.engine.worker import Worker
from raydfl.models import build_model
from raydfl.runs._run import resume
from raydfl.runs.folder import create, export
from raydfl.runs.progress import Progress

pytestmark = needs_transformers
Tiny = Callable[..., Config]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("encoders")
    return lambda kind: base / kind if (base / kind).exists() else write_encoder(base / kind, kind)


def configure(tiny: Tiny, folder: Path, after: int | None, *overrides: str, **features: Any) -> Config:
    """Configure a tiny run with an encoder, with the same ``after`` for features and network."""
    after_text = "null" if after is None else after
    options = "".join(f", {name}: {value}" for name, value in features.items())
    return tiny(
        f"data.features={{kind: pretrained, folder: {folder}, after: {after_text}{options}}}",
        f"models.model={{name: pretrained, folder: {folder}, after: {after_text}}}",
        "train.rounds=1",
        "data.speakers=3",
        "train.cohort=1.0",
        *overrides,
    )


def train_run(config: Config, name: str) -> dict[str, torch.Tensor]:
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    folder = create(config, Progress("quiet"))
    finish_in(folder, config)
    return dict(final_state(folder).tensors["global"])


@pytest.mark.parametrize(
    ("kind", "train", "after"),
    [
        ("hubert", "1", LAYERS - 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("wav2vec2-masked", "head", LAYERS), ("ast", "head", 1), ("whisper", "2", 0))
        ),
    ],
)
def test_caching_the_output_of_frozen_layers_does_not_change_the_run(
    tiny: Tiny, folders: Any, kind: str, train: str, after: int
) -> None:
    """Results agree to a tolerance, because cached clips are computed individually instead of in a batch."""
    folder, train_option = folders(kind), f"models.model.train={train}"
    length = {} if kind == "wav2vec2-masked" else {"seconds": 0.2}
    whole = train_run(configure(tiny, folder, None, train_option, **length), "whole")
    rest = train_run(configure(tiny, folder, after, train_option, **length), "rest")
    assert whole.keys() == rest.keys()
    assert all(name.startswith(("model/output", "model/encoder.layers", "model/encoder.norm")) for name in whole)
    layers = {int(name.split(".")[2]) for name in whole if ".layers." in name}
    assert layers == (set() if train == "head" else set(range(LAYERS - int(train), LAYERS)))
    first = build_model(ModelSpec("model", "pretrained", WIDTH, 3, (("after", after), ("folder", str(folder)))))
    assert not torch.equal(whole["model/output.weight"], first.state_dict()["output.weight"])
    for name, value in whole.items():
        torch.testing.assert_close(rest[name], value, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_a_head_on_pooled_tokens_equals_logistic_regression(tiny: Tiny, folders: Any) -> None:
    folder = folders("whisper")
    features = {"pooling": "own"}
    config = configure(tiny, folder, LAYERS, **features)
    pooled = train_run(config, "pooled")
    plain = train_run(
        tiny(
            f"data.features={config.data.features.model_dump_json()}",
            "models.model=linear",
            "train.rounds=1",
            "data.speakers=3",
            "train.cohort=1.0",
        ),
        "plain",
    )
    assert all(torch.equal(pooled[name], plain[name]) for name in plain), "the same draws and the same steps"


def test_frozen_tensors_are_not_sent(tiny: Tiny, folders: Any) -> None:
    run = create(config := configure(tiny, folders("hubert"), None, "models.model.hidden=4"), Progress("quiet"))
    finish_in(run, config)
    head = WIDTH * 4 + 4 + 4 * 3 + 3
    bytes_up = [row["value"] for row in read_rows(run).to_pylist() if row["metric"] == "bytes_up"]
    assert bytes_up == [3 * head * 4]


@pytest.mark.slow
@pytest.mark.parametrize("option", ["models.model.hidden=4", "models.model.lora={rank: 4}"])
def test_predict_and_export_include_frozen_tensors(tiny: Tiny, folders: Any, tmp_path: Path, option: str) -> None:
    if "lora" in option:
        pytest.importorskip("peft")
    folder = folders("hubert")
    config = configure(tiny, folder, None, option, seconds=0.25)
    run = create(config, Progress("quiet"))
    finish_in(run, config)
    export(run, config)
    wave = (0.3 * np.sin(np.arange(4_000) * 2 * np.pi * 300 / 16_000)).astype(np.float32)
    soundfile.write(tmp_path / "clip.wav", wave, 16_000)
    (prediction,) = classify(run, [tmp_path / "clip.wav"])
    pytest.importorskip("onnxruntime")
    import onnxruntime

    exported = export_model(run)
    assert exported.difference < 1e-4
    inputs = {"x": extract_input(folder, wave)[None]}
    _, probabilities = onnxruntime.InferenceSession(str(exported.path)).run(None, inputs)
    np.testing.assert_allclose(probabilities[0], prediction.probabilities, atol=1e-5)


def extract_input(folder: Path, wave: np.ndarray) -> np.ndarray:
    import transformers as hf

    features = hf.Wav2Vec2FeatureExtractor.from_pretrained(folder)(wave, sampling_rate=16_000)
    return np.asarray(features["input_values"][0], np.float32)[:, None]


@pytest.mark.parametrize("method", ["fedprox", "fedper", "ditto"])
def test_methods_train_only_unfrozen_tensors(tiny: Tiny, folders: Any, method: str) -> None:
    """Only the last layer, its norm and the head are shared. With FedPer the head is private."""
    tensors = train_run(
        configure(tiny, folders("whisper"), LAYERS - 1, "models.model.train=1", f"method={method}"), method
    )
    parts = {name.split("/")[1].split(".")[0] for name in tensors}
    assert parts == ({"encoder"} if method == "fedper" else {"encoder", "output"})
    assert {".".join(name.split(".")[:3]) for name in tensors if ".layers." in name} == {
        f"model/encoder.layers.{LAYERS - 1}"
    }


def test_batched_clients_equal_unbatched_clients(tiny: Tiny, folders: Any) -> None:
    """Networks from the same folder can be batched, although each has its own transformers settings."""
    unbatched = train_run(configure(tiny, folders("ast"), None, "models.model.train=all"), "alone")
    config = configure(tiny, folders("ast"), None, "models.model.train=all", "train.together=3", "run.name=together")
    run = create(config, Progress("quiet"))
    finish_in(run, config)
    assert [row["value"] for row in read_rows(run).to_pylist() if row["metric"] == "vectorised"] == [1.0]
    for name, value in final_state(run).tensors["global"].items():
        torch.testing.assert_close(unbatched[name], value, atol=1e-6, rtol=1e-4)


def test_a_changed_encoder_is_rejected_by_workers_and_on_resume(tiny: Tiny, folders: Any, tmp_path: Path) -> None:
    import pickle

    folder = shutil.copytree(folders("hubert"), tmp_path / "encoder")
    config = configure(tiny, folder, LAYERS, pooling="mean")
    run = create(config, Progress("quiet"))
    finish_in(run, config)
    assert config.files().keys() == {"models.model.folder", "data.features.folder"}
    digest, content = config.digest(), pickle.dumps(config)
    Worker(run, pickle.loads(content), PrivateStore(run / "private"))
    write_encoder(folder, "hubert", seed=1)
    assert config.digest() != digest
    with pytest.raises(
        ConfigError, match=re.escape(f"models.model.folder: {folder} on ") + ".*differs from the starting"
    ):
        Worker(run, pickle.loads(content), PrivateStore(run / "private"))
    with pytest.raises(RunDirectoryError, match=r"models\.model\.folder"):
        resume(run)
    with pytest.raises(ConfigError, match=r"data\.features\.folder: .* differs from the folder at the start"):
        config.data.features.check_content("another")
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=r" on \S+ is missing\. Provide the same content"):
        Worker(run, pickle.loads(content), PrivateStore(run / "private"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["models.model.train=9"],
            "models.model: train: 9, but the encoder in .* has only 3 layers. Set train to at most 3",
        ),
        (
            ["models.model.after=2", "data.features.after=2", "models.model.train=2"],
            "has only 1 layers after the features",
        ),
        (["models.model.after=2", "data.features.after=2", "models.model.train=all"], "train: all, but"),
        (
            ["models.model.after=7", "data.features.after=7"],
            r"data\.features\.after: 7, but the encoder .* has 3 layers",
        ),
        (["models.model.after=2"], r"models\.model\.after is 2, but the features are computed after layer None"),
        (["data.features.sample_rate=8000"], r"data\.features\.sample_rate is 8000, but the encoder .* needs 16000"),
        (["data.features.bands=40"], r"data\.features\.bands is 40, .* needs 1. Omit it"),
        (["data.features.pooling=mean"], r"data\.features\.pooling is 'mean', which needs the tokens after all layers"),
        (
            ["data.features={kind: logmel}"],
            "but the features are of the kind logmel. Set data.features='{kind: pretrained",
        ),
        (["models.model={name: pretrained}"], "pretrained needs a folder"),
        (["models.model.pooling=median"], "models.model: pretrained.pooling"),
        (["data.features.folder=nowhere"], r"data\.features\.folder: there is no folder .*nowhere"),
        (["models.model.folder=nowhere"], r"models\.model\.folder is .*nowhere, but the features are computed from"),
    ],
)
def test_options_that_do_not_fit_the_encoder_are_rejected(
    tiny: Tiny, folders: Any, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(tiny, folders("hubert"), None, *overrides)
