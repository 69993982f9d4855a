"""Notes of a study's tables: summary, best, control, protocol, features, paper and search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from raydfl.data import DataSettings, Population
from raydfl.data.features import (
    FeatureSettings,
    FileFeatures,
    ImageFeatures,
    KaldiFeatures,
    PretrainedFeatures,
    SpeechEmbeddingFeatures,
)
from raydfl.engine import Config, Criterion
from raydfl.experiments.protocol import CONTROLS, LABELS, MANY_SEEDS, is_untrained
from raydfl.experiments.records import RunResult
from raydfl.experiments.results import StudyResults
from raydfl.experiments.settings import label_of
from raydfl.experiments.statistics import CONFIDENCE, get_kind
from raydfl.experiments.study import Study, Trial, describe_value


def describe_results(results: StudyResults) -> list[str]:
    """Make the notes of the tables about summary, best, control, features, paper and search."""
    study, settings = results.study, results.study.settings
    trials = [trial for contestant in results.contestants for trial in contestant.trials]
    repeats = " or ".join(dict.fromkeys(trial.repeat.partition("=")[0] for trial in trials if trial.repeat))
    over = f"; mean ± sample standard deviation over {repeats}" if repeats else ""
    counts = {contestant.n for contestant in results.contestants}
    runs = f"n = {counts.pop()}" if len(counts) == 1 and results.complete else "n: runs"
    notes = [f"Headline: {results.headline}{over}; {runs}."]
    if results.summary == "chosen":
        choosers = {c.metric: c for trial in trials for c in _find_choosers(trial)}
        notes += [f"{name} chooses the round ({criterion.chooser})." for name, criterion in choosers.items()]
    if results.summary == "best":
        notes.append("The best evaluation is selected on the measured data.")
    kinds = results.kinds_of_evaluations
    if len(kinds) > 1 and not settings.domains:
        notes.append(
            f"Runs have different evaluations ({'; '.join(kinds)}). * marks cells with evaluations other than {kinds[0]}."
        )
    if any(contestant.best for contestant in results.contestants):
        cells = f"of the cells that differ only in {study.axes[-1]}" if study.axes else ""
        notes.append(
            f"Bold: the best {('draw of each cell' if study.axes else 'draw') if settings.domains else cells}."
        )
    if settings.control:
        names = ", ".join(f"{name} {label}" for name, label in settings.control.items())
        notes.append(
            f"Difference: from the cell with {names}, mean of the differences between runs with equal {repeats or 'seed'}, "
            f"with the {100 * CONFIDENCE:.0f} % interval of Student's t (for two or more pairs)."
        )
    measured = [contestant for contestant in results.contestants if contestant.results]
    notes += [
        f"No run measured {metric.score} on {metric.split}. Change the score or the split in also."
        for place, metric in enumerate(measured[0].metrics[1:] if measured else (), start=1)
        if not any(contestant.find_curves(place) for contestant in measured)
    ]
    notes += describe_protocol(results)
    notes += _describe_features(study)
    if settings.paper is not None:
        notes.append(f"Paper: {settings.paper.source}.{' ' + settings.paper.note if settings.paper.note else ''}")
    if settings.domains:
        notes.append("Draws are ranked by the headline, finished draws first and worthless draws last.")
    if settings.domains and study.first.metric.split == "test":
        notes.append(
            "The best settings are chosen on the test data, so their score is an optimistic estimate for new data."
        )
    if settings.scheduler.name != "none":
        notes.append(
            f"Scheduler: {label_of(settings.scheduler.model_dump(mode='json'))}. Ray Tune keeps its state in memory. After an "
            f"interruption, it compares only resumed and new trials, so it may stop different trials."
        )
    if settings.population is not None:
        notes.append(
            "A member of the population has the settings of its last exchange. Its result also depends on earlier settings "
            "(branches in its run.json), so training from round 1 with the best settings differs."
        )
    return notes


def describe_protocol(results: StudyResults) -> list[str]:
    """Make the notes about the protocol: comparisons, contestants without learning, plateau, tuning, controls, provenance."""
    settings = results.study.settings
    unlearned = "; ".join(
        contestant.name
        for contestant in results.contestants
        if not contestant.learned and not is_untrained(contestant.labels)
    )
    notes = [
        f"Did not learn, so not ranked: {unlearned}. The score is within two standard errors of chance or majority."
    ]
    notes = notes if unlearned else []
    if settings.domains:
        return notes
    if not settings.confirmatory:
        return ["Exploratory: the study draws no conclusions.", *notes, *_describe_pairs(results)]
    count = results.study.comparisons
    return [
        f"Smallest difference of interest: {settings.difference:g}. A conclusion needs a significant difference after Holm's "
        f"correction ({count} comparison{'s' * (count != 1)}).",
        *notes,
        *_describe_undecided(results),
        *_describe_pairs(results),
        *_describe_last_evaluations(results),
        *_describe_plateaus(results),
        *_describe_tuning(results.study),
        *_describe_controls(results.study),
        *_describe_provenance(results),
    ]


def _describe_undecided(results: StudyResults) -> Iterator[str]:
    """List undecided comparisons: the differences spread too much for the number of repeats."""
    smallest, count = results.study.settings.difference or 0.0, results.study.comparisons
    trained = (part for part in results.contestants if part.learned and not is_untrained(part.labels))
    found = {part.name: part.difference for part in trained if part.difference is not None}
    undecided = [
        f"{name} ({difference.spread:.1f})"
        for name, difference in found.items()
        if 1 < difference.n < MANY_SEEDS and not difference.excludes_zero and not difference.is_below(smallest, count)
        if 2 * difference.spread > smallest
    ]
    if undecided:
        yield (
            f"Undecided, because the differences of equal seeds spread too much for fewer than {MANY_SEEDS} repeats (standard "
            f"deviation): {'; '.join(undecided)}."
        )


def _describe_pairs(results: StudyResults) -> Iterator[str]:
    for name, (difference, conclusion) in results.further.items():
        yield f"{name}: {difference}, n = {difference.n}{f': {conclusion}' * bool(conclusion)}."


def _describe_last_evaluations(results: StudyResults) -> Iterator[str]:
    """List conclusions changed by the last evaluation alone. A mean favours fast methods while scores still improve."""
    changed = [f"{part.name} {part.difference}, {get_kind(part.conclusion)}" for part in results.changed]
    if changed:
        yield f"Other conclusions in the last evaluation: {'; '.join(changed)}."


def _describe_plateaus(results: StudyResults) -> Iterator[str]:
    rule, found = results.study.settings.plateau, results.plateaus
    if rule is None:
        return
    rounds = [f"{', '.join(labels)} {at:.0f}" for labels, at in found.items() if at is not None]
    if rounds:
        yield (
            f"Plateau, the round after which the best held-out {rule.score or 'score'} improves by less than {rule.rise:g} (of "
            f"{results.study.rounds} rounds): {'; '.join(rounds)}."
        )
    rising = [", ".join(labels) for labels, at in found.items() if at is None]
    if rising:
        yield f"Unfinished training, still improving in the last {rule.evaluations} evaluations: {'; '.join(rising)}."
    trained = (part for part in results.contestants if part.results and not is_untrained(part.labels))
    unknown = [part.name for part in trained if part.labels not in found]
    if unknown:
        yield f"No held-out score, so it is not known whether training is finished: {'; '.join(unknown)}."


def _describe_tuning(study: Study) -> Iterator[str]:
    if study.settings.tuned is None:
        yield "Settings are not tuned per contestant."
        return
    draws = max(tuned.draws for tuned in study.tuned.values())
    repeats = sorted({tuned.repeats for tuned in study.tuned.values()})
    yield (
        f"Tuning: {draws} trials per contestant on {' or '.join(map(str, repeats))} other repeat{'s' * (repeats != [1])}, "
        f"chosen by the score on held-out data ({study.settings.tuned})."
    )
    own = {labels: tuned for labels, tuned in study.tuned.items() if tuned.own}
    for labels, tuned in own.items():
        values = " ".join(f"{key}={describe_value(value)}" for key, value in tuned.values.items())
        yield f"Tuned settings of {', '.join(labels)}: {values}."
    extreme = [labels for labels, tuned in own.items() if tuned.extreme]
    if extreme:
        yield f"Best at an end of the tried range, so a wider range may be better: {_list_contestants(study, extreme)}."
    unlearned = [labels for labels, tuned in own.items() if not tuned.learned]
    if unlearned:
        yield (
            f"Did not learn in the search, so their settings are chosen at random: {_list_contestants(study, unlearned)}. Train "
            f"longer there."
        )
    lacking = [labels for labels, tuned in study.tuned.items() if not tuned.own and not is_untrained(labels)]
    if lacking:
        yield f"Not tuned, with the settings of the control: {_list_contestants(study, lacking)}."


def _list_contestants(study: Study, cells: Iterable[tuple[str, ...]]) -> str:
    """List the labels of cells on the axis of contestants."""
    place = study.axes.index(study.contestants_axis)
    return ", ".join(dict.fromkeys(labels[place] for labels in cells))


def _describe_controls(study: Study) -> Iterator[str]:
    labels = study.settings.axes[study.contestants_axis]
    absent = [name for name in CONTROLS if name not in study.settings.controls and LABELS.get(name) not in labels]
    if absent:
        yield f"Controls outside the study: {', '.join(absent)}."


def _describe_provenance(results: StudyResults) -> Iterator[str]:
    known = [result for contestant in results.contestants for result in contestant.results]
    if known:
        commits, processors = (
            ", ".join(dict.fromkeys(str(result.provenance.get(name)) for result in known))
            for name in ("commit", "processor")
        )
        hours = sum(result.budget.get("client seconds", 0.0) for result in known) / 3600
        yield f"Provenance: commits {commits}; {processors}; {len(known)} runs with {hours:.1f} hours of clients' work."
    pairs = [*_list_pairs_of_runs(results)]
    mixed = sum(
        any(first.provenance.get(name) != second.provenance.get(name) for name in ("commit", "processor"))
        for first, second in pairs
    )
    if mixed:
        yield (
            f"{mixed} of {len(pairs)} pairs with the control compare runs of different commits or processors. Their rounding may "
            f"differ, and after many rounds their scores by some points."
        )


def _list_pairs_of_runs(results: StudyResults) -> Iterator[tuple[RunResult, RunResult]]:
    """Yield the runs of each trained contestant with the control's runs of equal repeats."""
    trained = (contestant for contestant in results.contestants if not is_untrained(contestant.labels))
    by_labels = {contestant.labels: contestant for contestant in trained}
    for labels, contestant in by_labels.items():
        control = by_labels.get(results.study.find_control(labels))
        if control is not None and control is not contestant:
            runs = {result.repeat: result for result in control.results}
            yield from ((result, runs[result.repeat]) for result in contestant.results if result.repeat in runs)


