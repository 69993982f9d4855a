"""Policy of a site: a file at the site with limits on the runs with its data."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, time
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator

from raydfl.core.errors import ConfigError, PolicyError, nearest, translate_failures
from raydfl.core.metrics import base_name
from raydfl.core.options import explain
from raydfl.core.settings import Settings
from raydfl.core.types import Metrics
from raydfl.core.yaml import read_yaml
from raydfl.engine import Config
from raydfl.engine.storage import ComponentDigest

POLICIES = "RAYDFL_SITE_POLICY"
"""Environment variable of a node: paths of its sites' policies, separated by colons."""
ANY = "any"
"""Entry of a list of digests to allow all code."""
_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")

Digests = list[Annotated[str, Field(pattern=r"^([0-9a-f]{64}|any)$")]]


class SitePolicy(Settings):
    """Limits of a site on runs and on outgoing data, and the file of its record."""

    site: str = Field(min_length=1, description="Name of the site in data.sites.")
    record: Path = Field(description="Absolute path of the record of outgoing data.")
    methods: Digests = Field(
        default_factory=list, description="Digests of the allowed methods, or [any]. `raydfl site digests` prints them."
    )
    rules: Digests = Field(
        default_factory=list,
        description="Digests of the allowed aggregation rules, or [any]. A method's default rule belongs to the method.",
    )
    code: Digests = Field(
        default_factory=list,
        description="Digests of the allowed user's classes for objectives, data sets, features and so on, or [any].",
    )
    minimum_clients: int = Field(
        2, ge=2, description="Minimum number of clients: of the site, of each cohort, and behind each metric."
    )
    metrics: list[str] = Field(
        default_factory=list,
        description="Metrics with permission to leave the site, by name without the model (loss, accuracy, confusion). Metrics "
        "of a single client never leave it.",
    )
    differential_privacy: bool = Field(
        False,
        description="Require differential privacy: the rule gaussian with noise, or train.optimiser.private with "
        "noise, and without privacy.as_if and privacy.key: seed. The server has the key of the noise, so the site trusts it.",
    )
    hours: list[str] = Field(
        default_factory=list,
        description='Allowed times of day at the site, such as "20:00-06:00". The end is excluded. Empty: always.',
    )
    maximum_rounds: int | None = Field(None, ge=1, description="Maximum number of rounds of a run. null: no limit.")

    @field_validator("record")
    @classmethod
    def _check_absolute(cls, value: Path) -> Path:
        if not value.is_absolute():
            raise ValueError("a relative path would depend on the working directory of Ray. Give an absolute path")
        return value

    @field_validator("hours")
    @classmethod
    def _check_hours(cls, value: list[str]) -> list[str]:
        for text in value:
            begin, end = _parse_hours(text)
            if begin == end:
                raise ValueError(f"{text!r} is empty. Leave out `hours` to allow the whole day")
        return value

    def reject(self, rule: str, problem: str, advice: str) -> PolicyError:
        """Return the error about a violated rule.

        Args:
            rule: Name of the setting.
            problem: The violation, a clause.
            advice: The remedy, whole sentences.
        """
        return PolicyError(f"site {self.site!r} rejects the run: its policy (`{rule}`): {problem}. {advice}")

    def check_run(self, config: Config, components: Sequence[ComponentDigest]) -> None:
        """Check a configuration before its code is loaded and before data are read.

        Args:
            config: Configuration of the run.
            components: Digests of its code, computed at the site.

        Raises:
            PolicyError: The configuration violates the policy.
        """
        lists: Mapping[str, tuple[str, Digests]] = {
            "method": ("methods", self.methods),
            "rule": ("rules", self.rules),
            "code": ("code", self.code),
        }
        for component in components:
            setting, allowed = lists[component.kind]
            if ANY not in allowed and component.digest not in allowed:
                raise self.reject(
                    setting,
                    f"the {component.kind} {component.name} has the digest {component.digest} at this site, which the policy does "
                    f"not list",
                    "Send the site's administrator the configuration and its code. After a review, `raydfl site digests FILE` at "
                    "the site prints the digests for the policy.",
                )
        rule = config.method.get("rule")
        options = rule if isinstance(rule, Mapping) else {"name": rule}
        private = config.train.optimiser.private
        by_clip = private is not None and private.noise > 0
        by_client = options["name"] == "gaussian" and options.get("noise") != 0
        for_study = config.privacy.as_if is not None or config.privacy.key == "seed"
        if self.differential_privacy and not (by_client or by_clip):
            raise self.reject(
                "differential_privacy",
                "it requires differential privacy, but the run has none",
                "Set method.rule='{name: gaussian, noise: ...}' (raydfl privacy FILE prints the epsilon of each noise).",
            )
        if self.differential_privacy and for_study:
            raise self.reject(
                "differential_privacy",
                "it requires differential privacy, but the noise of the run gives none",
                "Set privacy.key=secret and privacy.as_if=null.",
            )
        if self.maximum_rounds is not None and config.train.rounds > self.maximum_rounds:
            raise self.reject(
                "maximum_rounds",
                f"train.rounds={config.train.rounds} exceeds its {self.maximum_rounds} rounds",
                f"Set train.rounds={self.maximum_rounds}.",
            )
        cohorts = [config.train.cohort, *(phase.cohort for phase in config.train.phases.values())]
        self._check_cohort(min((cohort for cohort in cohorts if isinstance(cohort, int)), default=self.minimum_clients))

    def check_moment(self, round_number: int, now: datetime) -> None:
        """Check the time of day at the site, and the number of a round.

        Args:
            round_number: Number of the round; 0: before the first round.
            now: Local time.

        Raises:
            PolicyError: The time is outside ``hours``, or the round is after the last allowed one.
        """
        if self.hours and not any(_contains(text, now.time()) for text in self.hours):
            raise self.reject(
                "hours",
                f"it is {now:%H:%M} at the site, and runs are allowed at {', '.join(self.hours)}",
                "Repeat the command in the allowed hours. The run resumes from its last commit.",
            )
        if self.maximum_rounds is not None and round_number > self.maximum_rounds:
            raise self.reject(
                "maximum_rounds",
                f"round {round_number} exceeds its {self.maximum_rounds} rounds",
                f"Set train.rounds={self.maximum_rounds}.",
            )

    def check_clients(self, clients: int) -> None:
        """Check the number of clients of the site.

        Raises:
            PolicyError: The site has too few clients.
        """
        if clients < self.minimum_clients:
            raise self.reject(
                "minimum_clients",
                f"the site has {clients} clients in this run, fewer than {self.minimum_clients}",
                "Change data.partition or data.split to give the site more clients.",
            )

    def check_cohorts(self, config: Config, clients: int) -> None:
        """Check the size of each phase's cohort.

        Args:
            config: Configuration of the run.
            clients: Number of clients of the federation.

        Raises:
            PolicyError: A cohort is too small.
        """
        for name in config.phases.names:
            self._check_cohort(config.train.resolve_phase(name).cohort_size(clients))

    def _check_cohort(self, cohort: int) -> None:
        if cohort < self.minimum_clients:
            raise self.reject(
                "minimum_clients",
                f"a round has {cohort} clients, fewer than {self.minimum_clients}",
                f"Raise train.cohort to at least {self.minimum_clients} clients.",
            )

    def withhold_metrics(self, metrics: Metrics, clients: int) -> Metrics:
        """Select the metrics with permission to leave the site.

        Args:
            metrics: Metrics by name.
            clients: Number of clients behind each value.
        """
        allowed = self.metrics if clients >= self.minimum_clients else ()
        return {name: value for name, value in metrics.items() if base_name(name) in allowed}


