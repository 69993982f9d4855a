"""Sites: nodes with data that never leave them.

A site builds a population of its clients in its own folder. It sends a :class:`SiteReport` for each part: numbers of clients and
examples, classes, and values of the configured columns. The server builds the federation's population from the reports. Its
client ids consist of the site and a number.
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

from raydfl.cluster.faults import unwrap_error
from raydfl.cluster.job import check_visible
from raydfl.cluster.run_files import RunFiles
from raydfl.cluster.site_guard import GuardedWorker, SiteGuard, call_at_site
from raydfl.cluster.site_policy import find_policy
from raydfl.cluster.site_reports import SiteReport, join_sites
from raydfl.core.errors import ConfigError, DataError, ResourcesError, RunDirectoryError, first_line, translate_failures
from raydfl.core.files import RESUME, make_private_folder, plain_name, write_durably, writing
from raydfl.core.progress import ProgressReporter
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
    qualify_error,
)
from raydfl.engine import Config, SerialPool, Worker
from raydfl.engine.storage import PrivateStore, SharedPrivateStore, UploadedPrivateStore, private_uri, read_about

SHARE = 0.001
"""Amount of the Ray resource ``site:NAME`` that each task or actor at the site reserves. The site's node offers 1."""


def site_resource(site: str) -> str:
    """Return the name of the Ray resource of a site's node."""
    return f"site:{site}"


def place_folder(config: Config, run_dir: Path, place: str) -> Path:
    """Return the folder of a run at a place: below the site's folder on its node, or ``run_dir`` itself.

    Sites may share a machine and even a folder.

    Raises:
        RunDirectoryError: The file ``sites.key`` of the run is missing or damaged.
    """
    if not place:
        return run_dir
    path = run_dir / _KEY
    with translate_failures(
        lambda reason: RunDirectoryError(f"{path} is missing or damaged ({reason}). Restore it from a copy.")
    ):
        key = plain_name(path.read_text() if path.exists() else str(read_about(run_dir)["site_key"]))
    return config.data.sites[place].folder / "runs" / key / place


def list_site_classes(config: Config, site: str, part: str) -> list[str]:
    """List all classes of a site's clips of a part, including classes of ``data.leave_out``."""
    data = config.data.each[part].select_site(site).model_copy(update={"leave_out": (), "ungrouped": "keep"})
    return list_clips(data, config.run.seed)[1]


