"""Places of data: a run's own folder, or sites whose data stay there.

A site makes a population of its own clients, which stays in its folder. It sends a :class:`SiteReport` for each part: numbers of
clients and examples, classes, and values of the columns that the configuration names. The population of the whole federation is
made of the reports; it calls clients by their site and a number.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.exceptions import RayError, RayTaskError

from raydfl.cluster.faults import task_cause
from raydfl.cluster.job import check_visible
from raydfl.core.errors import ConfigError, DataError, ResourcesError, RunDirectoryError, first_line
from raydfl.core.files import RESUME, make_private_folder, plain_name, write_durably, writing
from raydfl.core.progress import Progress
from raydfl.data import (
    ClientIds,
    Population,
    Shard,
    Tables,
    build_population,
    encode,
    kept_labels,
    list_clips,
    natural_order,
    no_clips,
)
from raydfl.engine import Config, SerialPool, Worker
from raydfl.engine.storage import PrivateStore, stored_about


@dataclass(frozen=True)
class ViewReport:
    """All that a site tells about a further view of its examples."""

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
    """Further views, by name."""

    @classmethod
    def of(cls, name: str, population: Population, whole: bool = False) -> SiteReport:
        """Return what the site of that name tells about its population.

        Args:
            whole: measure its test data in one piece, because scores are made of all of it.
        """
        shards: dict[str, list[tuple[int, int]]] = {split: [] for split in ("test", "triggered", "server_validation")}
        for shard in population.shards:
            shards[shard.split].append((shard.start, shard.stop))
        if whole:
            shards = {split: [(parts[0][0], parts[-1][1])] if parts else [] for split, parts in shards.items()}
        return cls(
            name,
            tuple(population.num_examples(index) for index in range(len(population))),
            population.bands,
            population.length,
            shards,
            len(population.skipped),
            tuple(np.array(population.classes)[population.class_counts() > 0].tolist()),
            {
                view: ViewReport(population.num_with_view(view), length, tuple(population.owners(view).tolist()))
                for view, length in population.view_lengths.items()
            },
        )

    def as_dict(self) -> dict[str, Any]:
        """Return its fields."""
        return dataclasses.asdict(self)


def join(reports: Sequence[SiteReport], classes: Sequence[str], separator: str | None = None) -> Population:
    """Return the population of all sites, in the order given: ids ``site/number``, numbers of examples, and no data.

    Args:
        reports: of the sites.
        classes: the labels of all sites' clips.
        separator: as for :class:`Population`.
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
        clients[f"has:{view}"] = pa.array(
            [owns for report in reports for owns in report.views[view].clients], pa.bool_()
        )
    lengths = {report.length for report in reports}
    length = lengths.pop() if len(lengths) == 1 else None
    messages = [
        f"site {report.site}: {len(report.examples)} clients with {sum(report.examples)} training examples"
        + (f", {report.left_out} clips cannot be read and are left out" if report.left_out else "")
        for report in reports
    ]
    views = {view: (None, _common_length([report.views[view] for report in reports])) for view in reports[0].views}
    return Population(
        Tables(no_clips(), pa.record_batch(clients)),
        classes,
        length,
        (),
        messages=messages,
        bands=reports[0].bands,
        shards=shards,
        separator=separator,
        views=views,
    )


def _common_length(reports: Sequence[ViewReport]) -> int | None:
    """Return the frames of a view at all sites that have any of it; ``None`` where they differ."""
    lengths = {report.length for report in reports if report.examples}
    return lengths.pop() if len(lengths) == 1 else None


SHARE = 0.001
"""The share of the Ray resource ``site:NAME`` that everything asks for that has to run at that site: a node offers 1 of it."""


def resource(site: str) -> str:
    """Return the Ray resource that a site's node offers."""
    return f"site:{site}"


def folder_at(config: Config, run_dir: Path, place: str) -> Path:
    """Return the folder of a run at a place: below the site's folder on its node, or ``run_dir`` itself.

    Sites may have the same folder, and may even be on one machine.

    Raises:
        RunDirectoryError: the file ``sites.key`` of the run is missing or damaged.
    """
    if not place:
        return run_dir
    path = run_dir / _KEY
    try:
        key = plain_name(path.read_text() if path.exists() else str(stored_about(run_dir)["site_key"]))
    except (OSError, ValueError, KeyError) as error:
        raise RunDirectoryError(f"{path} is missing or damaged ({error}). Restore it from a copy") from error
    return config.data.sites[place].folder / "runs" / key / place


def classes_at(config: Config, site: str) -> list[str]:
    """Return the names of the classes that a site has clips of, those to be left out too."""
    data = config.data.at(site).model_copy(update={"leave_out": (), "ungrouped": "keep"})
    return list_clips(data, config.run.seed)[1]


def prepare_at(config: Config, site: str, folder: Path, classes: list[str]) -> SiteReport:
    """Make the population of a site, in its folder, with features in its cache.

    Args:
        folder: of the run at the site.
        classes: of the whole federation.

    Raises:
        DataError: the site's recordings cannot be used, or not be divided as configured.
    """
    own = folder / "population"
    for new in (own, config.data.sites[site].folder / "cache"):
        with writing(new, 0, "the site's data", RESUME):
            make_private_folder(new)
    population = build_population(config.data.at(site), config.run.seed, classes=classes)
    population.save(own)
    return SiteReport.of(site, population, config.parts.method.objective.answers in ("set", "score"))


