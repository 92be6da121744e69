"""gRPC health of the ext_proc service, under the names that the endpoint-picker protocol gives it.

`liveness` serves as long as the process answers; `readiness`, the service's own name and the empty name serve
while streams should be sent here.
"""

from __future__ import annotations

from typing import TypeAlias

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import DESCRIPTOR
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

SERVICE_NAME: str = DESCRIPTOR.services_by_name["ExternalProcessor"].full_name
LIVENESS = "liveness"
READINESS = "readiness"
_READY_NAMES = (READINESS, SERVICE_NAME, "")

_Context: TypeAlias = "grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, HealthCheckResponse]"


class Health:
    """The servicer `grpc.health.v1.Health`."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on `server`."""
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    async def start(self) -> None:
        """Alive, and not ready."""
        await self._servicer.set(LIVENESS, HealthCheckResponse.SERVING)
        await self.set_ready(False)

    async def set_ready(self, ready: bool) -> None:
        """Announce whether streams should be sent here."""
        for name in _READY_NAMES:
            await self._servicer.set(
                name, HealthCheckResponse.SERVING if ready else HealthCheckResponse.NOT_SERVING
            )

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """One status; that of an unknown name is SERVICE_UNKNOWN, where the library would fail."""
        if request.service != LIVENESS and request.service not in _READY_NAMES:
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        return await self._servicer.Check(request, context)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:
        """The status, and each change of it."""
        await self._servicer.Watch(request, context)

    def List(self, request: health_pb2.HealthListRequest, context: _Context) -> health_pb2.HealthListResponse:
        """Not implemented, as the library answers by itself."""
        return self._servicer.List(request, context)