def prepare_site_part(
    config: Config, site: str, part: str, folder: Path, classes: list[str], attackers: Sequence[int] | None = None
) -> SiteReport:
    """Build a site's population of a part in the site's folder, with features in its cache.

    Args:
        config: Configuration of the run.
        site: Name of the site.
        part: Name of the part.
        folder: Folder of the run at the site.
        classes: Classes of the part at all sites.
        attackers: Positions of the site's attackers among its clients; ``None``: no data are poisoned.

    Raises:
        DataError: The site's recordings cannot be used, or cannot be divided as configured.
    """
    data, target = config.data.each[part], part_folder(folder / "population", part)
    for new in (target, config.data.sites[site].folder / "cache"):
        with writing(new, 0, "the site's data", RESUME):
            make_private_folder(new)
    attack = None
    if attackers is not None and config.components.attack is not None:
        ids = Population.load(target).ids
        chosen = tuple(ids[client] for client in attackers)
        attack = dataclasses.replace(config.components.attack, clients=chosen, draw="run", start=1, stop=None)
    population = build_population(data.select_site(site), config.run.seed, attack=attack, classes=classes)
    config.check_needs({part: population.pools})
    population.save(target)
    # A site with a policy sends the metrics of all test clips at once.
    objective = config.components.method.objective
    whole = objective.answers in ("set", "score") or objective.compares_clips or find_policy(site) is not None
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
    files: RunFiles | None = None,
) -> Worker:
    """Open a worker for the clients of a place, in a process at that place.

    Args:
        config: Configuration of the run.
        run_dir: Folder of the run. A site does not see it.
        place: Place of the data.
        folder: Folder of the run at the place.
        population: Population of the federation; ``None``: load it from ``folder``.
        device: Device of the computation.
        durable: Sync private state in this process, because the committing process runs on a different node.
        scratch: Folder of new private state, instead of ``folder``.
        files: Location of the run's files; ``None``: this node has them.

    Raises:
        RunDirectoryError: ``folder`` does not contain this run.
        ResourcesError: This node can neither read the run's files nor copy them.
        PolicyError: The policy of this node's site rejects the run.
    """
    policy = find_policy(place)
    guard = None if policy is None else SiteGuard(policy, config)
    if not place:
        if files is None:
            check_visible(folder)
        else:
            population = population or files.load_population(run_dir, config)
    elif not (folder / "population").is_dir():
        raise RunDirectoryError(
            f"{folder} does not contain the clients' data of this run on the node of site {place!r}. Restore the folder, or start "
            f"a new run under a different run.name (ray.actors=0 and raydfl replay need the folders of all sites on one machine)."
        )
    elif population is not None:
        population = population.load_place(place, folder / "population")
    uri = "" if place else private_uri(config.run.dir, run_dir)
    private = PrivateStore(folder / "private", uri=uri)
    if scratch is not None:
        private = PrivateStore(scratch, [folder / "private"], uri)
    elif uri and config.ray.actors != 0:
        private = UploadedPrivateStore(folder / "private", uri)
    elif durable or place:
        private = SharedPrivateStore(folder / "private")
    if guard is not None:
        return GuardedWorker(guard, run_dir, config, private, device, population, place)
    return Worker(run_dir, config, private, device, population, place)


def open_serial_pool(
    run_dir: Path,
    config: Config,
    population: Population,
    scratch: Path | None = None,
    device: str = "cpu",
    files: RunFiles | None = None,
) -> SerialPool:
    """Open a pool in this process. The folders of all sites must be on this machine.

    Args:
        run_dir: Folder of the run.
        config: Configuration of the run.
        population: Population of the federation.
        scratch: Folder of new private state, instead of the places' folders.
        device: Device of the computation.
        files: Location of the run's files; ``None``: this node has them.
    """
    folders = {place: place_folder(config, run_dir, place) for place in population.places}
    return SerialPool(
        *(
            open_worker(config, run_dir, place, folder, population, device, scratch=scratch, files=files)
            for place, folder in folders.items()
        )
    )


_KEY = "sites.key"
"""File in the folder of a run with the name of the run's folder at sites."""
_PATIENCE = 60.0
"""Seconds between two messages about a slow site."""


def _make_key(run_dir: Path) -> None:
    """Choose and store the name of the run's folder at sites."""
    path = run_dir / _KEY
    # Stored before the sites prepare their data: after a kill, the next start overwrites the incomplete folders.
    if not path.exists():
        write_durably(path, f"{run_dir.name}-{uuid.uuid4().hex[:8]}".encode())


def prepare_sites(config: Config, run_dir: Path, progress: ProgressReporter) -> Population:
    """Prepare the data at every site, and build the federation's population from the reports.

    The reports are stored in ``sites.json``.

    Raises:
        ConfigError: The attack does not fit the data.
        ResourcesError: A site's node is not in the cluster.
        DataError: A site's recordings cannot be used.
    """
    _make_key(run_dir)
    progress.message(f"Preparing the data at the sites: {', '.join(config.data.sites)}.")
    parts, reports = {}, {}
    for part, data in config.data.each.items():
        try:
            parts[part], reports[part] = _prepare_part(config, part, data, run_dir, progress)
        except (ConfigError, DataError) as error:
            raise qualify_error(error, part) from error
    write_durably(run_dir / "sites.json", json.dumps({"parts": reports}, indent=2).encode())
    return Population(parts)


