"""TLS for the gRPC server: its certificates may be exchanged while it runs."""

from __future__ import annotations

import grpc

from runnerd_service.config import SecurityConfig
from runnerd_service.security.certificates import Certificates, certificate_paths, load_certificates
from runnerd_service.security.reloading import Reloading


def server_credentials(config: SecurityConfig) -> grpc.ServerCredentials | None:
    """Give the credentials of the port; None without TLS.

    gRPC asks for the certificates before each handshake, in a thread of its own: connections made after an exchange
    have the new ones, those that stand keep what they have.

    Raises:
        ConfigurationError: The files cannot be used.
    """
    paths = certificate_paths(config)
    if not paths:
        return None
    files = Reloading("the certificates of TLS", paths, lambda: load_certificates(config))
    return grpc.dynamic_ssl_server_credentials(
        _configuration(files.get()),
        lambda: _configuration(files.get()),
        require_client_authentication=config.tls_client_ca is not None,
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pairs = [(certificates.key, certificates.chain)]
    return grpc.ssl_server_certificate_configuration(pairs, root_certificates=certificates.client_roots)
