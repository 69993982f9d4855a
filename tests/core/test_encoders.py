"""Encoders from a folder against the classes of transformers, and folders that cannot be used."""

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


def wave(samples: int, seed: int = 0) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


def theirs(folder: Path, waves: list[np.ndarray], **options: Any) -> Any:
    """Return tokens as transformers computes them, all waves in one batch."""
    about, network = read_encoder_folder(folder), reference(folder)
    given = about.extractor(waves, sampling_rate=RATE, return_tensors="pt", **options)
    with torch.no_grad():
        return network(**given).last_hidden_state


def ours(folder: Path, x: torch.Tensor, lengths: torch.Tensor | None = None, after: int | None = None) -> Any:
    with torch.no_grad():
        return Encoder(read_encoder_folder(folder), after, LAYERS).eval()(x, lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_computes_what_transformers_does_and_may_be_cut_after_any_layer(
    folders: dict[str, Path], kind: str
) -> None:
    folder = read_encoder_folder(folders[kind])
    assert (folder.layers, folder.width, folder.sample_rate) == (LAYERS, WIDTH, RATE)
    clip = wave(6_000)
    expected = theirs(folder.path, [clip])
    x = torch.from_numpy(EncoderFrontEnd(folder, None)(clip)).unsqueeze(0)
    assert x.shape[2] == folder.bands
    tokens, count = ours(folder.path, x)
    assert count is None
    torch.testing.assert_close(tokens, expected, atol=2e-6, rtol=1e-5)
    for after in range(LAYERS + 1):
        with torch.no_grad():
            begun, _ = Encoder(folder, None, after).eval()(x)
        rest, _ = ours(folder.path, begun, after=after)
        assert torch.equal(rest, tokens), after  # the same operations on the same shapes


@pytest.mark.parametrize("kind", KINDS)
def test_a_clip_is_to_the_encoder_what_it_is_alone_whatever_stands_beside_it(
    folders: dict[str, Path], kind: str
) -> None:
    folder = read_encoder_folder(folders[kind])
    made = [EncoderFrontEnd(folder, None)(wave(size, size)) for size in (6_000, 2_500, 4_111)]
    lengths = torch.tensor([len(matrix) for matrix in made])
    x = torch.zeros(3, int(lengths.max()), folder.bands)
    for row, matrix in zip(x, made, strict=True):
        row[: len(matrix)] = torch.from_numpy(matrix)
    tokens, count = ours(folder.path, x, lengths)
    for number, matrix in enumerate(made):
        alone, _ = ours(folder.path, torch.from_numpy(matrix).unsqueeze(0))
        assert count is None or int(count[number]) == alone.shape[1]
        torch.testing.assert_close(tokens[number, : alone.shape[1]], alone[0], atol=1e-5, rtol=1e-5)
    if kind == "wav2vec2-masked":  # the only one to which transformers gives lengths
        expected = theirs(folder.path, [wave(size, size) for size in (6_000, 2_500, 4_111)], padding=True)
        assert count is not None
        for number, size in enumerate(count.tolist()):
            torch.testing.assert_close(tokens[number, :size], expected[number, :size], atol=1e-5, rtol=1e-5)


def test_short_clips_are_filled_as_the_folder_s_extractor_fills_them(folders: dict[str, Path]) -> None:
    clip = wave(2_500)
    for kind in ("wav2vec2", "hubert"):
        folder = read_encoder_folder(folders[kind])
        made = EncoderFrontEnd(folder, 4_000)(clip)
        expected = folder.extractor(clip, sampling_rate=RATE, padding="max_length", max_length=4_000)["input_values"][0]
        np.testing.assert_array_equal(made[:, 0], expected)
    masked = read_encoder_folder(folders["wav2vec2-masked"])
    assert len(EncoderFrontEnd(masked, 4_000)(clip)) == 2_500
    assert len(EncoderFrontEnd(masked, 2_000)(clip)) == 2_000
    silent = read_encoder_folder(folders["whisper"])
    nothing = EncoderFrontEnd(silent, None)(np.zeros(800, np.float32))
    expected = theirs(silent.path, [np.zeros(800, np.float32)])
    torch.testing.assert_close(ours(silent.path, torch.from_numpy(nothing)[None])[0], expected, atol=2e-6, rtol=1e-5)


def test_pooling_is_that_of_transformers_classifiers(folders: dict[str, Path]) -> None:
    clip = wave(6_000)
    tokens = theirs(folders["ast"], [clip])
    network = reference(folders["ast"])
    given = read_encoder_folder(folders["ast"]).extractor([clip], sampling_rate=RATE, return_tensors="pt")
    with torch.no_grad():
        expected = network(**given).pooler_output
    torch.testing.assert_close(pool_tokens(tokens, None, "own", "audio-spectrogram-transformer"), expected)
    torch.testing.assert_close(pool_tokens(tokens, None, "mean", "audio-spectrogram-transformer"), tokens.mean(dim=1))
    count = torch.tensor([5])
    torch.testing.assert_close(pool_tokens(tokens, count, "own", "whisper"), tokens[:, :5].mean(dim=1))


def test_the_digest_is_that_of_what_decides_the_numbers(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "a", "hubert")
    first = encoder_digest(folder)
    (folder / "README.md").write_text("about")
    assert encoder_digest(folder) == first
    assert encoder_digest(write_encoder(tmp_path / "b", "hubert", seed=1)) != first
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "layer_norm_eps": 1e-3}))
    assert encoder_digest(folder) != first


