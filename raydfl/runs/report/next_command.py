"""The next command after a run, by the kinds of its findings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Set
from typing import Any

from raydfl.core.files import display_path
from raydfl.core.nested import get_path
from raydfl.core.remote import below, is_uri
from raydfl.core.yaml import to_yaml
from raydfl.runs.report.data import RunRecord
from raydfl.runs.verdict import NOT_SPEECH

USUAL_RATES = {"sgd": 0.1, "adam": 0.003, "adamw": 0.003}
"""Learning rates for a first run. A loss that does not move at a higher rate suggests a collapsed network."""
_ADAM = "train.optimiser={name: adam, lr: 0.003}"


def choose_command(run: RunRecord, learnt: bool | None, kinds: Set[str], name: str = "") -> str:
    """Choose the next command.

    Args:
        run: The run.
        learnt: Whether it learnt. ``None``: unknown.
        kinds: Kinds of its problems and findings.
        name: Folder or URI of the run, quoted for a shell. Defaults to its URI or folder.
    """
    folder, runs = display_path(run.folder), get_path(run.config, "run.dir")
    name = name or shlex.quote(below(runs, run.folder.name) if is_uri(runs) else folder)
    improves = kinds & {"rising", "loss falls", "few evaluations"}
    if run.done < run.total and not run.stopped:
        return f"raydfl resume {name}"
    if "one class" in kinds:
        return _check_data(folder)
    if learnt is False:
        return _choose_cure(run, kinds, folder, name)
    if improves:
        return _train_longer(run, name, 2)
    if kinds & {"falling", "overfitting"} and get_path(run.config, "run.best") is None:
        return _rerun(run, folder, "best", "run.best={}")
    if "below raw features" in kinds and _uses_sgd(run):
        return _rerun(run, folder, "adam", _ADAM)
    if "below raw features" in kinds:
        return _use_encoder(run, folder) if "few clips" in kinds else _train_longer(run, name, 2)
    if "worse than pooled" in kinds and run.method == "fedavg":
        return _rerun(run, folder, "fedopt", "method=fedopt")
    if not kinds & {"pooled", "worse than pooled", "local"} and _takes_references(run):
        return _rerun(run, folder, "reference", "run.reference={pooled: true, local: true}")
    return f"raydfl predict {name} PATH/TO/recordings"


def _choose_cure(run: RunRecord, kinds: Set[str], folder: str, name: str) -> str:
    """Choose the command after a run that did not learn."""
    gentle = {"train.cohort": 1.0, "train.local_epochs": 1}
    if "single classes" in kinds and any(get_path(run.config, path) != value for path, value in gentle.items()):
        return _rerun(run, folder, "gentle", *(f"{path}={value}" for path, value in gentle.items()))
    if kinds & {"diverged", "rate too high"}:
        return _rerun(run, folder, "rate", *_scale_rates(run.config, 0.1))
    if "rate too low" in kinds:
        return _rerun(run, folder, "rate", *_scale_rates(run.config, 10.0))
    if "labels" in kinds and "rising" not in kinds:
        return _check_data(folder)
    if kinds & {"rising", "loss falls", "few evaluations", "blanks"}:
        return _train_longer(run, name, 4)
    if "below raw features" in kinds:  # The data suffice.
        return _rerun(run, folder, "adam", _ADAM) if _uses_sgd(run) else _train_longer(run, name, 4)
    return _check_data(folder) if "labels" in kinds or "few clips" not in kinds else _use_encoder(run, folder)


def _use_encoder(run: RunRecord, folder: str) -> str:
    """Train a head on the pretrained encoder of speech, if the run trained one network on log-mel. Otherwise explain encoders."""
    data = get_path(run.config, "data") or {}
    is_log_mel = get_path(data, "features.kind") in (None, "logmel") and not data.get("transforms")
    other = data.get("name") in NOT_SPEECH or data.get("parts")
    if [*run.architectures] != ["model"] or not is_log_mel or other:
        return "raydfl methods pretrained"
    return _rerun(run, folder, "embedding", "data.features={kind: speech_embedding}", "models.model=linear")


def _rerun(run: RunRecord, folder: str, suffix: str, *settings: str) -> str:
    words = [f"{folder}/config.yaml", f"run.name={run.id}-{suffix}", *settings]
    return " ".join(["raydfl run", *map(shlex.quote, words)])


def _train_longer(run: RunRecord, name: str, factor: int) -> str:
    stop = " run.stop=null" * bool(run.stopped)
    return f"raydfl resume {name} train.rounds={factor * max(1, run.done)}{stop}"


def _check_data(folder: str) -> str:
    return f"raydfl data info {shlex.quote(f'{folder}/config.yaml')}"


def _uses_sgd(run: RunRecord) -> bool:
    return bool(get_path(run.config, "train.optimiser.name") == "sgd")


def _takes_references(run: RunRecord) -> bool:
    """Return whether ``run.reference`` supports the configuration."""
    data = get_path(run.config, "data") or {}
    return not data.get("parts") and not data.get("sites") and [*run.architectures] == ["model"]


def _scale_rates(config: Mapping[str, Any], factor: float) -> list[str]:
    """Return the settings of learning rates scaled by ``factor``, or by more if the usual rate is further away."""
    optimiser = get_path(config, "train.optimiser")
    usual = USUAL_RATES[optimiser["name"]] / optimiser["lr"]
    factor = min(factor, usual) if factor < 1 else max(factor, usual)
    settings = [f"train.optimiser.lr={optimiser['lr'] * factor:.3g}"]
    if models := optimiser.get("models"):
        scaled = {model: float(f"{rate * factor:.3g}") for model, rate in models.items()}
        settings.append(f"train.optimiser.models={to_yaml(scaled)}")
    return settings
