"""Certificates of a cluster: OpenSSL, through Python's ssl, accepts them for their node alone; the warning without TLS."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from commands import Raydfl

from raydfl.cluster.certificates import make_certificates, warn_without_tls
from raydfl.cluster.session import TLS_VARIABLE
from raydfl.core.errors import ConfigError


@pytest.fixture
def raydfl(capfd: pytest.CaptureFixture[str]) -> Raydfl:
    return Raydfl(capfd)


def make_context(purpose: ssl.Purpose, node: Path) -> ssl.SSLContext:
    """Require certificates of the authority on both sides, as Ray does."""
    context = ssl.create_default_context(purpose, cafile=str(node / "ca.crt"))
    context.load_cert_chain(node / "node.crt", node / "node.key")
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


def connect(server: Path, client: Path, name: str) -> bytes:
    """Send a word from a client to a server that the client expects to have a name."""
    near, far = socket.socketpair()
    received: list[bytes] = []

    def serve() -> None:
        try:
            with make_context(ssl.Purpose.CLIENT_AUTH, server).wrap_socket(far, server_side=True) as connection:
                received.append(connection.recv(10))
        except OSError:
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with make_context(ssl.Purpose.SERVER_AUTH, client).wrap_socket(near, server_hostname=name) as connection:
            connection.sendall(b"update")
    finally:
        near.close()
        thread.join()
    return b"".join(received)


def test_nodes_of_a_cluster_accept_each_other(tmp_path: Path) -> None:
    head, worker = make_certificates(tmp_path / "all", ["10.0.0.1,head.example", "10.0.0.2"])
    assert [head.name, worker.name] == ["10.0.0.1", "10.0.0.2"]
    for name in ("10.0.0.1", "head.example", "127.0.0.1", "localhost"):
        assert connect(head, worker, name) == b"update"
    with pytest.raises(ssl.SSLCertVerificationError, match="10.0.0.2"):
        connect(head, worker, "10.0.0.2")


def test_a_node_of_another_authority_is_rejected(tmp_path: Path) -> None:
    (head,) = make_certificates(tmp_path / "ours", ["10.0.0.1"])
    (stranger,) = make_certificates(tmp_path / "theirs", ["10.0.0.1"])
    with pytest.raises(ssl.SSLError):
        connect(head, stranger, "10.0.0.1")


def test_an_authority_is_used_again(tmp_path: Path) -> None:
    (head,) = make_certificates(tmp_path, ["10.0.0.1"])
    key = (tmp_path / "ca.key").read_bytes()
    (later,) = make_certificates(tmp_path, ["10.0.0.9"])
    assert (tmp_path / "ca.key").read_bytes() == key
    assert connect(later, head, "10.0.0.9") == b"update"


def test_keys_are_private(tmp_path: Path) -> None:
    (head,) = make_certificates(tmp_path / "all", ["10.0.0.1"])
    files = [path for path in (tmp_path / "all").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "all", head)} == {0o700}
    assert not (head / "ca.key").exists()


def test_the_command_prints_the_next_step(tmp_path: Path, raydfl: Raydfl) -> None:
    result = raydfl("cluster", "certificates", tmp_path / "all", "10.0.0.1", "10.0.0.2", "--days", "30")
    assert result.code == 0
    assert "source 10.0.0.2/tls.env" in result.out
    assert f"export {TLS_VARIABLE}=1" in (tmp_path / "all" / "10.0.0.2" / "tls.env").read_text()


@pytest.mark.parametrize("node", ["", "../up", "a/b", ",", "ca.example,käse"])
def test_wrong_names_are_rejected(tmp_path: Path, node: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of a node"):
        make_certificates(tmp_path, [node])


def test_a_damaged_authority_is_rejected(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["10.0.0.1"])
    for name in ("ca.crt", "ca.key"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(b"damaged")
        with pytest.raises(ConfigError, match="certificate authority that cannot be used"):
            make_certificates(tmp_path, ["10.0.0.2"])
        (tmp_path / name).unlink()
        with pytest.raises(ConfigError, match="cannot be used"):
            make_certificates(tmp_path, ["10.0.0.2"])
        (tmp_path / name).write_bytes(content)


def test_sites_without_tls_give_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(data=SimpleNamespace(sites=["north", "south"]))

    def list_nodes(*places: str) -> Callable[[], list[dict[str, Any]]]:
        return lambda: [
            {"NodeID": str(number), "Alive": place != "gone", "Resources": {"CPU": 1.0, f"site:{place}": 1.0}}
            for number, place in enumerate(places)
        ]

    monkeypatch.delenv(TLS_VARIABLE, raising=False)
    monkeypatch.setattr(ray, "nodes", list_nodes("north", "south", "west"))
    assert "without TLS between 2 nodes" in warn_without_tls(config)
    for places in (["north"], ["north", "west"], ["north", "gone"]):
        monkeypatch.setattr(ray, "nodes", list_nodes(*places))
        assert warn_without_tls(config) == ""
    monkeypatch.setattr(ray, "nodes", list_nodes("north", "south"))
    monkeypatch.setenv(TLS_VARIABLE, "1")
    assert warn_without_tls(config) == ""
