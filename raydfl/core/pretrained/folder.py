"""A folder with a pretrained encoder: its family, its sizes, its weights, and the digest of all that decides its numbers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from raydfl.core.errors import ConfigError, nearest
from raydfl.core.files import content_digest, plain_name, read_regular

_ABOUT, _FRONT_END = "config.json", "preprocessor_config.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_LISTED = 5
_ATTENTION = "sdpa"
"""Name of PyTorch's own attention in transformers."""


@dataclass(frozen=True)
class Family:
    """A kind of encoder of transformers."""

    network: str
    """The class of transformers that holds the encoder, and little else."""
    extractor: str
    """The class that makes what it takes."""
    layers: str
    """The setting in config.json that says how many layers there are."""
    width: str
    """The setting that says how many numbers a token has."""
    left_out: str
    """Names of weights that a file may have and the encoder does not need: heads, decoders, what pre-training learns with."""
    own: str = r"(projector|classifier)\..*"
    """Names of weights that only the class of transformers has, and that a file may lack."""


_OF_WAVES = (
    r"(lm_head|classifier|projector|quantizer|project_hid|project_q|final_proj)\..*|"
    r"label_embs_concat|masked_spec_embed|layer_weights"
)
FAMILIES: Mapping[str, Family] = {
    "wav2vec2": Family(
        "Wav2Vec2Model",
        "Wav2Vec2FeatureExtractor",
        "num_hidden_layers",
        "hidden_size",
        _OF_WAVES,
        "masked_spec_embed",
    ),
    "hubert": Family(
        "HubertModel", "Wav2Vec2FeatureExtractor", "num_hidden_layers", "hidden_size", _OF_WAVES, "masked_spec_embed"
    ),
    "audio-spectrogram-transformer": Family(
        "ASTModel", "ASTFeatureExtractor", "num_hidden_layers", "hidden_size", r"classifier\..*"
    ),
    "whisper": Family(
        "WhisperForAudioClassification",
        "WhisperFeatureExtractor",
        "encoder_layers",
        "d_model",
        r"((model\.)?decoder|proj_out|projector|classifier)\..*|layer_weights",
    ),
}
"""By what ``model_type`` says in config.json."""


