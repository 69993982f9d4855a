"""Reader and writer of ``config.yaml`` and ``run.json``, which describe a run in its folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raydfl.core.errors import InputError, RunDirectoryError, translate_failures
from raydfl.core.files import plain_name, read_json, write_durably
from raydfl.core.nested import flatten
from raydfl.core.types import State
from raydfl.core.yaml import read_yaml, to_yaml
from raydfl.data import check_tables
from raydfl.engine.config import Config, make_config
from raydfl.engine.storage.store import Commit, RunStore
from raydfl.engine.storage.trust import check_code


def check_begun(run_dir: Path) -> None:
    """Reject a folder without a prepared run, or with a table that crashes its reader.

    Raises:
        RunDirectoryError: The folder is no run directory, the run stopped before its first round, or a table is damaged.
    """
    if not run_dir.is_dir():
        raise RunDirectoryError(f"there is no run directory {run_dir}. Give the folder printed by `raydfl run`.")
    if not (run_dir / "config.yaml").exists() or not (run_dir / "run.json").exists():
        raise RunDirectoryError(
            f"{run_dir} is not a run directory, or the run was interrupted before it began (config.yaml or run.json is missing). "
            f"Start it with: raydfl run"
        )
    check_tables(run_dir)


def read_config(run_dir: Path, trust: bool = False) -> Config:
    """Load the configuration of a run directory.

    Args:
        trust: True approves the code in the configuration (:mod:`raydfl.engine.storage.trust`).

    Raises:
        RunDirectoryError: The folder is no run directory, or ``config.yaml`` is damaged or was edited after the start. Also
            for unapproved code and for changed files.
    """
    check_begun(run_dir)
    config = _load_config(run_dir, trust)
    check_revision(run_dir, config)
    check_files(run_dir, config)
    differing = _describe_differences(run_dir, config, trust)
    if differing:
        raise RunDirectoryError(
            f"{run_dir / 'config.yaml'} was changed since the run began ({differing}). The run's results belong to the former "
            f"settings. Restore them, or start a new run: raydfl run {run_dir / 'config.yaml'} run.name=NAME"
        )
    return config


def _read_values(run_dir: Path) -> Any:
    path = run_dir / "config.yaml"
    with translate_failures(
        lambda reason: RunDirectoryError(f"{path} cannot be read: {reason}. Restore it from a copy")
    ):
        return read_yaml(path, saved=True)


def _load_config(run_dir: Path, trust: bool) -> Config:
    path = run_dir / "config.yaml"
    try:
        values = _read_values(run_dir)
        check_code(run_dir, values, trust)
        return make_config(values, str(path))
    except RunDirectoryError:
        raise
    except InputError as error:
        raise RunDirectoryError(
            f"{path} is damaged, or refers to missing files: {error}. Restore it from a copy, or restart the run in a new folder"
        ) from error


def check_files(run_dir: Path, config: Config) -> None:
    """Reject changed files: compare the files in the options with the digests in ``run.json``.

    Raises:
        RunDirectoryError: A file has changed. The message names the first one.
    """
    now = config.files()
    for place, (path, content) in read_about(run_dir).get("files", {}).items():
        if now.get(place, (path, ""))[1] != content:
            raise RunDirectoryError(
                f"{place} of {run_dir}: the content of the file {now.get(place, (path, ''))[0]} has changed since the run began. "
                f"Restore it, or restart the run under another run.name"
            )


_ABOUT = {"id": str, "raydfl": str, "digest": str, "classes": list, "models": dict, "clients": int}
"""Required keys of ``run.json``, and their types."""
_ALSO_ABOUT = {
    "config": dict,
    "files": dict,
    "code": dict,
    "revision": int,
    "site_key": str,
    "mlflow_run_id": str,
    "cpu_fallback": str,
    "nodes": dict,
    "branches": list,
    "privacy": dict,
    "skipped": list,
    "kernels": dict,
    "resumes": list,
}
"""Optional keys of ``run.json``."""
_KINDS = {str: "text", list: "a list", dict: "a group", int: "a whole number"}


def read_about(run_dir: Path) -> dict[str, Any]:
    """Load ``run.json``, the description of a run.

    Raises:
        RunDirectoryError: The file is missing or damaged.
    """
    path = run_dir / "run.json"
    with translate_failures(
        lambda reason: RunDirectoryError(
            f"{path} is missing or damaged ({reason}). Restore it from a copy, or restart the run in a new folder"
        )
    ):
        about: dict[str, Any] = read_json(path)
        if not isinstance(about, dict):
            raise ValueError(f"it must hold a group, not {str(about)[:40]!r}")
        missing = [key for key in _ABOUT if key not in about]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        check_about(about)
        if about.get("site_key"):
            plain_name(about["site_key"])
    return about


def check_about(about: Mapping[str, Any]) -> None:
    """Reject values of a wrong type in ``run.json``.

    Raises:
        ValueError: A value has a wrong type. The message names the first one.
    """
    for key, kind in {**_ABOUT, **_ALSO_ABOUT}.items():
        absent = key not in about or (about[key] is None and key in _ALSO_ABOUT)
        if not absent and type(about[key]) is not kind:
            raise ValueError(f"{key} is {str(about[key])[:40]!r} but must be {_KINDS[kind]}")
    for resume in about.get("resumes") or ():
        if not isinstance(resume, dict) or not isinstance(resume.get("kernels"), dict):
            raise ValueError(f"resumes has {str(resume)[:40]!r} but must hold groups with kernels")


def write_config(run_dir: Path, config: Config) -> None:
    """Write the resolved configuration as ``config.yaml``."""
    write_durably(run_dir / "config.yaml", to_yaml(config.model_dump(mode="json"), flow=False).encode())


def check_same(run_dir: Path, config: Config, trust: bool = False) -> None:
    """Reject a configuration whose results would differ from the run's own configuration.

    Raises:
        RunDirectoryError: Decisive settings differ, or an earlier version computed the run's features differently.
    """
    about = read_about(run_dir)
    if "statistics" not in about and _read_values(run_dir)["data"]["features"].get("normalise") == "group":
        raise RunDirectoryError(
            f"{run_dir} was started by an earlier version of raydfl. With data.features.normalise: group, it computed statistics "
            f"from held-out clips too; this version uses training clips only and cannot resume the run. Restart it under another "
            f"run.name, or resume it with the version that started it"
        )
    check_files(run_dir, config)
    differing = _describe_differences(run_dir, config, trust)
    if differing:
        raise RunDirectoryError(
            f"{run_dir} belongs to another configuration ({differing}). Give the new run another run.name, or remove the folder"
        )


def check_revision(run_dir: Path, config: Config) -> None:
    """Reject a run of another revision of its method's equations.

    Raises:
        RunDirectoryError: The revisions differ. The message names both.
    """
    began, now = read_about(run_dir).get("revision") or 1, type(config.components.method).revision
    if began != now:
        raise RunDirectoryError(
            f"{run_dir} began with revision {began} of the equations of method {config.method['name']!r}, and this version of "
            f"raydfl has revision {now}. Restart the run under another run.name, or continue it with its former version of raydfl"
        )


def _describe_differences(run_dir: Path, config: Config, trust: bool) -> str:
    """List the decisive settings that differ from the run's own configuration, as text; empty: none."""
    about = read_about(run_dir)
    # Compare digests first: files of the stored configuration may have gone with another job's folder.
    if config.digest() == about["digest"]:
        return ""
    digest, began = about["digest"], about.get("config")
    if began is None:  # earlier versions stored only config.yaml, and may have computed digests differently
        stored = _load_config(run_dir, trust)
        digest, began = stored.digest(), stored.model_dump(mode="json")
    # Another folder of the same recordings changes nothing: the run folder stores the population.
    if "root" in began["data"] and began["data"]["name"] == config.data.name:
        data = config.data.model_copy(update={"root": began["data"]["root"]})
        if config.model_copy(update={"data": data}).digest() == digest:
            return ""
    elif config.digest() == digest:
        return ""
    now = config.model_dump(mode="json")
    changes = decisive_changes(began, now) or _list_changes(began, now, lambda key: key.startswith(_CHOOSING))
    return "; ".join(changes[:_LISTED]) or "files or classes in its settings have changed"


