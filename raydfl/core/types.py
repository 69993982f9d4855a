"""Messages between server and clients, as small frozen dataclasses without logic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from raydfl.core.cuts import Cuts
from raydfl.core.message import Message
from raydfl.core.settings import FIRST_VIEW

Tensors = Mapping[str, Tensor]
"""Tensors by flat name, ``"model/layer.weight"``. Prototypes, masks and counts are tensors too."""

BuiltModels = Sequence[Mapping[str, nn.Module]]
"""Untrained networks by name, one mapping for each combination of architectures."""


@dataclass(frozen=True, slots=True)
class Ratio(Message):
    """A metric as a sum and a count. Pooling adds both, so it never averages averages."""

    total: float
    count: float

    @property
    def value(self) -> float:
        """``total / count``, or NaN if the count is 0."""
        return self.total / self.count if self.count else float("nan")

    def __add__(self, other: Ratio) -> Ratio:
        return Ratio(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Scores of single clips or of pairs of clips, the input of ranking metrics such as AUC and mean average precision.

    They never leave a client: it reports the ranking metrics.
    """

    values: np.ndarray
    """float64 [clips], [clips, classes] or [pairs]: higher means more likely positive."""
    truth: np.ndarray
    """bool, in the shape of ``values``."""
    threshold: float | None = None
    """Clips with at least this value count as positive in F1. ``None``: no F1."""
    groups: np.ndarray | None = None
    """int64 [clips, 2]: indices of machine and domain, for DCASE's score. ``None``: unknown."""
    of_pairs: bool = False
    """Whether each value belongs to a pair of clips (a verification trial). Positive: both clips have the same label."""

    def __add__(self, other: Scores) -> Scores:
        return join_scores([self, other])


def join_scores(parts: Sequence[Scores]) -> Scores:
    """Concatenate scores of the same kind."""
    groups = [part.groups for part in parts if part.groups is not None]
    return replace(
        parts[0],
        values=np.concatenate([part.values for part in parts]),
        truth=np.concatenate([part.truth for part in parts]),
        groups=np.concatenate(groups) if len(groups) == len(parts) else None,
    )


Metric = Ratio | np.ndarray | Scores
Metrics = Mapping[str, Metric]
"""Metrics by name. Pooling adds ratios and arrays (such as confusion matrices), and joins :class:`Scores`."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Name and architecture of a client's network. Hashable: equal specs are equal architectures."""

    name: str
    """Prefix of its tensors, ``"plugin"`` in ``"plugin/gru.weight_ih_l0"``."""
    architecture: str
    """A name in ``raydfl/models`` (``crnn_lite``), or a user's ``module:Class`` or ``file.py:Class``."""
    inputs: int | tuple[int, int, int]
    """Feature bands of a frame, or channels, rows and columns of an image."""
    classes: int
    """Number of classes in the data."""
    options: tuple[tuple[str, Any], ...] = ()
    """Keyword arguments of the architecture, sorted by name."""
    outputs: int | None = None
    """Output size. ``None``: the number of classes."""

    init_from: tuple[tuple[str, Any], ...] = ()
    """Source of the initial weights (raydfl.models.start), as settings sorted by name. Empty: drawn from the run's seed."""
    view: str = FIRST_VIEW
    """Input view."""
    whole: ModelSpec | None = None
    """The server's larger network, if this network is a part of it. ``None``: it is whole."""

    @property
    def width(self) -> int:
        """Number of outputs."""
        return self.classes if self.outputs is None else self.outputs


@dataclass(frozen=True, slots=True)
class Client:
    """Identity and profile of a client. Its data stay on the process that trains it."""

    id: str
    index: int
    """Position in the population. Rules consume updates in this order."""
    num_examples: int
    """Number of training examples."""
    models: tuple[ModelSpec, ...] = ()
    profile: Mapping[str, Any] = field(default_factory=dict)
    """Further facts: speaker, device, site, labelled fraction, modalities ..."""
    chance: float = 1.0
    """Sampling weight (``train.clients``). 0: never sampled."""
    stratum: int = 0
    """Stratum for stratified sampling (``train.clients.strata``)."""


@dataclass(frozen=True, slots=True)
class Task(Message):
    """An order to a client."""

    client_id: str
    phase: str = "train"
    """A phase of the method. Methods with several stages have several."""
    receive: tuple[str, ...] = ("global",)
    """Keys of the server's state to deliver. Models load from the first key that holds their tensors. The client receives no
    tensors of models that it lacks."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Small values from the method to its client code."""
    cuts: Cuts = field(default_factory=dict)
    """Cuts of tensors for a client that receives a part of them, by the client's names. They apply to every key in ``receive``, and
    the client's networks must have the remaining shapes."""
    has: tuple[str, ...] = ()
    """Keys of ``receive`` that are unchanged since the client received them. They are not counted as traffic."""


@dataclass(frozen=True, slots=True)
class Update(Message):
    """A client's answer to a task."""

    tensors: Tensors
    weight: float | Mapping[str, float | Tensor]
    """Weight of this update in a weighted rule: a number, or for each tensor name a number or a tensor that broadcasts to the
    tensor's shape, such as [filters, 1, 1, 1] for a convolution."""
    metrics: Metrics = field(default_factory=dict)
    key: str = "global"
    """The entry of the server's state to update."""
    client_id: str = ""
    """Set by the engine."""
    cuts: Cuts = field(default_factory=dict)
    """Cuts of tensors that cover a part of the server's tensor. Elements outside have no weight."""
    further: tuple[Update, ...] = ()
    """Updates to further keys, all different, each with its own metrics. The server receives them one by one."""
    senders: Mapping[str, int] | None = None
    """Number of senders by tensor name, for a partial sum over several clients. Its tensors are float64 sums of weighted tensors,
    and its weight is the sum of the weights. ``None``: the update of one client."""


