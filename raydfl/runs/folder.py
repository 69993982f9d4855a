"""The folder of a run: creation, feature cache, run.json and exported models. Commits are in engine.storage."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raydfl.cluster import check_persistent, is_job, prepare_sites
from raydfl.core import ops, part_names
from raydfl.core.errors import ConfigError, DataError, RunDirectoryError, printable
from raydfl.core.files import default_cache, write_durably
from raydfl.core.lock import FileLock
from raydfl.core.tensor_file import to_safetensors
from raydfl.core.types import ModelSpec
from raydfl.core.version import __version__
from raydfl.data import Population, build_population, upgrade_population
from raydfl.engine import (
    Clients,
    Config,
    build_models,
    describe_run,
    find_best,
    find_received_entries,
    label_entry,
    prepare_examples,
    prepare_privacy,
    try_models,
)
from raydfl.engine.storage import (
    Commit,
    RunStore,
    approve_code,
    check_same,
    code_of,
    file_name_of,
    final_commit,
    local_runs,
    mirror_of,
    read_about,
    remember_code,
    write_config,
)
from raydfl.rules import Gaussian
from raydfl.runs.progress import Progress
from raydfl.runs.verdict import find_few_clips
from raydfl.training import find_fixed_tensors


def ensure_features(run_dir: Path, config: Config, progress: Progress) -> None:
    """Rebuild the run's feature cache if it is missing, corrupt or on another machine.

    Raises:
        DataError: The recordings are missing, too.
        RunDirectoryError: The recordings are not the run's, or its population is damaged.
    """
    folder = run_dir / "population"
    upgrade_population(folder)
    try:
        Population.load(folder, verify_features=True)
        return
    except DataError as error:
        problem = str(error).rpartition(". ")[0]  # without the remedy, which is the next step here
    progress.message(f"{problem}. Rebuilding the features.")
    try:
        population = build_population(
            config.data, config.run.seed, progress, attack=config.components.attack, labels_needed=config.labels_needed
        )
    except DataError as error:
        raise DataError(f"{problem}. Rebuilding the features failed: {error}") from error
    if not population.is_saved_in(folder):
        raise RunDirectoryError(
            f"{run_dir}: the feature cache is lost, and the recordings have changed since the run began. Restore the "
            f"recordings, or start a new run in another folder."
        )
    population.save(folder, again=True)


_PATIENCE = 20.0
"""Seconds to wait for a process that holds the run, because it may be about to stop."""


@contextlib.contextmanager
def lock_run_dir(run_dir: Path, progress: Progress) -> Iterator[None]:
    """Lock a run's folder while this process prepares the run, requests its rounds and writes the report.

    The committing process (with Ray, a different one) also holds the RunStore's lock. A new folder is removed if the run fails
    before its first commit, unless sites have prepared data for it.

    Raises:
        RunDirectoryError: Another process holds the folder, or it cannot be written.
    """
    missing = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    lock = FileLock(run_dir / ".driver.lock")
    try:
        try:
            lock.acquire(wait=0.0)
        except RunDirectoryError as error:
            progress.message(f"waiting up to {_PATIENCE:g} s: {error}")
            lock.acquire(_PATIENCE)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot create the run directory {run_dir}: {error.strerror}. Choose another `run.dir`."
        ) from error
    try:
        yield
    except BaseException:
        if run_dir in missing and not any((run_dir / name).exists() for name in ("LATEST", "sites.key")):
            # Renaming is atomic. Another process may recreate the folder while its files are being removed.
            shutil.rmtree(run_dir.rename(run_dir.with_name(f".{uuid.uuid4().hex}.part")), ignore_errors=True)
            with contextlib.suppress(OSError):
                for folder in missing[1:]:
                    folder.rmdir()
        raise
    finally:
        lock.release()


def locate_run_dir(config: Config, progress: Progress) -> Path:
    """Return the local folder of the configured run. It may not exist yet. Without ``run.name``, each call returns a new name.

    Raises:
        ConfigError: The machine would lose the run's files or its feature cache.
    """
    check_persistent({"run.dir": config.run.dir, "data.cache": config.data.cache or default_cache()})
    if config.run.name is None and is_job():
        progress.message(
            "run.name is not set, so submitting this job again starts a new run. Set it to resume the run instead."
        )
    method, data = _simplify_name(config.method["name"]), _simplify_name(config.data.title)
    name = config.run.name or f"{method}-{data}-{datetime.now().astimezone():%Y%m%d-%H%M%S-%f}"
    return local_runs(config.run.dir, config.data.cache) / name


def create(config: Config, progress: Progress) -> Path:
    """Create the configured run's folder, or check that an existing one can be resumed. :func:`prepare_run` has the errors."""
    run_dir = locate_run_dir(config, progress)
    with lock_run_dir(run_dir, progress):
        prepare_run(run_dir, config, progress)
    return run_dir


