"""Features of recordings and images, and their cache.

Start with kinds.py (the kinds of features), extraction.py (their computation) and cache.py (their storage).
"""

from raydfl.data.features.alteration import Alteration
from raydfl.data.features.cache import FeatureStore
from raydfl.data.features.extraction import Chunk, ChunkReport, RunChunks
from raydfl.data.features.extractor import FeatureExtractor, WaveFeatures
from raydfl.data.features.file import FileFeatures, needs_waves
from raydfl.data.features.image import ImageFeatures
from raydfl.data.features.kaldi import KaldiFeatures
from raydfl.data.features.kinds import AnyFeatures, kind_of
from raydfl.data.features.log_mel import LARGEST_DENOMINATOR, LEAST_SQUARES, NEUTRAL, FeatureSettings
from raydfl.data.features.model import ModelFeatures
from raydfl.data.features.pretrained import PretrainedFeatures
from raydfl.data.features.speech_embedding import SpeechEmbeddingFeatures, find_networks
from raydfl.data.features.statistics import z_scores
from raydfl.data.features.wave import BY_TRAINING_CLIPS, EPSILON

__all__ = [
    "BY_TRAINING_CLIPS",
    "EPSILON",
    "LARGEST_DENOMINATOR",
    "LEAST_SQUARES",
    "NEUTRAL",
    "Alteration",
    "AnyFeatures",
    "Chunk",
    "ChunkReport",
    "FeatureExtractor",
    "FeatureSettings",
    "FeatureStore",
    "FileFeatures",
    "ImageFeatures",
    "KaldiFeatures",
    "ModelFeatures",
    "PretrainedFeatures",
    "RunChunks",
    "SpeechEmbeddingFeatures",
    "WaveFeatures",
    "find_networks",
    "kind_of",
    "needs_waves",
    "z_scores",
]
