"""What Envoy does about ranks that fail, and what its access log says of requests that did not go well."""

from __future__ import annotations

import asyncio

import httpx2
import pytest
from aiohttp import web

from tests.builders_mode_setup import CHAT
from tests.builders_parts import Answer, always, ok, picks
from tests.e2e.conftest import StartPool, StubPool

SELDOM = {"interval_s": 60}
"""Health checks that do not come in time to change anything."""


async def die(request: web.Request) -> web.StreamResponse:
    """No answer: the connection is lost."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def break_off(request: web.Request) -> web.StreamResponse:
    """An answer that begins and never ends properly."""
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"data: 1\n\n")
    await asyncio.sleep(0.05)
    return await die(request)


async def take_long(_request: web.Request) -> web.StreamResponse:
    """An answer after a while."""
    await asyncio.sleep(3)
    return web.Response()


async def served_by(pool: StubPool, requests: int) -> list[int]:
    """How many of so many requests, which Envoy balances by itself, each rank gets."""
    before = [len(rank.received) for rank in pool.ranks]
    for _ in range(requests):
        await pool.post()
    return [len(rank.received) - count for rank, count in zip(pool.ranks, before, strict=True)]


class TestOutlierDetection:
    """For requests that Envoy balances by itself: failing ranks are left out before a health check."""

    @pytest.mark.parametrize("failure", [die, always(500)])
    async def test_a_rank_that_fails_again_and_again_is_left_out(
        self, start_pool: StartPool, failure: Answer
    ) -> None:
        outlier = {"consecutive_failures": 3}
        async with start_pool(
            failure, ok, ok, with_picker=False, outlier_detection=outlier, health_check=SELDOM
        ) as pool:
            assert (await served_by(pool, 60))[0] == 3
            assert (await served_by(pool, 20))[0] == 0

    async def test_a_rank_that_is_full_is_not_left_out(self, start_pool: StartPool) -> None:
        outlier = {"consecutive_failures": 1}
        async with start_pool(
            always(503), ok, with_picker=False, outlier_detection=outlier, health_check=SELDOM
        ) as pool:
            await served_by(pool, 30)
            assert (await served_by(pool, 40))[0] >= 5

    async def test_a_rank_that_is_left_out_is_used_again_after_a_while(self, start_pool: StartPool) -> None:
        outlier = {"consecutive_failures": 2, "ejection_s": 2}
        async with start_pool(
            always(500), ok, with_picker=False, outlier_detection=outlier, health_check=SELDOM
        ) as pool:
            async with asyncio.timeout(15):
                while (await served_by(pool, 10))[0]:
                    pass
                pool.ranks[0].answer = ok
                while (await served_by(pool, 10))[0] == 0:
                    await asyncio.sleep(0.2)

    async def test_an_answered_health_check_ends_it_sooner(self, start_pool: StartPool) -> None:
        outlier = {"consecutive_failures": 2, "ejection_s": 3600}
        async with start_pool(
            always(500), ok, with_picker=False, outlier_detection=outlier, health_check={"interval_s": 1.5}
        ) as pool:
            await served_by(pool, 30)
            async with asyncio.timeout(15):
                while (await served_by(pool, 10))[0] == 0:
                    await asyncio.sleep(0.2)

    async def test_when_all_ranks_fail_all_are_tried(self, start_pool: StartPool) -> None:
        outlier = {"consecutive_failures": 1}
        async with start_pool(
            always(500), always(500), with_picker=False, outlier_detection=outlier, health_check=SELDOM
        ) as pool:
            async with asyncio.timeout(15):
                while min(await served_by(pool, 40)) < 5:  # for half a second the last one gets all
                    pass

    async def test_a_pick_is_obeyed_whatever_envoy_thinks_of_the_rank(self, start_pool: StartPool) -> None:
        outlier = {"consecutive_failures": 1}
        async with start_pool(always(500), ok, outlier_detection=outlier, health_check=SELDOM) as pool:
            pool.picker.reply = picks(pool.ranks[0].endpoint)
            assert await served_by(pool, 10) == [10, 0]


class TestResponseFlags:
    """The access log's `flags` and `details`, as the reference explains them."""

    async def line(self, pool: StubPool) -> tuple[int, str, str]:
        """Status, flags and the first word of the details, of the only request."""
        (line,) = await pool.envoy.access_log(1)
        return line["status"], line["flags"], line["details"].partition("{")[0]

    async def leave(self, pool: StubPool) -> None:
        """Send a request and go away while it is under way."""
        async with pool.client(timeout=0.3) as http:
            with pytest.raises(httpx2.ReadTimeout):
                await http.post(CHAT, content=b"{}")

    async def raw(self, pool: StubPool, sent: bytes) -> None:
        """Send bytes as they are, and wait for the end of the answer."""
        host, _, port = pool.envoy.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        await asyncio.wait_for(reader.read(), 10)
        writer.close()

    async def test_of_a_request_that_went_well(self, start_pool: StartPool) -> None:
        async with start_pool(ok) as pool:
            await pool.post()
            assert await self.line(pool) == (200, "-", "via_upstream")

    async def test_when_no_rank_can_be_reached(self, start_pool: StartPool) -> None:
        async with start_pool(None, None) as pool:
            await pool.post()
            assert await self.line(pool) == (503, "URX,UF", "upstream_reset_before_response_started")

    async def test_when_all_ranks_are_full(self, start_pool: StartPool) -> None:
        async with start_pool(always(503), always(503), always(503)) as pool:
            await pool.post()
            assert await self.line(pool) == (503, "URX", "via_upstream")

    async def test_when_a_rank_dies_before_it_answers(self, start_pool: StartPool) -> None:
        async with start_pool(die) as pool:
            await pool.post()
            assert await self.line(pool) == (503, "UC", "upstream_reset_before_response_started")

    async def test_when_a_rank_dies_while_it_answers(self, start_pool: StartPool) -> None:
        async with start_pool(break_off) as pool:
            with pytest.raises(httpx2.RemoteProtocolError):
                await pool.post()
            assert await self.line(pool) == (200, "UPE", "upstream_reset_after_response_started")

    async def test_when_the_client_leaves(self, start_pool: StartPool) -> None:
        async with start_pool(take_long) as pool:
            await self.leave(pool)
            assert await self.line(pool) == (0, "DC", "downstream_remote_disconnect")

    async def test_when_a_body_is_too_large(self, start_pool: StartPool) -> None:
        async with start_pool(ok, max_body_bytes=1024) as pool:
            await pool.post(b"x" * 2000)
            assert await self.line(pool) == (413, "-", "request_payload_too_large")

    async def test_when_more_requests_come_than_may_be_under_way_or_wait_for_a_connection(
        self, start_pool: StartPool
    ) -> None:
        """Ranks speak HTTP/1.1: as many again wait for a connection."""
        async with (
            start_pool(take_long, max_concurrent_requests=2) as pool,
            pool.client(http2=True) as http,
        ):
            passed = [asyncio.create_task(http.post(CHAT, content=b"{}")) for _ in range(2)]
            async with asyncio.timeout(10):
                while len(pool.ranks[0].received) < 2:
                    await asyncio.sleep(0.01)
            passed += [asyncio.create_task(http.post(CHAT, content=b"{}")) for _ in range(2)]
            async with asyncio.timeout(10):
                while await pool.envoy.stat("cluster.ranks.upstream_rq_pending_active") < 2:
                    await asyncio.sleep(0.01)
            assert len(pool.ranks[0].received) == 2
            assert (await http.post(CHAT, content=b"{}")).status_code == 503
            assert {answer.status_code for answer in await asyncio.gather(*passed)} == {200}
            lines = await pool.envoy.access_log(5)
            assert [line["details"] for line in lines if line["flags"] == "UO"] == [
                "upstream_reset_before_response_started{overflow}"
            ]

    async def test_connections_beyond_the_limit_are_closed_without_a_line(
        self, start_pool: StartPool
    ) -> None:
        async with start_pool(ok, max_concurrent_requests=1) as pool, pool.client() as http:
            await http.post(CHAT, content=b"{}")
            with pytest.raises(httpx2.TransportError):
                await pool.post()
            await http.post(CHAT, content=b"{}")
            assert {line["status"] for line in await pool.envoy.access_log(2)} == {200}

    async def test_when_what_came_is_not_http(self, start_pool: StartPool) -> None:
        async with start_pool(ok) as pool:
            await self.raw(pool, b"NONSENSE\r\n\r\n")
            assert await self.line(pool) == (400, "DPE", "http1.codec_error")
