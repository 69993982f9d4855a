"""Method: the override points of a federated method. Their defaults implement FedAvg.

B. McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

A method is a frozen dataclass. Its fields are its hyperparameters. It holds no state: the server's state is a
:class:`~raydfl.core.types.State`, and a client's is ``step.state`` and the tensors for which ``shared`` returns False.
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
from raydfl.core.options import OURS
from raydfl.core.settings import StrictTypes
from raydfl.core.types import Batch, BuiltModels, Client, Metrics, ModelSpec, State, Task, Tensors, Update
from raydfl.core.users_code import is_users
from raydfl.data import Examples
from raydfl.methods._layers import check_prefixes
from raydfl.models import build_model
from raydfl.objectives import Classify, Objective
from raydfl.rules import Rule, WeightedMean, find_rule
from raydfl.training import Step, find_fixed_tensors, fit

CLIENTS = "clients"
"""Key of ``State.extra`` for the number of clients, N in many equations. With ``train.groups`` the engine sets it to the size of
a group, and ``clients@PART`` to the number of the group's members in a part."""


@dataclass(frozen=True, kw_only=True)
class Method(StrictTypes):
    """Base class of all methods. The defaults are FedAvg: override only the differences."""

    rule: Annotated[
        str | dict[str, Any] | None,
        Field(description="Aggregation rule: a name, or {name, options ...}. null: the method's default."),
        OURS,
    ] = None

    objective: Objective = dataclasses.field(default=Classify(), init=False)
    """The run's ``objective``, set by the engine. The default :meth:`loss` and :meth:`evaluate` use it."""

    models: ClassVar[Mapping[str, str]] = {"model": "crnn_base"}
    """A client's models by name, in building order, with their default architectures."""

    on_features: ClassVar[tuple[str, ...]] = ()
    """Models that read other models' features instead of a view. :meth:`build` sets their number of inputs."""

    partial: ClassVar[tuple[str, ...]] = ()
    """Models without an objective of their own. The engine does not check their outputs before the first round."""

    copies: ClassVar[Mapping[str, str]] = {}
    """Copies of models, by name, with their originals. A copy has the original's architecture and initial weights."""

    changes: ClassVar[tuple[str, ...]] = ()
    """Name prefixes of tensors that clients send as changes rather than as new values."""

    phases: ClassVar[tuple[str, ...]] = ()
    """Names of successive training phases. ``state.phase`` is the current one. ``train.phases`` sets each phase's rounds and
    training options."""

    default_rule: ClassVar[Rule] = WeightedMean()
    """The aggregation rule if the configuration sets no ``method.rule``."""

    additions: ClassVar[tuple[str, ...]] = ()
    """Name prefixes of tensors that clients may send without a counterpart at the server. All others are rejected, so that no
    client can add arbitrary tensors to the state."""

    reads_metrics: ClassVar[bool] = False
    """Whether the server's state depends on metrics of clients. Such metrics carry no noise (``train.optimiser.private``)."""

    tensor_options: ClassVar[tuple[str, ...]] = ()
    """Options with name prefixes of tensors. A prefix without a tensor is rejected, because it would silently change the method."""

    grouping: ClassVar[str] = "none"
    """Default of ``train.groups``."""

    fine_tuning: ClassVar[int] = 0
    """Default number of epochs of ``evaluate.fine_tune``."""

    associative: ClassVar[bool] = True
    """Whether :meth:`aggregate` accepts partial sums over several clients (``train.block``) in place of their updates. Then it must
    not read an update's client, metrics or weight. A subclass with an :meth:`aggregate` of its own declares it again."""

    revision: ClassVar[int] = 1
    """Version of the equations. A run resumes only with its initial revision, because both revisions have one digest."""

    def __init_subclass__(cls) -> None:
        """Reject a subclass with members of earlier versions, and reset ``associative`` if it aggregates by itself.

        Raises:
            ConfigError: A user's class has such a member, or ``additions`` or ``fixed`` is not a tuple of strings.
        """
        if "aggregate" in vars(cls) and "associative" not in vars(cls):
            cls.associative = False
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
            prefixes = vars(cls).get(name) or ()
            if isinstance(prefixes, list):
                setattr(cls, name, tuple(prefixes))
            elif not isinstance(prefixes, tuple | property):
                raise ConfigError(
                    f"{cls.__name__}.{name} is {prefixes!r:.60}. It must be a tuple of strings, such as ('model/',)."
                )

    @property
    def needs(self) -> Needs:
        """Requirements on other settings. The default has none."""
        return Needs()

    @property
    def fixed(self) -> tuple[str, ...] | None:
        """Name prefixes of fixed parameters. Parameters built without gradients are fixed anyway.

        Server and clients know a fixed parameter from the run's seed or a file. It is neither trained, nor sent, nor stored.
        Buffers of layers with only fixed parameters are fixed too (raydfl.training.ownership). ``None``: nothing is fixed.
        """
        return ()

    def client_models(self, models: Sequence[ModelSpec], profile: Mapping[str, Any]) -> tuple[ModelSpec, ...]:
        """Return the architectures that a client builds. The default is the server's.

        Args:
            models: The client's architectures by the configuration.
            profile: The client's profile, restricted to the columns in :meth:`needs`.

        Raises:
            ConfigError: No architecture fits this profile.
        """
        return tuple(models)

    def build(self, models: Sequence[ModelSpec]) -> dict[str, nn.Module]:
        """Build freshly initialised models by name, without :attr:`copies`.

        Clients with these architectures share the built networks, reloaded in place. The engine seeds PyTorch equally before
        each call, so equal architectures start from equal weights.
        """
        return {spec.name: build_model(spec) for spec in models}

    def shared(self, name: str) -> bool:
        """Return whether the tensor with this flat name is sent to the server. The client keeps all others between rounds.

        By default all tensors are shared except those of :attr:`copies`.
        """
        return name.partition("/")[0] not in type(self).copies

    def init(self, clients: Sequence[Client], models: BuiltModels, rng: np.random.Generator) -> State:
        """Return the state before the first round.

        Args:
            clients: The population. With several ``data.parts`` the engine calls this once per part, with its clients.
            models: Freshly built models, one set for each distinct ``client.models``.
            rng: Generator seeded by the run's seed.

        Returns:
            By default one key, ``"global"``, with the shared tensors of all clients' models, except fixed ones.

        Raises:
            ConfigError: Clients have different architectures for a shared model, or an option names no tensor.
        """
        for option in type(self).tensor_options:
            originals = [{n: model for n, model in built.items() if n not in type(self).copies} for built in models]
            check_prefixes(originals, getattr(self, option) or (), f"method.{option}")
        tensors: dict[str, Tensor] = {}
        for built in models:
            fixed = find_fixed_tensors(built, self.fixed)
            for model_name, model in built.items():
                for key, value in model.state_dict().items():
                    name = f"{model_name}/{key}"
                    if value.is_floating_point() and name not in fixed and self.shared(name):
                        if name in tensors and tensors[name].shape != value.shape:
                            raise ConfigError(
                                f"models.{model_name} is shared between the clients, so all must have one architecture, but "
                                f"{key} has the shapes {tuple(tensors[name].shape)} and {tuple(value.shape)}. Configure one "
                                f"architecture."
                            )
                        tensors.setdefault(name, value.detach().clone())
        return State(round_index=0, tensors={"global": tensors})

    def begin_phase(self, state: State) -> State:
        """Return the initial state of the phase ``state.phase``, from the last state of the previous phase."""
        return state

    def plan(self, state: State, clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Task]:
        """Plan the tasks of the next round. By default ``cohort`` clients are sampled without replacement.

        Each client may have at most one task in a round.
        """
        return [Task(client.id) for client in sample_clients(clients, rng, cohort)]

    def loss(self, step: Step, batch: Batch) -> Tensor:
        """Return the training loss of a batch, a scalar. The default is the objective's loss of the first model."""
        return self.objective.loss(step, next(iter(step.models)), batch)

    def local(self, step: Step) -> Update:
        """Compute a client's update. The default trains on the client's data with :meth:`loss`.

        To update several entries of the server's state, put the further updates into ``further`` of the first.
        """
        return step.update(fit(step, self.loss))

    @functools.cached_property
    def built_rule(self) -> Rule:
        """The aggregation rule: ``method.rule``, or :attr:`default_rule`.

        Raises:
            ConfigError: The rule is unknown, or one of its options is unknown, of the wrong type or out of range.
        """
        default: object = self.default_rule
        if not isinstance(default, Rule):
            raise ConfigError(
                f"{type(self).__name__}.default_rule is {default!r:.60}. It must be a rule, such as default_rule = UniformMean()."
            )
        return find_rule(self.rule, default, "method.rule")

    def complete(self, state: State, update: Update) -> Update:
        """Fill in the tensors missing from a client update. By default none are missing.

        With ``train.groups`` the engine completes updates before it clusters them, so :meth:`aggregate` receives complete ones.

        Args:
            state: The state from which the client received its task.
            update: The client's update, possibly complete already.
        """
        return update

    def aggregate(self, state: State, updates: Iterable[Update], rng: np.random.Generator) -> tuple[State, Metrics]:
        """Aggregate a round's client updates into the next state.

        The default applies the rule to each tensor of each entry, over its senders. A tensor without senders keeps its value.

        Args:
            state: The state before the round.
            updates: Client updates with their metrics, in client order. They can be iterated over once.
            rng: The round's generator.

        Returns:
            The next state, and metrics of the aggregation. The engine increments the state's round.
        """
        result = self.built_rule(updates, state.tensors, rng)
        return dataclasses.replace(state, tensors=merge(state.tensors, result.tensors)), result.metrics()

    def plan_evaluation(self, state: State, clients: Sequence[Client]) -> list[Task]:
        """Plan the evaluation tasks of some clients. By default each client receives ``"global"``.

        Tasks with the client id ``""`` are the server's own evaluation. The engine asks for them with an empty ``clients``. Their
        models load from the received entries, and scores carry the name of the first entry. Without such a task the server
        measures each entry by itself. A server task accepts these options:

        - ``models``: names of the models to measure. Default: all models with every tensor at the server.
        - ``split``: the data split to measure on. Default: all splits.
        - ``parts``: weights of the entry's scores in each part's mean, by the part's name in ``data.parts``, such as numbers of
          clients. A federation without parts has the single part ``""``. Default: all parts.
        """
        return [Task(client.id, phase="evaluate") for client in clients]

    def evaluate(self, step: Step, examples: Examples, batch_size: int) -> Metrics:
        """Return the objective's metrics of every model in ``step.models``, under names such as ``<model>/loss``."""
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
    "fixed": "fixed = ('model/output',), with name prefixes of parameters, or fixed = None for none",
    "models_for": "the class variables models and on_features",
    "logits": "the class variable partial, with the names of models whose outputs are not checked",
    "may_send": "the class variable additions, with name prefixes of tensors",
    "default_rule": "the class variable default_rule, such as default_rule = UniformMean()",
    "default_model": "nothing: the default is the only shared model, or the first model of a method with on_features",
}
"""Replacements of members of earlier versions, by name."""


