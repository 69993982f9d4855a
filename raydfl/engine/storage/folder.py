"""The files of a run's folder that describe it: reading and writing them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raydfl.core.errors import InputError, RunDirectoryError
from raydfl.core.files import plain_name, read_regular, write_durably
from raydfl.core.nested import flatten
from raydfl.core.types import State
from raydfl.core.yaml import read_yaml, to_yaml
from raydfl.engine.config import Config, make_config
from raydfl.engine.storage.store import Commit, RunStore
from raydfl.engine.storage.trust import check_code


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
        trust: approves the code that the configuration names; see :mod:`raydfl.engine.storage.trust`.

    Raises:
        RunDirectoryError: it is no run directory, or ``config.yaml`` is damaged or not what the run began with; or it names
            code that the user has not approved, or a file that has changed.
    """
    check_begun(run_dir)
    config = _read_config(run_dir, trust)
    check_revision(run_dir, config)
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
        return read_yaml(path, saved=True)
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
    "revision": int,
    "site_key": str,
    "mlflow_run_id": str,
    "cpu_fallback": str,
    "branches": list,
    "skipped": list,
    "kernels": dict,
    "resumes": list,
}
"""What it may say."""
_KINDS = {str: "text", list: "a list", dict: "a group", int: "a whole number"}


def stored_about(run_dir: Path) -> dict[str, Any]:
    """Read what ``run.json`` says about a run.

    Raises:
        RunDirectoryError: the file is missing or damaged.
    """
    path = run_dir / "run.json"
    try:
        about = json.loads(read_regular(path))
        if not isinstance(about, dict):
            raise ValueError(f"it must hold a group, not {str(about)[:40]!r}")
        missing = [key for key in _ABOUT if key not in about]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        check_about(about)
        if about.get("site_key"):
            plain_name(about["site_key"])
    except (OSError, ValueError, RecursionError) as error:  # the last of JSON that is nested too deep
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
    for resume in about.get("resumes") or ():
        if not isinstance(resume, dict) or not isinstance(resume.get("kernels"), dict):
            raise ValueError(f"resumes has {str(resume)[:40]!r}, which must be a group with kernels")


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


def check_revision(run_dir: Path, config: Config) -> None:
    """Refuse a run that began with another revision of its method's equations.

    Raises:
        RunDirectoryError: naming both revisions.
    """
    began, now = stored_about(run_dir).get("revision") or 1, type(config.parts.method).revision
    if began != now:
        raise RunDirectoryError(
            f"{run_dir} began with revision {began} of the equations of method {config.method['name']!r}, and this version of "
            f"raydfl has revision {now}. Start the run again under another run.name, or continue it in the version that began it"
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
    now = config.model_dump(mode="json")
    changes = decisive_changes(began, now) or _list_changes(began, now, lambda key: key.startswith(_CHOOSING))
    return "; ".join(changes[:_LISTED]) or "what its settings name has changed"


_LISTED = 5
"""Settings that a message names."""
_FREE = ("evaluate.", "ray.", "run.", "track.", "train.rounds", "data.cache", "data.root")
"""Beginnings of settings that decide no numbers, but for some that are decisive all the same."""
_CHOOSING = ("run.stop", "run.best", "evaluate.")
"""Beginnings of settings that decide numbers where a phase ends, or begins with an earlier round, because of what was measured."""
_NOT_FREE = ("run.seed", "ray.threads")


def decisive_changes(began: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the differing settings that decide the numbers, ``train.optimiser.lr: 0.1 there, 0.2 here``, by their values alone."""
    return _list_changes(began, now, lambda key: not key.startswith(_FREE) or key.startswith(_NOT_FREE))


def _list_changes(began: Mapping[str, Any], now: Mapping[str, Any], counts: Callable[[str], bool]) -> list[str]:
    before, after = flatten(began), flatten(now)
    return [
        f"{key}: {before.get(key)!r} there, {after.get(key)!r} here"
        for key in {**before, **after}
        if counts(key) and _without_folder(before.get(key)) != _without_folder(after.get(key))
    ]


def describe_edit(run_dir: Path, began: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe how ``config.yaml`` differs from the settings that the run began with; empty if the numbers are the same.

    Only code that the user has approved is loaded.

    Args:
        began: settings in ``run.json``.
        now: settings in ``config.yaml``.
    """
    known = flatten(began)
    changes = decisive_changes(began, {key: value for key, value in flatten(now).items() if key in known})
    added = decisive_changes(began, now)
    if added and not changes:
        # A later version has more settings, and a default may be written down. Only the digest shows whether they matter.
        try:
            return _differing(run_dir, _read_config(run_dir, trust=False), trust=False)
        except RunDirectoryError:
            changes = added
    return "; ".join(changes)


def _without_folder(value: Any) -> Any:
    """Return a reference to a class in a file of one's own, which may lie elsewhere each time, without the folder."""
    return re.sub(r"^.*/([^/]+\.py:\w+)$", r"\1", value) if isinstance(value, str) else value


def final_commit(run_dir: Path) -> Commit:
    """Return the newest commit.

    Raises:
        RunDirectoryError: there is none, or it is damaged.
    """
    commit = RunStore(run_dir).newest()
    if commit is None:
        raise RunDirectoryError(f"{run_dir} has no committed round yet")
    return commit


def final_state(run_dir: Path) -> State:
    """Return the server's state after the last committed round.

    Raises:
        RunDirectoryError: there is none, or it is damaged.
    """
    return final_commit(run_dir).state


def file_name_of(key: str) -> str:
    """Return a key of the server's state, or a model's name, as part of a file's name."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in key)
