"""Comparison of the software of two machines of a run."""

from __future__ import annotations

import getpass
import os
import platform
from collections.abc import Mapping

from raydfl.core.errors import ConfigError
from raydfl.core.ops import kernels
from raydfl.core.version import describe_source


def describe_software() -> dict[str, str]:
    """Describe this machine's raydfl (version and digest of its source) and kernels."""
    return {"raydfl": describe_source(), **kernels()}


def describe_user() -> str:
    """Return the user and the machine of this process, ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no entry for its user
        user = str(os.getuid())
    return f"{user}@{platform.node()}"


def check_same_software(first: Mapping[str, str]) -> None:
    """Compare the software of this machine with that of the run's first machine.

    Args:
        first: Result of :func:`describe_software` on the first machine.

    Raises:
        ConfigError: raydfl, the version of PyTorch, or the availability of the compiled operators differs.
    """
    here = describe_software()
    differing = [name for name in ("raydfl", "torch") if first[name] != here[name]]
    if (first["operators"] == "none") != (here["operators"] == "none"):
        differing.append("operators")
    if differing:
        values = ", ".join(f"{name} {here[name]} here, {first[name]} on the first machine" for name in differing)
        raise ConfigError(
            f"node {platform.node()} and the run's first machine have different software: {values}. Install the same "
            f"raydfl and PyTorch on every node, with compiled operators on all nodes or on none."
        )
