"""Places to which a run may write: not the temporary folder of a job, and only such as all its processes see."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from raydfl.core.errors import ConfigError, ResourcesError

_COPIES = ("runtime_resources", "working_dir_files")
"""Where Ray unpacks working directories, below the temporary folder of its session."""
_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray for the process that ``ray job submit`` starts."""


def in_a_job() -> bool:
    """Return whether this process is the entry of a submitted job."""
    return _VARIABLE in os.environ


def check_kept(folders: Mapping[str, str | Path]) -> None:
    """Refuse to write what shall be kept into the temporary copy of a job's working directory.

    Args:
        folders: where it would go, by the setting that says so; a URI counts by its path.

    Raises:
        ConfigError: naming the setting and what to write instead.
    """
    for setting, folder in folders.items():
        parts = Path(folder).parts
        if _COPIES in itertools.pairwise(parts):
            raise ConfigError(
                f"{setting}: {folder} lies in the temporary folder of this Ray job, where relative paths start, and would be lost "
                f"with it; give an absolute path that all nodes see, for instance {setting}=/shared/{setting.rpartition('.')[2]}"
                + (", or a URI such as s3://bucket/runs" if setting == "run.dir" else "")
            )


def check_no_token(token: str) -> None:
    """Refuse to begin a job whose working directory was uploaded with a token in it.

    Args:
        token: the cluster's; empty: only names are looked at.

    Raises:
        ConfigError: naming the file.
    """
    if not in_a_job() or _COPIES not in itertools.pairwise(Path.cwd().parts):
        return
    for folder, _, files in os.walk(Path.cwd()):
        for file in files:
            path = Path(folder, file)
            if path.suffix == ".token" or file == "auth_token" or (token and _holds(path, token)):
                raise ConfigError(
                    f"{path.relative_to(Path.cwd())} was uploaded with the job's working directory and holds a token, with which "
                    f"anybody can run code on the cluster: move it out of that folder (Ray looks for it in ~/.ray/auth_token), "
                    f"make a new one, and submit the job again"
                )


def _holds(path: Path, token: str) -> bool:
    """Return whether it is a file with this token and hardly anything else; large files are not read."""
    try:
        return path.stat().st_size <= 2 * len(token) + 16 and token.encode() in path.read_bytes()
    except OSError:
        return False


def check_visible(run_dir: Path) -> None:
    """Refuse to work where a run's folder is not to be seen.

    Raises:
        ResourcesError: it is not: this is another machine than the one that made it.
    """
    if not (run_dir / "run.json").exists():
        raise ResourcesError(
            f"{socket.gethostname()} does not see the run's folder {run_dir}: all nodes must see run.dir (for a URI: the folder "
            f"runs/ below data.cache) and data.cache under the same paths; use folders on a file system that they share, or place "
            f"everything on one node"
        )
