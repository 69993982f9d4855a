"""The values that move between server and clients: small frozen dataclasses, data and no logic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from raydfl.core.cuts import Cuts
from raydfl.core.settings import FIRST_VIEW

Tensors = Mapping[str, Tensor]

BuiltModels = Sequence[Mapping[str, nn.Module]]
"""Freshly built networks by name, a set for each combination of architectures."""
"""Tensors by their flat name ``"model/layer.weight"``. Prototypes, masks and counts are tensors too."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A metric as a sum and a count, so that pooling over clients never averages averages."""

    total: float
    count: float

    @property
    def value(self) -> float:
        """``total / count``; NaN when nothing was counted."""
        return self.total / self.count if self.count else float("nan")

    def __add__(self, other: Ratio) -> Ratio:
        return Ratio(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """A metric of single clips, which must be joined before it can be reduced: AUC, mean average precision ...

    A client's never leave it: what it reports is reduced there.
    """

    values: np.ndarray
    """float64 [clips], the higher the more likely; or [clips, classes], a column for each class."""
    truth: np.ndarray
    """bool, of the shape of ``values``."""
    threshold: float | None = None
    """The value from which on a clip is taken for true; ``None``: there is none, and F1 is not told."""
    groups: np.ndarray | None = None
    """int64 [clips, 2]: the machine that each clip is of, and the domain, as numbers; ``None``: not known. For DCASE's score."""

    def __add__(self, other: Scores) -> Scores:
        return joined_scores([self, other])


def joined_scores(parts: Sequence[Scores]) -> Scores:
    """Return scores of one kind as one, all at once."""
    groups = [part.groups for part in parts if part.groups is not None]
    return replace(
        parts[0],
        values=np.concatenate([part.values for part in parts]),
        truth=np.concatenate([part.truth for part in parts]),
        groups=np.concatenate(groups) if len(groups) == len(parts) else None,
    )


Metric = Ratio | np.ndarray | Scores
Metrics = Mapping[str, Metric]
"""Metrics by name. A :class:`Ratio` pools by adding sums and counts, an array (a confusion matrix, say) by adding,
:class:`Scores` by joining."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A network that a client builds, and the name under which it does. Hashable: equal specs are equal architectures."""

    name: str
    """The prefix of its tensors, ``"plugin"`` in ``"plugin/gru.weight_ih_l0"``."""
    architecture: str
    """A file name of ``raydfl/models``' registry (``crnn_lite``), or ``module:Class`` or ``file.py:Class`` of the user's."""
    inputs: int | tuple[int, int, int]
    """Feature bands of a frame; of images channels, rows and columns."""
    classes: int
    """Classes of the data."""
    options: tuple[tuple[str, Any], ...] = ()
    """Keyword arguments of the architecture, sorted by name."""
    outputs: int | None = None
    """Numbers that it gives for an example; ``None``: one for each class."""

    init_from: tuple[tuple[str, Any], ...] = ()
    """The file that its first weights come from (raydfl.models.start), by sorted names of settings; empty: from the run's seed."""
    view: str = FIRST_VIEW
    """The view of examples that it reads."""
    whole: ModelSpec | None = None
    """The larger network of which it is a part, and whose tensors the server has; ``None``: it is whole."""

    @property
    def width(self) -> int:
        """Numbers that it gives for an example."""
        return self.classes if self.outputs is None else self.outputs


@dataclass(frozen=True, slots=True)
class Client:
    """A client's identity. Immutable; its data stay with the process that trains it."""

    id: str
    index: int
    """Position in the population: the order in which updates are consumed."""
    num_examples: int
    """Training examples."""
    models: tuple[ModelSpec, ...] = ()
    profile: Mapping[str, Any] = field(default_factory=dict)
    """Further facts: speaker, device, site, labelled share, modalities ..."""
    chance: float = 1.0
    """The weight with which it is drawn for a round, by ``train.clients``; 0: it does not take part."""
    stratum: int = 0
    """The group of clients that it is drawn from, by ``train.clients.strata``."""


@dataclass(frozen=True, slots=True)
class Task:
    """One order to one client."""

    client_id: str
    phase: str = "train"
    """Named by the method; a method with several stages has several."""
    receive: tuple[str, ...] = ("global",)
    """Keys of the server's state to deliver; models load from the first that holds their tensors. Of models that the client does
    not have, nothing is delivered."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Anything small that the method wants its client code to know."""
    cuts: Cuts = field(default_factory=dict)
    """Of tensors of which the client receives a part, the part, by the names that the client knows. They are cut in every entry
    that it receives, and its networks must have the shapes that are left."""
    has: tuple[str, ...] = ()
    """Keys of ``receive`` that have not changed since the client received them: it has them, and no bytes are counted for them."""


@dataclass(frozen=True, slots=True)
class Update:
    """A client's answer to a task."""

    tensors: Tensors
    weight: float | Mapping[str, float | Tensor]
    """Weight of this update in a weighted rule: one number; or by tensor name one number, one per element, or what broadcasts to
    one per element, as [filters, 1, 1, 1] does to the weights of a convolution."""
    metrics: Metrics = field(default_factory=dict)
    key: str = "global"
    """The group that it joins: the entry of the server's state that it changes."""
    client_id: str = ""
    """Filled in by the engine."""
    cuts: Cuts = field(default_factory=dict)
    """Of tensors that are a part of the server's, the part. What the client did not send has no weight."""
    further: tuple[Update, ...] = ()
    """The client's updates to further keys, each to another one, with metrics of their own. They reach the server one by one."""


@dataclass(frozen=True, slots=True)
class State:
    """The server's state. With the clients' private state files it is the whole state of a run."""

    round_index: int
    """Rounds completed."""
    tensors: Mapping[str, Tensors]
    """By key (``"global"``, or one per cluster, task or model)."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Small facts that JSON can hold (names of buffers, counters, cluster membership); tensors go into ``tensors``."""
    phase: str = ""
    """The phase of the next round, one of the method's ``phases``; empty: its only one. The engine knows it from the round."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Some examples, cut from a client's features by index."""

    views: Mapping[str, Tensor]
    """By name float32 [batch, frames, bands]; frames beyond an example's length are 0, as is an example that lacks the view.
    Images: [batch, channels, rows, columns]."""
    y: Tensor
    """int64 [batch]: class indices; where a clip has a set of classes float32 [batch, classes], 1 for each that it has."""
    view_lengths: Mapping[str, Tensor] = field(default_factory=dict)
    """int64 [batch] each: valid frames of the examples, of the views in which these differ."""
    present: Mapping[str, Tensor] = field(default_factory=dict)
    """bool [batch] each: whether an example has the view, of the views of ``data.views``."""
    weight: Tensor | None = None
    """float32 [batch]: 0 for padding examples; ``None`` when all count 1."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """int64 [batch] each, by name: what else the manifest says of the examples, as codes; ``pool`` says which pool each is of."""

    @property
    def x(self) -> Tensor:
        """The first view."""
        return next(iter(self.views.values()))

    @property
    def lengths(self) -> Tensor | None:
        """int64 [batch]: valid frames of each example in the first view; ``None`` when all frames count."""
        return self.view_lengths.get(next(iter(self.views)))

    def input_of(self, network: Any) -> tuple[Tensor, Tensor | None]:
        """Return what a network reads, x and lengths: those of the view that its attribute ``view`` names, or the first's."""
        view = view_of(network)
        return self.views[view], self.view_lengths.get(view)

    def with_input_of(self, network: Any, x: Tensor, lengths: Tensor | None) -> Batch:
        """Return a batch in which a network reads other x and lengths: see :meth:`input_of`."""
        view = view_of(network)
        others = {name: own for name, own in self.view_lengths.items() if name != view}
        own = {} if lengths is None else {view: lengths}
        return replace(self, views={**self.views, view: x}, view_lengths={**others, **own})

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name; one of a mapping is ``"columns/pool"``."""
        found = {"y": self.y} if self.weight is None else {"y": self.y, "weight": self.weight}
        for group in ("views", "view_lengths", "present", "columns"):
            for name, tensor in getattr(self, group).items():
                found[f"{group}/{name}"] = tensor
        return found

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Batch:
        """Return the batch with these tensors, named as in :meth:`tensors`."""
        fields: dict[str, Any] = {"views": {}}
        for name, tensor in tensors.items():
            group, slash, key = name.partition("/")
            if slash:
                fields.setdefault(group, {})[key] = tensor
            else:
                fields[name] = tensor
        return cls(**fields)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of one value per example ([batch] -> scalar), padding left out. Every loss ends with it."""
        if self.weight is None:
            return values.mean()
        return (values * self.weight).sum() / self.weight.sum().clamp_min(1.0)

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Return the mean cross-entropy of logits ([batch, classes] -> scalar) with the labels, padding left out."""
        if self.weight is None:
            return F.cross_entropy(logits, self.y)  # its own mean takes three operations fewer a step
        return self.mean(F.cross_entropy(logits, self.y, reduction="none"))


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a run although its rounds are done; raydfl.runs.report.diagnosis has the rules."""

    kind: str
    """``"diverged"``, ``"one class"`` or ``"missing classes"``."""
    text: str
    worthless: bool
    """True: the run shows nothing; False: it is a warning."""


def view_of(network: Any) -> str:
    """Return the name of the view that a network reads."""
    # Asking a torch.nn.Module for an attribute that it has not takes ten times as long.
    view: str = vars(network).get("view") or getattr(type(network), "view", FIRST_VIEW)
    return view


def same_view(wrapper: Any, network: Any) -> Any:
    """Return a module that is called in the place of a network, having it read the network's view: see :meth:`Batch.input_of`."""
    vars(wrapper)["view"] = view_of(network)
    return wrapper
