"""The standard health service: every name SERVING or NOT_SERVING together, as the server says.

The servicer of grpcio-health-checking forgets its other watchers of a name when one of them leaves, and its Watch
streams hold up a stop; this one does neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

NAME = "grpc.health.v1.Health"


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # the package has no types
    """Answers Check and Watch. Begins as NOT_SERVING.

    Args:
        services: Full names of the services; "" (the whole server) is known beside them.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset({"", *services})
        self._serving = False
        self._closed = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Change the status of every name and tell the watchers."""
        if serving is not self._serving:
            self._serving = serving
            self._wake()

    def close(self) -> None:
        """End all Watch streams, now and later."""
        self._closed = True
        self._wake()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """Give the status of a service; NOT_FOUND for an unknown one."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service is called {request.service[:128]!r}")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """Give the status of a service now and at each change."""
        last = None
        while not self._closed:
            changed = self._changed  # taken before the status is read, so that no change is missed
            status = self._status(request.service)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            await changed.wait()

    def _status(self, service: str) -> int:
        if service not in self._services:
            return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        return int(
            health_pb2.HealthCheckResponse.SERVING if self._serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