@dataclass(frozen=True, eq=False)
class EncoderFolder:
    """A folder with an encoder: its kind, its settings and its feature extractor."""

    path: Path
    kind: str
    """One of :data:`FAMILIES`."""
    settings: Any
    """The configuration of transformers."""
    extractor: Any
    """The feature extractor of transformers."""

    @property
    def layers(self) -> int:
        """Layers of the transformer."""
        return int(getattr(self.settings, FAMILIES[self.kind].layers))

    @property
    def width(self) -> int:
        """Numbers of a token."""
        return int(getattr(self.settings, FAMILIES[self.kind].width))

    @property
    def takes_waves(self) -> bool:
        """True where the encoder takes samples, false where it takes spectra."""
        return self.kind in ("wav2vec2", "hubert")

    @property
    def bands(self) -> int:
        """Numbers of a frame that the encoder takes; 1 where it takes samples."""
        return 1 if self.takes_waves else int(self.settings.num_mel_bins)

    @property
    def sample_rate(self) -> int:
        """Hz of the recordings that it was trained on."""
        return int(self.extractor.sampling_rate)

    @property
    def fills(self) -> bool:
        """True where short recordings are filled with zeros, which the encoder hears; false where it is told their lengths."""
        return self.takes_waves and not self.extractor.return_attention_mask

    def check_layers(self, after: int | None) -> None:
        """Refuse to begin after a layer that there is not.

        Raises:
            ConfigError: there are fewer layers.
        """
        if after is not None and after > self.layers:
            raise ConfigError(
                f"after: {after}, and the encoder in {self.path} has {self.layers} layers; take 0 to {self.layers}"
            )

    def load(self) -> nn.Module:
        """Return the network of transformers with the folder's weights, in evaluation mode.

        Raises:
            ConfigError: the weights cannot be read, or a name, shape or number is not as it should be.
        """
        import transformers

        family = FAMILIES[self.kind]
        try:
            tensors: dict[str, torch.Tensor] = {}
            for file in _weight_files(self.path):
                tensors |= safetensors.torch.load_file(file)
            # Names that a file lacks are drawn, and refused or not used below: nobody else shall see the draws.
            with torch.random.fork_rng(devices=[]), _quiet():
                network, found = getattr(transformers, family.network).from_pretrained(
                    None,
                    config=self.settings,
                    state_dict=tensors,
                    attn_implementation=_ATTENTION,
                    dtype=torch.float32,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are refused below, by name
                )
        except Exception as error:  # whatever a damaged file or a strange setting makes of it
            raise ConfigError(
                f"the weights in {self.path} cannot be read: {_first_line(error)}; fetch them again, or take the folder's own "
                f"{_ABOUT}"
            ) from error
        unfit = sorted(name for name, *_ in found["mismatched_keys"])
        missing = sorted(n for n in found["missing_keys"] if n not in unfit and not re.fullmatch(family.own, n))
        strange = sorted(name for name in found["unexpected_keys"] if not re.fullmatch(family.left_out, name))
        unfit = [name for name in unfit if not re.fullmatch(family.own, name)]
        if missing or strange or unfit:
            said = [("lack", missing), ("have", strange), ("have in another shape", unfit)]
            texts = " and ".join(f"{verb} {_listed(names)}" for verb, names in said if names)
            raise ConfigError(
                f"the weights in {self.path} do not fit its {_ABOUT}: they {texts}; take the files of one model, as "
                f"save_pretrained writes them"
            )
        for name, value in network.state_dict().items():
            if value.is_floating_point() and not re.fullmatch(family.own, name) and not value.isfinite().all():
                raise ConfigError(f"the weights in {self.path}: {name!r} holds numbers that are not finite")
        loaded: nn.Module = network.eval()
        return loaded


def read_encoder_folder(folder: Path) -> EncoderFolder:
    """Read what a folder says of its encoder; the weights are looked for, and not read.

    Raises:
        ConfigError: there is no such folder, a file is missing or damaged, the encoder is of a kind that is not supported, the
            weights could only be read by running code, or the package transformers is not installed.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {folder}; give one that save_pretrained of transformers wrote, or a copy of a model's repository"
        )
    return _read(folder, tuple((file.name, file.stat().st_mtime_ns) for file in _files(folder)))


@functools.lru_cache(maxsize=8)
def _read(folder: Path, _stamp: tuple[tuple[str, int], ...]) -> EncoderFolder:
    about = _json(folder, _ABOUT, "says what the encoder is")
    kind = str(about.get("model_type"))
    if kind not in FAMILIES:
        raise ConfigError(f"{folder} holds a model of the type {kind!r}; {nearest(kind, FAMILIES)}")
    front_end = _json(folder, _FRONT_END, "says what the encoder takes")
    _weight_files(folder)
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("pretrained encoders need the package transformers: pip install 'raydfl[huggingface]'")
    import transformers

    family = FAMILIES[kind]
    try:
        # Not from the folder: transformers would read further files, which the digest does not cover.
        with _quiet():
            settings = transformers.CONFIG_MAPPING[kind].from_dict(dict(about), attn_implementation=_ATTENTION)
            extractor = getattr(transformers, family.extractor).from_dict(dict(front_end))
    except Exception as error:  # whatever transformers says of a strange setting
        raise ConfigError(f"{folder}: {_ABOUT} or {_FRONT_END} cannot be used: {_first_line(error)}") from error
    found = EncoderFolder(folder, kind, settings, extractor)
    _check_settings(found)
    return found


def encoder_digest(folder: Path) -> str:
    """Return a digest of all that decides what the encoder in a folder computes.

    Raises:
        OSError: a file cannot be read.
    """
    found = hashlib.blake2b(digest_size=16)
    for file in _files(folder):
        found.update(f"{file.name} {content_digest(file)}\n".encode())
    return found.hexdigest()


def _files(folder: Path) -> list[Path]:
    """Return the files that decide the numbers, those that are there."""
    names = [_ABOUT, _FRONT_END, _INDEX]
    return [*(folder / name for name in names if (folder / name).is_file()), *sorted(folder.glob("*.safetensors"))]


def _json(folder: Path, name: str, what: str) -> Mapping[str, Any]:
    try:
        found = json.loads(read_regular(folder / name))
    except OSError as error:
        raise ConfigError(
            f"{folder} has no {name}, which {what}, that can be read ({error.strerror}); copy it from the model's repository"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{folder / name} is no JSON: {error}; fetch it again") from error
    except RecursionError as error:
        raise ConfigError(f"{folder / name} cannot be read: it is nested too deep; fetch it again") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{folder / name} must hold settings; fetch it again")
    return found


def _weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights.

    Raises:
        ConfigError: there are none, or only in a form that can run code when it is read.
    """
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if (folder / _INDEX).is_file():
        parts = _json(folder, _INDEX, "says where the weights are").get("weight_map")
        if not isinstance(parts, Mapping) or not parts:
            raise ConfigError(f"{folder / _INDEX} names no weights; fetch it again")
        return [_weight_file(folder, name) for name in sorted({str(name) for name in parts.values()})]
    pickles = [file.name for pattern in _PICKLES for file in sorted(folder.glob(pattern))]
    if pickles:
        raise ConfigError(
            f"{folder} has its weights as {pickles[0]} only, and reading that can run code; write them as {_WEIGHTS} where you "
            f"trust the file: load the model with transformers, then model.save_pretrained(FOLDER)"
        )
    raise ConfigError(f"{folder} has no {_WEIGHTS}; copy it from the model's repository")


