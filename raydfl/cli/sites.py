"""The commands ``raydfl site ...``, for the administrator of a site."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from raydfl.cli._arguments import File, Overrides, TakesSettings
from raydfl.core.errors import InputError, printable

site_app = typer.Typer(
    help="Start a site with a policy, print digests of code for a policy, and verify a site's record.",
    no_args_is_help=True,
)


@site_app.command("start")
def site_start(
    policy: Annotated[Path, typer.Option("--policy", help="policy of the site (YAML)", show_default=False)],
    address: Annotated[str, typer.Option("--address", help="address of the cluster, HOST:PORT", show_default=False)],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTION ...]", help="further options of ray start", show_default=False),
    ] = None,
) -> None:
    """Join a Ray cluster as the node of a site, with the site's policy.

    The command becomes ``ray start --block``. All files of its processes are private to their user.
    """
    from raydfl.cluster import POLICIES, SiteRecord, read_policy  # imports Ray, which is slow

    policy = policy.absolute()
    rules = read_policy(policy)
    SiteRecord(rules.record, rules.site).append("started", policy=policy.read_text())
    os.umask(0o077)
    resources = json.dumps({f"site:{rules.site}": 1})
    command = ["start", f"--address={address}", f"--resources={resources}", "--block", *(options or [])]
    arguments = [sys.executable, "-m", "ray.scripts.scripts", *command]
    os.execve(sys.executable, arguments, {**os.environ, POLICIES: str(policy)})


@site_app.command("digests", cls=TakesSettings)
def site_digests(file: File, overrides: Overrides = None) -> None:
    """Print the digests of a configuration's code, in the form of a policy.

    Run it at the site after reading the code. A digest covers the options of a method or rule, the files of its class and of all
    modules that it imports, and the versions of packages and of raydfl.
    """
    from raydfl.engine import load_config
    from raydfl.engine.storage import digest_components, digest_values

    values = load_config(file, overrides or []).model_dump(mode="json")
    components = digest_components(values)
    print(f"# {file}, configuration {digest_values(values)}")  # noqa: T201
    for setting, kind in (("methods", "method"), ("rules", "rule"), ("code", "code")):
        found = [component for component in components if component.kind == kind]
        if found:
            print(f"{setting}:")  # noqa: T201
        for component in found:
            print(f"- {component.digest}  # {printable(component.name)}")  # noqa: T201
            for path in component.files:
                print(f"  # file {printable(path)}")  # noqa: T201
            for name, version in component.packages.items():
                print(f"  # package {name} {version}")  # noqa: T201
            for line in component.unresolved:
                print(f"  # not covered: {printable(line)} loads code by a computed name")  # noqa: T201


@site_app.command("audit")
def site_audit(
    record: Annotated[Path, typer.Argument(metavar="RECORD", help="record of a site", show_default=False)],
    site: Annotated[str | None, typer.Option("--site", help="name of the site; needed with --run")] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option("--run", help="folder of a run at the server: compare its heads with the record"),
    ] = None,
) -> None:
    """Verify the chain of a site's record.

    Exit code 1: a line was changed, removed or moved. Removed lines at the end are detected only with --run.
    """
    from raydfl.cluster import find_break, read_heads  # imports Ray, which is slow

    if runs and site is None:
        raise InputError("--run needs the name of the site in the run. Add --site NAME.")
    heads = [head for run in runs or [] for head in read_heads(run, str(site))]
    if runs and not heads:
        raise InputError(f"the run folders have no head of site {site!r}. Check the name of the site and the folders.")
    last, problem = find_break(record, heads)
    if problem:
        print(f"broken: {printable(str(record))}, {problem}")  # noqa: T201
        raise typer.Exit(1)
    compared = f", {len(heads)} heads of runs agree" if heads else ""
    print(f"intact: {printable(str(record))}, {last.number} lines{compared}, head {last}")  # noqa: T201
