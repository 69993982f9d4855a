"""A trained model of a run, ready for use: a shared one, or a client's own with its private part.

What is loaded is what the engine would evaluate: shared tensors from the last commit, under the key that the model lives under or
that the client is sent, and private ones from the client's newest record. Neither recordings nor cached features are needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from raydfl.core import part_names
from raydfl.core.cuts import Cuts, cut_tensors
from raydfl.core.errors import InputError, RunDirectoryError, nearest
from raydfl.core.settings import FIRST_VIEW
from raydfl.core.tensors import FlatTensors
from raydfl.core.types import Batch, ModelSpec, Tensors
from raydfl.data import DataSettings, Population, View
from raydfl.engine import (
    KEPT_MODEL,
    SERVER,
    Clients,
    Config,
    best_of,
    build_models,
    fixed_of_whole,
    label_entry,
    received_entries,
)
from raydfl.engine.storage import Commit, PrivateStore, RunStore, local_run, stored_config
from raydfl.methods import Method, compute_logits
from raydfl.objectives import Classify, Objective
from raydfl.runs.inference.threshold import Threshold, recorded_threshold
from raydfl.training import Replica, fixed_tensors

Specs = tuple[ModelSpec, ...]

_LISTED = 5
"""Clients that a message names."""


@dataclass(frozen=True, slots=True, eq=False)
class RunModel:
    """One model of a run, loaded, with what is needed to feed it."""

    run_dir: Path
    name: str
    """As in the record of the run: ``plugin``, or ``cluster-0:model`` where the server has several states."""
    client: str
    """Whose it is; empty for a shared model of the server's."""
    round: int
    """Completed rounds that it was trained for."""
    network: nn.Module
    """On the CPU, in evaluation mode; what the objective asks about recordings; see :meth:`logits`."""
    spec: ModelSpec
    classes: tuple[str, ...]
    """Names of the outputs."""
    data: DataSettings
    """The run's data."""
    view: View
    """The settings of the view that the network reads: they say how a recording or an image becomes its input."""
    length: int | None
    """Frames that every example of the run has; ``None`` when they differ, and the network is told the lengths."""
    statistics: np.ndarray | None = None
    """With ``normalise: group``: mean and deviation float64 [2, bands] that a recording is normalised with. ``None``: not known."""
    objective: Objective = field(default_factory=Classify)
    """The objective that it was trained for: it says what the outputs mean."""
    threshold: Threshold | None = None
    """The score from which on a recording is anomalous; ``None``: not known, or the answer is no score."""
    chosen: str = ""
    """Where it is the best round's, by what that was chosen; empty: it is the last round's."""

    @property
    def description(self) -> str:
        """One line: ``plugin (crnn_lite) of runs/first, round 60, shared by all clients``."""
        whose = f"of client {self.client!r}" if self.client else "shared by all clients"
        best = f" ({self.chosen})" if self.chosen else ""
        return f"{self.name} ({self.spec.architecture}) of {self.run_dir}, round {self.round}{best}, {whose}"

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs of its graph: logits and probabilities, or the score, or plain outputs."""
        return {"score": ("score",), "none": ("outputs",)}.get(self.objective.answers, ("logits", "probabilities"))

    def logits(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """Return the network's outputs float32 [batch, outputs]: those of a classifier, or what the objective makes of them.

        Args:
            x: float32 [batch, frames, bands]; of images [batch, channels, rows, columns].
            lengths: int64 [batch]: frames that count; ``None``: all.

        Raises:
            InputError: what comes out is not one number for each of :attr:`classes`.
        """
        with torch.no_grad():
            logits: Tensor = self.network(x, lengths)
        if logits.shape != (len(x), len(self.classes)):
            raise InputError(
                f"model {self.name!r} gives an output of shape {list(logits.shape)} for {len(x)} examples and "
                f"{len(self.classes)} classes: it does not classify recordings; choose another with --model"
            )
        return logits


@dataclass(frozen=True, slots=True, eq=False)
class RunFusion:
    """A model of a run that reads what all its other models make of an example, each of a view of its own."""

    name: str
    """As in the record of the run: ``fusion``, or ``teacher:fusion`` where the server has several states."""
    method: Method
    networks: Mapping[str, nn.Module]
    """All of them by name, on the CPU, in evaluation mode."""
    encoders: tuple[RunModel, ...]
    """What the others are, the first view's first: their views are looked at here."""
    student: RunModel
    """The model that answers for recordings which lack a view."""

    @property
    def description(self) -> str:
        """One line: ``fusion of audio and image of runs/first, round 60; without all views audio (crnn_lite)``."""
        names = " and ".join(model.name for model in self.encoders)
        first = self.encoders[0]
        best = f" ({first.chosen})" if first.chosen else ""
        return (
            f"{self.name} of {names} of {first.run_dir}, round {first.round}{best}; where a view is absent {self.student.name} "
            f"({self.student.spec.architecture})"
        )

    def logits(self, batch: Batch) -> Tensor:
        """Return its outputs float32 [batch, classes] for a batch with all views."""
        with torch.no_grad():
            return compute_logits(self.method, self.networks, self.name.rpartition(":")[2], batch)


