"""What the folder of a run holds besides its commits: made here, read back here, exported from here."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import raydfl
from raydfl.clients import Clients
from raydfl.config import Config, make_config
from raydfl.data.build import build_population
from raydfl.data.cache import default_cache
from raydfl.data.population import Population
from raydfl.errors import DataError, InputError, RunDirectoryError
from raydfl.files import plain_name, write_durably
from raydfl.jobfolder import check_kept, in_a_job
from raydfl.lock import FileLock
from raydfl.prepare_sites import prepare_sites
from raydfl.progress import Progress
from raydfl.remote.mirror import local_runs, mirror_of
from raydfl.store import RunStore
from raydfl.tensor_file import to_safetensors
from raydfl.trial import try_models
from raydfl.trust import check_code, code_of, remember_code
from raydfl.types import ModelSpec, State
from raydfl.worker import build_models
from raydfl.yaml_text import parse_yaml, to_yaml


def check_begun(run_dir: Path) -> None:
    """Refuse a folder that is none of a run that was prepared.

    Raises:
        RunDirectoryError: it is no run directory, or the run never got as far as its first round.
    """
    if not run_dir.is_dir():
        raise RunDirectoryError(f"there is no run directory {run_dir}")
    if not (run_dir / "config.yaml").exists() or not (run_dir / "run.json").exists():
        raise RunDirectoryError(
            f"{run_dir} is not a run directory, or the run was interrupted before it began (config.yaml or run.json is missing): "
            f"start it with raydfl run"
        )


def stored_config(run_dir: Path, trust: bool = False) -> Config:
    """Return the configuration that a run directory holds.

    Args:
        trust: whether code that came with the folder, or has changed since the run began, may be run; see :mod:`raydfl.trust`.

    Raises:
        RunDirectoryError: it is no run directory, or ``config.yaml`` is damaged or not what the run began with; or code in the
            folder is not trusted, or a file that it names has changed.
    """
    check_begun(run_dir)
    config = _read_config(run_dir, trust)
    check_files(run_dir, config)
    differing = _differing(run_dir, config, trust)
    if differing:
        raise RunDirectoryError(
            f"{run_dir / 'config.yaml'} was changed since the run began ({differing}), and its numbers are not those of these "
            f"settings; write the former values back, or start a new run with these: raydfl run {run_dir / 'config.yaml'} "
            f"run.name=NAME"
        )
    return config


def _stored_values(run_dir: Path) -> Any:
    path = run_dir / "config.yaml"
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RunDirectoryError(f"{path} cannot be read: {reason}; restore it from a copy") from error


def _read_config(run_dir: Path, trust: bool) -> Config:
    path = run_dir / "config.yaml"
    try:
        values = _stored_values(run_dir)
        check_code(run_dir, values, trust)
        return make_config(values, str(path))
    except RunDirectoryError:
        raise
    except InputError as error:
        raise RunDirectoryError(
            f"{path} is damaged, or what it names is gone: {error}; restore it from a copy, or start the run again in a new folder"
        ) from error


def check_files(run_dir: Path, config: Config) -> None:
    """Refuse files named by options whose content is not what it was when the run began, where the run has kept a digest of it.

    Raises:
        RunDirectoryError: naming the first.
    """
    now = config.files()
    for place, (path, content) in stored_about(run_dir).get("files", {}).items():
        if now.get(place, (path, ""))[1] != content:
            raise RunDirectoryError(
                f"{place} of {run_dir} is the file {now.get(place, (path, ''))[0]}, whose content is not what it was when the run "
                f"began: restore it, or start the run again under another run.name"
            )


_ABOUT = {"id": str, "raydfl": str, "digest": str, "classes": list, "models": dict, "clients": int}
"""What ``run.json`` must say, and of which kind."""
_ALSO_ABOUT = {
    "config": dict,
    "files": dict,
    "code": dict,
    "site_key": str,
    "mlflow_run_id": str,
    "branches": list,
    "skipped": list,
}
"""What it may say."""
_KINDS = {str: "text", list: "a list", dict: "a group", int: "a whole number"}


def stored_about(run_dir: Path) -> dict[str, Any]:
    """What ``run.json`` says about a run.

    Raises:
        RunDirectoryError: the file is missing or damaged.
    """
    path = run_dir / "run.json"
    try:
        about = json.loads(path.read_bytes())
        if not isinstance(about, dict):
            raise ValueError(f"it must hold a group, not {str(about)[:40]!r}")
        missing = [key for key in _ABOUT if key not in about]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        check_about(about)
        if about.get("site_key"):
            plain_name(about["site_key"])
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunDirectoryError(
            f"{path} is missing or damaged ({reason}); restore it from a copy, or start the run again in a new folder"
        ) from error
    return about


def check_about(about: Mapping[str, Any]) -> None:
    """Refuse values in ``run.json`` that are not of their kind.

    Raises:
        ValueError: naming the first of them.
    """
    for key, kind in {**_ABOUT, **_ALSO_ABOUT}.items():
        absent = key not in about or (about[key] is None and key in _ALSO_ABOUT)
        if not absent and type(about[key]) is not kind:
            raise ValueError(f"{key} is {str(about[key])[:40]!r}, which must be {_KINDS[kind]}")


def ensure_features(run_dir: Path, config: Config, progress: Progress) -> None:
    """Make the features of a run again where the cache that it used has gone or is damaged, or is that of another machine.

    Raises:
        DataError: the recordings are not there either.
        RunDirectoryError: they are not those of the run, or its population is damaged.
    """
    folder = run_dir / "population"
    try:
        Population.load(folder, verify_features=True)
        return
    except DataError as error:
        lost = str(error).partition("; ")[0]
    progress.message(f"{lost}: they are made again")
    try:
        population = build_population(config.data, config.run.seed, progress, attack=config.build_attack())
    except DataError as error:
        raise DataError(f"{lost}, and they cannot be made again: {error}") from error
    if not population.is_saved_in(folder):
        raise RunDirectoryError(
            f"the recordings have changed since {run_dir} began, and its features are lost; restore the recordings, or start the "
            f"run again in a new folder"
        )
    population.save(folder)


_PATIENCE = 20.0
"""Seconds for which a process waits for the one that has the run: it may be about to stop."""


@contextlib.contextmanager
def driving(run_dir: Path, progress: Progress) -> Iterator[None]:
    """Hold a run's folder while this process prepares the run, asks for its rounds and writes what comes after them.

    Who commits (in Ray another process) holds the RunStore's lock besides. A run that ends with an error before its first commit
    leaves nothing behind, unless its folder was there before.

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
        if run_dir in missing and not (run_dir / "LATEST").exists():
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
    check_kept({"run.dir": config.run.dir, "data.cache": config.data.cache or default_cache()})
    if config.run.name is None and in_a_job():
        progress.message(
            "run.name is not set, so the same job submitted again will not go on with this run but start another"
        )
    name = (
        config.run.name
        or f"{_short(config.method['name'])}-{_short(config.data.name)}-{datetime.now().astimezone():%Y%m%d-%H%M%S-%f}"
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
    site_key = _site_key(run_dir) if config.data.sites else ""
    if config.data.sites:
        population = prepare_sites(config, site_key, run_dir, progress)
    else:
        population = build_population(config.data, config.run.seed, progress, attack=config.build_attack())
    config.train.cohort_size(len(population))
    try_models(config, population)
    for message in population.messages:
        progress.message(message)
    begin(run_dir, config, population, site_key)


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
        "config": config.model_dump(mode="json"),
        "files": config.files(),
        "code": code_of(config.model_dump(mode="json")),
        "method": config.method["name"],
        "data": config.data.name,
        "classes": list(population.classes),
        "models": _describe_models(config, Clients(population, config)),
        "clients": len(population),
        "skipped": [{"clip": clip, "reason": reason} for clip, reason in population.skipped],
    }
    if config.data.features.normalise == "group":
        about["statistics"] = "training clips"
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
    for specs in clients.variants():
        for name, model in build_models(method, specs, config.run.seed).items():
            spec = next(spec for spec in specs if spec.name == name)
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


