"""Tiny pretrained encoders with random weights, saved by transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="the package of the extra huggingface is not installed"
)

WIDTH, LAYERS = 12, 3
_WAVES = {
    "conv_dim": (6, 6, 6),
    "conv_kernel": (10, 3, 2),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
_LAYERS = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 16}
KINDS = ("wav2vec2", "wav2vec2-masked", "hubert", "ast", "whisper")


def write_encoder(folder: Path, kind: str, seed: int = 0) -> Path:
    """Write one of ``KINDS`` into a folder, and return it. ``wav2vec2-masked`` has the structure of the large models."""
    import transformers as hf

    masked = {"feat_extract_norm": "layer", "do_stable_layer_norm": True} if kind == "wav2vec2-masked" else {}
    network: Any
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind.startswith("wav2vec2"):
            network = hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**_WAVES, **_LAYERS, **masked, vocab_size=5))
        elif kind == "hubert":
            network = hf.HubertModel(hf.HubertConfig(**_WAVES, **_LAYERS))
        elif kind == "ast":
            sizes = {"max_length": 40, "num_mel_bins": 16, "patch_size": 8, "time_stride": 6, "frequency_stride": 8}
            network = hf.ASTForAudioClassification(hf.ASTConfig(**_LAYERS, **sizes))
        else:
            sizes = {"d_model": WIDTH, "encoder_layers": LAYERS, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
            more = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16, "vocab_size": 9}
            ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
            network = hf.WhisperForConditionalGeneration(
                hf.WhisperConfig(**sizes, **more, **ids, num_mel_bins=16, max_source_positions=50)
            )
        for parameter in network.parameters():  # norms and biases too, so that each is seen
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    network.save_pretrained(folder)
    front_ends = {
        "ast": lambda: hf.ASTFeatureExtractor(num_mel_bins=16, max_length=40),
        "whisper": lambda: hf.WhisperFeatureExtractor(feature_size=16, chunk_length=1),
        "wav2vec2-masked": lambda: hf.Wav2Vec2FeatureExtractor(return_attention_mask=True),
    }
    front_ends.get(kind, hf.Wav2Vec2FeatureExtractor)().save_pretrained(folder)
    return folder


def reference(folder: Path) -> Any:
    """Load the encoder of a folder with transformers."""
    import transformers as hf

    found = hf.AutoModel.from_pretrained(folder).eval()
    return found.encoder if found.config.model_type == "whisper" else found