_LISTED = 5
"""Largest number of settings in a message."""
_FREE = ("evaluate.", "ray.", "run.", "track.", "train.rounds", "data.cache", "data.root")
"""Prefixes of settings without an effect on results, except for :data:`_NOT_FREE`."""
_CHOOSING = ("run.stop", "run.best", "evaluate.")
"""Prefixes of settings that affect results only through early stopping or the best round."""
_NOT_FREE = ("run.seed", "ray.threads")


def decisive_changes(began: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the settings that differ and affect results, such as ``train.optimiser.lr: 0.1 there, 0.2 here``."""
    return _list_changes(began, now, lambda key: not key.startswith(_FREE) or key.startswith(_NOT_FREE))


def _list_changes(began: Mapping[str, Any], now: Mapping[str, Any], counts: Callable[[str], bool]) -> list[str]:
    before, after = flatten(began), flatten(now)
    return [
        f"{key}: {before.get(key)!r} there, {after.get(key)!r} here"
        for key in {**before, **after}
        if counts(key) and _strip_folder(before.get(key)) != _strip_folder(after.get(key))
    ]


def describe_edit(run_dir: Path, began: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the edits of ``config.yaml`` since the start of the run; empty if they do not affect results.

    Loads only approved code.

    Args:
        began: Settings in ``run.json``.
        now: Settings in ``config.yaml``.
    """
    known = flatten(began)
    changes = decisive_changes(began, {key: value for key, value in flatten(now).items() if key in known})
    added = decisive_changes(began, now)
    if added and not changes:
        # A newer version adds settings with neutral defaults. Only the digest shows whether they affect results.
        try:
            return _describe_differences(run_dir, _load_config(run_dir, trust=False), trust=False)
        except RunDirectoryError:
            changes = added
    return "; ".join(changes)


def _strip_folder(value: Any) -> Any:
    """Strip the folder from a reference ``my_file.py:Class``, because it may differ between jobs."""
    return re.sub(r"^.*/([^/]+\.py:\w+)$", r"\1", value) if isinstance(value, str) else value


def final_commit(run_dir: Path) -> Commit:
    """Load the newest commit of a run.

    Raises:
        RunDirectoryError: The commit is missing or damaged.
    """
    commit = RunStore(run_dir).newest()
    if commit is None:
        raise RunDirectoryError(f"{run_dir} has no committed round yet")
    return commit


def final_state(run_dir: Path) -> State:
    """Load the server's state after the last committed round.

    Raises:
        RunDirectoryError: The commit is missing or damaged.
    """
    return final_commit(run_dir).state


def file_name_of(key: str) -> str:
    """Convert a state key or a model name to a safe file name."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in key)
