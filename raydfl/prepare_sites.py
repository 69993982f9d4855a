"""Before the first round of a run over several sites: each makes its clients, and tells how many there are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from raydfl.config import Config
from raydfl.data.listing import kept_labels
from raydfl.data.partition import natural_order
from raydfl.data.population import Population
from raydfl.data.sites import SiteReport, join
from raydfl.errors import ConfigError, DataError, ResourcesError
from raydfl.files import write_durably
from raydfl.progress import Progress
from raydfl.ray_pool import task_cause
from raydfl.sites import SHARE, classes_at, prepare_at, resource

_PATIENCE = 60.0
"""Seconds after which it is said which site is waited for."""


def prepare_sites(config: Config, key: str, run_dir: Path, progress: Progress) -> Population:
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
    names = list(config.data.sites)
    progress.message(f"asking the sites for their clients: {', '.join(names)}")
    found = _everywhere(config, classes_at, [(name,) for name in names], progress)
    labels = natural_order(sorted({label for labels in found for label in labels}))
    classes = kept_labels(labels, config.data.leave_out)
    reports: list[SiteReport] = _everywhere(config, prepare_at, [(name, key, classes) for name in names], progress)
    trained = {label for report in reports for label in report.trained}
    for label in classes:
        if label not in trained:
            raise DataError(
                f"no client of any site has a training clip of label {label!r}; choose data.split or data.partition "
                f"differently, or leave the label out of the data"
            )
    told = {"classes": classes, "sites": [report.as_dict() for report in reports]}
    write_durably(run_dir / "sites.json", json.dumps(told, indent=2).encode())
    return join(reports, classes)


def _everywhere(
    config: Config, function: Callable[..., Any], arguments: list[tuple[Any, ...]], progress: Progress
) -> list[Any]:
    """What a function of this module gives at each site, with the site's name as its first argument after the configuration."""
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
    task = ray.remote(num_cpus=1)(function)
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
            first = (str(error).strip().splitlines() or [""])[0]
            raise ResourcesError(
                f"site {name!r} was lost while it prepared its data: {type(error).__name__}: {first}; check its node and its "
                f"memory, then start the run again"
            ) from error
    return done
