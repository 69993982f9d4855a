"""Sites: nodes that hold data of their own. What is done there, in the site's own folder, and how it is asked for.

In a site's folder lie the feature cache (``cache/``) and, for each run, ``runs/KEY/SITE/population`` (who has which clips) and
``runs/KEY/SITE/private`` (clients' private state). The run's directory holds none of it: of a site it has the SiteReport
(``sites.json``, word for word), the clients' numbers, and what the method shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from raydfl.config import Config
from raydfl.data.build import build_population, list_clips
from raydfl.data.population import POPULATION_FILE, Population
from raydfl.data.sites import SiteReport
from raydfl.errors import RunDirectoryError
from raydfl.files import RESUME, write_atomically, writing
from raydfl.private import PrivateStore
from raydfl.worker import Worker

SHARE = 0.001
"""Of the Ray resource ``site:NAME``, for everything that has to run at that site: a node offers 1 of it."""


def resource(site: str) -> str:
    """The Ray resource that a site's node offers."""
    return f"site:{site}"


def run_folder(config: Config, site: str, key: str) -> Path:
    """Where a run's data lie on a site's node. Sites may be given the same folder, and may even be on one machine.

    Args:
        key: of the run, ``run.json``'s ``site_key``.
    """
    return config.data.sites[site].folder / "runs" / key / site


@dataclass(frozen=True)
class SentToSite:
    """What a client actor at a site gets of a run, besides its configuration: it does not see the run's folder."""

    key: str
    """See :func:`run_folder`."""
    population: bytes
    """The file of the federation's population: ids and numbers of examples."""

    @classmethod
    def of(cls, run_dir: Path, key: str) -> SentToSite:
        """Of a run."""
        return cls(key, (run_dir / "population" / POPULATION_FILE).read_bytes())


def receive(config: Config, site: str, sent: SentToSite) -> Population:
    """The federation's population, kept in the site's folder.

    Raises:
        ResourcesError: the disk is full or the folder cannot be written.
    """
    folder = run_folder(config, site, sent.key) / "federation"
    with writing(folder, len(sent.population), "the population of the federation", RESUME):
        write_atomically(folder / POPULATION_FILE, lambda path: path.write_bytes(sent.population))
    return Population.load(folder)


def classes_at(config: Config, site: str) -> list[str]:
    """Names of the classes that a site has clips of, those to be left out too."""
    data = config.data.at(site).model_copy(update={"leave_out": (), "ungrouped": "keep"})
    return list_clips(data, config.run.seed)[1]


def prepare_at(config: Config, site: str, key: str, classes: list[str]) -> SiteReport:
    """Make the population of a site, in its folder, with features in its cache.

    Args:
        classes: of the whole federation.

    Raises:
        DataError: the site's recordings cannot be used, or not be divided as configured.
    """
    population = build_population(config.data.at(site), config.run.seed, classes=classes)
    population.save(run_folder(config, site, key) / "population")
    return SiteReport.of(site, population)


def open_worker(
    config: Config,
    site: str,
    key: str,
    run_dir: Path,
    population: Population,
    device: str = "cpu",
    scratch: Path | None = None,
) -> Worker:
    """A worker for the clients of one site, which can run only where the site's folder is.

    Args:
        key: see :func:`run_folder`.
        population: of the federation.
        device: on which to compute.
        scratch: where new private state is written, in place of the site's folder, which is then only read.

    Raises:
        RunDirectoryError: the site's folder does not hold this run.
    """
    folder = run_folder(config, site, key)
    if not (folder / "population").is_dir():
        raise RunDirectoryError(
            f"{folder} does not hold the clients' data of this run on the node of site {site!r}; restore the folder, or start the "
            f"run again under another run.name (ray.actors=0 and raydfl replay need the folders of all sites on one machine)"
        )
    own = Population.load(folder / "population", verify=True, verify_features=True)
    own.length = population.length
    first = next(each.first for each in population.sites if each.name == site)
    kept = folder / "private"
    private = PrivateStore(kept, site=site) if scratch is None else PrivateStore(scratch, [kept], site)
    return Worker(run_dir, config, private, device, population, (own, first))


def workers_here(
    run_dir: Path, config: Config, population: Population, key: str, scratch: Path | None = None
) -> dict[str, Worker]:
    """A worker in this process for each site, all of whose folders must be on this machine; or one for everybody without sites.

    Args:
        key: see :func:`run_folder`; empty without sites.
        scratch: where new private state is written, in place of where it belongs.
    """
    if config.data.sites:
        return {
            site: open_worker(config, site, key, run_dir, population, scratch=scratch) for site in config.data.sites
        }
    kept = run_dir / "private"
    private = PrivateStore(kept) if scratch is None else PrivateStore(scratch, [kept])
    return {"": Worker(run_dir, config, private, population=population)}
