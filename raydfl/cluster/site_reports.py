"""Reports of sites about their data, and the population that is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from raydfl.core.settings import FIRST_VIEW
from raydfl.data import (
    ClientIds,
    DataSettings,
    Part,
    Population,
    Shard,
    StoredView,
    Tables,
    encode,
    natural_order,
    no_clips,
)


@dataclass(frozen=True)
class ViewReport:
    """All that a site tells about a view of ``data.views``."""

    examples: int
    """Training examples that have it."""
    length: int | None
    """Frames of each, ``None`` when they differ or there is none."""
    clients: tuple[bool, ...]
    """Its clients in their order: true for those that have it."""


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
    """Ranges of the server's examples by split."""
    left_out: int
    """Clips that cannot be read."""
    trained: tuple[str, ...]
    """Names of the classes of which some client has training examples."""
    views: Mapping[str, ViewReport] = field(default_factory=dict)
    """Those of ``data.views``, by name."""
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Values of ``data.columns``, by name."""
    profile: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Value of each client, by name in ``data.profile``, if its source is a column."""

    @classmethod
    def from_population(cls, name: str, population: Population, data: DataSettings, whole: bool) -> SiteReport:
        """Report about the population of a site.

        Args:
            name: of the site.
            population: the site's own.
            data: settings of the part.
            whole: measure the server's data in one piece, because scores are made of all of it.
        """
        shards: dict[str, list[tuple[int, int]]] = {split: [] for split in ("test", "triggered", "server_validation")}
        for shard in population.shards:
            shards[shard.split].append((shard.start, shard.stop))
        if whole:
            shards = {split: [(parts[0][0], parts[-1][1])] if parts else [] for split, parts in shards.items()}
        columns = {each: population.column(each) for each, own in data.profile.items() if own.column is not None}
        first = population.views[FIRST_VIEW]
        return cls(
            name,
            tuple(population.num_examples(index) for index in range(len(population))),
            first.bands or 0,
            first.length,
            shards,
            len(population.skipped),
            tuple(np.array(population.classes)[population.class_counts() > 0].tolist()),
            {
                view: ViewReport(
                    population.num_with_view(view),
                    population.views[view].length,
                    tuple(population.owners(view).tolist()),
                )
                for view in data.views
            },
            {column: population.columns[column] for column in data.columns},
            {each: [values[code] for code in of.tolist()] for each, (values, of) in columns.items()},
        )


def join_sites(reports: Sequence[SiteReport], classes: Sequence[str], separator: str | None = None) -> Part:
    """Join the reports of all sites to a part without clips.

    Clients are called ``site/number``, in the order of the reports.

    Args:
        reports: of one part, by each site.
        classes: the labels of all sites' clips.
        separator: as for :class:`Part`.
    """
    shards = [
        Shard(split, *bounds, report.site)
        for report in reports
        for split, ranges in report.shards.items()
        for bounds in ranges
    ]
    ids = ClientIds.from_strings(
        f"{report.site}/{number}" for report in reports for number in range(len(report.examples))
    )
    sizes = [len(report.examples) for report in reports]
    clients = ids.columns() | {
        "place": encode(np.repeat(np.arange(len(reports), dtype=np.int32), sizes), [report.site for report in reports]),
        "examples": pa.array([count for report in reports for count in report.examples], pa.int64()),
    }
    for view in reports[0].views:
        owners = [owns for report in reports for owns in report.views[view].clients]
        clients[f"has:{view}"] = pa.array(owners, pa.bool_())
    for name in reports[0].profile:
        clients[f"profile:{name}"] = _encode_mixed([value for report in reports for value in report.profile[name]])
    columns = {
        name: natural_order(list({value for report in reports for value in report.columns[name]}))
        for name in reports[0].columns
    }
    lengths = {report.length for report in reports}
    messages = [
        f"site {report.site}: {len(report.examples)} clients with {sum(report.examples)} training examples"
        + (f", {report.left_out} clips cannot be read and are left out" if report.left_out else "")
        for report in reports
    ]
    views = {FIRST_VIEW: StoredView(lengths.pop() if len(lengths) == 1 else None, bands=reports[0].bands)}
    views |= {view: StoredView(_common_length([own.views[view] for own in reports])) for view in reports[0].views}
    return Part(
        Tables(no_clips(), pa.record_batch(clients)),
        classes,
        views,
        columns=columns,
        separator=separator,
        messages=messages,
        shards=shards,
    )


def _encode_mixed(values: Sequence[Any]) -> pa.DictionaryArray:
    """Make a dictionary column of values in the order of their text; values of several types become text."""
    if len({type(value) for value in values}) > 1:
        values = list(map(str, values))
    known = sorted(set(values), key=str)
    return encode(np.array([known.index(value) for value in values], np.int32), known)


def _common_length(reports: Sequence[ViewReport]) -> int | None:
    """Return the frames of a view at all sites that have any of it; ``None`` where they differ."""
    lengths = {report.length for report in reports if report.examples}
    return lengths.pop() if len(lengths) == 1 else None
