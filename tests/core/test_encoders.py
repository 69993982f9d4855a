"""Encoders from a folder. Oracle: the classes of transformers. Unusable folders are rejected."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoders import KINDS, LAYERS, WIDTH, needs_transformers, reference, write_encoder
from safetensors.torch import load_file, save_file

from raydfl.core.errors import ConfigError
from raydfl.core.pretrained import Encoder, EncoderFrontEnd, encoder_digest, pool_tokens, read_encoder_folder

pytestmark = needs_transformers
RATE = 16_000


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write_encoder(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def make_wave(samples: int, seed: int = 0) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


def encode_with_transformers(folder: Path, waves: list[np.ndarray], **options: Any) -> Any:
    """Encode a batch of waves with transformers and return the tokens."""
    encoder_folder, network = read_encoder_folder(folder), reference(folder)
    inputs = encoder_folder.extractor(waves, sampling_rate=RATE, return_tensors="pt", **options)
    with torch.no_grad():
        return network(**inputs).last_hidden_state


def encode(folder: Path, x: torch.Tensor, lengths: torch.Tensor | None = None, after: int | None = None) -> Any:
    with torch.no_grad():
        return Encoder(read_encoder_folder(folder), after, LAYERS).eval()(x, lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_encoders_match_transformers_and_can_be_split_after_any_layer(folders: dict[str, Path], kind: str) -> None:
    folder = read_encoder_folder(folders[kind])
    assert (folder.layers, folder.width, folder.sample_rate) == (LAYERS, WIDTH, RATE)
    clip = make_wave(6_000)
    expected = encode_with_transformers(folder.path, [clip])
    x = torch.from_numpy(EncoderFrontEnd(folder, None)(clip)).unsqueeze(0)
    assert x.shape[2] == folder.bands
    tokens, count = encode(folder.path, x)
    assert count is None
    torch.testing.assert_close(tokens, expected, atol=2e-6, rtol=1e-5)
    for after in range(LAYERS + 1):
        with torch.no_grad():
            hidden, _ = Encoder(folder, None, after).eval()(x)
        rest, _ = encode(folder.path, hidden, after=after)
        assert torch.equal(rest, tokens), after  # bit-identical: the same operations on the same shapes


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_do_not_depend_on_longer_clips_in_the_batch(folders: dict[str, Path], kind: str) -> None:
    folder = read_encoder_folder(folders[kind])
    features = [EncoderFrontEnd(folder, None)(make_wave(size, size)) for size in (6_000, 2_500, 4_111)]
    lengths = torch.tensor([len(matrix) for matrix in features])
    x = torch.zeros(3, int(lengths.max()), folder.bands)
    for row, matrix in zip(x, features, strict=True):
        row[: len(matrix)] = torch.from_numpy(matrix)
    tokens, count = encode(folder.path, x, lengths)
    for number, matrix in enumerate(features):
        unbatched, _ = encode(folder.path, torch.from_numpy(matrix).unsqueeze(0))
        assert count is None or int(count[number]) == unbatched.shape[1]
        torch.testing.assert_close(tokens[number, : unbatched.shape[1]], unbatched[0], atol=1e-5, rtol=1e-5)
    if kind == "wav2vec2-masked":  # the only kind with lengths in transformers
        expected = encode_with_transformers(
            folder.path, [make_wave(size, size) for size in (6_000, 2_500, 4_111)], padding=True
        )
        assert count is not None
        for number, size in enumerate(count.tolist()):
            torch.testing.assert_close(tokens[number, :size], expected[number, :size], atol=1e-5, rtol=1e-5)


def test_short_clips_are_padded_like_the_extractor_of_the_folder(folders: dict[str, Path]) -> None:
    clip = make_wave(2_500)
    for kind in ("wav2vec2", "hubert"):
        folder = read_encoder_folder(folders[kind])
        features = EncoderFrontEnd(folder, 4_000)(clip)
        expected = folder.extractor(clip, sampling_rate=RATE, padding="max_length", max_length=4_000)["input_values"][0]
        np.testing.assert_array_equal(features[:, 0], expected)
    masked = read_encoder_folder(folders["wav2vec2-masked"])
    assert len(EncoderFrontEnd(masked, 4_000)(clip)) == 2_500
    assert len(EncoderFrontEnd(masked, 2_000)(clip)) == 2_000
    whisper = read_encoder_folder(folders["whisper"])
    silence = EncoderFrontEnd(whisper, None)(np.zeros(800, np.float32))
    expected = encode_with_transformers(whisper.path, [np.zeros(800, np.float32)])
    torch.testing.assert_close(encode(whisper.path, torch.from_numpy(silence)[None])[0], expected, atol=2e-6, rtol=1e-5)


def test_pooling_matches_the_classifiers_of_transformers(folders: dict[str, Path]) -> None:
    clip = make_wave(6_000)
    tokens = encode_with_transformers(folders["ast"], [clip])
    network = reference(folders["ast"])
    inputs = read_encoder_folder(folders["ast"]).extractor([clip], sampling_rate=RATE, return_tensors="pt")
    with torch.no_grad():
        expected = network(**inputs).pooler_output
    torch.testing.assert_close(pool_tokens(tokens, None, "own", "audio-spectrogram-transformer"), expected)
    torch.testing.assert_close(pool_tokens(tokens, None, "mean", "audio-spectrogram-transformer"), tokens.mean(dim=1))
    count = torch.tensor([5])
    torch.testing.assert_close(pool_tokens(tokens, count, "own", "whisper"), tokens[:, :5].mean(dim=1))


def test_the_digest_depends_on_weights_and_settings_only(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "a", "hubert")
    first = encoder_digest(folder)
    (folder / "README.md").write_text("about")
    assert encoder_digest(folder) == first
    assert encoder_digest(write_encoder(tmp_path / "b", "hubert", seed=1)) != first
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "layer_norm_eps": 1e-3}))
    assert encoder_digest(folder) != first


def _remove_file(name: str) -> Any:
    def change(folder: Path) -> None:
        (folder / name).unlink()

    return change


def _change_settings(name: str, **values: Any) -> Any:
    def change(folder: Path) -> None:
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, **values}))

    return change


def _rename_to_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _truncate_weights(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def _change_weights(change: Any) -> Any:
    def change_file(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return change_file


def _move_weights(name: str) -> Any:
    """Move the weights into a file named by an index, as a pickle if the suffix is ``.bin``."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        if name.endswith(".bin"):
            torch.save(tensors, folder / name)
        else:
            save_file(tensors, folder / name, {"format": "pt"})
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def _replace_by_pipe(name: str) -> Any:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


