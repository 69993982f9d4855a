"""What the folder of a run holds besides its commits: made here, read back here, exported from here."""

from __future__ import annotations

import json
import shutil
import uuid
from datetime import datetime
from pathlib import Path
from typing import Any

import safetensors.torch

import raydfl
from raydfl.clients import Clients
from raydfl.config import Config, make_config
from raydfl.data.build import build_population
from raydfl.data.cache import default_cache
from raydfl.data.population import Population
from raydfl.errors import DataError, InputError, RunDirectoryError
from raydfl.files import write_durably
from raydfl.jobfolder import check_kept, in_a_job
from raydfl.prepare_sites import prepare_sites
from raydfl.progress import Progress
from raydfl.remote.mirror import local_runs, mirror_of
from raydfl.store import RunStore
from raydfl.types import ModelSpec, State
from raydfl.worker import build_models
from raydfl.yaml_text import parse_yaml, to_yaml


def stored_config(run_dir: Path) -> Config:
    """The configuration that a run directory holds.

    Raises:
        RunDirectoryError: it is no run directory, or the run never got as far as its first round.
    """
    if not run_dir.is_dir():
        raise RunDirectoryError(f"there is no run directory {run_dir}")
    path = run_dir / "config.yaml"
    if not path.exists() or not (run_dir / "run.json").exists():
        raise RunDirectoryError(
            f"{run_dir} is not a run directory, or the run was interrupted before it began (config.yaml or run.json is missing): "
            f"start it with raydfl run"
        )
    try:
        return make_config(parse_yaml(path.read_text(encoding="utf-8"), str(path)), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RunDirectoryError(f"{path} cannot be read: {reason}; restore it from a copy") from error
    except InputError as error:
        raise RunDirectoryError(
            f"{path} is damaged, or what it names is gone: {error}; restore it from a copy, or start the run again in a new folder"
        ) from error


_ABOUT = ("id", "digest", "classes", "models", "clients")


def stored_about(run_dir: Path) -> dict[str, Any]:
    """What ``run.json`` says about a run.

    Raises:
        RunDirectoryError: the file is missing or damaged.
    """
    path = run_dir / "run.json"
    try:
        about = json.loads(path.read_bytes())
        missing = [key for key in _ABOUT if key not in about]
        if not isinstance(about, dict) or missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunDirectoryError(
            f"{path} is missing or damaged ({reason}); restore it from a copy, or start the run again in a new folder"
        ) from error
    return about


def ensure_features(run_dir: Path, config: Config, progress: Progress) -> None:
    """Make the features of a run again where the cache that it used has gone, or is that of another machine.

    Raises:
        DataError: the recordings are not there either.
        RunDirectoryError: they are not those of the run, or its population is damaged.
    """
    folder = run_dir / "population"
    try:
        Population.load(folder)
        return
    except DataError:
        progress.message("the features of this run are not in the cache; they are made again")
    population = build_population(config.data, config.run.seed, progress, attack=config.build_attack())
    if not population.is_saved_in(folder):
        raise RunDirectoryError(
            f"the recordings have changed since {run_dir} began, and its features are lost; restore the recordings, or start the "
            f"run again in a new folder"
        )
    population.save(folder)


def create(config: Config, progress: Progress) -> Path:
    """The run's folder with configuration and population; an existing folder of the same configuration is left as it is.

    Raises:
        RunDirectoryError: the folder belongs to another configuration, or cannot be written.
    """
    check_kept({"run.dir": config.run.dir, "data.cache": config.data.cache or default_cache()})
    if config.run.name is None and in_a_job():
        progress.message(
            "run.name is not set, so the same job submitted again will not go on with this run but start another"
        )
    name = (
        config.run.name
        or f"{_short(config.method['name'])}-{_short(config.data.name)}-{datetime.now().astimezone():%Y%m%d-%H%M%S-%f}"
    )
    run_dir = local_runs(config.run.dir, config.data.cache) / name
    mirror = mirror_of(config.run.dir, run_dir)
    if mirror is not None and mirror.fetch():
        progress.message(f"the run was fetched from {mirror.uri} to {run_dir}")
    if (run_dir / "run.json").exists() and not _forget_unbegun(run_dir, config):
        # By the digest that it was made with, if that fits: what its configuration names may have gone with another job's folder.
        if stored_about(run_dir)["digest"] != config.digest():
            check_same(run_dir, stored_config(run_dir), config)
        write_config(run_dir, config)
        ensure_features(run_dir, config, progress)
        return run_dir
    if RunStore(run_dir).commits():
        raise RunDirectoryError(
            f"{run_dir} holds rounds of a run, but its run.json is missing; restore it from a copy, give the new run another "
            f"run.name, or remove the folder"
        )
    site_key = _site_key(run_dir) if config.data.sites else ""
    if config.data.sites:
        population = prepare_sites(config, site_key, run_dir, progress)
    else:
        population = build_population(config.data, config.run.seed, progress, attack=config.build_attack())
    config.train.cohort_size(len(population))
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"cannot make the run directory {run_dir}: {error.strerror}") from error
    for message in population.messages:
        progress.message(message)
    begin(run_dir, config, population, site_key)
    return run_dir


def _site_key(run_dir: Path) -> str:
    """Return the key under which sites keep their part of the run.

    It is written down before they are asked: the next start overwrites what one that was killed has left at the sites.
    """
    path = run_dir / "sites.key"
    if not path.exists():
        write_durably(path, f"{run_dir.name}-{uuid.uuid4().hex[:8]}".encode())
    return path.read_text()


