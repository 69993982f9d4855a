"""The folder of a run, apart from its commits: made here, read back here, exported from here."""

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
from raydfl.engine import Clients, Config, build_models, find_best, find_received_entries, label_entry, try_models
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
from raydfl.runs.progress import Progress
from raydfl.training import find_fixed_tensors


def ensure_features(run_dir: Path, config: Config, progress: Progress) -> None:
    """Make the features of a run again where the cache that it used has gone or is damaged, or is that of another machine.

    Raises:
        DataError: the recordings are not there either.
        RunDirectoryError: they are not those of the run, or its population is damaged.
    """
    folder = run_dir / "population"
    upgrade_population(folder)
    try:
        Population.load(folder, verify_features=True)
        return
    except DataError as error:
        lost = str(error).partition("; ")[0]
    progress.message(f"{lost}: they are made again")
    try:
        population = build_population(
            config.data, config.run.seed, progress, attack=config.parts.attack, labels_needed=config.labels_needed
        )
    except DataError as error:
        raise DataError(f"{lost}, and they cannot be made again: {error}") from error
    if not population.is_saved_in(folder):
        raise RunDirectoryError(
            f"the recordings have changed since {run_dir} began, and its features are lost; restore the recordings, or start the "
            f"run again in a new folder"
        )
    population.save(folder, again=True)


_PATIENCE = 20.0
"""Seconds for which a process waits for the one that has the run: it may be about to stop."""


@contextlib.contextmanager
def driving(run_dir: Path, progress: Progress) -> Iterator[None]:
    """Hold a run's folder while this process prepares the run, asks for its rounds and writes what comes after them.

    Who commits (in Ray another process) holds the RunStore's lock besides. A run that ends with an error before its first commit
    leaves nothing behind, unless its folder was there before, or sites have been asked: the next start takes its place there.

    Raises:
        RunDirectoryError: another process holds the folder, or it cannot be written.
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
        raise RunDirectoryError(f"cannot make the run directory {run_dir}: {error.strerror}") from error
    try:
        yield
    except BaseException:
        if run_dir in missing and not any((run_dir / name).exists() for name in ("LATEST", "sites.key")):
            # First away with it at once: another process may be about to make it again.
            shutil.rmtree(run_dir.rename(run_dir.with_name(f".{uuid.uuid4().hex}.part")), ignore_errors=True)
            with contextlib.suppress(OSError):
                for folder in missing[1:]:
                    folder.rmdir()
        raise
    finally:
        lock.release()


def folder_of(config: Config, progress: Progress) -> Path:
    """Return the local folder of the configured run, which need not be there; without ``run.name`` a new one at every call.

    Raises:
        ConfigError: what the run writes would be lost.
    """
    check_persistent({"run.dir": config.run.dir, "data.cache": config.data.cache or default_cache()})
    if config.run.name is None and is_job():
        progress.message(
            "run.name is not set, so the same job submitted again will not go on with this run but start another"
        )
    name = (
        config.run.name
        or f"{_short(config.method['name'])}-{_short(config.data.title)}-{datetime.now().astimezone():%Y%m%d-%H%M%S-%f}"
    )
    return local_runs(config.run.dir, config.data.cache) / name


def create(config: Config, progress: Progress) -> Path:
    """Make the configured run's folder, or see that the one that is there can be gone on with; see :func:`prepare_run`."""
    run_dir = folder_of(config, progress)
    with driving(run_dir, progress):
        prepare_run(run_dir, config, progress)
    return run_dir


