"""A federation whose data lie at several sites: what a site tells about its own, and what everybody else knows of it.

A site makes a population of its own clients, which stays there. What it tells is a :class:`SiteReport`: how many clients with how
many training examples each, and of how many examples its test data are. From those reports alone comes the population of the whole
federation, in which clients are called by their site and a number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raydfl.data.names import Names
from raydfl.data.population import Population, Site


@dataclass(frozen=True)
class SiteReport:
    """All that a site tells about its data, besides the names of its classes. Plain values: it is also written as JSON."""

    site: str
    examples: tuple[int, ...]
    """Training examples of each client."""
    bands: int
    """Features of a frame."""
    length: int | None
    """Frames of every example, ``None`` when they differ."""
    shards: Mapping[str, Sequence[tuple[int, int]]]
    """Site.shards."""
    left_out: int
    """Clips that cannot be read."""
    trained: tuple[str, ...]
    """Names of the classes of which some client has training examples."""

    @classmethod
    def of(cls, name: str, population: Population) -> SiteReport:
        """What the site of that name tells about its population."""
        return cls(
            name,
            tuple(population.num_examples(index) for index in range(len(population))),
            population.bands,
            population.length,
            {split: [(int(a), int(b)) for a, b in parts] for split, parts in population.sites[0].shards.items()},
            len(population.skipped),
            tuple(np.array(population.classes)[population.label_counts().any(axis=0)].tolist()),
        )

    def as_dict(self) -> dict[str, Any]:
        """Its fields."""
        return dataclasses.asdict(self)


def join(reports: Sequence[SiteReport], classes: Sequence[str]) -> Population:
    """The population of all sites, in the order given: ids ``site/number``, numbers of examples, and no data."""
    sites: list[Site] = []
    for report in reports:
        first = sites[-1].stop if sites else 0
        sites.append(Site(report.site, first, first + len(report.examples), report.shards))
    clients = sites[-1].stop
    ids = Names.of(f"{report.site}/{number}" for report in reports for number in range(len(report.examples)))
    examples = np.array([count for report in reports for count in report.examples], np.int64)
    arrays = {
        "train/offsets": np.r_[0, np.cumsum(examples)].astype(np.int64),
        "groups_of": np.full(clients, -1, np.int32),
        "noisy": np.zeros(clients, bool),
        "label_errors": np.zeros(clients, bool),
        **{f"ids/{name}": array for name, array in ids.arrays.items()},
        **{f"groups/{name}": array for name, array in Names.of(()).arrays.items()},
    }
    lengths = {report.length for report in reports}
    length = lengths.pop() if len(lengths) == 1 else None
    messages = [
        f"site {report.site}: {len(report.examples)} clients with {sum(report.examples)} training examples"
        + (f", {report.left_out} clips cannot be read and are left out" if report.left_out else "")
        for report in reports
    ]
    return Population(classes, length, (), arrays, messages=messages, bands=reports[0].bands, sites=sites)
