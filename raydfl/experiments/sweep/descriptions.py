"""Descriptions of the features that the networks of a sweep see, for the notes below its table."""

from __future__ import annotations

from raydfl.data import DataSettings
from raydfl.data.features import FeatureSettings, FileFeatures, ImageFeatures, KaldiFeatures, PretrainedFeatures
from raydfl.engine import Config
from raydfl.experiments.sweep.grid import Sweep


def axis_of_features(sweep: Sweep) -> dict[str, str]:
    """Return, by description of the features, the labels that have them, when one axis alone decides."""
    for place in range(len(sweep.axes)):
        by_label: dict[str, set[str]] = {}
        for labels, runs in sweep.cells.items():
            by_label.setdefault(labels[place], set()).add(features_text(runs[0].config))
        if all(len(texts) == 1 for texts in by_label.values()):
            found: dict[str, list[str]] = {}
            for label, texts in by_label.items():
                found.setdefault(next(iter(texts)), []).append(label)
            return {text: ", ".join(labels) for text, labels in found.items()}
    return {}


def features_text(config: Config) -> str:
    """Describe the features that a network sees."""
    return "; ".join(dict.fromkeys(_features_text(data) for data in config.data.each.values()))


def _features_text(data: DataSettings) -> str:
    features = data.features
    by = {"group": "speaker", "part": "data set"}.get(features.normalise, features.normalise)
    z_score = "not normalised" if by == "none" else f"z-score by {by}"
    if isinstance(features, FileFeatures):
        return f"{features.path.name}, {features.bands} bands, {z_score}"
    if isinstance(features, ImageFeatures):
        return f"images of {features.size[0]} x {features.size[1]}, {features.channels} channels"
    if isinstance(features, KaldiFeatures):
        return f"Kaldi's filter bank, {features.bands} bands at {features.sample_rate / 1000:g} kHz"
    if isinstance(features, PretrainedFeatures):
        return features.title
    kind = "log-mel" if isinstance(features, FeatureSettings) else features.title
    return f"{kind}, {features.bands} bands at {features.sample_rate / 1000:g} kHz, {z_score}"
