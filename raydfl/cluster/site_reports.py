"""Reports of sites about their data, and the population built from these reports."""

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
    join_shards,
    make_empty_clips,
    natural_order,
)


@dataclass(frozen=True)
class ViewReport:
    """A site's report about a view of ``data.views``."""

    examples: int
    """Number of training examples with the view."""
    length: int | None
    """Frames of each example. ``None`` if lengths differ or no example has the view."""
    clients: tuple[bool, ...]
    """Whether each client has the view, in client order."""


@dataclass(frozen=True)
class SiteReport:
    """Report of a site about its data, in plain values for JSON.

    Together with the names of its classes, it is all information about the data that leaves a site.
    """

    site: str
    examples: tuple[int, ...]
    """Number of training examples of each client."""
    bands: int
    """Features of a frame."""
    length: int | None
    """Frames of each example. ``None`` if lengths differ."""
    shards: Mapping[str, Sequence[tuple[int, int]]]
    """Ranges of the server's examples by split."""
    left_out: int
    """Number of unreadable clips."""
    trained: tuple[str, ...]
    """Classes with at least one training example."""
    views: Mapping[str, ViewReport] = field(default_factory=dict)
    """Reports about the views of ``data.views``, by name."""
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Values of each column of ``data.columns``."""
    profile: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Clients' values of each entry of ``data.profile`` that reads a column."""

    @classmethod
    def from_population(cls, name: str, population: Population, data: DataSettings, whole: bool) -> SiteReport:
        """Create the report about a site's population.

        Args:
            name: Name of the site.
            population: The site's population.
            data: Settings of the part.
            whole: Join the shards of each split, because its metrics need all examples at once.
        """
        shards: dict[str, list[tuple[int, int]]] = {split: [] for split in ("test", "triggered", "server_validation")}
        for shard in join_shards(population.shards) if whole else population.shards:
            shards[shard.split].append((shard.start, shard.stop))
        columns = {key: population.column(key) for key, entry in data.profile.items() if entry.column is not None}
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
            {key: [values[code] for code in codes.tolist()] for key, (values, codes) in columns.items()},
        )


def join_sites(reports: Sequence[SiteReport], classes: Sequence[str], separator: str | None = None) -> Part:
    """Join the reports of all sites to a part without clips.

    Client ids are ``site/number``, in the order of the reports.

    Args:
        reports: A part's report from each site.
        classes: Classes of all sites.
        separator: Separator of several labels, see :class:`Part`.
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
        + (f". {report.left_out} clips cannot be read and are skipped" if report.left_out else "")
        for report in reports
    ]
    views = {FIRST_VIEW: StoredView(lengths.pop() if len(lengths) == 1 else None, bands=reports[0].bands)}
    views |= {
        view: StoredView(_find_common_length([report.views[view] for report in reports])) for view in reports[0].views
    }
    return Part(
        Tables(make_empty_clips(), pa.record_batch(clients)),
        classes,
        views,
        columns=columns,
        separator=separator,
        messages=messages,
        shards=shards,
    )


def _encode_mixed(values: Sequence[Any]) -> pa.DictionaryArray:
    """Encode values as a dictionary column, sorted as text. Values of mixed types become text."""
    if len({type(value) for value in values}) > 1:
        values = list(map(str, values))
    known = sorted(set(values), key=str)
    return encode(np.array([known.index(value) for value in values], np.int32), known)


def _find_common_length(reports: Sequence[ViewReport]) -> int | None:
    """Return the frames of a view at all sites with examples of it, or ``None`` if they differ."""
    lengths = {report.length for report in reports if report.examples}
    return lengths.pop() if len(lengths) == 1 else None
