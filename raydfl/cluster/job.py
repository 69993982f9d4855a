"""Checks of folders: not in the temporary folder of a Ray job, and visible on all nodes."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from raydfl.core.errors import ConfigError, ResourcesError

_COPIES = ("runtime_resources", "working_dir_files")
"""Folder of unpacked working directories, in the temporary folder of Ray's session."""
_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that marks the entry point of a submitted job."""


def is_job() -> bool:
    """Return whether this process is the entry point of a submitted job."""
    return _VARIABLE in os.environ


def check_persistent(folders: Mapping[str, str | Path]) -> None:
    """Reject output folders in the temporary copy of a job's working directory.

    Args:
        folders: Output folder or URI of each setting.

    Raises:
        ConfigError: An output folder would be deleted with the job.
    """
    for setting, folder in folders.items():
        parts = Path(folder).parts
        if _COPIES in itertools.pairwise(parts):
            raise ConfigError(
                f"{setting}: {folder} is in the temporary folder of this Ray job (relative paths start there) and would be deleted "
                f"with it. Set an absolute path that all nodes see, such as {setting}=/shared/{setting.rpartition('.')[2]}"
                + (", or a URI such as s3://bucket/runs." if setting == "run.dir" else ".")
            )


def check_no_token(token: str) -> None:
    """Reject a job with an authentication token, or the key of a private run, in its uploaded working directory.

    Args:
        token: Token of the cluster; empty: check only the names of files.

    Raises:
        ConfigError: A file contains the token, or has the name of a token file or of a key.
    """
    from raydfl.core.noise_key import KEY_FILE  # imports NumPy, which raydfl --help must not

    if not is_job() or _COPIES not in itertools.pairwise(Path.cwd().parts):
        return
    for folder, _, files in os.walk(Path.cwd()):
        for file in files:
            path = Path(folder, file)
            if file == KEY_FILE:
                raise ConfigError(
                    f"{path.relative_to(Path.cwd())} was uploaded with the job's working directory and reveals the noise of a "
                    f"private run. List it in .rayignore, and submit the job again."
                )
            if path.suffix == ".token" or file == "auth_token" or (token and _holds(path, token)):
                raise ConfigError(
                    f"{path.relative_to(Path.cwd())} was uploaded with the job's working directory and contains a token that lets "
                    f"others run code on the cluster. Move the file out of the folder (Ray reads ~/.ray/auth_token) or "
                    f"list it in .rayignore, create a new token, and submit the job again."
                )


def _holds(path: Path, token: str) -> bool:
    """Return whether a small file contains the token. Large files are not read."""
    try:
        return path.stat().st_size <= 2 * len(token) + 16 and token.encode() in path.read_bytes()
    except OSError:
        return False


def check_visible(run_dir: Path) -> None:
    """Check the visibility of a run's folder on this machine.

    Raises:
        ResourcesError: The folder is not visible here.
    """
    if not (run_dir / "run.json").exists():
        raise ResourcesError(explain_blind_node(socket.gethostname(), run_dir))


def explain_blind_node(node: str, run_dir: Path) -> str:
    """Return the message about a node that does not see the run's folder."""
    return (
        f"{node} does not see the run's folder {run_dir}: all nodes must see run.dir and data.cache under the same paths. Set "
        f"run.dir to a URI such as s3://bucket/runs and resume the run, or use folders on a shared file system, or a single node."
    )
