"""Places of data: a run's own folder, or sites whose data stay there.

A site makes a population of its own clients, which stays in its folder. It sends a :class:`SiteReport` for each part: numbers of
clients and examples, classes, and values of the columns that the configuration names. The population of the whole federation is
made of the reports; it calls clients by their site and a number.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from raydfl.cluster.faults import task_cause
from raydfl.cluster.job import check_visible
from raydfl.cluster.site_reports import SiteReport, join_sites
from raydfl.core.errors import ConfigError, DataError, ResourcesError, RunDirectoryError, first_line
from raydfl.core.files import RESUME, make_private_folder, plain_name, write_durably, writing
from raydfl.core.progress import Progress
from raydfl.core.users_code import naming_failures
from raydfl.data import (
    DataSettings,
    Part,
    Population,
    build_population,
    exclude_labels,
    list_clips,
    natural_order,
    part_folder,
    with_part,
)
from raydfl.engine import Config, SerialPool, Worker
from raydfl.engine.storage import PrivateStore, stored_about

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


def list_classes_at(config: Config, site: str, part: str) -> list[str]:
    """List the classes of a site's clips of a part, also those to be left out."""
    data = config.data.each[part].at(site).model_copy(update={"leave_out": (), "ungrouped": "keep"})
    return list_clips(data, config.run.seed)[1]


def prepare_at(
    config: Config, site: str, part: str, folder: Path, classes: list[str], attackers: Sequence[int] | None = None
) -> SiteReport:
    """Make a site's population of a part, in the site's folder, with features in its cache.

    Args:
        folder: of the run at the site.
        classes: of the part at all sites.
        attackers: positions of attackers among these clients; ``None``: nobody's data are poisoned.

    Raises:
        DataError: the site's recordings cannot be used, or not be divided as configured.
    """
    data, own = config.data.each[part], part_folder(folder / "population", part)
    for new in (own, config.data.sites[site].folder / "cache"):
        with writing(new, 0, "the site's data", RESUME):
            make_private_folder(new)
    attack = None
    if attackers is not None and config.parts.attack is not None:
        ids = Population.load(own).ids
        chosen = tuple(ids[client] for client in attackers)
        attack = dataclasses.replace(config.parts.attack, clients=chosen, draw="run", start=1, stop=None)
    population = build_population(data.at(site), config.run.seed, attack=attack, classes=classes)
    config.check_needs({part: population.pools})
    population.save(own)
    whole = config.parts.method.objective.answers in ("set", "score")
    return SiteReport.from_population(site, population, data, whole)


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
        population = population.at(place, folder / "population")
    private = PrivateStore(folder / "private", durable=durable or bool(place))
    if scratch is not None:
        private = PrivateStore(scratch, [folder / "private"])
    return Worker(run_dir, config, private, device, population, place)


def open_serial_pool(
    run_dir: Path, config: Config, population: Population, scratch: Path | None = None, device: str = "cpu"
) -> SerialPool:
    """Open a pool in this process. The folders of all sites must be on this machine.

    Args:
        run_dir: of the run.
        config: of the run.
        population: of the federation.
        scratch: where new private state is written instead of the places' folders.
        device: on which to compute.
    """
    folders = {place: folder_at(config, run_dir, place) for place in population.places}
    return SerialPool(
        *(
            open_worker(config, run_dir, place, folder, population, device, scratch=scratch)
            for place, folder in folders.items()
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
    """Have every site prepare its data, and make the federation's population of the reports, which ``sites.json`` keeps.

    Raises:
        ConfigError: the attack does not fit the data.
        ResourcesError: a site's node is not in the cluster.
        DataError: a site's recordings cannot be used.
    """
    _make_key(run_dir)
    progress.message(f"asking the sites for their clients: {', '.join(config.data.sites)}")
    parts, written = {}, {}
    for part, data in config.data.each.items():
        try:
            parts[part], written[part] = _prepare_part(config, part, data, run_dir, progress)
        except (ConfigError, DataError) as error:
            raise with_part(error, part) from error
    write_durably(run_dir / "sites.json", json.dumps({"parts": written}, indent=2).encode())
    return Population(parts)


def _prepare_part(
    config: Config, part: str, data: DataSettings, run_dir: Path, progress: Progress
) -> tuple[Part, dict[str, Any]]:
    """Have the sites of a part prepare their data; return the part, and the reports for ``sites.json``."""
    sites = list(data.sites)
    listed = _everywhere(config, list_classes_at, [(site, part) for site in sites], progress)
    classes = exclude_labels(natural_order(sorted({label for labels in listed for label in labels})), data.leave_out)
    separator = None if data.label_sets is None else data.label_sets.separator
    work: list[tuple[Any, ...]] = [(site, part, folder_at(config, run_dir, site), classes) for site in sites]
    reports: list[SiteReport] = _everywhere(config, prepare_at, work, progress)
    found, attack = join_sites(reports, classes, separator), config.parts.attack
    if attack is not None:
        with naming_failures(attack, "check", kind="attack"):
            attack.check(classes, data.features)
        with naming_failures(attack, "candidates", kind="attack"):
            attackers = np.flatnonzero(attack.candidates(found.tables.ids, config.run.seed))
        if attack.poisons:  # only now are all clients known, of whom attackers are drawn
            places = np.cumsum([0, *(len(report.examples) for report in reports)]).tolist()
            own = [attackers[(attackers >= first) & (attackers < stop)] - first for first, stop in pairwise(places)]
            work = [(*call, chosen.tolist()) for call, chosen in zip(work, own, strict=True)]
            reports = _everywhere(config, prepare_at, work, progress)
            found = join_sites(reports, classes, separator)
    trained = {label for report in reports for label in report.trained}
    for label in found.classes if config.labels_needed and data.unseen == "stop" else ():
        if label not in trained:
            raise DataError(
                f"no client of any site has a training clip of label {label!r}; choose data.split or data.partition "
                f"differently, or leave the label out of the data"
            )
    for view in data.views:
        if not any(report.views[view].examples for report in reports):
            raise DataError(
                f"data.views.{view}.column: no training example of any site has a file in the column "
                f"{data.views[view].column!r}"
            )
    return found, {"classes": classes, "sites": [dataclasses.asdict(report) for report in reports]}


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
