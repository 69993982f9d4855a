"""Checks of declared needs, with a common wording for conflicts between the groups of a configuration.

A method, an objective, an attack and a rule declare their needs (:class:`raydfl.core.needs.Needs`). The rest of the configuration
must meet them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from raydfl.attacks import Attack
from raydfl.core.errors import ConfigError, RaydflError, nearest
from raydfl.core.needs import Needs
from raydfl.core.users_code import FAILURES, describe
from raydfl.data import KNOWN, LABELLED, UNLABELLED, DataSettings
from raydfl.methods import Method
from raydfl.objectives import Objective
from raydfl.rules import Rule
from raydfl.training import ClientSettings, TrainSettings

_LABELS = {
    "one": "one class for each clip",
    "sets": "sets of classes",
    "sequences": "transcripts",
    "events": "events",
}
Conflict = tuple[str, str, str, str]
"""The setting in conflict, the unmet need, the reason, and the remedy."""


def check_needs(
    names: tuple[str, str, str],
    method: Method,
    attack: Attack | None,
    rule: Rule,
    data: DataSettings,
    clients: ClientSettings | None,
    phases: Sequence[TrainSettings],
    pools: Mapping[str, Sequence[str]],
) -> None:
    """Reject conflicts between the groups of a configuration.

    Args:
        names: Names of the method, the objective and the attack.
        method: Method, with its objective.
        attack: Attack; ``None``: every client is honest.
        rule: Aggregation rule of the method.
        data: Data settings of all parts.
        clients: Setting ``train.clients``.
        phases: Training settings of each phase.
        pools: Names of the training pools by part, for parts whose clips are assigned. For the rest, the settings name the pools,
            or a user's table of clips does.

    Raises:
        ConfigError: A need is not met. The message describes the first conflict.
    """
    declaring: dict[str, Method | Objective | Attack] = {
        f"method {names[0]!r}": method,
        f"objective {names[1]!r}": method.objective,
    }
    if attack is not None:
        declaring[f"attack {names[2]!r}"] = attack
    needs = {owner: _read_needs(owner, declarer) for owner, declarer in declaring.items()}
    needs[f"rule {type(rule).__name__}"] = Needs(new_values=rule.relative, one_round=rule.changes_basis)
    if clients is not None:
        needs |= {f"train.clients.{key}": Needs(columns=(name,)) for key, name in clients.columns.items()}
    fleet = phases[0].fleet
    if fleet is not None:
        needs |= {f"train.fleet.seconds.{key}": Needs(columns=(name,)) for key, name in fleet.seconds.columns.items()}
        if fleet.hours is not None:
            needs["train.fleet.hours"] = Needs(columns=(fleet.hours.column,))
    if phases[0].class_weights == "balanced":
        needs["train.class_weights=balanced"] = Needs(objectives=("classify",), labels="one")
        _check_weighted_pools(data, pools)
    for owner, declared in needs.items():
        conflicts = (
            *_find_method_conflicts(declared, method, names),
            *_find_training_conflicts(declared, phases),
            *_find_parts_conflicts(declared, data),
            *(
                c
                for part, own in data.each.items()
                for c in _find_data_conflicts(owner, declared, own, pools.get(part))
            ),
        )
        for place, need, reason, remedy in conflicts:
            end = "" if remedy.endswith(("?", ".")) else "."
            raise ConfigError(f"{place}: {owner} needs {need}, but {reason}. {remedy[0].upper()}{remedy[1:]}{end}")


def _check_weighted_pools(data: DataSettings, pools: Mapping[str, Sequence[str]]) -> None:
    """Reject class weights with several pools, because labels of unlabelled clips are hidden from training."""
    if any(own.unlabelled is not None or own.pools or len(pools.get(part, ())) > 1 for part, own in data.each.items()):
        raise ConfigError(
            "train.class_weights: balanced counts the labels of a client's clips, but data.pools and data.unlabelled have clips "
            "without labels. Set it to none."
        )


def _read_needs(owner: str, declarer: Method | Objective | Attack) -> Needs:
    """Read the needs of a class, which may be a user's.

    Raises:
        ConfigError: The attribute fails, or is not a :class:`Needs`.
    """
    remedy = "Write needs = raydfl.Needs(...), or a property that returns it"
    try:
        needs: object = declarer.needs
    except RaydflError:
        raise
    except FAILURES as error:
        raise ConfigError(f"{owner}: needs failed: {describe(error)}. {remedy}") from error
    if not isinstance(needs, Needs):
        raise ConfigError(f"{owner}: needs must be a raydfl.Needs. {remedy}")
    return needs


def _find_method_conflicts(needs: Needs, method: Method, names: tuple[str, str, str]) -> Iterator[Conflict]:
    name, objective, _ = names
    reason = f"the objective is {objective!r}"
    if needs.objectives and objective not in needs.objectives:
        remedy = "choose a supported objective, or a method for any objective (fedavg, fedprox, scaffold ...)"
        yield "objective", f"objective={' or '.join(needs.objectives)}", reason, remedy
    if needs.labels not in ("any", method.objective.needs.labels):
        remedy = "choose another objective, or an attack on updates (sign_flip, gaussian_noise ...)"
        target = _LABELS[needs.labels]
        yield "objective", f"an objective that learns {target}", reason, remedy
    if needs.new_values and method.changes:
        remedy = "choose a rule that compares clients with each other (geometric_median, multi_krum, dnc ...)"
        yield "method.rule", "updates near the server's tensors", f"method {name!r} also sends changes", remedy
    if needs.one_round and type(method).aggregate is not Method.aggregate:
        remedy = "choose weighted_mean, or a method whose server takes over the aggregate (fedavg, fedprox, fedper ...)"
        yield "method.rule", "tensors of one round", f"method {name!r} combines those of several rounds", remedy


def _find_training_conflicts(needs: Needs, phases: Sequence[TrainSettings]) -> Iterator[Conflict]:
    if needs.one_round and phases[0].fleet is not None:
        remedy = "remove it, or choose another rule"
        yield "train.fleet", "tensors of one round", "a fleet combines updates of several rounds", remedy
    for train in phases:
        name, size = train.optimiser.name, train.batch_size
        if needs.optimiser not in ("", name):
            remedy = f"set it to {needs.optimiser}, or choose another method"
            yield "train.optimiser.name", f"train.optimiser.name={needs.optimiser}", f"it is {name!r}", remedy
        if needs.plain_steps and (train.optimiser.momentum or train.optimiser.clip_norm is not None):
            remedy = "remove train.optimiser.momentum and train.optimiser.clip_norm"
            yield "train.optimiser", "plain steps", "it has momentum or clipping", remedy
        if size < needs.batch_size:
            remedy = f"set it to at least {needs.batch_size}"
            yield "train.batch_size", f"batches of at least {needs.batch_size} clips", f"it is {size}", remedy


def _find_parts_conflicts(needs: Needs, data: DataSettings) -> Iterator[Conflict]:
    if needs.one_class_list and data.parts:
        yield "data.parts", "one list of classes for all clients", "each part has its own", "remove one of the two"
    if needs.own_outputs and data.parts and data.heads == "common":
        remedy = "set it to part, or choose objective=classify"
        yield "data.heads", "one output for each class of a part", "all parts share the outputs", remedy


def _find_data_conflicts(
    owner: str, needs: Needs, data: DataSettings, pools: Sequence[str] | None
) -> Iterator[Conflict]:
    kind = data.features.kind
    if needs.recordings and kind in ("file", "image"):
        remedy = "set it to logmel, or run the attack with the model that computed the features"
        yield "data.features.kind", "recordings", f"features of the kind {kind} have none", remedy
    partitions = [data.partition, *(data.select_site(site).partition for site in data.sites)] if needs.own_clips else []
    if any(partition.by == "table" for partition in partitions):
        remedy = "choose another partition, or an attack on updates (sign_flip, gaussian_noise ...)"
        yield "data.partition.by", "clips with a single owner", "clients of a table may share clips", remedy
    yield from _find_label_conflicts(owner, needs, data)
    if pools is None:
        named = [*data.pools] if data.unlabelled is None else [LABELLED, UNLABELLED]
        # A table may name any pool. The check is repeated after the clips are assigned.
        pools = needs.pools if needs.pools and has_clip_table(data) else named
    for pool in needs.pools:
        if pool not in pools:
            remedy = (
                "hide labels with data.unlabelled='{keep: 0.1}', or select clips by a column with data.pools or with the column "
                "pool of data.tables.clips"
            )
            yield "data.pools", f"the pool {pool!r}", f"data has {', '.join(pools) or 'none'}", remedy
        elif pool == UNLABELLED and data.unlabelled is not None and data.unlabelled.use == 0:
            remedy = "set it above 0, or choose a method without unlabelled clips"
            yield "data.unlabelled.use", "clips without labels", "it is 0", remedy
    for view in needs.views:
        if view not in data.views:
            remedy = f"add it, or choose another view. {nearest(view, data.views)}"
            yield "data.views", f"the view {view!r}", "it is not defined", remedy
    for column in needs.columns:
        if column not in data.profile and column not in KNOWN:
            hint = nearest(column, [*data.profile, *KNOWN])
            remedy = f"set data.profile.{column}='{{values: [...]}}', or choose another column. {hint}"
            yield "data.profile", f"the column {column!r}", "the clients' profiles do not have it", remedy


def _find_label_conflicts(owner: str, needs: Needs, data: DataSettings) -> Iterator[Conflict]:
    if needs.labels == "one" and data.label_sets is not None:
        remedy = "choose objective=multi_label, or set data.label_sets to null"
        yield "data.label_sets", "one label for each clip", "data.label_sets splits labels into sets of classes", remedy
    if needs.labels != "sequences" and data.label_sequences is not None and owner.startswith("objective"):
        remedy = "choose objective=transcribe, or set data.label_sequences to null"
        yield (
            "data.label_sequences",
            "labels that are no transcripts",
            "data.label_sequences makes them transcripts",
            remedy,
        )
    if needs.labels == "sequences" and data.label_sequences is None:
        remedy = "set data.label_sequences='{units: words}' or '{units: characters}', or choose objective=classify"
        yield "data.label_sequences", "transcripts", "a label is a class", remedy
    if needs.labels != "events" and data.events is not None and owner.startswith("objective"):
        remedy = "choose objective=events, or set data.events to null"
        yield "data.events", "labels without times", "data.events gives labels the times of events", remedy
    if needs.labels == "events" and data.events is None:
        remedy = "set data.events='{file: EVENTS.tsv}', or choose objective=classify"
        yield "data.events", "events", "a label is a class", remedy
    if needs.labels == "sets" and data.label_sets is None:
        remedy = "set data.label_sets.separator to the text between a label's classes, or choose objective=classify"
        yield "data.label_sets", "a set of classes for each clip", "a label is one class", remedy


def has_clip_table(data: DataSettings) -> bool:
    """Return whether a user's table of clips may assign roles and pools, here or at a site."""
    return any(own.tables.clips is not None for own in (data, *(data.select_site(site) for site in data.sites)))