def prepare_run(run_dir: Path, config: Config, progress: Progress) -> None:
    """Write the configuration and the population to a run's folder, unless it has them already.

    Args:
        run_dir: From :func:`locate_run_dir`, locked by :func:`lock_run_dir`.

    Raises:
        RunDirectoryError: The folder belongs to another configuration.
    """
    approve_code(config.model_dump(mode="json"))
    mirror = mirror_of(config.run.dir, run_dir)
    if mirror is not None and mirror.fetch(config.ray.actors == 0):
        progress.message(f"the run was fetched from {mirror.uri} to {run_dir}")
    if (run_dir / "run.json").exists() and not _remove_unstarted_run(run_dir, config):
        check_same(run_dir, config)
        write_config(run_dir, config)
        if remember_code(run_dir, config.model_dump(mode="json")):
            progress.message("your own code has changed since the run began. The run continues with the current code.")
        ensure_features(run_dir, config, progress)
        return
    if RunStore(run_dir).commits():
        raise RunDirectoryError(
            f"{run_dir} contains rounds of a run, but its run.json is missing. Restore it from a copy, give the new run another "
            f"`run.name`, or remove the folder."
        )
    if config.data.sites:
        population = prepare_sites(config, run_dir, progress)
    else:
        population = build_population(
            config.data, config.run.seed, progress, attack=config.components.attack, labels_needed=config.labels_needed
        )
    config.check_needs({name: part.pools for name, part in population.parts.items() if part.has_clips})
    _check_ids(config)
    clients = Clients(population, config)
    eligible = clients.eligible
    for name in config.phases.names:
        config.train.resolve_phase(name).cohort_size(eligible)
    models = try_models(config, population)
    remarks = _collect_remarks(config, population)
    if eligible < len(population):
        remarks.append(f"train.clients: {eligible} of {len(population)} clients may take part")
    answers, data = config.components.method.objective.answers, config.data
    few = find_few_clips(population, data.features.kind, data.name) if answers in ("class", "set") else ()
    for message in (*population.messages, *remarks, *few):  # The verdict repeats the remarks on few clips.
        progress.message(message)
    privacy = None
    if isinstance(config.components.rule, Gaussian):
        privacy = prepare_privacy(config, run_dir, eligible)
        progress.message(f"privacy: {describe_run(privacy, config.train.rounds)[1]}")
    elif config.train.optimiser.private is not None:
        privacy, text = prepare_examples(config, run_dir, population, clients)
        progress.message(f"privacy: {text}, if each client takes part in the expected number of rounds")
    write_new_run(run_dir, config, population, models, remarks, privacy)


def _check_ids(config: Config) -> None:
    """Reject duplicates in ``train.clients.ids``. Only new runs are checked, because earlier versions accepted them."""
    ids = [] if config.train.clients is None else config.train.clients.ids or []
    for client, times in Counter(ids).items():
        if times > 1:
            raise ConfigError(
                f"train.clients.ids: {client!r} is listed {times} times. A client is drawn at most once per round. List it once."
            )


