"""Connections to Ray. A cluster is first asked whether it takes our token: Ray itself tries for long and does not say why."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import ray

from raydfl.cluster.resources import check_resources
from raydfl.core.errors import ResourcesError, first_line
from raydfl.engine import Config

_SECONDS = 10
_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""A question without arguments that every cluster answers to those who may ask."""
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)

_TOKEN_FILE = (".ray", "auth_token")
"""Path of Ray's token in the user's home."""


def check_access(address: str) -> None:
    """Ask the cluster at ``host:port`` (or ``ray://host:port``); of any other form of address nothing is known here.

    Raises:
        OSError: nobody listens there.
        ResourcesError: the cluster wants a token, and there is none, or it is not the cluster's.
    """
    found = re.fullmatch(r"(ray://)?(.+):(\d+)", address)
    if found is None:
        return
    socket.create_connection((found[2].strip("[]"), int(found[3])), timeout=_SECONDS).close()
    if found[1] is None:
        _check_token(address)


def _check_token(address: str) -> None:
    token, place = current_token()
    if token and Path(place).parts[-2:] == _TOKEN_FILE:
        _check_mode(Path(place))
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(_METHOD)(b"", timeout=_SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() in _REFUSED:
                raise ResourcesError(
                    f"the Ray cluster at {address} refused access: "
                    + (f"the token in {place} is not the cluster's" if token else f"it wants a token, and {place}")
                    + "; set RAY_AUTH_TOKEN to its token, or RAY_AUTH_TOKEN_PATH to a file with it, and RAY_AUTH_MODE=token"
                ) from error
            # With TLS, or whatever else: Ray itself knows better.


def _check_mode(path: Path) -> None:
    """Refuse a token that other users of this machine can read.

    Raises:
        ResourcesError: naming the file and the command that repairs it.
    """
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ResourcesError(
            f"{path} has mode {mode:04o}, so other users of this machine can read the cluster's token and run code on the "
            f"cluster. Run: chmod 600 {path}"
        )


def _sends_unasked() -> bool:
    """Tell whether this Ray looks for a token where RAY_AUTH_MODE is not set; those before it do not, and have no word for it."""
    try:
        from ray._private.authentication import authentication_token_setup as setup
    except ImportError:  # not a public module: a later Ray may have it elsewhere
        return True
    return hasattr(setup, "maybe_enable_token_auth_if_token_available")


def current_token() -> tuple[str, str]:
    """Return the token that Ray would send, empty if nothing, and where it stands or why there is none. The order is Ray's."""
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode is None and not _sends_unasked():
        return "", f"Ray {ray.__version__} sends none as long as RAY_AUTH_MODE is not set"
    if mode is not None and mode.lower() != "token":
        return "", f"RAY_AUTH_MODE={mode} sends none"
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token, "RAY_AUTH_TOKEN"
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home().joinpath(*_TOKEN_FILE)
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        token = ""
    return token, str(path) if token else f"there is none in {path}"


_INLINE = 1 << 20
"""Bytes up to which what an actor returns comes with its answer; by way of the object store two more processes are asked."""


def start_local_ray(**options: Any) -> None:
    """Start a Ray of this process alone, which ends with it; options as for ``ray.init``."""
    os.environ.setdefault(
        "RAY_max_direct_call_object_size", str(_INLINE)
    )  # read by every process of Ray when it starts
    ray.init("local", include_dashboard=False, **options)


@contextlib.contextmanager
def ray_session(config: Config, clients: int, quiet: bool = False) -> Iterator[None]:
    """Have Ray for one run: the cluster that this process is in, the one configured, or a local one that ends with the block.

    Raises:
        ResourcesError: the cluster cannot be reached, or can never hold the configured actors.
    """
    if config.ray.actors == 0:
        yield
        return
    own = not (ray.is_initialized() or config.ray.address or os.environ.get("RAY_ADDRESS"))
    with connected(config.ray.address, quiet):
        check_resources(config, clients, grows=config.ray.autoscale and not own)
        yield


@contextlib.contextmanager
def connected(address: str | None, quiet: bool = False, local_cpus: int | None = None) -> Iterator[None]:
    """Have the Ray that this process is in, the one at ``address`` or ``$RAY_ADDRESS``, or a local one that ends with the block.

    Args:
        local_cpus: CPUs of a local one; ``None``: those of the machine.

    Raises:
        ResourcesError: the cluster cannot be reached, or wants another token.
    """
    started = False
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = address or os.environ.get("RAY_ADDRESS")
        options: dict[str, Any] = {"log_to_driver": not quiet, "logging_level": "ERROR", "namespace": "raydfl"}
        try:
            if address:
                check_access(address)
                ray.init(address, **options)
            else:
                start_local_ray(num_cpus=local_cpus, **options)
        except ResourcesError:
            raise
        except Exception as error:  # Ray raises many kinds here
            where = f"the Ray cluster at {address}" if address else "a local Ray"
            first = first_line(error)
            reason = error.strerror or first if isinstance(error, OSError) else f"{type(error).__name__}: {first}"
            advice = (
                "check the address (ray.address, or RAY_ADDRESS), and that RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH holds the "
                "cluster's token"
                if address
                else "the machine may be too busy or short of memory: try again"
            )
            raise ResourcesError(
                f"cannot reach {where}: {reason}; {advice}, or set ray.actors=0 for a single run without Ray"
            ) from error
        started = True
    try:
        yield
    finally:
        if started:
            ray.shutdown()