def check_same(run_dir: Path, config: Config, trust: bool = False) -> None:
    """Refuse a configuration that would give other numbers than the one that a run began with.

    Raises:
        RunDirectoryError: naming what differs; or the run is an earlier version's, whose features were others.
    """
    about = stored_about(run_dir)
    if "statistics" not in about and _stored_values(run_dir)["data"]["features"].get("normalise") == "group":
        raise RunDirectoryError(
            f"{run_dir} was begun by an earlier version of raydfl, whose data.features.normalise: group took statistics from "
            f"held-out clips too; this version takes them from training clips only and cannot go on with the run: start it again "
            f"under another run.name, or go on with it in the version that began it"
        )
    check_files(run_dir, config)
    differing = _differing(run_dir, config, trust)
    if differing:
        raise RunDirectoryError(
            f"{run_dir} belongs to another configuration ({differing}); give the new run another run.name, or remove the folder"
        )


def _differing(run_dir: Path, config: Config, trust: bool) -> str:
    """Say in which settings a configuration decides other numbers than the one that the run began with; empty: in none."""
    about = stored_about(run_dir)
    # By the digest that it was made with, if that fits: what its configuration names may have gone with another job's folder.
    if config.digest() == about["digest"]:
        return ""
    digest, began = about["digest"], about.get("config")
    if began is None:  # begun by a version that kept only config.yaml, and perhaps made digests otherwise
        stored = _read_config(run_dir, trust)
        digest, began = stored.digest(), stored.model_dump(mode="json")
    # Another folder of the same recordings changes nothing: who has which features is kept with the run.
    if "root" in began["data"] and began["data"]["name"] == config.data.name:
        data = config.data.model_copy(update={"root": began["data"]["root"]})
        if config.model_copy(update={"data": data}).digest() == digest:
            return ""
    elif config.digest() == digest:
        return ""
    changes = decisive_changes(began, config.model_dump(mode="json"))
    return "; ".join(changes[:_LISTED]) or "what its settings name has changed"


_LISTED = 5
"""Settings that a message names."""
_FREE = ("evaluate.", "ray.", "run.", "track.", "train.rounds", "train.tape", "data.cache", "data.root")
"""How settings begin that decide no numbers, but for some that are decisive all the same."""
_NOT_FREE = ("run.seed", "ray.threads")


def decisive_changes(began: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say which settings that decide the numbers differ, ``train.optimiser.lr: 0.1 there, 0.2 here``, by their values alone."""
    before, after = flat(began), flat(now)
    return [
        f"{key}: {before.get(key)!r} there, {after.get(key)!r} here"
        for key in {**before, **after}
        if _without_folder(before.get(key)) != _without_folder(after.get(key))
        and (not key.startswith(_FREE) or key.startswith(_NOT_FREE))
    ]


def _without_folder(value: Any) -> Any:
    """A reference to a class in a file of one's own, which may lie elsewhere each time, without the folder."""
    return re.sub(r"^.*/([^/]+\.py:\w+)$", r"\1", value) if isinstance(value, str) else value


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
        write_durably(path, to_safetensors(models, metadata))
        paths.append(path)
    return paths


def file_name_of(key: str) -> str:
    """A key of the server's state, or a model's name, as part of a file's name."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in key)