def open_model(
    run_dir: str | Path, model: str | None, client: str | None, trust: bool, best: bool, several: bool
) -> RunModel | RunFusion:
    """Return the model of a run that is named: one that reads a view, or one that reads what all others make of an example.

    Args (the others are those of :func:`load_model`):
        model: ``KEY:NAME`` of an entry of the server's state too, else the first that holds it.
        several: whether recordings come with files or arrays of further views; a model of one view refuses them.
    """
    folder = local_run(run_dir)
    if model is not None and model.rpartition(":")[2] in type(stored_config(folder, trust).parts.method).on_features:
        if client is not None:
            raise InputError(f"model {model!r} is the server's alone; leave the client out")
        return _Run(folder, trust, best).fusion(model)
    if several:
        raise InputError(
            "--view goes with a model that reads several views: add --model fusion (in Python: model='fusion')"
        )
    return load_model(folder, model, client, trust, best)


def load_model(
    run_dir: str | Path,
    model: str | None = None,
    client: str | None = None,
    trust: bool = False,
    best: bool = False,
) -> RunModel:
    """Return a model of a run, finished or not, as of its last commit, or as it was after its best round.

    Args:
        run_dir: the run's folder, or its URI: then it is fetched first.
        model: its name; by default the shared model, or with ``client`` the one that the client does not share.
        client: the id of the client whose model it shall be, private parts included; by default the server's.
        trust: approves the code that the run's configuration names.
        best: whether it is that of the best round by ``run.best``, private parts included.

    Raises:
        RunDirectoryError: no run directory, a damaged one, or no round is completed yet.
        InputError: there is no such model or client; the client has no model of its own yet; nothing is shared as a whole; or the
            run keeps no best round.
    """
    run = _Run(local_run(run_dir), trust, best)
    return run.shared_model(model) if client is None else run.clients_model(model, client)


def load_models_of(
    run_dir: str | Path, clients: Iterable[str], model: str | None = None, trust: bool = False, best: bool = False
) -> dict[str, RunModel]:
    """Return each client's model, for an unknown id the shared one; arguments and errors are those of :func:`load_model`."""
    run = _Run(local_run(run_dir), trust, best)
    known = run.population.ids
    return {name: run.clients_model(model, name) if name in known else run.shared_model(model) for name in clients}


