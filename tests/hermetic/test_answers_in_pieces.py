"""What arrives in several pieces is read whole by all who read, and no further than is meant to be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from ext_proc.vocabulary import Rank, RankReport
from gateway import gateway_groups, status_client
from gateway.gateway_groups import GatewayGroups
from gateway.status_client import StatusError, read_status, status_session
from gateway.warm_up import complaint
from tests.builders_gateway import running_gateway
from tests.builders_ranks import StandInRank
from tests.hermetic.conftest import chat
from vllm_ranks.reports.asking import TooLong, read_at_most
from vllm_ranks.reports.scraper import Scraper

PAUSE_S = 0.01


@asynccontextmanager
async def answering(body: bytes, *, piece_bytes: int) -> AsyncIterator[str]:
    """A server that answers everything with `body`, in pieces sent one after the other; its `host:port`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body))
                for start in range(0, len(body), piece_bytes):
                    writer.write(body[start : start + piece_bytes])
                    await writer.drain()
                    await asyncio.sleep(PAUSE_S)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def read(address: str, limit_bytes: int) -> bytes:
    """What the server there has to say."""
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}/") as answer:
        return await read_at_most(answer.content, limit_bytes)


async def test_all_of_an_answer_is_read_up_to_the_limit_itself() -> None:
    async with answering(b"0123456789", piece_bytes=3) as address:
        assert await read(address, 10) == b"0123456789"
        with pytest.raises(TooLong, match="longer than 9 bytes"):
            await read(address, 9)


async def test_an_answer_without_end_is_read_no_further_than_the_limit() -> None:
    async with answering(b"x" * (64 << 20), piece_bytes=1 << 16) as address, asyncio.timeout(10):
        with pytest.raises(TooLong):
            await read(address, 1 << 18)


def groups(count: int) -> bytes:
    """The gateway's `/groups`."""
    return json.dumps(
        [{"name": f"g{number}", "in_rotation": True, "reservations": 3} for number in range(count)]
    ).encode()


async def test_a_supervisor_understands_a_gateway_whose_groups_take_several_pieces() -> None:
    async with answering(groups(30), piece_bytes=1448) as address:
        gateway = GatewayGroups(f"http://{address}", "supervisor")
        async with gateway.talking(), asyncio.timeout(10):
            assert await gateway.wait_until_in("g29", timeout_s=5)


async def test_a_supervisor_takes_too_long_an_answer_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_groups, "MAX_ANSWER_BYTES", 100)
    async with answering(groups(30), piece_bytes=1448) as address:
        gateway = GatewayGroups(f"http://{address}", "supervisor")
        async with gateway.talking():
            assert not await gateway.wait_until_in("g29", timeout_s=5)


async def test_a_status_in_several_pieces_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    async with answering(b'{"version": "1"}', piece_bytes=5) as address, status_session() as session:
        assert await read_status(session, f"http://{address}") == b'{"version": "1"}'
        monkeypatch.setattr(status_client, "MAX_ANSWER_BYTES", 10)
        with pytest.raises(StatusError, match="/status is longer than 10 bytes"):
            await read_status(session, f"http://{address}")


async def test_a_rank_that_aborts_is_understood_however_its_answer_arrives() -> None:
    aborted = b'{"choices": [{"finish_reason": "abort"}]}'
    async with answering(aborted, piece_bytes=20) as address, aiohttp.ClientSession() as session:
        found = await complaint(session, address, "m", 5)
    assert found is not None
    assert found.reason == "a request was aborted: it is shutting down"


async def test_a_rank_that_answers_without_end_does_not_work() -> None:
    async with (
        answering(b"x" * (2 << 20), piece_bytes=1 << 16) as address,
        aiohttp.ClientSession() as session,
    ):
        found = await complaint(session, address, "m", 5)
    assert found is not None
    assert "longer than" in found.reason


class Heard:
    """The first report of a rank."""

    def __init__(self) -> None:
        self.report = asyncio.get_running_loop().create_future()

    def on_report(self, _rank: Rank, report: RankReport) -> None:
        if not self.report.done():
            self.report.set_result(report)

    def on_failed_scrape(self, _rank: Rank, cause: str, *, refused: bool) -> None:
        if not self.report.done():
            self.report.set_exception(AssertionError(f"{cause}, refused: {refused}"))


async def test_metrics_in_several_pieces_are_read_whole() -> None:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    page = "".join(f'vllm:{name}{{engine="0"}} 1\n' for name in names).encode()
    async with answering(page, piece_bytes=50) as address:
        heard = Heard()
        scraper = Scraper([Rank("g", 0, address)], heard, interval_s=1, jitter_ratio=0, timeout_s=5)
        task = asyncio.create_task(scraper.run())
        try:
            report = await asyncio.wait_for(heard.report, 10)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert (report.running, report.waiting) == (1, 1)


async def test_a_request_to_be_explained_may_arrive_in_several_pieces(
    unused_tcp_port_factory: Callable[[], int],
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        body = chat("hello " * 1000)
        for start in range(0, len(body), 1448):
            yield body[start : start + 1448]
            await asyncio.sleep(PAUSE_S)

    async with StandInRank() as rank, aiohttp.ClientSession() as session:
        config: list[dict[str, Any]] = [
            {"name": "g0", "engine": "adopted", "model": "m", "endpoints": [rank.endpoint]}
        ]
        async with (
            running_gateway(config, unused_tcp_port_factory) as gateway,
            session.post(f"{gateway.admin_url}/explain", data=pieces()) as answer,
        ):
            explained = await answer.json()
    assert explained["request"]["prompt_tokens"] == 1500
