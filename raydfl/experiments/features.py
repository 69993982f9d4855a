"""Descriptions of the features that the networks of a study see, for the notes below its table."""

from __future__ import annotations

from raydfl.data import DataSettings
from raydfl.data.features import FeatureSettings, FileFeatures, ImageFeatures, KaldiFeatures, PretrainedFeatures
from raydfl.engine import Config
from raydfl.experiments.study import Study


def describe_features(study: Study) -> list[str]:
    """Return notes on the features that the networks of a study see, with the labels that have them."""
    described: dict[str, list[tuple[str, ...]]] = {}
    for labels in study.cells:
        trial = next((each for each in study.trials if each.labels == labels), study.first)
        described.setdefault(features_text(trial.config), []).append(labels)
    if len(described) == 1:
        return [f"Features: {next(iter(described))}."]
    for place in range(len(study.axes)):  # one axis may decide alone
        groups = {text: {labels[place] for labels in cells} for text, cells in described.items()}
        if sum(map(len, groups.values())) == len(set().union(*groups.values())):
            return [
                f"Features ({', '.join(dict.fromkeys(labels[place] for labels in cells))}): {text}."
                for text, cells in described.items()
            ]
    return [
        f"Features ({len(cells)} cells, such as {', '.join(cells[0])}): {text}." for text, cells in described.items()
    ]


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