@dataclass(frozen=True, slots=True)
class State:
    """State of the server. Together with the clients' private state it is a run's complete state."""

    round_index: int
    """Number of completed rounds."""
    tensors: Mapping[str, Tensors]
    """Tensors by key (``"global"``, or one key per cluster, task or model)."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Small JSON values (names of buffers, counters, cluster membership). Put tensors into ``tensors``."""
    phase: str = ""
    """Phase of the next round, from the method's ``phases``. Empty: the method has a single phase. The engine sets it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of a client's examples."""

    views: Mapping[str, Tensor]
    """Inputs by view, float32 [batch, frames, bands]; images: [batch, channels, rows, columns]. Frames beyond an example's length
    are 0, and so are examples without the view."""
    y: Tensor
    """int64 [batch]: class indices. For sets of classes float32 [batch, classes]: 1 for the classes of a clip, else 0. For
    transcripts int64 [batch, longest]: class indices in order, -1 after the end. For events float32 [batch, most events, 3]: onset
    and offset in frames of the first view, and the class index, -1 after the last event. Events without times last from -inf to
    inf."""
    view_lengths: Mapping[str, Tensor] = field(default_factory=dict)
    """int64 [batch] by view: valid frames of each example. Views with examples of equal length have no entry."""
    present: Mapping[str, Tensor] = field(default_factory=dict)
    """bool [batch] by view of ``data.views``: whether an example has the view."""
    weight: Tensor | None = None
    """float32 [batch]: 0 for padding examples, else 1 or the class weight (``train.class_weights``). ``None``: all are 1."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """int64 [batch] by name: codes of further manifest columns, and of the pool (``pool``)."""

    @property
    def x(self) -> Tensor:
        """Input tensor of the first view."""
        return next(iter(self.views.values()))

    @property
    def lengths(self) -> Tensor | None:
        """int64 [batch]: valid frames of each example in the first view. ``None``: all frames."""
        return self.view_lengths.get(next(iter(self.views)))

    def input_of(self, network: Any) -> tuple[Tensor, Tensor | None]:
        """Return a network's input and its lengths, from the view in the network's attribute ``view`` or from the first view."""
        view = view_of(network)
        return self.views[view], self.view_lengths.get(view)

    def with_input_of(self, network: Any, x: Tensor, lengths: Tensor | None) -> Batch:
        """Return a copy of the batch with a network's input replaced (see :meth:`input_of`).

        Args:
            network: the network whose view changes.
            x: the new input.
            lengths: int64 [batch]: valid frames of ``x``. ``None``: all frames.
        """
        view = view_of(network)
        view_lengths = {name: frames for name, frames in self.view_lengths.items() if name != view}
        if lengths is not None:
            view_lengths[view] = lengths
        return replace(self, views={**self.views, view: x}, view_lengths=view_lengths)

    def tensors(self) -> dict[str, Tensor]:
        """Flatten the batch to tensors by name, such as ``"y"`` and ``"columns/pool"``."""
        tensors = {"y": self.y} if self.weight is None else {"y": self.y, "weight": self.weight}
        for group in ("views", "view_lengths", "present", "columns"):
            for name, tensor in getattr(self, group).items():
                tensors[f"{group}/{name}"] = tensor
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Batch:
        """Build a batch from tensors by name, the inverse of :meth:`tensors`."""
        fields: dict[str, Any] = {"views": {}}
        for name, tensor in tensors.items():
            group, slash, key = name.partition("/")
            if slash:
                fields.setdefault(group, {})[key] = tensor
            else:
                fields[name] = tensor
        return cls(**fields)

    def mean(self, values: Tensor) -> Tensor:
        """Average values over the examples without padding ([batch] -> scalar). Use it as the last step of every loss."""
        if self.weight is None:
            return values.mean()
        return (values * self.weight).sum() / self.weight.sum().clamp_min(1.0)  # 0 for a batch of padding alone

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Compute the mean cross-entropy of logits over the examples without padding ([batch, classes] -> scalar)."""
        if self.weight is None:
            return F.cross_entropy(logits, self.y)  # its built-in mean saves three operations a step
        return self.mean(F.cross_entropy(logits, self.y, reduction="none"))


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a completed run (raydfl.runs.report.diagnosis has the rules)."""

    kind: str
    """``"diverged"``, ``"one class"`` or ``"missing classes"``."""
    text: str
    worthless: bool
    """Whether the results are worthless. False: the problem is a warning."""


def view_of(network: Any) -> str:
    """Return the name of a network's input view."""
    # Looking up a missing attribute of a torch.nn.Module takes ten times as long.
    view: str = vars(network).get("view") or getattr(type(network), "view", FIRST_VIEW)
    return view


def same_view(wrapper: Any, network: Any) -> Any:
    """Give a module that wraps a network the network's input view, and return it."""
    vars(wrapper)["view"] = view_of(network)
    return wrapper