def _without(name: str) -> Any:
    def change(folder: Path) -> None:
        (folder / name).unlink()

    return change


def _settings(name: str, **values: Any) -> Any:
    def change(folder: Path) -> None:
        about = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**about, **values}))

    return change


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _torn(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def _weights(change: Any) -> Any:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return changed


def _indexed(name: str) -> Any:
    """Move the weights into a file that an index names: as a pickle, unless its name is that of safetensors."""

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


def _piped(name: str) -> Any:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


_NORM = "encoder.layers.1.layer_norm.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without("config.json"), "config.json cannot be read (No such file"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
        (
            lambda folder: (folder / "config.json").write_text("[" * 10**5),
            "config.json cannot be read: it is nested too deep",
        ),
        (_piped("config.json"), "config.json cannot be read (it is a pipe"),
        (
            _piped("preprocessor_config.json"),
            "preprocessor_config.json cannot be read (it is a pipe",
        ),
        (_piped("model.safetensors"), "has no model.safetensors"),
        (_indexed("x.bin"), "index.json names x.bin, and reading it could run code"),
        (_settings("config.json", model_type="hubort"), "'hubort'. Did you mean 'hubert'"),
        (_without("preprocessor_config.json"), "preprocessor_config.json cannot be read (No such file"),
        (_without("model.safetensors"), "has no model.safetensors. Copy it"),
        (_pickled, "pytorch_model.bin only, and reading a pickle can run code"),
        (_settings("config.json", add_adapter=True, adapter_attn_dim=4), "adapters"),
        (_torn, "cannot be read"),
        (_settings("config.json", num_hidden_layers=5), "do not fit"),
        (_settings("config.json", num_hidden_layers=2), "do not fit its config.json: they have 'encoder.layers.2."),
        (_weights(lambda tensors: tensors.pop(_NORM)), f"they lack '{_NORM}'"),
        (_weights(lambda tensors: tensors.update(other=torch.zeros(1))), "they have 'other'"),
        (_weights(lambda tensors: tensors.update({_NORM: torch.zeros(3)})), f"they have in another shape '{_NORM}'"),
        (_weights(lambda tensors: tensors[_NORM].fill_(float("nan"))), "non-finite values"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(tmp_path: Path, change: Any, said: str) -> None:
    folder = write_encoder(tmp_path / "encoder", "hubert")
    change(folder)
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_encoder_folder(folder).load()


def test_the_files_that_an_index_names_are_read(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "encoder", "hubert")
    whole = read_encoder_folder(folder).load().state_dict()
    _indexed("model-00001-of-00001.safetensors")(folder)
    parts = read_encoder_folder(folder).load().state_dict()
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_file_outside_the_digest_decides_nothing(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "encoder", "hubert")
    front_end = json.loads((folder / "preprocessor_config.json").read_text())
    nested = {"feature_extractor": {**front_end, "sampling_rate": 8000}}
    (folder / "processor_config.json").write_text(json.dumps(nested))
    assert read_encoder_folder(folder).sample_rate == front_end["sampling_rate"] == 16000


def test_no_folder_and_a_front_end_of_another_encoder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        read_encoder_folder(tmp_path / "none")
    folder = write_encoder(tmp_path / "ast", "ast")
    _settings("preprocessor_config.json", max_length=100)(folder)
    with pytest.raises(ConfigError, match="makes max_length 100, but the encoder requires max_length 40"):
        read_encoder_folder(folder)