def _weight_file(folder: Path, name: str) -> Path:
    """Return a file that the index names."""
    try:
        file = folder / plain_name(name)
    except ValueError as error:
        raise ConfigError(f"{folder / _INDEX}: {error}") from error
    if file.suffix != ".safetensors":
        raise ConfigError(
            f"{folder / _INDEX} names {name}, and reading that can run code; give a model whose files end in .safetensors"
        )
    if not file.is_file():
        raise ConfigError(f"{folder} has no {name}, which {_INDEX} names; fetch it")
    return file


def _check_settings(folder: EncoderFolder) -> None:
    """Refuse an encoder that is built otherwise than this package runs it, and a front end that is another encoder's."""
    settings, extractor = folder.settings, folder.extractor
    if getattr(settings, "add_adapter", False) or getattr(settings, "adapter_attn_dim", None) is not None:
        raise ConfigError(f"{folder.path}: encoders with adapters (add_adapter, adapter_attn_dim) are not supported")
    if folder.takes_waves:
        pairs = []
    elif folder.kind == "whisper":
        pairs = [
            ("feature_size", extractor.feature_size, "num_mel_bins", settings.num_mel_bins),
            ("frames", extractor.nb_max_frames, "twice max_source_positions", 2 * settings.max_source_positions),
        ]
    else:
        pairs = [
            (name, getattr(extractor, name), name, getattr(settings, name)) for name in ("num_mel_bins", "max_length")
        ]
    for given, value, taken, expected in pairs:
        if value != expected:
            raise ConfigError(
                f"{folder.path}: {_FRONT_END} makes {given} {value}, and the encoder takes {taken} {expected}; take both files of "
                f"one model"
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(repr, names[:_LISTED])) + more


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what transformers prints while it loads: bars, and a report of names that are accounted for here."""
    from transformers.utils import logging as transformers_logging

    said: Any = transformers_logging  # it has no types
    log, bars = logging.getLogger("transformers"), said.is_progress_bar_enabled()
    level = log.level
    said.disable_progress_bar()
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
        if bars:
            said.enable_progress_bar()