def prepare_run(run_dir: Path, config: Config, progress: Progress) -> None:
    """Write configuration and population into a run's folder; one of the same configuration is left as it is.

    Args:
        run_dir: from :func:`folder_of`, held by :func:`driving`.

    Raises:
        RunDirectoryError: the folder belongs to another configuration.
    """
    approve_code(config.model_dump(mode="json"))
    mirror = mirror_of(config.run.dir, run_dir)
    if mirror is not None and mirror.fetch():
        progress.message(f"the run was fetched from {mirror.uri} to {run_dir}")
    if (run_dir / "run.json").exists() and not _forget_unbegun(run_dir, config):
        check_same(run_dir, config)
        write_config(run_dir, config)
        if remember_code(run_dir, config.model_dump(mode="json")):
            progress.message("code of your own has changed since the run began; the run goes on with it as it is now")
        ensure_features(run_dir, config, progress)
        return
    if RunStore(run_dir).commits():
        raise RunDirectoryError(
            f"{run_dir} holds rounds of a run, but its run.json is missing; restore it from a copy, give the new run another "
            f"run.name, or remove the folder"
        )
    if config.data.sites:
        population = prepare_sites(config, run_dir, progress)
    else:
        population = build_population(
            config.data, config.run.seed, progress, attack=config.parts.attack, labels_needed=config.labels_needed
        )
    config.check_needs({name: part.pools for name, part in population.parts.items() if part.has_clips})
    _check_ids(config)
    eligible = Clients(population, config).eligible
    for name in config.phases.names:
        config.train.resolve_phase(name).cohort_size(eligible)
    models = try_models(config, population)
    remarks = _remarks(config, population)
    if config.train.clients is not None:
        remarks.append(f"train.clients: {eligible} of {len(population)} clients may take part")
    for message in (*population.messages, *remarks):
        progress.message(message)
    begin(run_dir, config, population, models, remarks)


def _check_ids(config: Config) -> None:
    """Refuse a client that ``train.clients.ids`` lists twice. A run that began with such a list keeps it."""
    ids = [] if config.train.clients is None else config.train.clients.ids or []
    for client, times in Counter(ids).items():
        if times > 1:
            raise ConfigError(
                f"train.clients.ids lists {client!r} {times} times; a client is drawn at most once, so list it once"
            )


def _remarks(config: Config, population: Population) -> list[str]:
    """Return what the objective says of the clients' data, of each part."""
    of_parts = {part: config.parts.method.objective.remarks(each) for part, each in population.parts.items()}
    return [part_names.qualify(part, ": ", text) for part, texts in of_parts.items() for text in texts]


