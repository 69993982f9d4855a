"""Folders with pretrained encoders: their family, sizes, weights and digest."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from raydfl.core.errors import ConfigError, first_line, nearest, translate_failures
from raydfl.core.files import content_digest, plain_name, read_json

_ABOUT, _FRONT_END = "config.json", "preprocessor_config.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_LISTED = 5
_ATTENTION = "sdpa"
"""Name of PyTorch's scaled dot-product attention in transformers."""


@dataclass(frozen=True)
class Family:
    """A family of encoders in transformers."""

    network: str
    """The class of transformers with the encoder and the fewest further weights."""
    extractor: str
    """The class of its feature extractor."""
    layers: str
    """Name of the number of layers in config.json."""
    width: str
    """Name of the token width in config.json."""
    left_out: str
    """Pattern of weights that a file may have but the encoder ignores: heads, decoders, and parts for pre-training."""
    own: str = r"(projector|classifier)\..*"
    """Pattern of weights that the class has but a file may lack."""


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
"""Families by ``model_type`` in config.json."""


@dataclass(frozen=True, eq=False)
class EncoderFolder:
    """Kind, settings and feature extractor of an encoder in a folder."""

    path: Path
    kind: str
    """A key of :data:`FAMILIES`."""
    settings: Any
    """The configuration of transformers."""
    extractor: Any
    """The feature extractor of transformers."""

    @property
    def layers(self) -> int:
        """Number of transformer layers."""
        return int(getattr(self.settings, FAMILIES[self.kind].layers))

    @property
    def width(self) -> int:
        """Number of features of a token."""
        return int(getattr(self.settings, FAMILIES[self.kind].width))

    @property
    def takes_waves(self) -> bool:
        """True if the encoder's inputs are samples. False: spectrograms."""
        return self.kind in ("wav2vec2", "hubert")

    @property
    def bands(self) -> int:
        """Number of mel bands in an input frame, or 1 for samples."""
        return 1 if self.takes_waves else int(self.settings.num_mel_bins)

    @property
    def hop(self) -> int:
        """Number of samples between two input frames."""
        if self.takes_waves:
            return 1
        return int(self.extractor.hop_length) if self.kind == "whisper" else self.sample_rate // 100

    @property
    def frames_per_token(self) -> int:
        """Number of input frames from a token to the next in time."""
        if self.takes_waves:
            return math.prod(self.settings.conv_stride)
        return 2 if self.kind == "whisper" else int(self.settings.time_stride)

    @property
    def patch_bands(self) -> int | None:
        """Number of AST's patches over the bands; ``None`` for encoders with a single token at a time."""
        if self.kind != "audio-spectrogram-transformer":
            return None
        return int((self.bands - self.settings.patch_size) // self.settings.frequency_stride + 1)

    @property
    def sample_rate(self) -> int:
        """Sample rate of the encoder's inputs in Hz."""
        return int(self.extractor.sampling_rate)

    @property
    def fills(self) -> bool:
        """True if short recordings are padded with audible zeros. False: the encoder masks padding by the lengths."""
        return self.takes_waves and not self.extractor.return_attention_mask

    def check_layers(self, after: int | None) -> None:
        """Check the option ``after``, the number of layers before the trained range.

        Raises:
            ConfigError: the encoder has fewer layers.
        """
        if after is not None and after > self.layers:
            raise ConfigError(
                f"after: {after}, but the encoder in {self.path} has {self.layers} layers. Choose 0 to {self.layers}."
            )

    def load(self) -> nn.Module:
        """Load the network of transformers with the folder's weights, in evaluation mode.

        Raises:
            ConfigError: the weights cannot be read, do not match the settings in name or shape, or are not finite.
        """
        family = FAMILIES[self.kind]
        network, info = self._load_as(family.network)
        unfit = sorted(name for name, *_ in info["mismatched_keys"])
        missing = sorted(n for n in info["missing_keys"] if n not in unfit and not re.fullmatch(family.own, n))
        unexpected = sorted(name for name in info["unexpected_keys"] if not re.fullmatch(family.left_out, name))
        unfit = [name for name in unfit if not re.fullmatch(family.own, name)]
        if missing or unexpected or unfit:
            problems = [("lack", missing), ("have", unexpected), ("have in another shape", unfit)]
            texts = " and ".join(f"{verb} {_format_names(names)}" for verb, names in problems if names)
            raise ConfigError(
                f"the weights in {self.path} do not fit its {_ABOUT}: they {texts}. Use the files of a single model, as "
                f"save_pretrained writes them."
            )
        for name, value in network.state_dict().items():
            if value.is_floating_point() and not re.fullmatch(family.own, name) and not value.isfinite().all():
                raise ConfigError(f"the weights in {self.path}: {name!r} has non-finite values. Download them again.")
        encoder: nn.Module = network.eval()
        return encoder

    def load_whole(self) -> nn.Module:
        """Load the network of transformers with all weights of the folder, also of heads and decoders.

        Raises:
            ConfigError: the weights cannot be read.
        """
        import transformers

        names = [name for name in self.settings.architectures or [] if hasattr(transformers, name)]
        network: nn.Module = self._load_as(names[0] if names else FAMILIES[self.kind].network)[0]
        return network

    def _load_as(self, network: str) -> tuple[Any, Any]:
        """Load the weights into a class of transformers, and return the network and a report about the weights."""
        import transformers

        with translate_failures(
            lambda reason: ConfigError(
                f"the weights in {self.path} cannot be read: {first_line(reason)}. Download them again, or restore the model's "
                f"{_ABOUT}."
            )
        ):
            tensors: dict[str, torch.Tensor] = {}
            for file in _weight_files(self.path):
                tensors |= safetensors.torch.load_file(file)
            # from_pretrained draws missing weights, rejected or unused. The fork preserves the caller's random state.
            with torch.random.fork_rng(devices=[]), _quiet():
                loaded: tuple[Any, Any] = getattr(transformers, network).from_pretrained(
                    None,
                    config=self.settings,
                    state_dict=tensors,
                    attn_implementation=_ATTENTION,
                    dtype=torch.float32,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # rejected by load, by name
                )
        return loaded


def read_encoder_folder(folder: Path) -> EncoderFolder:
    """Read an encoder's settings from its folder, and check that its weights exist.

    Raises:
        ConfigError: the folder or a file is missing or damaged, the kind of encoder is not supported, the weights are pickles, or
            the package transformers is not installed.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {folder}. Give a folder from save_pretrained of transformers, or a copy of a model's repository."
        )
    return _read(folder, tuple((file.name, file.stat().st_mtime_ns) for file in _files(folder)))


@functools.lru_cache(maxsize=8)  # the stamp of names and times invalidates the cache when a file changes
def _read(folder: Path, _stamp: tuple[tuple[str, int], ...]) -> EncoderFolder:
    about = _read_json(folder, _ABOUT)
    kind = str(about.get("model_type"))
    if kind not in FAMILIES:
        raise ConfigError(f"{folder} holds a model of the unsupported type {kind!r}. {nearest(kind, FAMILIES)}")
    front_end = _read_json(folder, _FRONT_END)
    _weight_files(folder)
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "Pretrained encoders need the package transformers. Install it with: pip install 'raydfl[huggingface]'"
        )
    import transformers

    family = FAMILIES[kind]
    with (
        translate_failures(
            lambda reason: ConfigError(f"{folder}: {_ABOUT} or {_FRONT_END} is invalid: {first_line(reason)}")
        ),
        _quiet(),
    ):
        # Given the folder, transformers would read further files, and the digest does not cover them.
        settings = transformers.CONFIG_MAPPING[kind].from_dict(dict(about), attn_implementation=_ATTENTION)
        extractor = getattr(transformers, family.extractor).from_dict(dict(front_end))
    encoder_folder = EncoderFolder(folder, kind, settings, extractor)
    _check_settings(encoder_folder)
    return encoder_folder


def encoder_digest(folder: Path) -> str:
    """Return a digest of the files that determine the encoder's outputs.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in _files(folder):
        digest.update(f"{file.name} {content_digest(file)}\n".encode())
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    """Return the existing files that determine the encoder's outputs."""
    names = [_ABOUT, _FRONT_END, _INDEX]
    return [*(folder / name for name in names if (folder / name).is_file()), *sorted(folder.glob("*.safetensors"))]


def _read_json(folder: Path, name: str) -> Mapping[str, Any]:
    """Read a JSON object from a file of the folder."""
    with translate_failures(
        lambda reason: ConfigError(f"{folder / name} cannot be read ({reason}). Copy it from the model's repository.")
    ):
        content = read_json(folder / name)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{folder / name} must hold an object with settings. Download it again.")
    return content


def _weight_files(folder: Path) -> list[Path]:
    """Return the files with the weights.

    Raises:
        ConfigError: the weights are missing, or are pickles, which could run code.
    """
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if (folder / _INDEX).is_file():
        parts = _read_json(folder, _INDEX).get("weight_map")
        if not isinstance(parts, Mapping) or not parts:
            raise ConfigError(f"{folder / _INDEX} names no weights. Download it again.")
        return [_weight_file(folder, name) for name in sorted({str(name) for name in parts.values()})]
    pickles = [file.name for pattern in _PICKLES for file in sorted(folder.glob(pattern))]
    if pickles:
        raise ConfigError(
            f"{folder} has its weights as {pickles[0]} only, and reading a pickle can run code. If you trust the file, convert it "
            f"to {_WEIGHTS}: load the model with transformers, then call model.save_pretrained(FOLDER)."
        )
    raise ConfigError(f"{folder} has no {_WEIGHTS}. Copy it from the model's repository.")


def _weight_file(folder: Path, name: str) -> Path:
    """Return the path of a file in the index, after checks."""
    try:
        file = folder / plain_name(name)
    except ValueError as error:
        raise ConfigError(f"{folder / _INDEX}: {error}") from error
    if file.suffix != ".safetensors":
        raise ConfigError(
            f"{folder / _INDEX} names {name}, and reading it could run code. Use a model with .safetensors files."
        )
    if not file.is_file():
        raise ConfigError(f"{folder} has no {name}, but {_INDEX} names it. Download it.")
    return file


def _check_settings(folder: EncoderFolder) -> None:
    """Reject unsupported variants of an encoder, and a front end of a different encoder."""
    settings, extractor = folder.settings, folder.extractor
    if getattr(settings, "add_adapter", False) or getattr(settings, "adapter_attn_dim", None) is not None:
        raise ConfigError(
            f"{folder.path}: encoders with adapters (add_adapter, adapter_attn_dim) are not supported. Choose another encoder."
        )
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
    for output, value, required, expected in pairs:
        if value != expected:
            raise ConfigError(
                f"{folder.path}: {_FRONT_END} sets {output} to {value}, but the encoder requires {required} {expected}. Use both "
                f"files of a single model."
            )


def _format_names(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(repr, names[:_LISTED])) + more


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence progress bars and warnings of transformers. :meth:`EncoderFolder.load` reports unexpected weights itself."""
    from transformers.utils import logging as transformers_logging

    untyped: Any = transformers_logging  # it has no types
    log, bars = logging.getLogger("transformers"), untyped.is_progress_bar_enabled()
    level = log.level
    untyped.disable_progress_bar()
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
        if bars:
            untyped.enable_progress_bar()
