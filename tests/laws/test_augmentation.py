"""The laws of runs with transforms: every process and every batched training computes the same augmented examples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import differ, final_state, known

from raydfl.core.errors import ConfigError, DataError
from raydfl.engine.config import Config
from raydfl.engine.storage import record
from raydfl.runs.folder import create
from raydfl.runs.progress import Progress
from raydfl.testing import assert_same_bits, start_server, train_federation

Tiny = Callable[..., Config]

EVERYTHING: list[dict[str, Any]] = [
    {"name": "random_crop", "size": 16},
    {"name": "reverberation", "seconds": [0.05, 0.2], "share": 0.5},
    {"name": "noise", "snr_db": [0, 20]},
    {"name": "spec_augment", "frames": 4, "bands": 3},
    {"name": "shift", "frames": 2},
    {"name": "cutout", "size": 2},
]
ON = f"data.transforms={json.dumps(EVERYTHING)}"
DIFFERING = "data.features.seconds=null"
"""Clips keep their lengths, so networks receive the lengths."""


@pytest.mark.parametrize("length", ["data.features.seconds=0.25", DIFFERING])
def test_batched_training_equals_unbatched_training_with_transforms(tiny: Tiny, length: str) -> None:
    models = {}
    for together in (1, 3):
        config = tiny(
            f"train.together={together}", f"run.name=w{together}", "train.cohort=4", "train.local_epochs=2", ON, length
        )
        train_federation(config)
        models[together] = final_state(Path(config.run.dir) / f"w{together}").tensors["global"]
        rows = record.read_rows(Path(config.run.dir) / f"w{together}").to_pylist()
        assert [row["value"] for row in rows if row["metric"] == "vectorised"] == ([] if together == 1 else [1.0] * 3)
    for name, tensor in models[1].items():
        torch.testing.assert_close(models[3][name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_a_resumed_run_with_transforms_has_the_same_bits(tiny: Tiny) -> None:
    reference = known(tiny(ON))
    config = tiny("run.name=stopped", ON)
    server = start_server(config)
    server.round()
    server.close()
    assert_same_bits(reference, train_federation(config))


@pytest.mark.usefixtures("ray_session")
def test_actors_with_transforms_give_the_same_bits(tiny: Tiny) -> None:
    reference = known(tiny(ON))
    for actors in (1, 2):
        assert_same_bits(reference, train_federation(tiny(f"run.name=actors{actors}", f"ray.actors={actors}", ON)))


NEUTRAL: dict[str, dict[str, Any]] = {
    "random_crop": {"size": 26},
    "noise": {"share": 0},
    "reverberation": {"share": 0},
    "spec_augment": {"frame_masks": 0, "band_masks": 0},
    "shift": {"frames": 0},
}
"""Options that disable a transform. Noise and reverberation compute on power, where rounding differs."""


@pytest.mark.parametrize("name", ["random_crop", "spec_augment", "shift", "cutout", "noise", "reverberation", "gain"])
def test_each_transform_changes_the_model_unless_it_is_neutral(tiny: Tiny, name: str) -> None:
    options = next((transform for transform in EVERYTHING if transform["name"] == name), {"name": name})
    plain = ["data.features.normalise=none"] if name == "gain" else []
    short = ["train.rounds=1", "train.optimiser.lr=0.01", *plain]
    reference = known(tiny(*short))
    assert differ(reference, train_federation(tiny("run.name=on", *short, f"data.transforms={json.dumps([options])}")))
    if name not in NEUTRAL:
        return
    neutral = json.dumps([{"name": name, **NEUTRAL[name]}])
    result = train_federation(tiny("run.name=neutral", *short, f"data.transforms={neutral}"))
    if name in ("noise", "reverberation"):
        for key in (key for key in reference if key.startswith("server")):
            models = [np.frombuffer(run[key], np.float32) for run in (reference, result)]
            np.testing.assert_allclose(*models, rtol=1e-3, atol=1e-4)
    else:
        assert_same_bits(reference, result)


def test_the_digest_covers_transforms_and_their_defaults(tiny: Tiny) -> None:
    plain = tiny().digest()
    assert tiny("data.transforms=[]").digest() == plain
    digest = tiny("data.transforms=[spec_augment]").digest()
    assert digest != plain
    assert tiny("data.transforms=[{name: spec_augment, frames: 20}]").digest() == digest
    assert tiny("data.transforms=[{name: spec_augment, frames: 19}]").digest() != digest


def test_predictions_equal_the_evaluation_of_the_run(tiny: Tiny) -> None:
    """Predict a clip as the run evaluates it, with late normalisation and a crop."""
    import soundfile
    from tones import RATE, Tones

    from raydfl import classify
    from raydfl.data.population import Population
    from raydfl.runs.inference.model import load_model

    for name, crop in (("centre", {}), ("segments", {"test": "segments", "stride": 5})):
        transforms = [{"name": "random_crop", "size": 16, **crop}, {"name": "noise"}]
        config = tiny("train.rounds=1", f"run.name={name}", f"data.transforms={json.dumps(transforms)}")
        train_federation(config)
        run_dir = Path(config.run.dir) / name
        population = Population.load(run_dir / "population").use(config.data)
        test = population.test
        assert len(test) == (1 if not crop else 3) * len(set(test.clips.tolist()))
        row = Tones().manifest().slice(int(test.clips[0]), 1).to_pylist()[0]
        soundfile.write(run_dir / "clip.wav", Tones().read(row)[0], RATE, subtype="FLOAT")
        batch = test.batch(next(iter([(test.clips == test.clips[0]).nonzero()[0]])))
        assert batch.x.shape[1:] == (16, 16)
        expected = load_model(run_dir).logits(batch.x, batch.lengths).double().softmax(dim=1).mean(dim=0)
        (prediction,) = classify(run_dir, [run_dir / "clip.wav"])
        torch.testing.assert_close(torch.from_numpy(prediction.probabilities), expected, rtol=1e-3, atol=1e-4)


def test_invalid_transforms_are_rejected_before_the_first_round(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.transforms\.0: noise\.snr_db"):
        tiny("data.transforms=[{name: noise, snr_db: loud}]")
    with pytest.raises(ConfigError, match="write a list of transforms"):
        tiny("data.transforms=noise")
    with pytest.raises(ConfigError, match="both cut clips"):
        tiny("data.transforms=[{name: random_crop, size: 5}]", "data.segment={frames: 5, stride: 5}", DIFFERING)
    longer = tiny("data.transforms=[{name: random_crop, size: 50}]", DIFFERING)
    with pytest.raises(ConfigError, match="at least 50 frames, but the longest has 26"):
        create(longer, Progress("quiet"))
    rooms = tiny(f"data.transforms=[{{name: reverberation, folder: {tmp_path / 'rooms'}}}]")
    with pytest.raises(DataError, match="there is no folder"):
        create(rooms, Progress("quiet"))