def _parse_hours(text: str) -> tuple[time, time]:
    """Parse ``"20:00-06:00"``.

    Raises:
        ValueError: The text has another form.
    """
    match = _HOURS.fullmatch(text)
    if match is None:
        raise ValueError(f'{text!r} is not an interval. Write "HH:MM-HH:MM", such as "20:00-06:00"')
    hour, minute, end_hour, end_minute = map(int, match.groups())
    return time(hour, minute), time(end_hour, end_minute)


def _contains(hours: str, moment: time) -> bool:
    """Return whether an interval contains a time of day. An interval contains midnight if it ends before its start."""
    begin, end = _parse_hours(hours)
    return begin <= moment < end if begin < end else moment >= begin or moment < end


def read_policy(path: Path) -> SitePolicy:
    """Read the policy of a site.

    Raises:
        ConfigError: The file cannot be read, or a setting is wrong.
    """
    with translate_failures(
        lambda reason: ConfigError(f"cannot read the policy {path}: {reason}. Give a YAML file (docs/security.md).")
    ):
        values = read_yaml(path)
    for key in values if isinstance(values, dict) else ():
        if key not in SitePolicy.model_fields:
            raise ConfigError(f"{path}: unknown key {key!r}. {nearest(str(key), SitePolicy.model_fields)}")
    try:
        return SitePolicy.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, '', values, SitePolicy)}") from error


def find_policy(site: str) -> SitePolicy | None:
    """Find the policy of a site on this node.

    Args:
        site: Name of the site; empty: a run without sites.

    Returns:
        The policy; ``None`` on a node without policies.

    Raises:
        ConfigError: A policy cannot be read.
        PolicyError: The node has policies, but none for the site.
    """
    paths = [Path(path) for path in os.environ.get(POLICIES, "").split(os.pathsep) if path]
    policies = {policy.site: policy for policy in map(read_policy, paths)}
    if site in policies or not policies:
        return policies.get(site)
    known = ", ".join(policies)
    what = f"site {site!r} has no policy on this node" if site else "the run has no sites"
    raise PolicyError(
        f"a node of the cluster with a policy for site {known} rejects the run: {what}. Declare the site in data.sites, or exclude "
        f"this node with ray.options.label_selector."
    )
