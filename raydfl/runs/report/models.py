"""A run's models, as its page shows them: which of them is the one that comes out, where it lies, and how to use it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raydfl.core.errors import RunDirectoryError
from raydfl.core.metrics import model_name
from raydfl.engine.storage import Commit, RunStore
from raydfl.runs.report.data import SPLITS, RunRecord, place
from raydfl.runs.report.page import Section, value_text
from raydfl.runs.words import size


def show_models(run: RunRecord) -> Section:
    """Show each model's architectures, with a few sentences and the commands that use it.

    There are no sentences without run.json or a commit, and no commands before the first round.
    """
    commit, sentences, commands = _last_commit(run.folder), [], []
    if commit is not None:
        known = {name: [kind for kind in kinds if "shared" in kind] for name, kinds in run.architectures.items()}
        kinds = {name: described for name, described in known.items() if described}
        sentences = [_explain(run, commit, name, described) for name, described in kinds.items()]
        commands = _commands(run, commit, kinds)
    if commands:
        client = " (ID: a client, for its own model)" * commands[-1].endswith("--client ID")
        sentences.append(f"To classify recordings, or to write a model as ONNX{client}:")
    return Section(
        "Models",
        headings=("model", "architecture", "parameters", "its weights", ""),
        rows=[_row(name, dict(kind)) for name, kinds in run.architectures.items() for kind in kinds],
        text=sentences,
        commands=commands,
    )


def _row(name: str, about: dict[str, Any]) -> list[str]:
    """Return the table's line of an architecture, from run.json."""
    shared, parameters = about.pop("shared", None), about.pop("parameters", None)
    return [
        name,
        value_text(about.pop("architecture", "")),
        f"{parameters:,}" if isinstance(parameters, int) else "",
        "" if shared is None else ("sent and averaged" if shared else "stays with the client"),
        value_text(about),
    ]


def _commands(run: RunRecord, commit: Commit, kinds: Mapping[str, list[Mapping[str, Any]]]) -> list[str]:
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


def _explain(run: RunRecord, commit: Commit, name: str, kinds: list[Mapping[str, Any]]) -> str:
    measured = _measured(run, name)
    if all(kind.get("shared") for kind in kinds):
        return (
            f"{name} is what the clients train together: each sends it, and the average goes back to all. It is the model to hand "
            f"out{_where(run.folder)}.{measured}"
        )
    sent = any(tensor.startswith(f"{name}/") for tensors in commit.state.tensors.values() for tensor in tensors)
    own = "its own layers of" if sent else "its own"
    count = f"{len(commit.private):,}" + (
        f" of {run.about['clients']:,}" if isinstance(run.about.get("clients"), int) else ""
    )
    rest = f" The other layers are sent and averaged{_where(run.folder)}." if sent else ""
    return (
        f"{name} stays with the clients: each has {own} {name}, and none is the run's result. {count} clients have taken part and "
        f"have one, in private/.{rest}{measured}"
    )


def _measured(run: RunRecord, name: str) -> str:
    splits = sorted(
        {split for split, metric in run.scores() if split != "train" and model_name(metric).rpartition(":")[2] == name},
        key=lambda split: place(split, list(SPLITS)),
    )
    if not splits:
        return " It has not been measured."
    return f" Measured on {' and on '.join(SPLITS.get(split, split) for split in splits)}."


def _where(folder: Path) -> str:
    """``: model.safetensors, 98.5 kB``; before the end of the run the weights are in its commits only."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        return ", at present in the last commit; at the end of the run in model.safetensors"
    return f": {', '.join(f'{file.name}, {size(file.stat().st_size)}' for file in files)}"


def _last_commit(folder: Path) -> Commit | None:
    """Return the newest commit, or ``None`` where there is none or it cannot be read: a page is about what there is."""
    try:
        return RunStore(folder).newest()
    except RunDirectoryError:
        return None
