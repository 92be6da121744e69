"""Stand-ins for what Envoy talks to: a rank that answers as told, a picker that picks as told."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from aiohttp import web
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyResponse,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

ANY_SIZE = 1 << 30


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it arrived at a rank."""

    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def ok(_request: web.Request) -> web.StreamResponse:
    """The plainest answer."""
    return web.json_response({"ok": True})


class StubRank:
    """An HTTP server in a rank's place; it keeps what it received (health checks apart)."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.answer: Answer = ok
        self.is_healthy = True
        self.endpoint = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Record a request and answer it as told."""
        if request.path == "/health":
            return web.Response(status=200 if self.is_healthy else 503)
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.received.append(Received(request.method, request.path_qs, headers, await request.read()))
        return await self.answer(request)


@asynccontextmanager
async def stub_rank(answer: Answer = ok) -> AsyncIterator[StubRank]:
    """A stub rank on a free port."""
    rank = StubRank()
    rank.answer = answer
    app = web.Application(client_max_size=ANY_SIZE)
    app.router.add_route("*", "/{path:.*}", rank.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
    await site.start()
    rank.endpoint = f"127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield rank
    finally:
        await runner.cleanup()


def always(status: int, **headers: str) -> Answer:
    """An answer with this status and no content."""

    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": status}, status=status, headers=headers)

    return answer


Reply = Callable[[ProcessingRequest], ProcessingResponse]


def picks(*endpoints: str) -> Reply:
    """The reply that sends a request to these endpoints, in order; none: no opinion."""

    def reply(_message: ProcessingRequest) -> ProcessingResponse:
        response = ProcessingResponse(request_body=BodyResponse())
        if endpoints:
            response.dynamic_metadata.update(
                {"envoy.lb": {"x-gateway-destination-endpoint": ",".join(endpoints)}}
            )
        return response

    return reply


def refuses(status: int, body: bytes) -> Reply:
    """The reply that ends a request with this answer."""

    def reply(_message: ProcessingRequest) -> ProcessingResponse:
        response = ProcessingResponse(immediate_response=ImmediateResponse(body=body))
        response.immediate_response.status.code = status
        return response

    return reply


class StubPicker:
    """An ext_proc service that replies as told."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.delay_s = 0.0
        self.messages: list[ProcessingRequest] = []
        self.open_streams = 0
        self.target = ""

    async def process(self, _requests: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """One stream: every message gets the reply."""
        self.open_streams += 1
        try:
            while (data := await context.read()) is not grpc.aio.EOF:
                message = ProcessingRequest.FromString(data)
                self.messages.append(message)
                await asyncio.sleep(self.delay_s)
                await context.write(self.reply(message).SerializeToString())
        finally:
            self.open_streams -= 1

    async def becomes_idle(self, *, within_s: float = 5.0) -> None:
        """Return as soon as no stream is open; fail if that takes too long."""
        async with asyncio.timeout(within_s):
            while self.open_streams:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def stub_picker(*endpoints: str) -> AsyncIterator[StubPicker]:
    """A picker on a free port that picks these endpoints, in order."""
    picker = StubPicker(picks(*endpoints))
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", ANY_SIZE)])
    method = grpc.stream_stream_rpc_method_handler(picker.process)
    service = "envoy.service.ext_proc.v3.ExternalProcessor"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Process": method}),))
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    picker.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield picker
    finally:
        await server.stop(grace=None)


@contextmanager
def refusing_endpoint() -> Iterator[str]:
    """An address that refuses connections for as long as the block lasts: bound, but not listening."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{reserved.getsockname()[1]}"
