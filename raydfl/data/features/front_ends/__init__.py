"""Front ends: a PyTorch module for each kind of features of recordings, for extraction, prediction and export.

A front end maps samples, float32 [batch, samples] at the settings' rate, to unnormalised features, float32 [batch, frames, bands].
``torch.export`` traces the kinds logmel and kaldi for any number of samples. No step branches on this number or slices, because a
slice puts a guard on the length. The import of PyTorch takes seconds, so import this package only to compute.

Start with spectral.py.
"""

from torch import nn

from raydfl.data.features.front_ends.networks import EncoderTokens, NamedModel, SpeechEmbedding
from raydfl.data.features.front_ends.spectral import FilterBank, LogMel, larger, smaller, take
from raydfl.data.features.kaldi import KaldiFeatures
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.features.model import ModelFeatures
from raydfl.data.features.pretrained import PretrainedFeatures
from raydfl.data.features.speech_embedding import SpeechEmbeddingFeatures

FRONT_ENDS: dict[type, type[nn.Module]] = {
    FeatureSettings: LogMel,
    KaldiFeatures: FilterBank,
    PretrainedFeatures: EncoderTokens,
    ModelFeatures: NamedModel,
    SpeechEmbeddingFeatures: SpeechEmbedding,
}
"""The front end of each kind, by the class of its settings."""

__all__ = ["FRONT_ENDS", "larger", "smaller", "take"]