def begin(run_dir: Path, config: Config, population: Population, site_key: str = "") -> None:
    """Write what makes a folder the folder of a run that has done no round yet.

    Args:
        run_dir: an empty folder, or one that is not there yet; its name becomes the run's.
        site_key: under which sites keep their part of the run (raydfl.sites); empty: there are none.
    """
    population.save(run_dir / "population")
    write_config(run_dir, config)
    about = {
        "id": run_dir.name,
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "raydfl": raydfl.__version__,
        "digest": config.digest(),
        "method": config.method["name"],
        "data": config.data.name,
        "classes": list(population.classes),
        "models": _describe_models(config, Clients(population, config)),
        "clients": len(population),
        "skipped": [{"clip": clip, "reason": reason} for clip, reason in population.skipped],
    }
    if site_key:
        about["site_key"] = site_key
    write_durably(run_dir / "run.json", json.dumps(about, indent=2).encode())


def _forget_unbegun(run_dir: Path, config: Config) -> bool:
    """Whether the folder held another configuration's run without a single completed round, which is then removed.

    A start that failed (too few CPUs, an option that the method refuses) must not stand in the way of the corrected one.
    """
    store = RunStore(run_dir)
    if any(store.rounds()) or stored_about(run_dir)["digest"] == config.digest():
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


def _describe_models(config: Config, clients: Clients) -> dict[str, list[dict[str, Any]]]:
    """For every model of the method, its architectures with options, number of parameters, and whether all of it is shared."""
    method = config.build_method()
    described: dict[str, dict[ModelSpec, dict[str, Any]]] = {}
    for client in clients.variants():
        for name, model in build_models(method, client, config.run.seed).items():
            spec = next(spec for spec in client.models if spec.name == name)
            described.setdefault(name, {})[spec] = {
                "architecture": spec.architecture,
                **dict(spec.options),
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "shared": all(method.shared(f"{name}/{key}") for key in model.state_dict()),
            }
    return {name: list(kinds.values()) for name, kinds in described.items()}


def _short(name: str) -> str:
    return name.rpartition(":")[2].lower()


def write_config(run_dir: Path, config: Config) -> None:
    """Write the resolved configuration as ``config.yaml``."""
    write_durably(run_dir / "config.yaml", to_yaml(config.model_dump(mode="json"), flow=False).encode())


def check_same(run_dir: Path, stored: Config, config: Config) -> None:
    """Refuse a configuration that would give other numbers than the stored one.

    Raises:
        RunDirectoryError: naming what differs.
    """
    # Another folder of the same recordings changes nothing: who has which features is kept with the run.
    options = stored.data.model_extra or {}
    kept = {"root": options["root"]} if "root" in options else {}
    moved = config.model_copy(update={"data": config.data.model_copy(update=kept)})
    if stored.digest() == (moved if stored.data.name == config.data.name else config).digest():
        return
    before, after = flat(stored.model_dump(mode="json")), flat(config.model_dump(mode="json"))
    changed = [
        f"{key}: {before.get(key)!r} there, {after.get(key)!r} here"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    ]
    free = ("evaluate.", "ray.", "run.", "track.", "train.rounds", "train.tape", "data.cache", "data.root")
    decisive = [line for line in changed if not line.startswith(free) or line.startswith(("run.seed", "ray.threads"))]
    raise RunDirectoryError(
        f"{run_dir} belongs to another configuration ({'; '.join(decisive[:5])}); "
        f"give the new run another run.name, or remove the folder"
    )


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, ``{"train.rounds": 5}``."""
    if not isinstance(values, dict):
        return {prefix: values}
    result: dict[str, Any] = {}
    for key, value in values.items():
        result.update(flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return result


def final_state(run_dir: Path) -> State:
    """The server's state after the last committed round.

    Raises:
        RunDirectoryError: there is none, or it is damaged.
    """
    store = RunStore(run_dir)
    name = store.latest()
    if name is None:
        raise RunDirectoryError(f"{run_dir} has no committed round yet")
    return store.load(name).state


def export(run_dir: Path, config: Config) -> list[Path]:
    """The shared models as safetensors: ``model.safetensors``, or ``model-<key>.safetensors`` for each of several keys.

    Tensor names are ``model/layer.weight``; the metadata says architecture, classes, features and round.
    """
    state = final_state(run_dir)
    about = stored_about(run_dir)
    names = tuple(type(config.build_method()).models)
    paths = []
    for key, tensors in state.tensors.items():
        models = {n: t.contiguous() for n, t in tensors.items() if n.partition("/")[0] in names}
        if not models:
            continue
        path = run_dir / ("model.safetensors" if key == "global" else f"model-{file_name_of(key)}.safetensors")
        metadata = {
            "raydfl": about["raydfl"],
            "key": key,
            "round": str(state.round_index),
            "method": json.dumps(config.method),
            "models": json.dumps(about["models"]),
            "classes": json.dumps(about["classes"]),
            "features": config.data.features.model_dump_json(),
        }
        write_durably(path, safetensors.torch.save(models, metadata))
        paths.append(path)
    return paths


def file_name_of(key: str) -> str:
    """A key of the server's state, or a model's name, as part of a file's name."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in key)