def open_worker(
    config: Config,
    run_dir: Path,
    place: str,
    folder: Path,
    population: Population | None,
    device: str = "cpu",
    durable: bool = False,
    scratch: Path | None = None,
) -> Worker:
    """Open a worker for the clients of one place, in a process there.

    Args:
        config: of the run.
        run_dir: of the run; a site does not see it.
        place: of the data.
        folder: of the run at the place.
        population: of the federation; ``None``: the one in ``folder``.
        device: on which to compute.
        durable: whether private state is synced here, because the process that commits cannot do it.
        scratch: where new private state is written instead of ``folder``.

    Raises:
        RunDirectoryError: ``folder`` does not hold this run.
    """
    if not place:
        check_visible(folder)
    elif not (folder / "population").is_dir():
        raise RunDirectoryError(
            f"{folder} does not hold the clients' data of this run on the node of site {place!r}; restore the folder, or start the "
            f"run again under another run.name (ray.actors=0 and raydfl replay need the folders of all sites on one machine)"
        )
    elif population is not None:
        own = Population.load(folder / "population", verify=True, verify_features=True)
        population = population.at(place, own)
    private = PrivateStore(folder / "private", durable=durable or bool(place))
    if scratch is not None:
        private = PrivateStore(scratch, [folder / "private"])
    return Worker(run_dir, config, private, device, population, place)


def open_serial_pool(run_dir: Path, config: Config, population: Population, scratch: Path | None = None) -> SerialPool:
    """Open a pool in this process. The folders of all sites must be on this machine.

    Args:
        run_dir: of the run.
        config: of the run.
        population: of the federation.
        scratch: where new private state is written instead of the places' folders.
    """
    places = population.places
    folders = [folder_at(config, run_dir, place) for place in places]
    return SerialPool(
        *(
            open_worker(config, run_dir, place, folder, population, scratch=scratch)
            for place, folder in zip(places, folders, strict=True)
        )
    )


_KEY = "sites.key"
"""File in the folder of a run with the name of its folder at sites."""
_PATIENCE = 60.0
"""Seconds after which it is said which site is waited for."""


def _make_key(run_dir: Path) -> None:
    """Choose the name of the run's folder at sites.

    It is written down before they are asked: the next start overwrites what one that was killed has left at the sites.
    """
    path = run_dir / _KEY
    if not path.exists():
        write_durably(path, f"{run_dir.name}-{uuid.uuid4().hex[:8]}".encode())


def prepare_sites(config: Config, run_dir: Path, progress: Progress) -> Population:
    """Have every site prepare its data, and make the federation's population of what they tell; it is kept in ``sites.json``.

    Raises:
        ConfigError: an attack is configured, which needs to know everybody's data.
        ResourcesError: a site's node is not in the cluster.
        DataError: a site's recordings cannot be used.
    """
    if config.attack is not None:
        raise ConfigError(
            "attack: simulated attackers need one place that knows all data, which data.sites does not make; leave one of both out"
        )
    _make_key(run_dir)
    names = list(config.data.sites)
    progress.message(f"asking the sites for their clients: {', '.join(names)}")
    found = _everywhere(config, classes_at, [(name,) for name in names], progress)
    labels = natural_order(sorted({label for labels in found for label in labels}))
    classes = kept_labels(labels, config.data.leave_out)
    reports: list[SiteReport] = _everywhere(
        config, prepare_at, [(name, folder_at(config, run_dir, name), classes) for name in names], progress
    )
    trained = {label for report in reports for label in report.trained}
    population = join(reports, classes, None if config.data.label_sets is None else config.data.label_sets.separator)
    for label in population.classes if config.labels_needed else ():
        if label not in trained:
            raise DataError(
                f"no client of any site has a training clip of label {label!r}; choose data.split or data.partition "
                f"differently, or leave the label out of the data"
            )
    for view in config.data.views:
        if not any(report.views[view].examples for report in reports):
            raise DataError(
                f"data.views.{view}.column: no training example of any site has a file in the column "
                f"{config.data.views[view].column!r}"
            )
    told = {"classes": classes, "sites": [report.as_dict() for report in reports]}
    write_durably(run_dir / "sites.json", json.dumps(told, indent=2).encode())
    return population


def _everywhere(
    config: Config, function: Callable[..., Any], arguments: list[tuple[Any, ...]], progress: Progress
) -> list[Any]:
    """Return what a function of this module gives at each site; after the configuration it gets the site's name."""
    if config.ray.actors == 0:
        return [function(config, *each) for each in arguments]
    there = ray.cluster_resources()  # type: ignore[no-untyped-call]
    for name, *_ in arguments:
        if resource(name) not in there:
            known = ", ".join(sorted(kind for kind in there if kind.startswith("site:"))) or "none"
            raise ResourcesError(
                f"no node of the cluster is site {name!r} (the cluster has: {known}); start Ray there with "
                f"ray start --address=HEAD:6379 --resources='{{\"{resource(name)}\": 1}}'"
            )
    task = ray.remote(num_cpus=1, scheduling_strategy="DEFAULT")(function)  # not in a trial's placement group
    calls = [
        task.options(resources={resource(each[0]): SHARE}, max_retries=0).remote(config, *each) for each in arguments
    ]
    done: list[Any] = []
    for (name, *_), call in zip(arguments, calls, strict=True):
        while not ray.wait([call], timeout=_PATIENCE)[0]:
            progress.message(f"site {name} is still at it, or has no CPU free, or its node has left the cluster")
        try:
            done.append(ray.get(call))
        except RayTaskError as error:
            raise task_cause(error) from error
        except RayError as error:
            raise ResourcesError(
                f"site {name!r} was lost while it prepared its data: {type(error).__name__}: {first_line(error)}; check its node "
                f"and its memory, then start the run again"
            ) from error
    return done