def _collect_remarks(config: Config, population: Population) -> list[str]:
    """Collect the objective's remarks on the clients' data, for each part of the data."""
    remarks = {part: config.components.method.objective.remarks(data) for part, data in population.parts.items()}
    return [part_names.qualify(part, ": ", text) for part, texts in remarks.items() for text in texts]


def write_new_run(
    run_dir: Path,
    config: Config,
    population: Population,
    models: Mapping[str, Any],
    remarks: Sequence[str] = (),
    privacy: Mapping[str, Any] | None = None,
) -> None:
    """Write the population, config.yaml and run.json of a new run.

    Args:
        run_dir: An empty or missing folder. Its name becomes the run's.
        config: The run's configuration.
        population: The run's clients.
        models: Descriptions of the models, from :func:`raydfl.engine.probe.try_models`.
        remarks: The objective's remarks on the clients' data, for the report.
        privacy: Mechanism of a run with the rule ``gaussian``.
    """
    population.save(run_dir / "population")
    write_config(run_dir, config)
    about = {
        "id": run_dir.name,
        "created": _format_now(),
        "raydfl": __version__,
        "kernels": ops.kernels(),
        "digest": config.digest(),
        "config": config.model_dump(mode="json"),
        "files": config.files(),
        "code": code_of(config.model_dump(mode="json")),
        "method": config.method["name"],
        "data": config.data.title,
        "classes": list(population.classes),
        "models": models,
        "clients": len(population),
        "skipped": [{"clip": clip, "reason": reason} for clip, reason in population.skipped],
    }
    # run.json of configurations without these features stays equal to that of earlier versions.
    if type(config.components.method).revision > 1:
        about["revision"] = type(config.components.method).revision
    if remarks:
        about["remarks"] = list(remarks)
    if privacy is not None:
        about["privacy"] = dict(privacy)
    if len(config.phases.names) > 1:
        about["phases"] = dict(zip(config.phases.names, (first + 1 for first in config.phases.first), strict=True))
    if config.data.parts:
        about["parts"] = {name: list(part.classes) for name, part in population.parts.items()}
    if any(data.features.normalise == "group" for data in config.data.each.values()):
        about["statistics"] = "training clips"
    write_durably(run_dir / "run.json", json.dumps(about, indent=2).encode())


def record_resume(run_dir: Path, config: Config, about: dict[str, Any], round_index: int, progress: Progress) -> None:
    """Record a resume with this machine's kernels in ``run.json``, and warn if the kernels differ from the last start or resume.

    Args:
        run_dir: The run's folder.
        config: The run's configuration.
        about: Content of ``run.json``. It is changed in place.
        round_index: Number of rounds completed before.
        progress: Shows the warning.
    """
    resumes = about["resumes"] = about.get("resumes") or []
    differing = ops.differing_kernels((resumes or [about])[-1].get("kernels") or {})
    resumes.append({"round": round_index, "at": _format_now(), "raydfl": __version__, "kernels": ops.kernels()})
    write_about(run_dir, config, about)
    if differing and config.ray.gpus == 0:
        progress.message(
            f"warning: the run resumes on other kernels ({printable(differing)}). Its last digits may differ from an "
            f"uninterrupted run."
        )


def write_about(run_dir: Path, config: Config, about: Mapping[str, Any]) -> None:
    """Write ``run.json`` to the folder and to its mirror."""
    write_durably(run_dir / "run.json", json.dumps(about, indent=2).encode())
    mirror = mirror_of(config.run.dir, run_dir)
    if mirror is not None:
        mirror.put("run.json")


def _format_now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _remove_unstarted_run(run_dir: Path, config: Config) -> bool:
    """Remove a run of another configuration without a completed round from the folder. Return whether the folder had one.

    A failed start (too few CPUs, an option that the method rejects) must not block the corrected run.
    """
    store = RunStore(run_dir)
    if any(store.rounds()) or read_about(run_dir)["digest"] == config.digest():
        return False
    store.lock(wait=1.0)
    try:
        for name in ("run.json", "LATEST"):  # These make the folder a run, so they are removed first.
            (run_dir / name).unlink(missing_ok=True)
        for name in ("commits", "rows", "private", "population"):
            shutil.rmtree(run_dir / name, ignore_errors=True)
    finally:
        store.unlock()
    return True