def sample_clients(clients: Sequence[Client], rng: np.random.Generator, cohort: int) -> list[Client]:
    """Sample a cohort without replacement, uniformly or by the weights and strata of ``train.clients``.

    Clients with weight 0 are never sampled. The others are sampled in turn, with probabilities proportional to their weights.
    Each stratum has its share of the cohort, rounded down. The remaining places go to random strata, with probabilities
    proportional to the rounding errors.

    Args:
        clients: The population, or a part of it.
        rng: The round's generator.
        cohort: Number of clients, at most ``len(clients)``.

    Returns:
        The sampled clients in their original order. Fewer than ``cohort`` if fewer have a positive weight.
    """
    if hasattr(clients, "draw"):  # The whole population knows its weights without making its clients.
        draw = clients.draw
        chances, strata = (np.ones(0), np.zeros(0)) if draw is None else (draw.chances, draw.strata)
    else:
        chances = np.array([client.chance for client in clients])
        strata = np.array([client.stratum for client in clients])
    if (chances == 1).all() and (strata == 0).all():
        chosen = np.sort(rng.choice(len(clients), size=cohort, replace=False))
        return [clients[int(index)] for index in chosen]
    positive = np.flatnonzero(chances)
    groups = [positive[strata[positive] == stratum] for stratum in np.unique(strata[positive])]
    shares = _divide_cohort(np.array([len(group) for group in groups]), min(cohort, len(positive)), rng)
    samples = [
        rng.choice(group, size=share, replace=False, p=chances[group] / chances[group].sum())
        for group, share in zip(groups, shares, strict=True)
    ]
    return [clients[int(index)] for index in np.sort(np.concatenate(samples))] if samples else []


