"""Connections to Ray. The token is checked first, because Ray retries a refused token for long without a reason."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import ray

from raydfl.cluster.resources import check_resources
from raydfl.core.errors import ConfigError, ResourcesError, first_line, translate_failures
from raydfl.engine import Config, RaySettings

_SECONDS = 10
_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""A call without arguments, open to all authorised clients."""
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)

_TOKEN_FILE = (".ray", "auth_token")
"""Path of Ray's token in the user's home."""

TLS_VARIABLE = "RAY_USE_TLS"
"""Environment variable of Ray to enable TLS. It must be equal in all processes of a cluster."""
_TLS_FILES = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_SERVER_CERT")
"""Environment variables of Ray: the authority's certificate, and the node's key and certificate."""


def check_access(address: str) -> None:
    """Check access to the cluster at ``host:port`` or ``ray://host:port``, and skip further forms of addresses.

    Raises:
        ConfigError: The address is that of a dashboard.
        OSError: The address refuses connections.
        ResourcesError: The token is missing or wrong, or the cluster and this process do not both use TLS.
    """
    if re.match("https?://", address):
        raise ConfigError(
            f"ray.address={address} is the address of a dashboard, for `ray job`. Give the host and port of `ray start`, such as "
            f"127.0.0.1:6379."
        )
    match = re.fullmatch(r"(ray://)?(.+):(\d+)", address)
    if match is None:
        return
    socket.create_connection((match[2].strip("[]"), int(match[3])), timeout=_SECONDS).close()
    if match[1] is None:
        _check_token(address)


def _check_token(address: str) -> None:
    token, place = current_token()
    if token and Path(place).parts[-2:] == _TOKEN_FILE:
        _check_mode(Path(place))
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with _open_channel(address) as channel:
        try:
            channel.unary_unary(_METHOD)(b"", timeout=_SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() in _REFUSED:
                raise ResourcesError(
                    f"the Ray cluster at {address} refused access: "
                    + (f"the token in {place} is not the cluster's" if token else f"it requires a token, but {place}")
                    + ". Set RAY_AUTH_TOKEN to its token, or RAY_AUTH_TOKEN_PATH to a file with it, and RAY_AUTH_MODE=token."
                ) from error
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                raise ResourcesError(
                    f"the Ray cluster at {address} accepts connections, but not the messages of this process: "
                    f"{first_line(error.details())}. Give the port of `ray start --port` (6379 by default), not the dashboard's. "
                    f"Use TLS ({TLS_VARIABLE}=1, with certificates of one authority) for this command and on all nodes, or nowhere."
                ) from error
            # Any other error is left to Ray.


def uses_tls() -> bool:
    """Return whether Ray uses TLS in this process."""
    return os.environ.get(TLS_VARIABLE, "").lower() in ("1", "true")


def _open_channel(address: str) -> grpc.Channel:
    """Open a channel with the certificates of Ray's environment variables, so that the token is not sent in plain text."""
    if not uses_tls():
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(*map(_read_tls_file, _TLS_FILES)))


def _read_tls_file(variable: str) -> bytes:
    """Read the file of an environment variable of Ray."""
    path = os.environ.get(variable, "")

    def make_error(reason: str) -> ResourcesError:
        return ResourcesError(
            f"{TLS_VARIABLE}=1 needs certificates, but {variable}={path} cannot be read: {reason}. Run `source tls.env` in the "
            f"folder of this node's certificates."
        )

    if not path:
        raise make_error("the variable is not set")
    with translate_failures(make_error):
        return Path(path).read_bytes()


def _check_mode(path: Path) -> None:
    """Reject a token file with permissions for the group or for all users.

    Raises:
        ResourcesError: The group or all users have permissions for the file.
    """
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ResourcesError(
            f"{path} has mode {mode:04o}, so other users of this machine can read the cluster's token and run code on the "
            f"cluster. Run: chmod 600 {path}"
        )


def _sends_by_default() -> bool:
    """Return whether this version of Ray sends a token if RAY_AUTH_MODE is not set. Older versions do not."""
    try:
        from ray._private.authentication import authentication_token_setup as setup
    except ImportError:  # The module is private, so that a later Ray may move it.
        return True
    return hasattr(setup, "maybe_enable_token_auth_if_token_available")


