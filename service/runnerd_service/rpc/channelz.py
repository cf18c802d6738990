"""gRPC's own view of its channels and sockets, as a service: for tools that look into connections. An extra."""

from __future__ import annotations

import grpc

from runnerd_service.errors import ConfigurationError

NAME = "grpc.channelz.v1.Channelz"


def add_channelz(server: grpc.aio.Server) -> None:
    """Serve ``grpc.channelz.v1.Channelz``; the server needs the option ``grpc.enable_channelz``.

    Raises:
        ConfigurationError: The extra is not installed.
    """
    try:
        from grpc_channelz.v1 import channelz
    except ImportError as error:
        raise ConfigurationError(f"--channelz needs an extra: {error}; pip install 'runnerd[channelz]'") from error
    channelz.add_channelz_servicer(server)
