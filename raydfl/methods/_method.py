"""Method: the override points of a federated method and their defaults, which together are FedAvg.

B. McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

A method is a frozen dataclass: its fields are its hyperparameters. It holds no state; what the server knows is in
:class:`~raydfl.core.types.State`, what a client keeps is in ``step.state`` and in the tensors that ``shared`` keeps private.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from raydfl.core.errors import ConfigError
from raydfl.core.needs import Needs
from raydfl.core.settings import StrictTypes
from raydfl.core.types import Batch, BuiltModels, Client, Metrics, ModelSpec, State, Task, Tensors, Update
from raydfl.core.users_code import is_users
from raydfl.data import Examples
from raydfl.methods._layers import check_prefixes
from raydfl.models import build_model
from raydfl.objectives import Classify, Objective
from raydfl.rules import Rule, WeightedMean, find_rule
from raydfl.training import Step, fit, fixed_tensors

CLIENTS = "clients"
"""The key of the state's ``extra`` for the number of clients, where a method's equations have it. With ``train.groups`` the engine
sets it to the number of a group's members, and ``clients@PART`` to that of its members in a part."""


@dataclass(frozen=True, kw_only=True)
class Method(StrictTypes):
    """Base of every method. Override what differs from FedAvg and nothing else."""

    rule: Annotated[
        str | dict[str, Any] | None,
        Field(description="aggregation rule by name, or {name, options ...}; null: the method's own"),
    ] = None

    objective: Objective = dataclasses.field(default=Classify(), init=False)
    """The run's ``objective``, what is learnt; no option of the method. :meth:`loss` and :meth:`evaluate` ask it by default."""

    models: ClassVar[Mapping[str, str]] = {"model": "crnn_base"}
    """Names of the models that a client has, in building order, with the architecture to use when none is configured."""

    on_features: ClassVar[tuple[str, ...]] = ()
    """Names of models that read no view, but features that others compute: :meth:`build` says how many."""

    partial: ClassVar[tuple[str, ...]] = ()
    """Names of models that do not learn the objective by themselves. Their outputs are not checked before the first round."""

    copies: ClassVar[Mapping[str, str]] = {}
    """Names of models that are copies of another one, and that one's: they have its architecture and begin with its weights."""

    changes: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of tensors that clients send as changes to something, and not as new values of what they received."""

    phases: ClassVar[tuple[str, ...]] = ()
    """Names of the phases that follow one another, where there are several: ``state.phase`` says which it is. ``train.phases`` says
    how many rounds each has and what of the training is different in it."""

    default_rule: ClassVar[Rule] = WeightedMean()
    """The aggregation rule of a configuration that names none."""

    additions: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of tensors that clients may send although the server has none of the name. Others are rejected,
    because a client could add anything to the state."""

    tensor_options: ClassVar[tuple[str, ...]] = ()
    """Names of options that hold beginnings of tensors' names. One that names no tensor is rejected: the method would silently be
    another."""

    grouping: ClassVar[str] = "none"
    """The discovery rule of a run that leaves ``train.groups`` out."""

    fine_tuning: ClassVar[int] = 0
    """The passes of fine-tuning at evaluation of a run that leaves ``evaluate.fine_tune`` out."""

    revision: ClassVar[int] = 1
    """Version of the equations. A run continues only with the revision that it began with, because both have one digest."""

    def __init_subclass__(cls) -> None:
        """Reject members that earlier versions called.

        Raises:
            ConfigError: a user's class has one, or ``additions`` or ``fixed`` is no tuple of texts.
        """
        for name, replacement in _REMOVED.items():
            owner = next((owner for owner in cls.__mro__ if name in vars(owner)), Method)
            member = vars(owner).get(name) if is_users(owner.__module__) else None
            if member is None or (name in vars(Method) and not isinstance(member, types.FunctionType)):
                continue
            if name != "build" or "client" in inspect.signature(member).parameters:
                raise ConfigError(
                    f"{owner.__name__}.{name} is not called in this version of raydfl. Write {replacement}."
                )
        for name in ("additions", "fixed"):
            given = vars(cls).get(name) or ()
            if isinstance(given, list):
                setattr(cls, name, tuple(given))
            elif not isinstance(given, tuple | property):
                raise ConfigError(
                    f"{cls.__name__}.{name} is {given!r:.60}; it must be a tuple of texts, such as ('model/',)"
                )

    @property
    def needs(self) -> Needs:
        """The needs of other settings, and what the method excludes; by default nothing."""
        return Needs()

    @property
    def fixed(self) -> tuple[str, ...] | None:
        """The beginnings of the names of parameters that are fixed besides those that do not train as they were built.

        Everybody knows a fixed parameter from the run's seed or a file. So it does not train, and is neither sent nor kept.
        Buffers beside fixed parameters alone are fixed too (raydfl.training.fates). ``None``: nothing is fixed.
        """
        return ()

    def client_models(self, models: Sequence[ModelSpec], profile: Mapping[str, Any]) -> tuple[ModelSpec, ...]:
        """Return the networks that a client builds in place of those that the server has; by default the same.

        Args:
            models: that the configuration gives the client.
            profile: of the client, but only the columns that :meth:`needs` names.

        Raises:
            ConfigError: there is no such network for this profile.
        """
        return tuple(models)

    def build(self, models: Sequence[ModelSpec]) -> dict[str, nn.Module]:
        """Build the models by name, freshly initialised, of clients for which these architectures were chosen; no :attr:`copies`.

        All those clients share one built network, re-loaded in place. The engine seeds PyTorch before, equally for all, so equal
        architectures start from equal weights.
        """
        return {spec.name: build_model(spec) for spec in models}

    def shared(self, name: str) -> bool:
        """Return whether the tensor of that flat name may leave the client. Others are kept for the client between rounds.

        By default all may but those of :attr:`copies`.
        """
        return name.partition("/")[0] not in type(self).copies

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return the state before the first round.

        Args:
            clients: the population; over several ``data.parts`` the clients of one, for it is asked for each part.
            models: freshly built models, one set for each distinct ``client.models``.
            rng: seeded by the run seed.

        Returns:
            By default one key, ``"global"``, with every shared tensor of any client's models that is not fixed.

        Raises:
            ConfigError: clients have different architectures for a shared model, or an option names no tensor.
        """
        for option in type(self).tensor_options:
            own = [{n: model for n, model in built.items() if n not in type(self).copies} for built in models]
            check_prefixes(own, getattr(self, option) or (), f"method.{option}")
        tensors: dict[str, Tensor] = {}
        for built in models:
            fixed = fixed_tensors(built, self.fixed)
            for model_name, model in built.items():
                for key, value in model.state_dict().items():
                    name = f"{model_name}/{key}"
                    if value.is_floating_point() and name not in fixed and self.shared(name):
                        if name in tensors and tensors[name].shape != value.shape:
                            raise ConfigError(
                                f"models.{model_name} is shared between the clients, so all must have one architecture, but "
                                f"{key} is {tuple(tensors[name].shape)} here and {tuple(value.shape)} there"
                            )
                        tensors.setdefault(name, value.detach().clone())
        return State(round_index=0, tensors={"global": tensors})

    def begin_phase(self, state: State) -> State:
        """Return the state with which a phase begins, ``state.phase``; asked after the last round of the phase before."""
        return state

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Plan the tasks of the next round; by default ``cohort`` clients drawn uniformly without replacement.

        A client may appear once in a round.
        """
        return [Task(client.id) for client in drawn(clients, rng, cohort)]

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the training loss of a batch, a scalar; by default the objective's, of the method's first model."""
        return self.objective.loss(step, next(iter(step.models)), batch)

    def local(self, step: Step) -> Update:
        """Do the client's work for one task; by default train on its data with :meth:`loss`.

        Where it changes several entries of the server's state, the updates to the others are the first one's ``further``.
        """
        return step.update(fit(step, self.loss))

    @functools.cached_property
    def built_rule(self) -> Rule:
        """The aggregation rule: the configured one, or :attr:`default_rule`; built once.

        Raises:
            ConfigError: there is no such rule, or an option of it is unknown, of the wrong type or out of range.
        """
        default: object = self.default_rule
        if not isinstance(default, Rule):
            raise ConfigError(
                f"{type(self).__name__}.default_rule is {default!r:.60}; it must be a rule, such as default_rule = UniformMean()"
            )
        return find_rule(self.rule, default, "method.rule")

    def complete(self, state: State, update: Update) -> Update:
        """Fill in the tensors that a client left out, so that updates can be compared; by default nothing is left out.

        With ``train.groups`` the engine does it before groups are found: :meth:`aggregate` gets completed updates.

        Args:
            state: from which the client was sent its task.
            update: as the client sent it, or completed already.
        """
        return update

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Make the next state from this round's updates, which come one after another in client order, each with its metrics.

        Returns:
            The state (its round is counted by the engine), and what is to be recorded about the aggregation. By default the rule
            per key and tensor name over those who sent it; what nobody sent keeps its value.
        """
        result = self.built_rule(updates, state.tensors, rng)
        return dataclasses.replace(state, tensors=merge(state.tensors, result.tensors)), result.metrics()

    def plan_evaluation(self, state: State, clients: Sequence[Client]) -> list[Task]:
        """Choose which entries of the state the given clients receive when their models are measured; by default ``"global"``.

        The method may also plan what the server measures, by tasks with the client id ``""``: models load from the entries that
        such a task receives, and its options may name ``models`` (by default all of which the server has every tensor), the
        ``split`` (by default every one) and ``parts`` (by default every one): a mapping of the names of parts of ``data.parts`` to
        how much the entry's scores count in the part's mean, such as the number of clients that have the model; a federation
        without parts is one of the name ``""``. Scores carry the name of the first entry. Without such a task the server measures
        each entry by itself. It is asked for these with no clients.
        """
        return [Task(client.id, phase="evaluate") for client in clients]

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        """Measure on some examples what the objective measures, for every model in ``step.models``: ``<model>/loss`` ..."""
        return {
            f"{name}/{metric}": value
            for name in step.models
            for metric, value in self.objective.evaluate(step, name, examples, batch_size).items()
        }


