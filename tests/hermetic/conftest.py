"""Fixtures of the hermetic tests: a real ext_proc server and a client that speaks to it as Envoy does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    ProcessingRequest,
    ProcessingResponse,
)
from google.protobuf.struct_pb2 import Struct

from ext_proc.decision import Decider, Placed, Refused
from ext_proc.health import SERVICE_NAME
from ext_proc.protocol import ProtocolSettings
from ext_proc.service import ExtProcServer, ServerSettings, TlsFiles
from ext_proc.usage import Usage
from ext_proc.vocabulary import Pick, Rank
from tests.builders_protocol import canonical


def whole_body(
    body: bytes, *, path: str = "/v1/chat/completions", request_id: str = "r"
) -> ProcessingRequest:
    """The one message of one-message mode: the whole body, and the attributes that go with it."""
    attributes = Struct()
    attributes.update({"request.path": path, "request.id": request_id})
    message = ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=True))
    message.attributes["envoy.filters.http.ext_proc"].CopyFrom(attributes)
    return message


def chat(content: str = "hello", **fields: Any) -> bytes:
    """The body of a chat request."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **fields}).encode()


class ExtProcClient:
    """Speaks ext_proc to a server, a stream per request."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        options = [("grpc.max_send_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = (
            grpc.aio.secure_channel(target, credentials, options=options)
            if credentials is not None
            else grpc.aio.insecure_channel(target, options=options)
        )
        self._process = self.channel.stream_stream(
            f"/{SERVICE_NAME}/Process",
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )

    def open(self, metadata: Sequence[tuple[str, str]] = ()) -> Any:
        """A new stream, as Envoy opens one per request."""
        return self._process(metadata=grpc.aio.Metadata(*metadata))

    async def exchange(self, stream: Any, message: ProcessingRequest) -> ProcessingResponse:
        """Send one message and await its reply."""
        await stream.write(message)
        reply: ProcessingResponse = await stream.read()
        return reply


class Observed:
    """What a server told its observer."""

    def __init__(self) -> None:
        self.picks: list[Pick] = []
        self.durations_s: list[float] = []
        """Of reading and deciding, for each pick."""
        self.refused: list[Refused] = []
        self.responses: list[tuple[Rank, int | None, Usage | None]] = []

    def on_placed(self, placed: Placed, duration_s: float) -> None:
        self.picks.append(placed.pick)
        self.durations_s.append(duration_s)

    def on_refused(self, refused: Refused) -> None:
        self.refused.append(refused)

    def on_response(self, rank: Rank, status: int | None, usage: Usage | None) -> None:
        self.responses.append((rank, status, usage))


class Served:
    """A running server, a client of it, and what it has observed."""

    def __init__(self, server: ExtProcServer, port: int, client: ExtProcClient, observed: Observed) -> None:
        self.server = server
        self.port = port
        self.client = client
        self.observed = observed

    async def sent(self, *conversation: Sequence[ProcessingRequest]) -> Any:
        """A stream on which these messages were sent."""
        stream = self.client.open()
        for messages in conversation:
            for message in messages:
                await stream.write(message)
        return stream

    async def replies(self, *conversation: Sequence[ProcessingRequest]) -> list[ProcessingResponse]:
        """All replies to these messages on a stream that the gateway then ends, in canonical form."""
        stream = await self.sent(*conversation)
        await stream.done_writing()
        found = []
        while (reply := await stream.read()) is not grpc.aio.EOF:
            found.append(reply)
        return canonical(found)


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def serve_ext_proc(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """`async with serve_ext_proc(decider) as served:` runs a real server on a free port or a unix socket.

    Further keywords are fields of `ProtocolSettings`.
    """

    @asynccontextmanager
    async def serve(
        decider: Decider,
        *,
        listen: str = "127.0.0.1:0",
        max_streams: int = 1024,
        tls: TlsFiles | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        keepalive_s: float = 60.0,
        **protocol: Any,
    ) -> AsyncIterator[Served]:
        observed = Observed()
        server = ExtProcServer(
            decider,
            ServerSettings(listen, max_streams=max_streams, tls=tls, keepalive_s=keepalive_s),
            ProtocolSettings(**protocol),
            observed,
        )
        port = await server.start()
        target = listen if listen.startswith("unix:") else f"127.0.0.1:{port}"
        client = ExtProcClient(target, credentials)
        try:
            yield Served(server, port, client, observed)
        finally:
            await client.channel.close()
            await server.stop()

    return serve


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    """`await eventually(condition)` returns as soon as the condition holds; fails if it does not in time."""

    async def wait(condition: Callable[[], bool], *, within_s: float = 5.0) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.005)

    return wait
