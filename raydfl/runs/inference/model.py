"""Loading of a run's trained models: a shared model, or a client's model with its private tensors.

A loaded model equals the engine's model at evaluation. Shared tensors come from the last commit, private tensors from the client's
newest private state. Loading needs neither recordings nor cached features.
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
    build_fixed_tensors,
    build_models,
    find_best,
    find_received_entries,
    label_entry,
)
from raydfl.engine.storage import Commit, PrivateStore, RunStore, local_run, private_uri, read_config
from raydfl.methods import Method, compute_logits
from raydfl.objectives import Classify, Objective
from raydfl.runs.inference.threshold import Threshold, read_threshold
from raydfl.training import Replica, find_fixed_tensors

Specs = tuple[ModelSpec, ...]

_LISTED = 5
"""Maximum number of clients in a message."""


@dataclass(frozen=True, slots=True, eq=False)
class RunModel:
    """A loaded model of a run, with the settings of its input."""

    run_dir: Path
    name: str
    """Name in the metrics table: ``plugin``, or ``cluster-0:model`` if the server has several states."""
    client: str
    """Id of the client. Empty for a shared model."""
    round: int
    """Number of completed training rounds."""
    network: nn.Module
    """Network on the CPU, in evaluation mode. Call it through :meth:`logits`."""
    spec: ModelSpec
    classes: tuple[str, ...]
    """Names of the outputs."""
    data: DataSettings
    """The run's data."""
    view: View
    """Settings of the view that the network reads."""
    length: int | None
    """Number of frames of every example of the run. ``None``: it varies, and the network takes lengths."""
    statistics: np.ndarray | None = None
    """Mean and standard deviation for ``normalise: group``, float64 [2, bands]. ``None``: unknown or unused."""
    objective: Objective = field(default_factory=Classify)
    """Training objective. It defines the meaning of the outputs."""
    threshold: Threshold | None = None
    """Threshold of the anomaly score. ``None``: unknown, or the answer is not a score."""
    chosen: str = ""
    """Description of the best round's choice. Empty: the model is of the last round."""

    @property
    def description(self) -> str:
        """One line: ``plugin (crnn_lite) of runs/first, round 60, shared by all clients``."""
        whose = f"of client {self.client!r}" if self.client else "shared by all clients"
        best = f" ({self.chosen})" if self.chosen else ""
        return f"{self.name} ({self.spec.architecture}) of {self.run_dir}, round {self.round}{best}, {whose}"

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the exported graph's outputs: logits and probabilities, score, embedding, or outputs."""
        return {
            "score": ("score",),
            "none": ("outputs",),
            "text": ("log_probabilities",),
            "intervals": ("probabilities",),
            "embedding": ("embedding",),
        }.get(self.objective.answers, ("logits", "probabilities"))

    def logits(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """Compute the network's outputs, float32 [batch, classes], or [batch, tokens, classes] for transcripts and intervals.

        Args:
            x: float32 [batch, frames, bands]; for images [batch, channels, rows, columns].
            lengths: Number of frames without padding, int64 [batch]. ``None``: no padding.

        Raises:
            InputError: The output does not have one value per class.
        """
        with torch.no_grad():
            logits: Tensor = self.network(x, lengths)
        tokens = logits.shape[1:2] if self.objective.answers in ("text", "intervals") else ()
        if logits.shape != (len(x), *tokens, len(self.classes)):
            raise InputError(
                f"model {self.name!r} returns an output of shape {list(logits.shape)} for {len(x)} examples and "
                f"{len(self.classes)} classes, so it does not classify recordings. Choose another model with --model."
            )
        return logits


@dataclass(frozen=True, slots=True, eq=False)
class RunFusion:
    """A loaded fusion model of a run, with an encoder for each view."""

    name: str
    """Name in the metrics table: ``fusion``, or ``teacher:fusion`` if the server has several states."""
    method: Method
    networks: Mapping[str, nn.Module]
    """Fusion model and encoders by name, on the CPU, in evaluation mode."""
    encoders: tuple[RunModel, ...]
    """The encoders, starting with the first view's."""
    student: RunModel
    """Model for recordings with missing views."""

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
        """Compute the outputs for a batch with all views, float32 [batch, classes]."""
        with torch.no_grad():
            return compute_logits(self.method, self.networks, self.name.rpartition(":")[2], batch)


def open_model(
    run_dir: str | Path, model: str | None, client: str | None, trust: bool, best: bool, several: bool
) -> RunModel | RunFusion:
    """Load a model of one view, or a fusion model, of a run.

    Args (see :func:`load_model` for the rest):
        model: Name, or ``KEY:NAME`` for a particular entry of the server's state.
        several: Whether files or arrays of further views are passed. Models of one view reject them.

    Raises:
        InputError: A client's fusion model, or further views for a model of one view.
    """
    folder = local_run(run_dir)
    if model is not None and model.rpartition(":")[2] in type(read_config(folder, trust).components.method).on_features:
        if client is not None:
            raise InputError(f"model {model!r} exists only on the server. Omit the client.")
        return _Run(folder, trust, best).load_fusion(model)
    if several:
        raise InputError("--view needs a model of several views. Add --model fusion (in Python: model='fusion').")
    return load_model(folder, model, client, trust, best)


def load_model(
    run_dir: str | Path,
    model: str | None = None,
    client: str | None = None,
    trust: bool = False,
    best: bool = False,
) -> RunModel:
    """Load a model of a finished or unfinished run from its last commit, or from its best round.

    Args:
        run_dir: Run folder, or its URI. A URI is fetched first.
        model: Name of the model. Default: the shared model, or with ``client`` the client's private model.
        client: Id of the client whose model is loaded, with its private tensors. Default: the server's model.
        trust: Approve the code named by the run's configuration.
        best: Load the best round by ``run.best`` instead of the last round.

    Raises:
        RunDirectoryError: The run folder is missing or damaged, or has no completed round.
        InputError: Unknown model or client, a client without a model, a run without a fully shared model, or without
            ``run.best``.
    """
    run = _Run(local_run(run_dir), trust, best)
    return run.load_shared(model) if client is None else run.load_client(model, client)


def load_client_models(
    run_dir: str | Path, clients: Iterable[str], model: str | None = None, trust: bool = False, best: bool = False
) -> dict[str, RunModel]:
    """Load the model of each client, or the shared model for an unknown id. See :func:`load_model` for arguments and errors."""
    run = _Run(local_run(run_dir), trust, best)
    known = run.population.ids
    return {name: run.load_client(model, name) if name in known else run.load_shared(model) for name in clients}


class _Run:
    """A run folder, opened for reading."""

    def __init__(self, run_dir: Path, trust: bool, best: bool = False) -> None:
        self.run_dir = run_dir
        self.config: Config = read_config(run_dir, trust)
        self.commit, self.chosen = _load_best_commit(run_dir, self.config) if best else (_load_last_commit(run_dir), "")
        self.method: Method = self.config.components.method
        self.population = Population.load(run_dir / "population", verify=True, features=False)
        self.clients = Clients(self.population, self.config)

    def load_shared(self, model: str | None) -> RunModel:
        """Load a model whose tensors are all on the server."""
        shared = self._find_shared()
        self._check_reads_data(model)
        if model is None and shared:
            # For fusion methods the default is the student. It is the first model without a key.
            named = [name for name in shared if ":" not in name] if self.method.on_features else [*shared]
            model = named[0] if named and (self.method.on_features or len(shared) == 1) else None
        if model in shared:
            specs, name, key, part = shared[model]
            networks, _ = self._load(specs, self._select_entries([key], part), {}, f"model {model!r}")
            return self._wrap(model, "", part, specs, name, networks[name])
        if not shared or model in self.config.components.models:
            subject = "no model of this run is" if model is None else f"model {model!r} of this run is not"
            raise InputError(
                f"{subject} shared as a whole, because clients keep private tensors. Choose a client with --client; "
                f"{self._describe_owners()}."
            )
        if model is None:
            raise InputError(f"this run has several shared models. Choose one with --model: {', '.join(shared)}.")
        raise InputError(
            f"this run has no model {model!r}. {nearest(model, [*shared, *self.config.components.models])}"
        )

    def _check_reads_data(self, model: str | None) -> None:
        """Reject a fusion model, because it reads outputs of models instead of data."""
        if model is not None and model.rpartition(":")[2] in type(self.method).on_features:
            whole = [name for name in self.config.components.models if name not in type(self.method).on_features]
            raise InputError(
                f"model {model!r} reads the outputs of other models, so it cannot be used alone. Pass the files of all views to "
                f"raydfl predict, or choose one of {', '.join(whole)} with --model."
            )

    def load_fusion(self, model: str) -> RunFusion:
        """Load a fusion model with its encoders."""
        entry, _, name = model.rpartition(":")
        for part, variants in self.clients.variants_of_parts().items():
            received = self._select_entries(self.commit.state.tensors, part)
            for specs in variants:
                built = build_models(self.method, specs, self.config.run.seed)
                for key, tensors in received.items():
                    if name in built and entry in ("", key) and all(self._is_whole(built, n, tensors) for n in built):
                        networks, _ = self._load(specs, {key: tensors}, {}, f"model {model!r}")
                        label = ":".join([*label_entry("", key), name])
                        encoders = tuple(
                            self._wrap(encoder, "", part, specs, encoder, network)
                            for encoder, network in networks.items()
                            if encoder not in type(self.method).on_features
                        )
                        networks = {model_name: network.eval() for model_name, network in networks.items()}
                        return RunFusion(label, self.method, networks, encoders, self.load_shared(None))
        raise InputError(
            f"this run does not keep {model!r}: no entry of the server's state has it together with its encoders. Choose one of "
            f"{', '.join(self._find_shared())} with --model."
        )

    def load_client(self, model: str | None, client_id: str) -> RunModel:
        """Load a client's model: shared tensors as the client receives them, and its private tensors."""
        self._check_reads_data(model)
        client = self.clients.by_id(client_id)
        record = self.commit.private.get(client.index)
        records = PrivateStore(self.run_dir / "private", uri=private_uri(self.config.run.dir, self.run_dir))
        private_tensors = {} if record is None else records.read(record)
        tasks = [task for task in self.method.plan_evaluation(self.commit.state, [client]) if task.client_id != SERVER]
        keys = tasks[0].receive if tasks else tuple(self.commit.state.tensors)
        part = self.population.part_of(client.index)
        received = self._select_entries(keys, part)
        cuts = tasks[0].cuts if tasks else {}
        if cuts:
            whole = {key: FlatTensors.from_tensors(tensors) for key, tensors in received.items()}
            received = {key: cut_tensors(tensors, cuts, f"client {client_id!r}") for key, tensors in whole.items()}
        networks, absent = self._load(client.models, received, private_tensors, f"client {client_id!r}", cuts)
        if model is None:
            fixed = find_fixed_tensors(networks, self.method.fixed)
            private = [
                name
                for name in networks
                if any(
                    tensor not in fixed and not self.method.shared(tensor) for tensor in _name_tensors(networks, name)
                )
            ]
            model = (private or list(networks))[0]
        if model not in networks:
            raise InputError(f"client {client_id!r} has no model {model!r}. {nearest(model, networks)}")
        if any(tensor in absent for tensor in _name_tensors(networks, model)):
            raise InputError(
                f"client {client_id!r} has no model {model!r} yet, because it took part in none of the "
                f"{self.commit.state.round_index} completed rounds. Choose another client; {self._describe_owners()}."
            )
        return self._wrap(model, client_id, part, client.models, model, networks[model])

    def _select_entries(self, keys: Iterable[str], part: str) -> dict[str, Tensors]:
        """Return entries of the server's state with the tensor names of a part's clients."""
        return {key: part_names.select_part(self.commit.state.tensors[key], part) for key in keys}

    def _find_shared(self) -> dict[str, tuple[Specs, str, str, str]]:
        """Return (specs, model, key, part) of each shared model by its name in the metrics table."""
        shared: dict[str, tuple[Specs, str, str, str]] = {}
        for part, variants in self.clients.variants_of_parts().items():
            received = self._select_entries(self.commit.state.tensors, part)
            for specs in variants:
                networks = build_models(self.method, specs, self.config.run.seed)
                for key, tensors in received.items():
                    for name in networks:
                        if name in type(self.method).on_features:
                            continue
                        if self._is_whole(networks, name, tensors):
                            label = ":".join([*label_entry(part, key), name])
                            shared.setdefault(label, (specs, name, key, part))
        if len({key for *_, key, _ in shared.values()}) < 2:
            return shared
        # Entries for the server's own use, such as momentum, hold models too. Clients never receive them.
        keys = find_received_entries(self.config, self.commit.state, self.clients, self.commit.begun)
        return {label: model for label, model in shared.items() if model[2] in keys}

    def _is_whole(self, networks: Mapping[str, nn.Module], name: str, tensors: Tensors) -> bool:
        fixed = find_fixed_tensors(networks, self.method.fixed)
        trained = {tensor: value for tensor, value in _name_tensors(networks, name).items() if tensor not in fixed}
        return bool(trained) and all(
            self.method.shared(tensor) and tensor in tensors and tensors[tensor].shape == value.shape
            for tensor, value in trained.items()
        )

    def _load(
        self, specs: Specs, received: Mapping[str, Tensors], state: Tensors, owner: str, cuts: Cuts | None = None
    ) -> tuple[dict[str, nn.Module], set[str]]:
        """Build networks, load their tensors like the engine, and return the names of missing tensors."""
        networks = build_models(self.method, specs, self.config.run.seed)
        private = {name.removeprefix(KEPT_MODEL): value for name, value in state.items() if name.startswith(KEPT_MODEL)}
        flat = {key: FlatTensors.from_tensors(tensors) for key, tensors in received.items()}
        fixed = find_fixed_tensors(networks, self.method.fixed)
        slices = cut_tensors(build_fixed_tensors(self.method, specs, self.config.run.seed), cuts or {}, owner)
        Replica(networks, fixed).start(flat, private, self.method.shared, f"{self.run_dir}, {owner}", slices)
        sent = {name for tensors in flat.values() for name in tensors}
        names = {tensor for name in networks for tensor in _name_tensors(networks, name)} - fixed
        return networks, {name for name in names if name not in (sent if self.method.shared(name) else private)}

    def _wrap(self, label: str, client_id: str, part: str, specs: Specs, name: str, network: nn.Module) -> RunModel:
        population, data = self.population.parts[part], self.config.data.each[part]
        inputs = population.shape(FIRST_VIEW, data)
        default = ModelSpec(name, type(network).__name__, inputs, len(population.classes))
        spec = next((spec for spec in specs if spec.name == name), default)
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
            read_threshold(self.run_dir, label, client_id, self.commit.state.round_index)
            if self.method.objective.answers == "score"
            else None,
            self.chosen,
        )

    def _describe_owners(self) -> str:
        ids = [self.clients[index].id for index in itertools.islice(self.commit.private, _LISTED + 1)]
        if not ids:
            return "no client has taken part yet"
        return f"clients with a model: {', '.join(ids[:_LISTED])}{' ...' if len(ids) > _LISTED else ''}"


def _name_tensors(networks: Mapping[str, nn.Module], name: str) -> dict[str, Tensor]:
    """Return a model's floating-point tensors (not copies) by flat name."""
    return {f"{name}/{key}": v for key, v in networks[name].state_dict().items() if v.is_floating_point()}


def _load_best_commit(run_dir: Path, config: Config) -> tuple[Commit, str]:
    """Return the commit of the best round, and a description of the choice.

    Raises:
        RunDirectoryError: The run has no completed round.
        InputError: The run keeps no best round.
    """
    _load_last_commit(run_dir)
    best = find_best(run_dir, config)
    if best is None:
        reason = "no best round is recorded yet" if config.run.best else "run.best was not set"
        raise InputError(f"--best: {run_dir} keeps no best round, because {reason}. Omit --best to use the last round.")
    leader = best.leader
    return best.commit, f"the best: {leader.criterion.metric} {leader.value:.4f}, chosen by {leader.criterion.chooser}"


def _load_last_commit(run_dir: Path) -> Commit:
    commit = RunStore(run_dir).newest()
    if commit is None or commit.state.round_index == 0:
        raise RunDirectoryError(
            f"{run_dir} has no completed round, so its models are untrained. Resume the run: raydfl resume {run_dir}"
        )
    return commit