def _prepare_part(
    config: Config, part: str, data: DataSettings, run_dir: Path, progress: ProgressReporter
) -> tuple[Part, dict[str, Any]]:
    """Prepare the data of a part at its sites; return the part, and the reports for ``sites.json``."""
    sites = list(data.sites)
    site_labels = _call_sites(config, list_site_classes, [(site, part) for site in sites], progress)
    classes = exclude_labels(
        natural_order(sorted({label for labels in site_labels for label in labels})), data.leave_out
    )
    separator = None if data.label_sets is None else data.label_sets.separator
    work: list[tuple[Any, ...]] = [(site, part, place_folder(config, run_dir, site), classes) for site in sites]
    reports: list[SiteReport] = _call_sites(config, prepare_site_part, work, progress)
    population, attack = join_sites(reports, classes, separator), config.components.attack
    if attack is not None:
        with naming_failures(attack, "check", kind="attack"):
            attack.check(classes, data.features)
        with naming_failures(attack, "candidates", kind="attack"):
            attackers = np.flatnonzero(attack.candidates(population.tables.ids, config.run.seed))
        if attack.poisons:  # Attackers are drawn from the clients of all sites, so the data are prepared a second time.
            bounds = np.cumsum([0, *(len(report.examples) for report in reports)]).tolist()
            chosen = [attackers[(attackers >= first) & (attackers < stop)] - first for first, stop in pairwise(bounds)]
            work = [(*call, positions.tolist()) for call, positions in zip(work, chosen, strict=True)]
            reports = _call_sites(config, prepare_site_part, work, progress)
            population = join_sites(reports, classes, separator)
    trained = {label for report in reports for label in report.trained}
    for label in population.classes if config.labels_needed and data.unseen == "stop" else ():
        if label not in trained:
            raise DataError(
                f"no client of any site has a training clip of label {label!r}. Change data.split or data.partition, or add the "
                f"label to data.leave_out."
            )
    for view in data.views:
        if not any(report.views[view].examples for report in reports):
            raise DataError(
                f"data.views.{view}.column: no training example of any site has a file in the column "
                f"{data.views[view].column!r}. Choose a column of the sites' manifests, or remove the view."
            )
    return population, {"classes": classes, "sites": [dataclasses.asdict(report) for report in reports]}


def _call_sites(
    config: Config, function: Callable[..., Any], arguments: list[tuple[Any, ...]], progress: ProgressReporter
) -> list[Any]:
    """Call a function of this module at each site, and return the results.

    Args:
        config: Configuration of the run, the first argument of ``function``.
        function: The function.
        arguments: Further arguments for each site. The first is the site's name.
        progress: Shows messages about slow sites.
    """
    if config.ray.actors == 0:
        return [call_at_site(function, config, *call) for call in arguments]
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    for site, *_ in arguments:
        if site_resource(site) not in resources:
            known = ", ".join(sorted(name for name in resources if name.startswith("site:"))) or "none"
            raise ResourcesError(
                f"no node of the cluster is site {site!r} (the cluster has: {known}). Start Ray on its node with "
                f"ray start --address=HEAD:6379 --resources='{{\"{site_resource(site)}\": 1}}'"
            )
    task = ray.remote(num_cpus=1, scheduling_strategy="DEFAULT")(call_at_site)  # Outside a trial's placement group.
    calls = [
        task.options(resources={site_resource(call[0]): SHARE}, max_retries=0).remote(function, config, *call)
        for call in arguments
    ]
    results: list[Any] = []
    for (site, *_), call in zip(arguments, calls, strict=True):
        while not ray.wait([call], timeout=_PATIENCE)[0]:
            progress.message(f"Site {site} is still preparing its data, has no free CPU, or has left the cluster.")
        try:
            results.append(ray.get(call))
        except RayTaskError as error:
            raise unwrap_error(error) from error
        except RayError as error:
            raise ResourcesError(
                f"site {site!r} was lost while it prepared its data: {type(error).__name__}: {first_line(error)}. Check its node "
                f"and memory, then start the run again."
            ) from error
    return results
