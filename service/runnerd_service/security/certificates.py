"""The server's certificate, its key, and whose clients' certificates it takes: read and checked together.

OpenSSL checks them before gRPC sees them: gRPC tells of a key that does not fit only by refusing every client.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from runnerd_service.config import SecurityConfig
from runnerd_service.errors import ConfigurationError
from runnerd_service.security.reloading import read_bytes
from runnerd_service.security.validity import Validity, validity_of

_PASSWORD_MARKS = (b"BEGIN ENCRYPTED PRIVATE KEY", b"Proc-Type: 4,ENCRYPTED")


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM, as gRPC takes it."""

    chain: bytes
    """The server's certificate, then those between it and its root."""
    key: bytes
    client_roots: bytes | None
    """Who signs clients' certificates; None: clients need none."""
    validity: Validity | None
    """Of the server's certificate; None where it cannot be told."""


def certificate_paths(config: SecurityConfig) -> tuple[Path, ...]:
    """Give the files that TLS reads; none without TLS.

    Raises:
        ConfigurationError: Some of the settings need another one.
    """
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigurationError("TLS needs both --tls-cert and --tls-key; give the other one, too")
    if config.tls_client_ca is not None and config.tls_cert is None:
        raise ConfigurationError("--tls-client-ca needs --tls-cert and --tls-key")
    if config.tls_admins and config.tls_client_ca is None:
        raise ConfigurationError("--tls-admins names clients by their certificates; give --tls-client-ca, too")
    if config.tls_admins and config.auth_tokens is not None:
        raise ConfigurationError("with --auth-tokens a token says who may administrate; leave out --tls-admins")
    return tuple(Path(one) for one in (config.tls_cert, config.tls_key, config.tls_client_ca) if one is not None)


def load_certificates(config: SecurityConfig) -> Certificates:
    """Read the files of TLS.

    Raises:
        ConfigurationError: One cannot be read or is no PEM, or the key does not belong to the certificate; the message
            names the file, its flag and what to do.
    """
    assert config.tls_cert is not None  # certificate_paths has seen to it
    assert config.tls_key is not None
    cert_path, key_path = Path(config.tls_cert), Path(config.tls_key)
    chain = read_bytes(cert_path, "the certificate", "--tls-cert")
    key = read_bytes(key_path, "the key of the certificate", "--tls-key")
    _check_pem(chain, cert_path, "--tls-cert", "the server's certificate, then those between it and its root")
    _check_pair(cert_path, key_path, key)
    if config.tls_client_ca is None:
        return Certificates(chain, key, None, validity_of(chain))
    ca_path = Path(config.tls_client_ca)
    roots = read_bytes(ca_path, "the certificates of the authority of clients", "--tls-client-ca")
    _check_pem(roots, ca_path, "--tls-client-ca", "the certificates of who signs those of clients")
    return Certificates(chain, key, roots, validity_of(chain))


def _check_pem(content: bytes, path: Path, flag: str, expected: str) -> None:
    try:
        # What is not ASCII can only stand between the certificates, where anything may.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=content.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is no PEM certificate: {_reason(error)}; give {flag} a PEM file of {expected}"
        ) from error


def _check_pair(cert_path: Path, key_path: Path, key: bytes) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # By path: OpenSSL takes it no other way. Without a password of ours it would ask at the terminal.
        context.load_cert_chain(cert_path, key_path, password=lambda: "")
    except (ssl.SSLError, OSError) as error:
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            problem = f"the key {key_path} does not belong to the certificate {cert_path}"
            remedy = "give --tls-key the key of the first certificate in the file of --tls-cert"
        elif any(mark in key for mark in _PASSWORD_MARKS):
            problem = f"the key {key_path} has a password"
            remedy = "give --tls-key one without (openssl pkey -in KEY -out NEW takes it off)"
        else:
            problem = f"the certificate {cert_path} and the key {key_path} cannot be used: {_reason(error)}"
            remedy = "give --tls-key a PEM file of the key that belongs to the first certificate in that of --tls-cert"
        raise ConfigurationError(f"{problem}; {remedy}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason
    return str(error)
