"""Recordings of a study's runs: their features, and whether the recordings can be used."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from raydfl.core.errors import InputError, ResourcesError
from raydfl.core.options import path_options
from raydfl.core.remote import is_uri
from raydfl.data import build_population, find_dataset, place_of
from raydfl.data.features import RunChunks
from raydfl.engine import Clients
from raydfl.experiments.files import describe_faults
from raydfl.experiments.study import Trial
from raydfl.runs import Progress


def prepare(trials: Sequence[Trial], progress: Progress, run_chunks: RunChunks | None = None) -> None:
    """Compute the features of the trials, each once, and check that recordings and splits suffice.

    Raises:
        InputError: naming the trials whose recordings cannot be used.
    """
    known: dict[str, int] = {}
    faults: dict[str, list[str]] = {}
    for trial in trials:
        if (trial.run_dir / "run.json").exists():
            continue  # it has its population, and reports what it lacks itself
        settings = trial.config
        if settings.data.sites:
            continue  # its recordings are not here: each site prepares its own when the run begins
        chosen = settings.train.clients
        described = [settings.data.model_dump(mode="json"), None if chosen is None else chosen.model_dump(mode="json")]
        key = json.dumps([*described, settings.run.seed], sort_keys=True)
        try:
            if key not in known:
                population = build_population(
                    settings.data, settings.run.seed, progress, run_chunks, labels_needed=settings.labels_needed
                )
                known[key] = Clients(population, settings).eligible
            settings.train.cohort_size(known[key])
        except ResourcesError:
            raise
        except InputError as error:
            faults.setdefault(str(error), []).append(trial.name)
    if faults:
        count = sum(map(len, faults.values()))
        raise InputError(
            describe_faults(f"{count} of {len(trials)} runs cannot be done; nothing was started", faults, 1)
        )


def check_data_sets(trials: Sequence[Trial]) -> None:
    """Check that the files and folders of the trials' data sets exist, without reading any. Begun runs and URIs are skipped.

    Raises:
        InputError: naming the missing paths, each with the trials that need it.
    """
    faults: dict[str, list[str]] = {}
    for trial in trials:
        data = trial.config.data
        if data.sites or (trial.run_dir / "run.json").exists():
            continue  # recordings at sites are checked there; a begun run has its list of clips
        for part, settings in data.each.items():
            dataset, where = find_dataset(settings.name), place_of(part)
            for option in path_options(dataset):
                path = (settings.model_extra or {}).get(option)
                if path is not None and not is_uri(path) and not os.path.exists(path):  # noqa: PTH110  (pathlib's may raise)
                    source = f" The set is at {dataset.card.url}." * bool(dataset.card.url)
                    message = f"{dataset.card.title}: {where}.{option} {path} does not exist. Correct {where}.{option}.{source}"
                    faults.setdefault(message, []).append(trial.name)
    if faults:
        count = len(set().union(*faults.values()))
        raise InputError(describe_faults(f"{count} of {len(trials)} runs have no recordings", faults, 1))