class _Run:
    """A run directory, opened to read."""

    def __init__(self, run_dir: Path, trust: bool, best: bool = False) -> None:
        self.run_dir = run_dir
        self.config: Config = stored_config(run_dir, trust)
        self.commit, self.chosen = _best_commit(run_dir, self.config) if best else (_last_commit(run_dir), "")
        self.method: Method = self.config.parts.method
        self.population = Population.load(run_dir / "population", features=False)
        self.clients = Clients(self.population, self.config)

    def shared_model(self, model: str | None) -> RunModel:
        """Return a model of which the server holds every tensor."""
        found = self._shared()
        self._check_reads_data(model)
        if model is None and found:
            # Of a method with models on features the student, which is the first.
            named = [name for name in found if ":" not in name] if self.method.on_features else [*found]
            model = named[0] if named and (self.method.on_features or len(found) == 1) else None
        if model in found:
            specs, name, key, part = found[model]
            networks, _ = self._load(specs, self._received([key], part), {}, f"model {model!r}")
            return self._made(model, "", part, specs, name, networks[name])
        if not found or model in self.config.parts.models:
            what = "no model of this run is" if model is None else f"model {model!r} of this run is not"
            raise InputError(
                f"{what} shared as a whole, clients keep theirs or parts of them: name one with --client; "
                f"{self._who_has_models()}"
            )
        if model is None:
            raise InputError(f"this run has several shared models; choose one with --model: {', '.join(found)}")
        raise InputError(f"this run has no model {model!r}; {nearest(model, [*found, *self.config.parts.models])}")

    def _check_reads_data(self, model: str | None) -> None:
        """Refuse a model that reads no recordings or images."""
        if model is not None and model.rpartition(":")[2] in type(self.method).on_features:
            whole = [name for name in self.config.parts.models if name not in type(self.method).on_features]
            raise InputError(
                f"model {model!r} reads what other models of the run make of an example, and cannot be used by itself: raydfl "
                f"predict takes it with the files of all views; else choose one of {', '.join(whole)} with --model"
            )

    def fusion(self, model: str) -> RunFusion:
        """Return a model that reads what all others make of an example, with these."""
        entry, _, name = model.rpartition(":")
        for part, variants in self.clients.variants_of_parts().items():
            received = self._received(self.commit.state.tensors, part)
            for specs in variants:
                built = build_models(self.method, specs, self.config.run.seed)
                for key, tensors in received.items():
                    if name in built and entry in ("", key) and all(self._is_whole(built, n, tensors) for n in built):
                        networks, _ = self._load(specs, {key: tensors}, {}, f"model {model!r}")
                        label = ":".join([*label_entry("", key), name])
                        others = tuple(
                            self._made(other, "", part, specs, other, network)
                            for other, network in networks.items()
                            if other not in type(self.method).on_features
                        )
                        networks = {other: network.eval() for other, network in networks.items()}
                        return RunFusion(label, self.method, networks, others, self.shared_model(None))
        raise InputError(
            f"this run keeps no {model!r}: no entry of the server's state holds it with all models that it reads; choose one of "
            f"{', '.join(self._shared())} with --model"
        )

    def clients_model(self, model: str | None, client_id: str) -> RunModel:
        """Return a model as one client would use it."""
        self._check_reads_data(model)
        client = self.clients.by_id(client_id)
        record = self.commit.private.get(client.index)
        kept = {} if record is None else PrivateStore(self.run_dir / "private").read(record)
        tasks = [task for task in self.method.plan_evaluation(self.commit.state, [client]) if task.client_id != SERVER]
        keys = tasks[0].receive if tasks else tuple(self.commit.state.tensors)
        part = self.population.part_of(client.index)
        received = self._received(keys, part)
        cuts = tasks[0].cuts if tasks else {}
        if cuts:
            whole = {key: FlatTensors.of(tensors) for key, tensors in received.items()}
            received = {key: cut_tensors(tensors, cuts, f"client {client_id!r}") for key, tensors in whole.items()}
        networks, absent = self._load(client.models, received, kept, f"client {client_id!r}", cuts)
        if model is None:
            fixed = fixed_tensors(networks, self.method.fixed)
            own = [
                name
                for name in networks
                if any(tensor not in fixed and not self.method.shared(tensor) for tensor in _names(networks, name))
            ]
            model = (own or list(networks))[0]
        if model not in networks:
            raise InputError(f"client {client_id!r} has no model {model!r}; {nearest(model, networks)}")
        if any(tensor in absent for tensor in _names(networks, model)):
            raise InputError(
                f"client {client_id!r} has no model {model!r} of its own yet: it took part in none of the "
                f"{self.commit.state.round_index} rounds that are done; {self._who_has_models()}"
            )
        return self._made(model, client_id, part, client.models, model, networks[model])

    def _received(self, keys: Iterable[str], part: str) -> dict[str, Tensors]:
        """Return entries of the server's state as the clients of a part know them."""
        return {key: part_names.of_part(self.commit.state.tensors[key], part) for key in keys}

    def _shared(self) -> dict[str, tuple[Specs, str, str, str]]:
        """Return the shared models by the name that the record has for them: architectures that it is one of, model, key, part."""
        found: dict[str, tuple[Specs, str, str, str]] = {}
        for part, variants in self.clients.variants_of_parts().items():
            received = self._received(self.commit.state.tensors, part)
            for specs in variants:
                networks = build_models(self.method, specs, self.config.run.seed)
                for key, tensors in received.items():
                    for name in networks:
                        if name in type(self.method).on_features:
                            continue
                        if self._is_whole(networks, name, tensors):
                            label = ":".join([*label_entry(part, key), name])
                            found.setdefault(label, (specs, name, key, part))
        if len({key for *_, key, _ in found.values()}) < 2:
            return found
        keys = received_entries(self.config, self.commit.state, self.clients, self.commit.begun)
        return {label: model for label, model in found.items() if model[2] in keys}

    def _is_whole(self, networks: Mapping[str, nn.Module], name: str, tensors: Tensors) -> bool:
        fixed = fixed_tensors(networks, self.method.fixed)
        own = {tensor: value for tensor, value in _names(networks, name).items() if tensor not in fixed}
        return bool(own) and all(
            self.method.shared(tensor) and tensor in tensors and tensors[tensor].shape == value.shape
            for tensor, value in own.items()
        )

    def _load(
        self, specs: Specs, received: Mapping[str, Tensors], kept: Tensors, whose: str, cuts: Cuts | None = None
    ) -> tuple[dict[str, nn.Module], set[str]]:
        """Networks as the engine loads them, and the tensors that nobody has."""
        networks = build_models(self.method, specs, self.config.run.seed)
        own = {name.removeprefix(KEPT_MODEL): value for name, value in kept.items() if name.startswith(KEPT_MODEL)}
        flat = {key: FlatTensors.of(tensors) for key, tensors in received.items()}
        fixed = fixed_tensors(networks, self.method.fixed)
        parts = cut_tensors(fixed_of_whole(self.method, specs, self.config.run.seed), cuts or {}, whose)
        Replica(networks, fixed).start(flat, own, self.method.shared, f"{self.run_dir}, {whose}", parts)
        there = {name for tensors in flat.values() for name in tensors}
        names = {tensor for name in networks for tensor in _names(networks, name)} - fixed
        return networks, {name for name in names if name not in (there if self.method.shared(name) else own)}

    def _made(self, label: str, client_id: str, part: str, specs: Specs, name: str, network: nn.Module) -> RunModel:
        population, data = self.population.parts[part], self.config.data.each[part]
        inputs = population.shape(FIRST_VIEW, data)
        unnamed = ModelSpec(name, type(network).__name__, inputs, len(population.classes))
        spec = next((spec for spec in specs if spec.name == name), unnamed)
        statistics = population.statistics()
        if client_id:
            statistics = self.population.statistics(self.clients.index_of(client_id))
        return RunModel(
            self.run_dir,
            label,
            client_id,
            self.commit.state.round_index,
            self.method.objective.predictor(network).eval(),
            spec,
            self.method.objective.names(population.classes),
            data,
            data.all_views[spec.view],
            population.views[spec.view].length,
            statistics if spec.view == FIRST_VIEW else None,
            self.method.objective,
            recorded_threshold(self.run_dir, label, client_id, self.commit.state.round_index)
            if self.method.objective.answers == "score"
            else None,
            self.chosen,
        )

    def _who_has_models(self) -> str:
        ids = [self.clients[index].id for index in itertools.islice(self.commit.private, _LISTED + 1)]
        if not ids:
            return "no client has taken part yet"
        return f"clients that have one: {', '.join(ids[:_LISTED])}{' ...' if len(ids) > _LISTED else ''}"


def _names(networks: Mapping[str, nn.Module], name: str) -> dict[str, Tensor]:
    """Return a model's floating tensors, live, by their flat names."""
    return {f"{name}/{key}": v for key, v in networks[name].state_dict().items() if v.is_floating_point()}


def _best_commit(run_dir: Path, config: Config) -> tuple[Commit, str]:
    """Return the commit of the best round, and by what it was chosen.

    Raises:
        RunDirectoryError: no round is completed yet.
        InputError: none is kept.
    """
    _last_commit(run_dir)
    found = best_of(run_dir, config)
    if found is None:
        why = "no round of it was the best yet" if config.run.best else "run.best was not set"
        raise InputError(f"--best: {run_dir} keeps no best round, because {why}; leave it out for the last round")
    leader = found.leader
    return found.commit, f"the best: {leader.criterion.metric} {leader.value:.4f}, chosen by {leader.criterion.chooser}"


def _last_commit(run_dir: Path) -> Commit:
    commit = RunStore(run_dir).newest()
    if commit is None or commit.state.round_index == 0:
        raise RunDirectoryError(
            f"{run_dir} has completed no round yet, so its models know nothing; go on with it: raydfl resume {run_dir}"
        )
    return commit
