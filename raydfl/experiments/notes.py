"""Notes below a study's tables."""

from __future__ import annotations

from collections.abc import Iterable

from raydfl.data import DataSettings, Population
from raydfl.data.features import FeatureSettings, FileFeatures, ImageFeatures, KaldiFeatures, PretrainedFeatures
from raydfl.engine import Config, Criterion
from raydfl.experiments.results import CONFIDENCE, StudyResults
from raydfl.experiments.settings import label_of
from raydfl.experiments.study import Study, Trial


def describe_results(results: StudyResults) -> list[str]:
    """Return the notes that a reader of the tables needs: summary, best, control, features, paper, search."""
    study, settings = results.study, results.study.settings
    trials = [trial for each in results.contestants for trial in each.trials]
    repeats = " or ".join(dict.fromkeys(trial.repeat.partition("=")[0] for trial in trials if trial.repeat))
    over = f"; mean ± sample standard deviation over {repeats}" if repeats else ""
    counts = {each.n for each in results.contestants}
    runs = f"n = {counts.pop()}" if len(counts) == 1 and results.complete else "n: runs"
    notes = [f"Headline: {results.headline}{over}; {runs}."]
    if results.summary == "chosen":
        choosers = {c.metric: c for trial in trials for c in _find_choosers(trial)}
        notes += [f"{name} chooses the round ({criterion.chooser})." for name, criterion in choosers.items()]
    if results.summary == "best":
        notes.append("The best evaluation is chosen on the measured data.")
    kinds = results.kinds_of_evaluations
    if len(kinds) > 1 and not settings.domains:
        notes.append(
            f"Runs have different evaluations ({'; '.join(kinds)}). * marks cells that differ from {kinds[0]}."
        )
    if any(each.best for each in results.contestants):
        cells = f"of the cells that differ only in {study.axes[-1]}" if study.axes else ""
        notes.append(
            f"Bold: the best {('draw of each cell' if study.axes else 'draw') if settings.domains else cells}."
        )
    if settings.control:
        names = ", ".join(f"{name} {label}" for name, label in settings.control.items())
        notes.append(
            f"Difference: from the cell with {names}, mean of the differences between runs with equal {repeats or 'seed'}, "
            f"with the {100 * CONFIDENCE:.0f} % interval of Student's t. It takes two pairs or more."
        )
    notes += _describe_features(study)
    if settings.paper is not None:
        notes.append(f"Paper: {settings.paper.source}.{' ' + settings.paper.note if settings.paper.note else ''}")
    return notes + (_search_notes(study) if settings.domains else [])


def _find_choosers(trial: Trial) -> Iterable[Criterion]:
    """Return the criteria of ``run.best`` with the validation data of the trial's run, if it has begun."""
    folder, config = trial.run_dir / "population", trial.config
    population = Population.load(folder, features=False) if folder.exists() else None
    return config.make_selection(population).for_best.values()


def _search_notes(study: Study) -> list[str]:
    settings, metric = study.settings, study.first.metric
    notes = ["Draws are ranked by the headline: finished ones first, worthless ones last."]
    if metric.split == "test":
        notes.append(
            "The best settings are chosen on the test data: their score is too good an estimate of that on new data."
        )
    if settings.scheduler.name != "none":
        notes.append(
            f"Scheduler: {label_of(settings.scheduler.model_dump(mode='json'))}. It is Ray Tune's, and so is its memory: an "
            f"interrupted study compares its trials with those that continued, and may stop others than it would have stopped."
        )
    if settings.population is not None:
        notes.append(
            "A member of the population has the settings of its last exchange. Its result depends on all settings that it and its "
            "parents had (branches in its run.json): training with the best settings from the first round is another training."
        )
    return notes


def _describe_features(study: Study) -> list[str]:
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