def _divide_cohort(sizes: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """Divide ``total`` in proportion to sizes: int64 [groups], at most each group's size."""
    exact = total * sizes / sizes.sum()
    shares: np.ndarray = np.floor(exact + 1e-9).astype(np.int64)  # A rounding error must not cost a place.
    remainders = np.maximum(exact - shares, 0)
    if left := total - int(shares.sum()):
        shares[rng.choice(len(sizes), size=left, replace=False, p=remainders / remainders.sum())] += 1
    return shares


def merge(tensors: Mapping[str, Tensors], changed: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """Return the entries of a state with changed tensors replaced."""
    return {key: {**tensors.get(key, {}), **changed.get(key, {})} for key in {**tensors, **changed}}


class UpdateCounter(Iterable[Update]):
    """Iterate over updates once, and count them.

    Afterwards ``senders`` has the number of senders by tensor name, and ``clients`` lists the senders in order. Partial sums do not
    name their clients.
    """

    def __init__(self, updates: Iterable[Update]) -> None:
        self.clients: list[str] = []
        self.senders: Counter[str] = Counter()
        self._updates = updates

    def __iter__(self) -> Iterator[Update]:
        for update in self._updates:
            if update.senders is None:
                self.clients.append(update.client_id)
                self.senders.update(update.tensors.keys())
            else:
                self.senders.update(update.senders)
            yield update
