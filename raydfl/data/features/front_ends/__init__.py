"""Front ends: one module for each kind of features of recordings. The same object extracts, predicts and exports.

Each takes samples float32 [batch, samples] at the settings' rate and returns features float32 [batch, frames, bands], not
normalised. ``torch.export`` traces those of the kinds logmel and kaldi with any number of samples: no step branches on it, and
none slices, because a slice puts a guard on the length. PyTorch takes seconds to import: import this package only to compute.

Begin with spectral.py.
"""

from torch import nn

from raydfl.data.features.front_ends.networks import EncoderTokens, NamedModel
from raydfl.data.features.front_ends.spectral import FilterBank, LogMel, Spectral, larger, smaller, take
from raydfl.data.features.kaldi import KaldiFeatures
from raydfl.data.features.log_mel import FeatureSettings
from raydfl.data.features.model import ModelFeatures
from raydfl.data.features.pretrained import PretrainedFeatures

FRONT_ENDS: dict[type, type[nn.Module]] = {
    FeatureSettings: LogMel,
    KaldiFeatures: FilterBank,
    PretrainedFeatures: EncoderTokens,
    ModelFeatures: NamedModel,
}
"""The module of each kind, by the kind's settings."""

__all__ = ["FRONT_ENDS", "Spectral", "larger", "smaller", "take"]