def begin(
    run_dir: Path,
    config: Config,
    population: Population,
    models: Mapping[str, Any],
    remarks: Sequence[str] = (),
) -> None:
    """Write what makes a folder the folder of a run that has done no round yet.

    Args:
        run_dir: an empty folder, or one that is not there yet; its name becomes the run's.
        models: as :func:`raydfl.engine.probe.try_models` describes them.
        remarks: what the objective says of the clients' data; the report shows it.
    """
    population.save(run_dir / "population")
    write_config(run_dir, config)
    about = {
        "id": run_dir.name,
        "created": _now(),
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
    if type(config.parts.method).revision > 1:
        about["revision"] = type(config.parts.method).revision
    if remarks:
        about["remarks"] = list(remarks)
    if len(config.phases.names) > 1:
        about["phases"] = dict(zip(config.phases.names, (first + 1 for first in config.phases.first), strict=True))
    if config.data.parts:
        about["parts"] = {name: list(part.classes) for name, part in population.parts.items()}
    if any(data.features.normalise == "group" for data in config.data.each.values()):
        about["statistics"] = "training clips"
    write_durably(run_dir / "run.json", json.dumps(about, indent=2).encode())


def note_resume(run_dir: Path, config: Config, about: dict[str, Any], round_index: int, progress: Progress) -> None:
    """Record a resume with this machine's kernels in ``run.json``, and warn if they are not those of the last start or resume.

    Args:
        about: what ``run.json`` holds; changed.
        round_index: rounds completed before.
    """
    resumes = about["resumes"] = about.get("resumes") or []
    differing = ops.differing_kernels((resumes or [about])[-1].get("kernels") or {})
    resumes.append({"round": round_index, "at": _now(), "raydfl": __version__, "kernels": ops.kernels()})
    write_about(run_dir, config, about)
    if differing and config.ray.gpus == 0:
        progress.message(
            f"warning: the run resumes on other kernels ({printable(differing)}): its last digits may differ from those of an "
            f"uninterrupted run"
        )


def write_about(run_dir: Path, config: Config, about: Mapping[str, Any]) -> None:
    """Write ``run.json``, also to the mirror."""
    write_durably(run_dir / "run.json", json.dumps(about, indent=2).encode())
    mirror = mirror_of(config.run.dir, run_dir)
    if mirror is not None:
        mirror.put("run.json")


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _forget_unbegun(run_dir: Path, config: Config) -> bool:
    """Remove another configuration's run without a completed round from the folder; return whether there was one.

    A start that failed (too few CPUs, an option that the method refuses) must not stand in the way of the corrected one.
    """
    store = RunStore(run_dir)
    if any(store.rounds()) or read_about(run_dir)["digest"] == config.digest():
        return False
    store.lock(wait=1.0)
    try:
        for name in ("run.json", "LATEST"):  # first what makes it a run
            (run_dir / name).unlink(missing_ok=True)
        for name in ("commits", "rows", "private", "population"):
            shutil.rmtree(run_dir / name, ignore_errors=True)
    finally:
        store.unlock()
    return True


def _fixed_tensors(config: Config, clients: Clients) -> dict[str, dict[str, Tensor]]:
    """Return the fixed tensors of the models by part, as they are built; of a model that clients build differently none."""
    return {part: _fixed_of_all(config, of_part) for part, of_part in clients.variants_of_parts().items()}


def _fixed_of_all(config: Config, variants: Sequence[tuple[ModelSpec, ...]]) -> dict[str, Tensor]:
    built = [build_models(config.parts.method, specs, config.run.seed) for specs in variants]
    found: dict[str, Tensor] = {}
    unlike: set[str] = set()
    for models in built:
        for name in sorted(find_fixed_tensors(models, config.parts.method.fixed)):
            model, _, key = name.partition("/")
            tensor = models[model].state_dict()[key].detach().contiguous()
            if not torch.equal(found.setdefault(name, tensor), tensor):
                unlike.add(model)
    return {name: tensor for name, tensor in found.items() if name.partition("/")[0] not in unlike}


def _short(name: str) -> str:
    return name.rpartition(":")[2].lower()


def export(run_dir: Path, config: Config) -> list[Path]:
    """Write the shared models as safetensors: ``model.safetensors``, or ``model-<key>.safetensors`` for each of several keys.

    If several entries of the state hold models, only those that clients receive are written.

    Tensor names are ``model/layer.weight``; the metadata says architecture, classes, features and round. What is fixed of a model
    is in the file of each key that has tensors of the model. With ``run.best`` those of the best round are beside them, in
    ``model-best.safetensors`` and ``model-best-<key>.safetensors``, which also say by which metric and value.
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
    more: Mapping[str, str],
) -> list[Path]:
    """Write the shared models of one round.

    Args:
        stem: of the files' names.
        more: metadata.
    """
    about, state, fixed = read_about(run_dir), commit.state, _fixed_tensors(config, clients)
    names = tuple(f"{name}/" for name in config.parts.models)
    keys = [key for key, each in state.tensors.items() if any(part_names.plain_name(n).startswith(names) for n in each)]
    if len(keys) > 1:
        received = find_received_entries(config, state, clients, commit.begun)
        keys = [key for key in keys if key in received]
    paths = []
    for key, (part, data) in itertools.product(keys, config.data.each.items()):
        tensors = part_names.of_part(state.tensors[key], part)
        models = {n: t.contiguous() for n, t in tensors.items() if n.startswith(names)}
        if not models:
            continue
        there = {n.partition("/")[0] for n in models}
        models |= {n: t for n, t in fixed[part].items() if n not in models and n.partition("/")[0] in there}
        path = run_dir / f"{'-'.join([stem, *map(file_name_of, label_entry(part, key))])}.safetensors"
        metadata = {
            "raydfl": about["raydfl"],
            "key": key,
            "round": str(state.round_index),
            "method": json.dumps(config.method),
            "models": json.dumps(about["models"]),
            "classes": json.dumps(clients.classes_of(part)),
            "features": data.features.model_dump_json(),
            **more,
            **part_names.describe_part(part),
        }
        write_durably(path, to_safetensors(models, metadata))
        paths.append(path)
    return paths
