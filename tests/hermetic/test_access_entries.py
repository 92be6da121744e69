"""What Envoy's access logs tell the gateway, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from envoy.data.accesslog.v3.accesslog_pb2 import AccessLogType
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage

from gateway import access_entries
from gateway.access_entries import SERVICE_NAME, access_entries_handler

LIMIT_S = 10.0


class Heard:
    """What a reader was told."""

    def __init__(self) -> None:
        self.failed: list[tuple[str, int]] = []
        self.retries: list[tuple[str, str]] = []

    def on_failed_answer(self, endpoint: str, status: int) -> None:
        self.failed.append((endpoint, status))

    def on_retry(self, request_id: str, endpoint: str) -> None:
        self.retries.append((request_id, endpoint))


class Scene:
    """The service, and a reader of what comes."""

    def __init__(self, channel: grpc.aio.Channel, heard: Heard) -> None:
        self.heard = heard
        self._channel = channel

    def stream(self) -> grpc.aio.StreamUnaryCall[bytes, bytes]:
        """A stream of messages, as Envoy opens it."""
        method: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = self._channel.stream_unary(
            f"/{SERVICE_NAME}/StreamAccessLogs"
        )
        return method()

    async def until_retries(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(self.heard.retries) < count:
                await asyncio.sleep(0.005)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """The service on a free port."""
    server, heard = grpc.aio.server(), Heard()
    server.add_generic_rpc_handlers((access_entries_handler(heard),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Scene(channel, heard)
    await server.stop(grace=None)


def entry(
    *, request_id: str = "", status: int = 0, retried: bool = False, host: str = "10.0.0.1", port: int = 8000
) -> bytes:
    """A message with one entry; no `host`: the request came to no rank."""
    message = StreamAccessLogsMessage()
    log = message.http_logs.log_entry.add()
    if host:
        log.common_properties.upstream_remote_address.socket_address.address = host
        log.common_properties.upstream_remote_address.socket_address.port_value = port
    log.common_properties.access_log_type = (
        AccessLogType.UpstreamPoolReady if retried else AccessLogType.DownstreamEnd
    )
    log.request.request_id = request_id
    log.response.response_code.value = status
    return message.SerializeToString()


async def test_failed_answers_and_retries_are_told_apart(scene: Scene) -> None:
    stream = scene.stream()
    await stream.write(entry(status=500, request_id="r1"))
    await stream.write(entry(status=504, host=""))
    await stream.write(entry(retried=True, request_id="r2", host="2001:db8::1"))
    await scene.until_retries(1)
    assert scene.heard.retries == [("r2", "[2001:db8::1]:8000")]
    assert scene.heard.failed == [("10.0.0.1:8000", 500)]


async def test_entries_that_come_in_a_row_are_all_heard(scene: Scene) -> None:
    """A request that two ranks have refused is sent to the third a moment after the second."""
    stream = scene.stream()
    for index in range(300):
        await stream.write(entry(retried=True, request_id=str(index)))
        await asyncio.sleep(0.001 * (index % 3))
    await scene.until_retries(300)


async def test_a_stream_that_is_quiet_is_ended_so_that_the_next_goes_where_requests_go(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_entries, "QUIET_STREAM_S", 0.1)
    stream = scene.stream()
    await stream.write(entry(retried=True))
    async with asyncio.timeout(LIMIT_S):
        assert await stream == b""


async def test_a_stream_that_is_never_quiet_is_ended_too(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_entries, "QUIET_STREAM_S", 5.0)
    monkeypatch.setattr(access_entries, "LONGEST_STREAM_S", 0.5)
    stream = scene.stream()
    async with asyncio.timeout(3.0):
        while not stream.done():
            try:
                await stream.write(entry(retried=True))
            except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
                break  # it was ended meanwhile
            await asyncio.sleep(0.01)
    assert stream.done()