_REMOVED = {
    "needs_pools": "needs = raydfl.Needs(pools=...)",
    "reads_views": "needs = raydfl.Needs(views=...)",
    "reads_profile": "needs = raydfl.Needs(columns=...)",
    "objectives": "needs = raydfl.Needs(objectives=...)",
    "across_parts": "needs = raydfl.Needs(one_class_list=True)",
    "check": "needs = raydfl.Needs(optimiser=..., batch_size=...)",
    "build": "def build(self, models), with models in place of client.models: clients with equal architectures share networks",
    "fixed": "fixed = ('model/output',), with the beginnings of the parameters' names, or fixed = None for none",
    "models_for": "the class variables models and on_features",
    "logits": "the class variable partial, with the names of models whose outputs are not checked",
    "may_send": "the class variable additions, with the beginnings of the tensors' names",
    "default_rule": "the class variable default_rule, such as default_rule = UniformMean()",
    "default_model": "nothing: the only shared model is used where none is named, or the first of a method with on_features",
}
"""Members of earlier versions, and their replacements."""


def drawn(clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Client]:
    """Return ``cohort`` clients, drawn without replacement, in their order; fewer where fewer take part.

    They are drawn uniformly, or as ``train.clients`` says: those with a weight of 0 never, the others one after another with
    probabilities that are proportional to their weights, and of each group its share of the cohort. What is left when shares are
    rounded down goes to groups that are drawn, with probabilities in proportion to what they lack.

    Args:
        clients: the population, or some of it.
        rng: of the round.
        cohort: how many, at most as many as there are.
    """
    if hasattr(clients, "draw"):  # the whole population, which knows it without making its clients
        how = clients.draw
        chances, strata = (np.ones(0), np.zeros(0)) if how is None else (how.chances, how.strata)
    else:
        chances = np.array([client.chance for client in clients])
        strata = np.array([client.stratum for client in clients])
    if (chances == 1).all() and (strata == 0).all():
        chosen = np.sort(rng.choice(len(clients), size=cohort, replace=False))
        return [clients[int(index)] for index in chosen]
    able = np.flatnonzero(chances)
    groups = [able[strata[able] == stratum] for stratum in np.unique(strata[able])]
    shares = _shares(np.array([len(group) for group in groups]), min(cohort, len(able)), rng)
    each = [
        rng.choice(group, size=share, replace=False, p=chances[group] / chances[group].sum())
        for group, share in zip(groups, shares, strict=True)
    ]
    return [clients[int(index)] for index in np.sort(np.concatenate(each))] if each else []


def _shares(sizes: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """Divide ``total`` in proportion to sizes: int [groups], none larger than its size."""
    exact = total * sizes / sizes.sum()
    shares: np.ndarray = np.floor(exact + 1e-9).astype(np.int64)
    lacking = np.maximum(exact - shares, 0)
    if left := total - int(shares.sum()):
        shares[rng.choice(len(sizes), size=left, replace=False, p=lacking / lacking.sum())] += 1
    return shares


def merge(tensors: Mapping[str, Tensors], changed: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """Return ``tensors`` with those of ``changed`` in their place, key by key and name by name."""
    return {key: {**tensors.get(key, {}), **changed.get(key, {})} for key in {**tensors, **changed}}


class Counted(Iterable[Update]):
    """Updates to be read once; afterwards ``clients`` says whose they were, and ``senders`` by tensor name how many had it."""

    def __init__(self, updates: Iterable[Update]) -> None:
        self.clients: list[str] = []
        self.senders: Counter[str] = Counter()
        self._updates = updates

    def __iter__(self) -> Iterator[Update]:
        for update in self._updates:
            self.clients.append(update.client_id)
            self.senders.update(update.tensors.keys())
            yield update
