"""Each client reads the channel of its own microphone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from raydfl.core.errors import InputError
from raydfl.data.build import build_population
from raydfl.data.population import Population
from raydfl.data.settings import DataSettings

CHANNELS = {"values": [0, 1]}


@pytest.fixture
def stereo(tmp_path: Path) -> dict[str, Any]:
    """Return settings of 16 stereo recordings by 2 speakers."""
    rng = np.random.default_rng(0)
    lines = ["path,label,group"]
    for speaker in ("ann", "bob"):
        for number in range(8):
            name = f"{speaker}{number}.wav"
            soundfile.write(tmp_path / name, rng.normal(scale=0.1, size=(1600, 2)), 8000)
            lines.append(f"{name},{'ab'[number % 2]},{speaker}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    return {
        "name": "manifest",
        "file": str(tmp_path / "list.csv"),
        "cache": str(tmp_path / "cache"),
        "features": {"sample_rate": 8000, "bands": 8},
        "split": {"test": {"by": "clip", "fraction": 0.25}, "client_test": {"fraction": 0.25}},
    }


def build(settings: dict[str, Any], **options: Any) -> Population:
    return build_population(DataSettings.model_validate({**settings, **options}), 1)


def load_inputs(population: Population, client: int, part: str) -> np.ndarray:
    examples = getattr(population.data(client), part)
    return examples.batch(np.arange(len(examples))).x.numpy()


@pytest.mark.parametrize("noise", [None, {"snr_db": 10.0}])
def test_clients_use_their_own_channel_and_the_server_uses_the_common_one(
    stereo: dict[str, Any], noise: dict[str, float] | None
) -> None:
    stereo |= {"corrupt": {"noise": noise}}
    mixed = build(stereo, profile={"microphone": CHANNELS}, device="microphone")
    for client, channel in enumerate([0, 1]):
        features = {**stereo["features"], "channel": channel}
        single = build(stereo, features=features)
        for part in ("train", "test"):
            np.testing.assert_array_equal(load_inputs(mixed, client, part), load_inputs(single, client, part))
    first = build(stereo)
    examples = mixed.first_examples(100)
    assert examples is not None
    if noise is None:  # the first client reads the common channel
        np.testing.assert_array_equal(
            examples.batch(np.arange(len(examples))).x.numpy(), load_inputs(mixed, 0, "train")
        )
    np.testing.assert_array_equal(
        *(source.test.batch(np.arange(len(source.test))).x.numpy() for source in (mixed, first))
    )
    assert not np.array_equal(load_inputs(mixed, 1, "train"), load_inputs(first, 1, "train"))


def test_a_clip_without_the_channel_of_its_client_can_be_skipped(stereo: dict[str, Any], tmp_path: Path) -> None:
    """Oracle: the list without the clip."""
    stereo |= {"profile": {"microphone": CHANNELS}, "device": "microphone", "unreadable": "skip"}
    clips = build(stereo).data(1).train.clips
    lines = (tmp_path / "list.csv").read_text().split()
    name = lines[1 + int(clips[0])].partition(",")[0]
    soundfile.write(tmp_path / name, np.random.default_rng(1).normal(scale=0.1, size=1600), 8000)
    partial = build(stereo)
    assert [clip for clip, _ in partial.skipped] == [name]
    assert f"1 of 16 clips cannot be read and are left out, the first {name}" in partial.messages
    (tmp_path / "list.csv").write_text("\n".join(line for line in lines if not line.startswith(name)))
    expected = build(stereo)
    for client in range(2):
        for part in ("train", "test"):
            np.testing.assert_array_equal(load_inputs(partial, client, part), load_inputs(expected, client, part))
    (tmp_path / "list.csv").write_text("\n".join(lines))
    with pytest.raises(InputError, match="data.device: channel 1 of 'microphone': 1 of 6 clips cannot be read"):
        build({**stereo, "unreadable": "stop"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "phone"}, "'phone' is not in data.profile. Did you mean 'microphone'"),
        ({"features": {"kind": "image", "size": [8, 8]}}, "needs recordings, but data.features.kind is image"),
        ({"features": {"sample_rate": 8000, "normalise": "client"}}, "would mix channels"),
        ({"profile": {"microphone": {"values": [0, "left"]}}}, "is 'left' for client 'bob'. Write the number"),
        ({"profile": {"microphone": {"values": [0, 5]}}}, "channel 5 of 'microphone': 6 of 6 clips cannot be read"),
    ],
)
def test_impossible_devices_are_rejected(stereo: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^data.device: (.*|){message}"):
        build({**stereo, "profile": {"microphone": CHANNELS}, "device": "microphone", **options})
