"""Requirements of a method, an objective or an attack on the rest of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Labels = Literal["one", "sets", "sequences", "events", "any"]
"""The labels of a clip: one class, a set of classes (``data.label_sets``), a transcript (``data.label_sequences``), events
(``data.events``), or any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """A declaration of requirements. The defaults require and exclude nothing."""

    pools: tuple[str, ...] = ()
    """Required training pools."""
    views: tuple[str, ...] = ()
    """Required views, in addition to its models' views."""
    columns: tuple[str, ...] = ()
    """Required profile columns."""
    objectives: tuple[str, ...] = ()
    """Supported objectives. Empty: any."""
    labels: Labels = "any"
    """Supported labels."""
    optimiser: str = ""
    """The only supported optimiser. Empty: any."""
    plain_steps: bool = False
    """Whether the optimiser must have neither momentum nor clipping."""
    batch_size: int = 1
    """The smallest batch, in clips."""
    one_class_list: bool = False
    """Whether all clients must have the same classes. Excludes ``data.parts``."""
    own_outputs: bool = False
    """Whether a network's outputs must be exactly the classes of its part. Excludes ``data.heads=common``."""
    recordings: bool = False
    """Whether features must be computed from recordings. Excludes features of the kinds file and image."""
    own_clips: bool = False
    """Whether each clip must belong to a single client. Excludes ``data.partition.by=table``."""
    new_values: bool = False
    """Whether clients must send new values of the server's tensors. Excludes methods that send changes."""
    one_round: bool = False
    """Whether tensors of different rounds must not be combined. Excludes methods with an ``aggregate`` of their own, and
    ``train.fleet``."""
