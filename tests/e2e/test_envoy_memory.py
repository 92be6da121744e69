"""What Envoy does when its memory is used up: refuse, cut off what arrives, and serve again afterwards."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.envoy_listener import MAX_STREAMS_PER_CONNECTION
from tests.builders_envoy import RunningEnvoy
from tests.builders_mode_setup import CHAT
from tests.builders_parts import ok
from tests.e2e.conftest import StartPool, StubPool

MIB = 1 << 20
HEAP_BYTES = 128 * MIB
SENT_BYTES = 12 * MIB
"""Of each body that is under way; the rest comes later, or never."""
OVERSHOOT_BYTES = 160 * MIB
"""What arrives between two looks at the heap, and what the process takes besides its heap."""
LIMIT_S = 30.0


class Upload:
    """A request whose body is under way, on an HTTP/1.1 connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, size: int) -> None:
        """A piece of the body; what is sent after the answer is lost."""
        try:
            for _ in range(size // MIB):
                self._writer.write(b"x" * MIB)
                await self._writer.drain()
        except ConnectionError:
            pass

    async def answer(self) -> str:
        """Head and body of the answer."""
        async with asyncio.timeout(LIMIT_S):
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            return (head + await self._reader.readexactly(length)).decode()


@asynccontextmanager
async def uploads(
    envoy: RunningEnvoy, count: int, sent_bytes: int = SENT_BYTES
) -> AsyncIterator[list[Upload]]:
    """So many requests with bodies of which `sent_bytes` are sent."""
    host, _, port = envoy.url.removeprefix("http://").partition(":")
    async with AsyncExitStack() as connections:
        opened = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection(host, int(port))
            connections.callback(writer.close)
            head = f"POST {CHAT} HTTP/1.1\r\nhost: h\r\ncontent-length: {SENT_BYTES + MIB}\r\n\r\n"
            writer.write(head.encode())
            opened.append(Upload(reader, writer))
        await asyncio.gather(*(upload.send(sent_bytes) for upload in opened))
        yield opened


def resident_bytes(envoy: RunningEnvoy) -> int:
    """Physical memory of the process."""
    status = Path(f"/proc/{envoy.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


async def until_answered(pool: StubPool, status: int) -> httpx2.Response:
    """Ask until the answer has this status."""
    async with asyncio.timeout(LIMIT_S):
        while (answer := await pool.post()).status_code != status:
            await asyncio.sleep(0.05)
    return answer


def nothing_is_cut_off(rendered: Any) -> None:
    """So that what is under way stays, however much it is."""
    del rendered["overload_manager"]["loadshed_points"]


async def test_while_memory_is_short_new_requests_are_refused_and_others_go_on(start_pool: StartPool) -> None:
    async with start_pool(ok, change=nothing_is_cut_off, max_heap_bytes=HEAP_BYTES) as pool:
        async with uploads(pool.envoy, 12) as under_way:
            refused = await until_answered(pool, 503)
            assert refused.json()["error"] == {
                "message": "Envoy's memory is used up: envoy overloaded",
                "type": "server_error",
                "param": None,
                "code": "out_of_memory",
            }
            assert refused.headers["retry-after"] == "1"
            await under_way[0].send(MIB)
            assert (await under_way[0].answer()).startswith("HTTP/1.1 200 ")
        assert (await until_answered(pool, 200)).headers["x-wavegate-rank"] == "g0/0"
        refusals = {
            (line["flags"], line["details"])
            for line in await pool.envoy.access_log()
            if line["status"] == 503
        }
        assert refusals == {("-", "overload")}


async def test_bodies_that_arrive_cannot_take_more_memory_than_there_is(start_pool: StartPool) -> None:
    async with start_pool(ok, max_heap_bytes=HEAP_BYTES) as pool:
        highest = before = resident_bytes(pool.envoy)
        async with uploads(pool.envoy, 50, sent_bytes=0) as under_way:
            for _ in range(SENT_BYTES // MIB):
                await asyncio.gather(*(upload.send(MIB) for upload in under_way))
                await asyncio.sleep(0.3)
                highest = max(highest, resident_bytes(pool.envoy))
        assert highest - before < HEAP_BYTES + OVERSHOOT_BYTES
        await until_answered(pool, 200)


async def test_a_body_that_is_cut_off_is_answered_like_a_request_that_is_refused(
    start_pool: StartPool,
) -> None:
    async with (
        start_pool(ok, max_heap_bytes=HEAP_BYTES) as pool,
        uploads(pool.envoy, 30) as under_way,
    ):
        tries = asyncio.gather(*(upload.answer() for upload in under_way), return_exceptions=True)
        await asyncio.sleep(0.5)
        await asyncio.gather(*(upload.send(MIB) for upload in under_way))
        answers = [answer for answer in await tries if isinstance(answer, str)]
        cut = [answer for answer in answers if " 503 " in answer.partition("\r\n")[0]]
        assert cut
        assert '"code":"out_of_memory"' in cut[0]
        assert "retry-after: 1" in cut[0]
        await until_answered(pool, 200)


async def test_large_bodies_on_one_http2_connection_are_cut_off_too(start_pool: StartPool) -> None:
    async def slowly() -> AsyncIterator[bytes]:
        for _ in range(12):
            yield b"x" * MIB
            await asyncio.sleep(0.2)

    async with start_pool(ok, max_heap_bytes=HEAP_BYTES) as pool:
        highest = before = resident_bytes(pool.envoy)
        async with pool.client(http2=True) as http:
            requests = [asyncio.create_task(http.post(CHAT, content=slowly())) for _ in range(40)]
            _, pending = await asyncio.wait(requests, timeout=0.2)
            while pending:
                highest = max(highest, resident_bytes(pool.envoy))
                _, pending = await asyncio.wait(pending, timeout=0.2)
        failures = [request.exception() for request in requests if request.exception()]
        assert failures
        assert highest - before < HEAP_BYTES + OVERSHOOT_BYTES
        await until_answered(pool, 200)
        log = await pool.envoy.access_log(len(requests))
        assert (0, "OM", "overload") in {(line["status"], line["flags"], line["details"]) for line in log}


async def test_an_http2_connection_carries_a_bounded_number_of_requests_at_once(
    start_pool: StartPool,
) -> None:
    max_concurrent_streams = 3
    async with start_pool(ok) as pool:
        host, _, port = pool.envoy.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            length = int.from_bytes((await reader.readexactly(9))[:3], "big")
            settings = dict(struct.iter_unpack(">HI", await reader.readexactly(length)))
        finally:
            writer.close()
    assert settings[max_concurrent_streams] == MAX_STREAMS_PER_CONNECTION


@pytest.mark.parametrize("heap_bytes", [HEAP_BYTES, 2 << 30])
async def test_the_largest_request_passes_when_it_is_alone(start_pool: StartPool, heap_bytes: int) -> None:
    async with start_pool(ok, max_heap_bytes=heap_bytes) as pool:
        largest = b"x" * (16 * MIB)
        for _ in range(3):
            assert (await pool.post(largest)).status_code == 200
        assert pool.ranks[0].received[-1].body == largest
