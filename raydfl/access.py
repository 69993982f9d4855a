"""Whether a Ray cluster answers and takes our token: asked before Ray itself tries for a long time and then does not say why."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import grpc

from raydfl.errors import ResourcesError

_SECONDS = 10
_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""A question without arguments that every cluster answers to those who may ask."""
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def check_access(address: str) -> None:
    """Asks the cluster at ``host:port`` (or ``ray://host:port``); of any other form of address nothing is known here.

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


def current_token() -> tuple[str, str]:
    """What Ray would send, empty if nothing, and where it stands or why there is none. The order is Ray's."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return "", f"RAY_AUTH_MODE={os.environ['RAY_AUTH_MODE']} sends none"
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token, "RAY_AUTH_TOKEN"
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        token = ""
    return token, str(path) if token else f"there is none in {path}"
