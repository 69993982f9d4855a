"""The commands ``raydfl cluster ...``, for the administrator of a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

cluster_app = typer.Typer(help="Set up a Ray cluster.", no_args_is_help=True)


@cluster_app.callback()
def _describe() -> None:
    """Keep the name of the only command."""


@cluster_app.command("certificates")
def cluster_certificates(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="folder of the certificate authority", show_default=False)
    ],
    nodes: Annotated[
        list[str],
        typer.Argument(
            metavar="NODE...", help="address of each node; with further names: ADDRESS,NAME", show_default=False
        ),
    ],
    days: Annotated[int, typer.Option("--days", min=1, max=3650, help="validity in days")] = 365,
) -> None:
    """Create TLS certificates for the nodes of a Ray cluster.

    FOLDER gets a certificate authority, and for each NODE a folder with its certificate, its key and Ray's variables. An
    existing authority is used again. Keep ca.key in FOLDER: its owner can admit nodes to the cluster.
    """
    from raydfl.cluster import make_certificates  # imports Ray, which is slow

    for target in make_certificates(folder, nodes, days):
        print(f"{target}: copy it to the node, and there run: source {target.name}/tls.env")  # noqa: T201
