"""TLS for the gRPC server: its certificates may be exchanged while it runs."""

from __future__ import annotations

import grpc

from runnerd_service.security.certificates import Certificates
from runnerd_service.security.reloading import Reloading


def server_credentials(files: Reloading[Certificates]) -> grpc.ServerCredentials:
    """Give the credentials of the port.

    gRPC asks for the certificates before each handshake, in a thread of its own: connections made after an exchange
    have the new ones, those that stand keep what they have.

    Args:
        files: What the port shows, and asks of clients.
    """
    first = files.get()
    return grpc.dynamic_ssl_server_credentials(
        _configuration(first),
        lambda: _configuration(files.get()),
        require_client_authentication=first.client_roots is not None,
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pairs = [(certificates.key, certificates.chain)]
    return grpc.ssl_server_certificate_configuration(pairs, root_certificates=certificates.client_roots)
