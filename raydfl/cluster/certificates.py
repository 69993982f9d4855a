"""Certificates for a Ray cluster with TLS between its nodes (``RAY_USE_TLS``), and the warning about a cluster without TLS."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import ray
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from raydfl.cluster.session import TLS_VARIABLE, uses_tls
from raydfl.cluster.sites import site_resource
from raydfl.core.errors import ConfigError, translate_failures
from raydfl.core.files import make_private_folder, plain_name, write_durably
from raydfl.engine import Config

_ADVICE = "Choose another folder"
_AUTHORITY = "ca"
_LOCAL = ("localhost", "127.0.0.1")
"""Further names in every certificate, because processes of a node also connect to it locally."""

_SIGNS = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    **dict.fromkeys(
        ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
    ),
    encipher_only=False,
    decipher_only=False,
)
"""Use of the authority's key: it only signs."""


def make_certificates(folder: Path, nodes: Sequence[str], days: int = 365) -> list[Path]:
    """Create a certificate for each node of a cluster, and the certificate authority if it is missing.

    Each node gets a folder with ``ca.crt``, ``node.crt`` and ``node.key`` and ``tls.env``, the variables of Ray. The key of the
    authority stays in ``folder``. Keys are P-256, and all files are private to their owner.

    Args:
        folder: Folder of the certificate authority, kept by the cluster's administrator.
        nodes: Each node's addresses and host names, separated by commas. The first is the name of its folder.
        days: Validity in days.

    Returns:
        The folder of each node.

    Raises:
        ConfigError: A node's name is invalid, or the folder has a damaged authority.
    """
    make_private_folder(folder)
    key, authority = _open_authority(folder, days)
    made = []
    for node in nodes:
        names = [name.strip() for name in node.split(",") if name.strip()]
        try:
            target = folder / plain_name(names[0] if names else "")
            alternatives = [_make_name(name) for name in dict.fromkeys((*names, *_LOCAL))]
        except ValueError as error:
            raise ConfigError(
                f"{node!r} is not the name of a node: {error}. Give its address, or ADDRESS,HOST without spaces."
            ) from error
        node_key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        builder = _start_certificate(subject, authority.subject, node_key.public_key(), days)
        certificate = (
            builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
            # Every node is a server and a client of others.
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .sign(key, hashes.SHA256())
        )
        make_private_folder(target)
        write_durably(target / "ca.crt", _encode(authority), _ADVICE)
        write_durably(target / "node.crt", _encode(certificate), _ADVICE)
        write_durably(target / "node.key", _encode_key(node_key), _ADVICE)
        write_durably(target / "tls.env", _describe_variables().encode(), _ADVICE)
        made.append(target)
    return made


def _describe_variables() -> str:
    """Return a shell script for Ray's variables. The files are in its own folder."""
    here = '"$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)'
    return (
        f"export {TLS_VARIABLE}=1\n"
        f'export RAY_TLS_SERVER_CERT={here}/node.crt"\n'
        f'export RAY_TLS_SERVER_KEY={here}/node.key"\n'
        f'export RAY_TLS_CA_CERT={here}/ca.crt"\n'
    )


def _make_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _open_authority(folder: Path, days: int) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Load the certificate authority of a folder, or create it."""
    key_file, certificate_file = folder / f"{_AUTHORITY}.key", folder / f"{_AUTHORITY}.crt"
    if key_file.exists() or certificate_file.exists():

        def make_error(reason: str) -> ConfigError:
            return ConfigError(
                f"{folder} has a certificate authority that cannot be used: {reason}. Restore {key_file.name} and "
                f"{certificate_file.name} from a copy, or choose another folder."
            )

        with translate_failures(make_error):
            key = serialization.load_pem_private_key(key_file.read_bytes(), None)
            if not isinstance(key, ec.EllipticCurvePrivateKey):
                raise make_error("its key has another type")
            return key, x509.load_pem_x509_certificate(certificate_file.read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "raydfl cluster authority")])
    certificate = (
        _start_certificate(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_SIGNS, critical=True)
        .sign(key, hashes.SHA256())
    )
    write_durably(key_file, _encode_key(key), _ADVICE)
    write_durably(certificate_file, _encode(certificate), _ADVICE)
    return key, certificate


def _start_certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    """Build a certificate with validity since an hour ago, because the clocks of nodes differ."""
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _encode(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _encode_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def warn_without_tls(config: Config) -> str:
    """Return a warning if the connected cluster has nodes of several sites without TLS, or "".

    Args:
        config: Configuration of the run.
    """
    if uses_tls():
        return ""
    resources = {site_resource(site) for site in config.data.sites}
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    at_sites = {node["NodeID"] for node in nodes if node["Alive"] and resources & node["Resources"].keys()}
    if len(at_sites) < 2:
        return ""
    return (
        f"warning: Ray runs without TLS between {len(at_sites)} nodes of sites, so anyone on the network between them can read and "
        f"change updates, and read the cluster's token. Use a private network or a tunnel, or certificates (`raydfl cluster "
        f"certificates` and {TLS_VARIABLE}=1 on every node; docs/security.md)."
    )