def _collect_fixed_tensors(config: Config, clients: Clients) -> dict[str, dict[str, Tensor]]:
    """Return the initial fixed tensors of the models, by part of the data. Models that differ between clients are omitted."""
    return {part: _build_fixed_tensors(config, variants) for part, variants in clients.variants_of_parts().items()}


def _build_fixed_tensors(config: Config, variants: Sequence[tuple[ModelSpec, ...]]) -> dict[str, Tensor]:
    """Build each variant's models, and return the fixed tensors of models that are equal in all variants."""
    tensors: dict[str, Tensor] = {}
    unequal: set[str] = set()
    for models in [build_models(config.components.method, specs, config.run.seed) for specs in variants]:
        for name in sorted(find_fixed_tensors(models, config.components.method.fixed)):
            model, _, key = name.partition("/")
            tensor = models[model].state_dict()[key].detach().contiguous()
            if not torch.equal(tensors.setdefault(name, tensor), tensor):
                unequal.add(model)
    return {name: tensor for name, tensor in tensors.items() if name.partition("/")[0] not in unequal}


def _simplify_name(name: str) -> str:
    return name.rpartition(":")[2].lower()


def export(run_dir: Path, config: Config) -> list[Path]:
    """Write the shared models to ``model.safetensors``, or to a ``model-<key>.safetensors`` per key of the server's state.

    If several keys hold models, only the keys sent to clients are written. Tensors are named ``model/layer.weight``. The metadata
    contain the architecture, classes, features and round. A model's fixed tensors are in each file with tensors of the model.
    With ``run.best``, ``model-best.safetensors`` or ``model-best-<key>.safetensors`` contain the best round's models. Their
    metadata add the metric and its value.
    """
    population = Population.load(run_dir / "population", features=False)
    clients = Clients(population, config)
    paths = _export(run_dir, config, clients, final_commit(run_dir), "model", {})
    best = find_best(run_dir, config)
    if best is not None:
        leader = best.leader
        chosen = {"metric": leader.criterion.metric, "value": leader.value, "chosen_by": leader.criterion.chooser}
        paths += _export(run_dir, config, clients, best.commit, "model-best", {"best": json.dumps(chosen)})
    return paths


def _export(
    run_dir: Path,
    config: Config,
    clients: Clients,
    commit: Commit,
    stem: str,
    extra: Mapping[str, str],
) -> list[Path]:
    """Write the shared models of one round to files named after ``stem``, with ``extra`` metadata."""
    about, state, fixed = read_about(run_dir), commit.state, _collect_fixed_tensors(config, clients)
    names = tuple(f"{name}/" for name in config.components.models)
    keys = [
        key for key, entry in state.tensors.items() if any(part_names.plain_name(n).startswith(names) for n in entry)
    ]
    if len(keys) > 1:
        received = find_received_entries(config, state, clients, commit.begun)
        keys = [key for key in keys if key in received]
    paths = []
    for key, (part, data) in itertools.product(keys, config.data.each.items()):
        tensors = part_names.select_part(state.tensors[key], part)
        models = {n: t.contiguous() for n, t in tensors.items() if n.startswith(names)}
        if not models:
            continue
        exported = {n.partition("/")[0] for n in models}
        models |= {n: t for n, t in fixed[part].items() if n not in models and n.partition("/")[0] in exported}
        path = run_dir / f"{'-'.join([stem, *map(file_name_of, label_entry(part, key))])}.safetensors"
        metadata = {
            "raydfl": about["raydfl"],
            "key": key,
            "round": str(state.round_index),
            "method": json.dumps(config.method),
            "models": json.dumps(about["models"]),
            "classes": json.dumps(clients.classes_of(part)),
            "features": data.features.model_dump_json(),
            **extra,
            **part_names.describe_part(part),
        }
        write_durably(path, to_safetensors(models, metadata))
        paths.append(path)
    return paths
