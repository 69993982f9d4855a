"""Needs: what a method, an objective or an attack needs of the rest of a configuration, and what it excludes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Labels = Literal["one", "sets", "any"]
"""The labels of a clip: one class, a set of classes (``data.label_sets``), or whatever there is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """A declaration of needs. The defaults need nothing, and exclude nothing."""

    pools: tuple[str, ...] = ()
    """Training pools that it reads by name."""
    views: tuple[str, ...] = ()
    """Views that it reads, besides those of its models."""
    columns: tuple[str, ...] = ()
    """Profile columns that it reads."""
    objectives: tuple[str, ...] = ()
    """Objectives for which it is defined. Empty: any."""
    labels: Labels = "any"
    """The labels that it learns from or changes."""
    optimiser: str = ""
    """The optimiser for which it is defined. Empty: any."""
    plain_steps: bool = False
    """Whether the optimiser must have neither momentum nor clipping."""
    batch_size: int = 1
    """The smallest batch, in clips."""
    one_class_list: bool = False
    """Whether all clients must have the same classes. Excludes ``data.parts``."""
    own_outputs: bool = False
    """Whether a network must have one output for each class of its part. Excludes ``data.heads=common``."""
    recordings: bool = False
    """Whether features must be computed from recordings. Excludes features of the kinds file and image."""
    own_clips: bool = False
    """Whether a clip must belong to one client. Excludes ``data.partition.by=table``."""
    new_values: bool = False
    """Whether clients must send new values of the server's tensors. Excludes methods that also send changes."""
