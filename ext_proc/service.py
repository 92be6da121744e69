"""The gRPC service `envoy.service.ext_proc.v3.ExternalProcessor` and standard gRPC health, on grpc.aio.

Owns sockets and streams; decides nothing. Messages are parsed here from raw bytes, which was the cheapest way
of serving them (less than half the CPU of the synchronous server).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import DESCRIPTOR, ProcessingRequest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ext_proc.balancer import Balancer
from ext_proc.exchange import Exchange
from ext_proc.ledger import Outcome
from ext_proc.vocabulary import Pick

log = logging.getLogger(__name__)

SERVICE_NAME: str = DESCRIPTOR.services_by_name["ExternalProcessor"].full_name
MESSAGE_OVERHEAD_BYTES = 1 << 20
"""Room for attributes and metadata beside the largest body in one gRPC message."""

LIVENESS = "liveness"
READINESS = "readiness"
_READY_NAMES = (READINESS, SERVICE_NAME, "")

PickObserver = Callable[[Pick, float], None]
"""Told each pick and the seconds it took, for telemetry."""


class ExtProcServer:
    """Serves ext_proc streams until stopped."""

    def __init__(
        self, balancer: Balancer, *, listen: str, max_body_bytes: int, on_pick: PickObserver
    ) -> None:
        """Prepare to serve on `listen`: `ip:port` (port 0: any free one) or `unix:/path`."""
        self._balancer = balancer
        self._listen = listen
        self._on_pick = on_pick
        self._open_streams = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", max_body_bytes + MESSAGE_OVERHEAD_BYTES),
                ("grpc.max_concurrent_streams", 2**31 - 1),
                # Two gateways must not share a port by accident and split the ledger.
                ("grpc.so_reuseport", 0),
            ]
        )
        handler = grpc.stream_stream_rpc_method_handler(self._process)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE_NAME, {"Process": handler}),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self) -> int:
        """Listen. Returns the port (1 for a unix socket); raises `OSError` when the address is taken."""
        try:
            port: int = self._server.add_insecure_port(self._listen)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._listen}: {error}") from error
        if self._listen.startswith("unix:"):
            _only_for_owner(Path(self._listen.removeprefix("unix:")))
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)
        await self._server.start()
        return port

    async def set_ready(self, ready: bool) -> None:
        """Announce through gRPC health whether Envoy should send streams here."""
        status = (
            health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in _READY_NAMES:
            await self._health.set(name, status)

    async def drain(self, timeout_s: float) -> int:
        """Wait until the open streams have ended. Returns how many were still open at the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        return self._open_streams

    async def stop(self) -> None:
        """Cut what is still open and stop listening."""
        await self._server.stop(grace=None)

    async def _process(self, _requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        exchange = Exchange(self._balancer)
        outcome = Outcome.FAILED
        self._open_streams += 1
        self._idle.clear()
        try:
            while (data := await context.read()) is not grpc.aio.EOF:
                started_s = time.perf_counter()
                is_undecided = exchange.pick is None
                reply = exchange.on_message(ProcessingRequest.FromString(data), time.monotonic())
                if is_undecided and exchange.pick is not None:
                    self._on_pick(exchange.pick, time.perf_counter() - started_s)
                await context.write(reply)
            outcome = Outcome.ENDED
        except asyncio.CancelledError:
            outcome = Outcome.CANCELLED
            # Swallowing the cancellation leaks memory in the native library (grpc/grpc#43360).
            raise
        finally:
            exchange.end(outcome, time.monotonic())
            self._open_streams -= 1
            if self._open_streams == 0:
                self._idle.set()


def _only_for_owner(socket: Path) -> None:
    socket.chmod(0o600)
