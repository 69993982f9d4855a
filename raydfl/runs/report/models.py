"""The models of a run: their architectures, the files with their weights, and the commands for using them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raydfl.core.errors import RunDirectoryError
from raydfl.core.metrics import model_name
from raydfl.core.words import format_size
from raydfl.engine.storage import Commit, RunStore
from raydfl.runs.report.data import SPLITS, RunRecord, sort_key
from raydfl.runs.report.page import Section, format_value


def show_models(run: RunRecord) -> Section:
    """Show each model's architectures, with an explanation and commands.

    The explanation needs run.json and a commit, and the commands need a completed round.
    """
    commit, sentences, commands = _load_last_commit(run.folder), [], []
    if commit is not None:
        known = {name: [kind for kind in kinds if "shared" in kind] for name, kinds in run.architectures.items()}
        kinds = {name: described for name, described in known.items() if described}
        sentences = [_explain_model(run, commit, name, described) for name, described in kinds.items()]
        commands = _list_commands(run, commit, kinds)
    if commands:
        client = " (ID: a client, for its own model)" * commands[-1].endswith("--client ID")
        sentences.append(f"To classify recordings or to export a model to ONNX{client}:")
    return Section(
        "Models",
        headings=("model", "architecture", "parameters", "weights", "options"),
        rows=[_make_row(name, dict(kind)) for name, kinds in run.architectures.items() for kind in kinds],
        text=sentences,
        commands=commands,
    )


def _make_row(name: str, about: dict[str, Any]) -> list[str]:
    """Return the table's row for an architecture described in run.json."""
    shared, parameters = about.pop("shared", None), about.pop("parameters", None)
    return [
        name,
        format_value(about.pop("architecture", "")),
        f"{parameters:,}" if isinstance(parameters, int) else "",
        "" if shared is None else ("shared" if shared else "private"),
        format_value(about),
    ]


def _list_commands(run: RunRecord, commit: Commit, kinds: Mapping[str, list[Mapping[str, Any]]]) -> list[str]:
    if commit.state.round_index == 0:
        return []
    folder = shlex.quote(str(run.folder))
    shared = [bool(kind.get("shared")) for described in kinds.values() for kind in described]
    lines = [f"raydfl predict {folder} FILE...", f"raydfl export {folder}"] if any(shared) else []
    if not all(shared) and len(commit.private):
        lines += [f"raydfl predict {folder} FILE... --client ID", f"raydfl export {folder} --client ID"]
    if "best_round" in run.facts:
        lines.append(f"raydfl predict {folder} FILE... --best")
    return lines


def _explain_model(run: RunRecord, commit: Commit, name: str, kinds: list[Mapping[str, Any]]) -> str:
    evaluation = _describe_evaluation(run, name)
    if all(kind.get("shared") for kind in kinds):
        return (
            f"{name} is shared: all clients train it, and the server aggregates their updates. It is the run's "
            f"result{_describe_files(run.folder)}.{evaluation}"
        )
    partly = any(tensor.startswith(f"{name}/") for tensors in commit.state.tensors.values() for tensor in tensors)
    count = f"{len(commit.private):,}" + (
        f" of {run.about['clients']:,}" if isinstance(run.about.get("clients"), int) else ""
    )
    rest = f" The other layers are shared{_describe_files(run.folder)}." if partly else ""
    return (
        f"{name} is {'partly ' * partly}private: each client keeps {'some layers' if partly else 'its own model'}, so no single "
        f"model is the run's result. {count} clients have taken part. Their weights are in private/.{rest}{evaluation}"
    )


def _describe_evaluation(run: RunRecord, name: str) -> str:
    splits = sorted(
        {split for split, metric in run.scores() if split != "train" and model_name(metric).rpartition(":")[2] == name},
        key=lambda split: sort_key(split, list(SPLITS)),
    )
    if not splits:
        return " It has not been measured."
    return f" Measured on {' and on '.join(SPLITS.get(split, split) for split in splits)}."


def _describe_files(folder: Path) -> str:
    """List the model's files and sizes, such as ``: model.safetensors, 98.5 kB``. An unfinished run has only commits."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        return ", stored in the last commit until the end of the run writes model.safetensors"
    return f": {', '.join(f'{file.name}, {format_size(file.stat().st_size)}' for file in files)}"


def _load_last_commit(folder: Path) -> Commit | None:
    """Return the newest commit, or ``None`` if it is missing or damaged, because a report shows partial runs, too."""
    try:
        return RunStore(folder).newest()
    except RunDirectoryError:
        return None