def current_token() -> tuple[str, str]:
    """Return Ray's authentication token and its source.

    Returns:
        The token and the name of its variable or file. Without a token: "" and the reason.
    """
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode is None and not _sends_by_default():
        return "", f"Ray {ray.__version__} sends none as long as RAY_AUTH_MODE is not set"
    if mode is not None and mode.lower() != "token":
        return "", f"RAY_AUTH_MODE={mode} sends none"
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token, "RAY_AUTH_TOKEN"
    variable = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(variable) if variable else Path.home().joinpath(*_TOKEN_FILE)
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        token = ""
    return token, str(path) if token else f"{path} contains none"


_INLINE = 1 << 20
"""Maximum bytes of an actor's result that is sent inline. The object store would involve two more processes."""


def start_local_ray(**options: Any) -> None:
    """Start a local Ray that ends with this process.

    Args:
        options: Options of ``ray.init``.
    """
    # Every process of Ray reads this variable at its start.
    os.environ.setdefault("RAY_max_direct_call_object_size", str(_INLINE))
    ray.init("local", include_dashboard=False, **options)


def check_without_actors(settings: RaySettings) -> None:
    """Reject settings without effect if ``ray.actors`` is 0.

    Raises:
        ConfigError: The settings request a GPU, memory or a cluster.
    """
    if settings.actors != 0:
        return
    for name in ("memory", "options"):
        if name in settings.model_fields_set and getattr(settings, name) != type(settings).model_fields[name].default:
            raise ConfigError(
                f"ray.{name}: with ray.actors=0 clients train in this process, without actors. Remove ray.{name}, or set "
                f"ray.actors to at least 1."
            )
    if settings.gpus != 0:
        raise ConfigError(
            f"ray.gpus={settings.gpus}: with ray.actors=0 clients train in this process, on the CPU. Set ray.gpus=0, or "
            f"ray.actors to at least 1."
        )
    if settings.address and not ray.is_initialized():  # A trial of a search already runs on the cluster.
        raise ConfigError(
            f"ray.address={settings.address}: with ray.actors=0 clients train in this process, without Ray. Set ray.address=null, "
            f"or ray.actors to at least 1."
        )


@contextlib.contextmanager
def ray_session(config: Config, clients: int, quiet: bool = False) -> Iterator[None]:
    """Connect to Ray for a run, and check that the cluster can hold its actors. Without actors, do nothing.

    Raises:
        ResourcesError: The cluster cannot be reached, or has no room for the configured actors.
    """
    if config.ray.actors == 0:
        yield
        return
    local = not (ray.is_initialized() or config.ray.address or os.environ.get("RAY_ADDRESS"))
    with connect_ray(config.ray.address, quiet):
        check_resources(config, clients, grows=config.ray.autoscale and not local)
        yield


@contextlib.contextmanager
def connect_ray(address: str | None, quiet: bool = False, local_cpus: int | None = None) -> Iterator[None]:
    """Connect to Ray for the duration of a block.

    It uses an existing connection of this process, else the cluster at ``address`` or ``$RAY_ADDRESS``, else a local Ray.

    Args:
        address: Address of the cluster.
        quiet: Do not print logs of the cluster's processes.
        local_cpus: CPUs of a local Ray; ``None``: all CPUs of the machine.

    Raises:
        ResourcesError: The cluster cannot be reached, or refuses the token.
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
        except (ConfigError, ResourcesError):
            raise
        except Exception as error:  # Ray raises many types here.
            where = f"the Ray cluster at {address}" if address else "a local Ray"
            first = first_line(error)
            reason = error.strerror or first if isinstance(error, OSError) else f"{type(error).__name__}: {first}"
            if "Version mismatch" in first:
                raise ResourcesError(
                    f"{where} has another Python or Ray than this process: {' '.join(str(error).split())}. Start the head and this "
                    f"command with equal versions of both."
                ) from error
            advice = (
                "Check the address (ray.address, or RAY_ADDRESS: host:port of `ray start`), and that RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH contains the cluster's token"
                if address
                else "The machine may be too busy or short of memory. Try again"
            )
            raise ResourcesError(
                f"cannot reach {where}: {reason}. {advice}, or set ray.actors=0 for a single run without Ray."
            ) from error
        started = True
    try:
        with _interrupt_on_termination() if started else contextlib.nullcontext():
            yield
    finally:
        if started:
            ray.shutdown()


@contextlib.contextmanager
def _interrupt_on_termination() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C inside a block. Ray's own handler prints the stack of its C++ code.

    Raises:
        KeyboardInterrupt: SIGTERM arrived.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # Outside the main thread, the caller handles signals.
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