_NORM = "encoder.layers.1.layer_norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_remove_file("config.json"), "config.json cannot be read (No such file"),
        (
            lambda folder: (folder / "config.json").write_text("{"),
            "config.json cannot be read (Expecting property name",
        ),
        (
            lambda folder: (folder / "config.json").write_text("[" * 10**5),
            "config.json cannot be read (it is nested too deep",
        ),
        (_replace_by_pipe("config.json"), "config.json cannot be read (it is a pipe"),
        (
            _replace_by_pipe("preprocessor_config.json"),
            "preprocessor_config.json cannot be read (it is a pipe",
        ),
        (_replace_by_pipe("model.safetensors"), "has no model.safetensors"),
        (_move_weights("x.bin"), "index.json names x.bin, and reading it could run code"),
        (_change_settings("config.json", model_type="hubort"), "'hubort'. Did you mean 'hubert'"),
        (_remove_file("preprocessor_config.json"), "preprocessor_config.json cannot be read (No such file"),
        (_remove_file("model.safetensors"), "has no model.safetensors. Copy it"),
        (_rename_to_pickle, "pytorch_model.bin only, and reading a pickle can run code"),
        (_change_settings("config.json", add_adapter=True, adapter_attn_dim=4), "adapters"),
        (_truncate_weights, "cannot be read"),
        (_change_settings("config.json", num_hidden_layers=5), "do not fit"),
        (
            _change_settings("config.json", num_hidden_layers=2),
            "do not fit its config.json: they have 'encoder.layers.2.",
        ),
        (_change_weights(lambda tensors: tensors.pop(_NORM)), f"they lack '{_NORM}'"),
        (_change_weights(lambda tensors: tensors.update(other=torch.zeros(1))), "they have 'other'"),
        (
            _change_weights(lambda tensors: tensors.update({_NORM: torch.zeros(3)})),
            f"they have in another shape '{_NORM}'",
        ),
        (_change_weights(lambda tensors: tensors[_NORM].fill_(float("nan"))), "non-finite values"),
    ],
)
def test_unusable_folders_are_rejected(tmp_path: Path, change: Any, message: str) -> None:
    folder = write_encoder(tmp_path / "encoder", "hubert")
    change(folder)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_encoder_folder(folder).load()


def test_files_of_an_index_are_read(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "encoder", "hubert")
    whole = read_encoder_folder(folder).load().state_dict()
    _move_weights("model-00001-of-00001.safetensors")(folder)
    parts = read_encoder_folder(folder).load().state_dict()
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_files_outside_the_digest_are_ignored(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "encoder", "hubert")
    front_end = json.loads((folder / "preprocessor_config.json").read_text())
    nested = {"feature_extractor": {**front_end, "sampling_rate": 8000}}
    (folder / "processor_config.json").write_text(json.dumps(nested))
    assert read_encoder_folder(folder).sample_rate == front_end["sampling_rate"] == 16000


def test_missing_folders_and_unsuitable_front_ends_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        read_encoder_folder(tmp_path / "none")
    folder = write_encoder(tmp_path / "ast", "ast")
    _change_settings("preprocessor_config.json", max_length=100)(folder)
    with pytest.raises(ConfigError, match="sets max_length to 100, but the encoder requires max_length 40"):
        read_encoder_folder(folder)