def _find_choosers(trial: Trial) -> Iterable[Criterion]:
    """Return the criteria of ``run.best``, with the validation data of the trial's run if it exists."""
    folder, config = trial.run_dir / "population", trial.config
    population = Population.load(folder, features=False) if folder.exists() else None
    return config.make_selection(population).for_best.values()


def _describe_features(study: Study) -> list[str]:
    """Make notes about the input features of a study's networks, with the labels of differing cells."""
    described: dict[str, list[tuple[str, ...]]] = {}
    for labels in study.cells:
        trial = next((trial for trial in study.trials if trial.labels == labels), study.first)
        described.setdefault(describe_features(trial.config), []).append(labels)
    if len(described) == 1:
        return [f"Features: {next(iter(described))}."]
    for place in range(len(study.axes)):  # A single axis may determine the features.
        groups = {text: dict.fromkeys(labels[place] for labels in cells) for text, cells in described.items()}
        if sum(map(len, groups.values())) == len(set().union(*groups.values())):
            return [f"Features ({', '.join(labels)}): {text}." for text, labels in groups.items()]
    return [
        f"Features ({len(cells)} cells, such as {', '.join(cells[0])}): {text}." for text, cells in described.items()
    ]


def describe_features(config: Config) -> str:
    """Describe the input features of a configuration's networks."""
    return "; ".join(dict.fromkeys(_describe_data(data) for data in config.data.each.values()))


def _describe_data(data: DataSettings) -> str:
    features = data.features
    by = {"group": "speaker", "part": "data set"}.get(features.normalise, features.normalise)
    z_score = "not normalised" if by == "none" else f"z-score by {by}"
    if isinstance(features, FileFeatures):
        return f"{features.path.name}, {features.bands} bands, {z_score}"
    if isinstance(features, ImageFeatures):
        return f"images of {features.size[0]} x {features.size[1]}, {features.channels} channels"
    if isinstance(features, KaldiFeatures):
        return f"Kaldi's filter bank, {features.bands} bands at {features.sample_rate / 1000:g} kHz"
    if isinstance(features, PretrainedFeatures | SpeechEmbeddingFeatures):
        return features.title
    kind = "log-mel" if isinstance(features, FeatureSettings) else features.title
    return f"{kind}, {features.bands} bands at {features.sample_rate / 1000:g} kHz, {z_score}"
