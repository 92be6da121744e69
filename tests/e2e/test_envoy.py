"""What a client, a rank and an operator see of the rendered configuration, on a real Envoy.

Ranks and picker are stand-ins that do as told, so that each test shows one behaviour of Envoy's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx2
import openai
import pytest
from aiohttp import web

from gateway.envoy_ranks import RANK_IDLE_TIMEOUT_S
from tests.builders_envoy import RunningEnvoy
from tests.builders_mode_setup import CHAT
from tests.builders_parts import always, ok, picks, refuses, stub_rank
from tests.e2e.conftest import StartEnvoy, StartPool

MIB = 1 << 20
FAST_HEALTH_CHECK = {"interval_s": 0.1, "timeout_s": 1.0, "unhealthy_threshold": 2}


async def break_off(request: web.Request) -> web.StreamResponse:
    """An answer that begins and never ends properly."""
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"data: 1\n\n")
    await asyncio.sleep(0.05)
    return await die(request)


async def die(request: web.Request) -> web.StreamResponse:
    """No answer: the connection is lost."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def test_every_answer_names_its_rank_and_group(start_envoy: StartEnvoy) -> None:
    async with (
        stub_rank() as a,
        stub_rank() as b,
        start_envoy([[a.endpoint], [b.endpoint]]) as envoy,
        httpx2.AsyncClient(base_url=envoy.url) as http,
    ):
        names = {(await http.post(CHAT, content=b"{}")).headers["x-wavegate-rank"] for _ in range(20)}
    assert names == {"g0/0", "g1/0"}


async def test_the_picked_rank_gets_the_request_untouched(start_pool: StartPool) -> None:
    async with start_pool(ok, ok, ok) as pool:
        for index in (2, 0, 1, 2):
            pool.picker.reply = picks(pool.ranks[index].endpoint)
            answer = await pool.post(b'{"model":  "m"}')
            assert answer.headers.get_list("x-wavegate-rank") == [f"g0/{index}"]
            received = pool.ranks[index].received[-1]
            assert (received.method, received.path, received.body) == ("POST", CHAT, b'{"model":  "m"}')


async def test_the_picker_gets_one_message_with_body_path_and_request_id(start_pool: StartPool) -> None:
    async with start_pool(ok) as pool:
        await pool.post(b"x" * 100_000, headers={"x-request-id": "mine"})
        (message,) = pool.picker.messages
        assert message.request_body.body == b"x" * 100_000
        assert message.request_body.end_of_stream
        attributes = message.attributes["envoy.filters.http.ext_proc"]
        assert dict(attributes) == {"request.path": CHAT, "request.id": "mine"}


async def test_a_request_without_body_is_balanced_by_envoy_itself(start_pool: StartPool) -> None:
    async with start_pool(ok) as pool, pool.client() as http:
        answer = await http.get("/v1/models?x=1")
        assert answer.headers["x-wavegate-rank"] == "g0/0"
        assert pool.ranks[0].received[-1].path == "/v1/models?x=1"
        assert pool.picker.messages == []


async def test_headers_that_steer_ranks_do_not_pass(start_pool: StartPool) -> None:
    async with start_pool(ok, always(200, **{"x-wavegate-rank": "forged"})) as pool:
        a, b = pool.ranks
        pool.picker.reply = picks(b.endpoint)
        answer = await pool.post(
            headers={"X-Data-Parallel-Rank": "1", "x-gateway-destination-endpoint": a.endpoint, "x-mine": "1"}
        )
        assert answer.headers.get_list("x-wavegate-rank") == ["g0/1"]
        headers = b.received[-1].headers
        assert "x-data-parallel-rank" not in headers
        assert "x-gateway-destination-endpoint" not in headers
        assert headers["x-mine"] == "1"


async def test_clients_cannot_change_retries_and_timeouts(start_pool: StartPool) -> None:
    async with start_pool(always(503), retries=0) as pool:
        await pool.post(headers={"x-envoy-max-retries": "3", "x-envoy-retry-on": "5xx"})
        assert len(pool.ranks[0].received) == 1


async def test_the_client_s_request_id_is_kept_and_one_is_made_otherwise(start_pool: StartPool) -> None:
    async with start_pool(ok) as pool:
        kept = await pool.post(headers={"x-request-id": "mine"})
        made = await pool.post()
        seen = [received.headers["x-request-id"] for received in pool.ranks[0].received]
        assert seen == [kept.headers["x-request-id"], made.headers["x-request-id"]]
        assert seen[0] == "mine" != seen[1]


class TestRetries:
    """Only before the first byte, and only where no work can be done twice."""

    async def test_a_rank_that_refuses_connections_is_replaced_by_the_next_of_the_list(
        self, start_pool: StartPool
    ) -> None:
        async with start_pool(None, ok, ok) as pool:
            dead, other, second = (rank.endpoint for rank in pool.ranks)
            pool.picker.reply = picks(dead, second, other)
            for _ in range(5):
                assert (await pool.post()).headers["x-wavegate-rank"] == "g0/2"
            (line, *_rest) = await pool.envoy.access_log(5)
            assert (line["attempts"], line["rank"], line["status"]) == (2, "g0/2", 200)

    async def test_a_rank_whose_queue_is_full_is_replaced_with_the_whole_body(
        self, start_pool: StartPool
    ) -> None:
        body = b"x" * (16 * MIB)
        async with start_pool(always(503), ok) as pool:
            assert (await pool.post(body)).headers["x-wavegate-rank"] == "g0/1"
            full, free = pool.ranks
            assert full.received[-1].body == free.received[-1].body == body

    async def test_when_the_list_is_used_up_a_rank_that_was_not_tried_is_chosen(
        self, start_pool: StartPool
    ) -> None:
        async with start_pool(None, ok) as pool:
            pool.picker.reply = picks(pool.ranks[0].endpoint)
            for _ in range(5):
                assert (await pool.post()).headers["x-wavegate-rank"] == "g0/1"

    async def test_the_last_refusal_reaches_the_client_unchanged(self, start_pool: StartPool) -> None:
        async with start_pool(always(503), always(503), retries=1) as pool:
            answer = await pool.post()
            assert (answer.status_code, answer.json()) == (503, {"status": 503})
            assert [len(rank.received) for rank in pool.ranks] == [1, 1]

    @pytest.mark.parametrize("status", [400, 404, 429, 500])
    async def test_other_errors_are_not_retried(self, start_pool: StartPool, status: int) -> None:
        async with start_pool(always(status), ok) as pool:
            assert (await pool.post()).status_code == status
            assert pool.ranks[1].received == []

    async def test_a_request_that_kills_a_rank_is_not_handed_to_the_next(self, start_pool: StartPool) -> None:
        async with start_pool(die, ok) as pool:
            answer = await pool.post()
            assert (answer.status_code, answer.headers["x-wavegate-rank"]) == (503, "g0/0")
            assert pool.ranks[1].received == []

    async def test_a_stream_that_breaks_is_not_started_again(self, start_pool: StartPool) -> None:
        async with start_pool(break_off, ok) as pool:
            with pytest.raises(httpx2.RemoteProtocolError):
                await pool.post()
            assert pool.ranks[1].received == []


class TestErrorsOfEnvoy:
    """They look like OpenAI's, so that clients can say what happened."""

    async def test_no_rank_can_be_reached(self, start_pool: StartPool) -> None:
        async with start_pool(None) as pool:
            answer = await pool.post()
            assert answer.status_code == 503
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "no_rank_available")
            assert error["message"].startswith("No rank could answer: ")

    @pytest.mark.parametrize("status", [429, 503])
    async def test_the_picker_s_own_refusals_pass_unchanged(self, start_pool: StartPool, status: int) -> None:
        async with start_pool(ok) as pool:
            pool.picker.reply = refuses(status, b'{"error": "mine"}')
            answer = await pool.post()
            assert (answer.status_code, answer.content) == (status, b'{"error": "mine"}')

    @pytest.mark.parametrize("http2", [False, True])
    async def test_a_body_at_the_limit_passes_and_one_above_it_is_413(
        self, start_pool: StartPool, http2: bool
    ) -> None:
        async with start_pool(ok) as pool, pool.client(http2=http2) as http:
            assert (await http.post(CHAT, content=b"x" * (16 * MIB))).status_code == 200
            assert len(pool.ranks[0].received[-1].body) == 16 * MIB
            assert len(pool.picker.messages[-1].request_body.body) == 16 * MIB
            answer = await http.post(CHAT, content=b"x" * (16 * MIB + 1))
            assert answer.status_code == 413
            assert answer.json()["error"] == {
                "message": "The request body is larger than 16777216 bytes, the limit of this gateway.",
                "type": "invalid_request_error",
                "param": None,
                "code": "request_too_large",
            }
            assert len(pool.ranks[0].received) == 1

    async def test_the_openai_client_understands_a_413(self, start_pool: StartPool) -> None:
        async with (
            start_pool(ok) as pool,
            openai.AsyncOpenAI(base_url=f"{pool.envoy.url}/v1", api_key="none") as ai,
        ):
            with pytest.raises(openai.APIStatusError, match="larger than 16777216 bytes") as refused:
                await ai.completions.create(model="m", prompt="x" * (17 * MIB))
            assert refused.value.status_code == 413

    async def test_the_limit_is_the_configured_one_with_and_without_picker(
        self, start_pool: StartPool
    ) -> None:
        for with_picker in (True, False):
            async with start_pool(ok, max_body_bytes=2 * MIB, with_picker=with_picker) as pool:
                assert (await pool.post(b"x" * (2 * MIB))).status_code == 200
                assert (await pool.post(b"x" * (2 * MIB + 1))).status_code == 413


class TestWithoutAnswerOfThePicker:
    """failure_mode_allow: requests are then balanced by Envoy alone."""

    async def test_without_picker_requests_are_spread_over_the_ranks(self, start_pool: StartPool) -> None:
        async with start_pool(ok, ok, with_picker=False) as pool:
            for _ in range(40):
                assert (await pool.post()).status_code == 200
            assert min(len(rank.received) for rank in pool.ranks) >= 5
            assert {line["picked"] for line in await pool.envoy.access_log(40)} == {None}

    async def test_a_picker_that_is_too_slow_is_passed_over(self, start_pool: StartPool) -> None:
        async with start_pool(ok, message_timeout_s=0.2) as pool:
            pool.picker.delay_s = 30.0
            assert (await pool.post()).status_code == 200
            (line,) = await pool.envoy.access_log(1)
            assert 150 < line["duration_ms"] < 10_000

    async def test_a_pick_that_takes_longer_than_a_second_is_waited_for(self, start_pool: StartPool) -> None:
        async with start_pool(ok, ok) as pool:
            pool.picker.delay_s = 1.2
            pool.picker.reply = picks(pool.ranks[1].endpoint)
            assert (await pool.post()).headers["x-wavegate-rank"] == "g0/1"

    async def test_a_pick_outside_the_pool_is_not_followed(self, start_pool: StartPool) -> None:
        async with start_pool(ok) as pool, stub_rank() as outside:
            pool.picker.reply = picks(outside.endpoint)
            assert (await pool.post()).headers["x-wavegate-rank"] == "g0/0"
            assert outside.received == []


class TestStreams:
    """Server-sent events as a rank writes them, and the life of the picker's stream beside them."""

    @pytest.mark.parametrize("http2", [False, True])
    async def test_events_arrive_one_by_one_and_in_order(self, start_pool: StartPool, http2: bool) -> None:
        seen = asyncio.Event()

        async def one_by_one(request: web.Request) -> web.StreamResponse:
            """Writes the next event only once the client has seen the last one."""
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for number in range(20):
                seen.clear()
                await response.write(f"data: {number}\n\n".encode())
                await asyncio.wait_for(seen.wait(), 10)
            return response

        async with (
            start_pool(one_by_one) as pool,
            pool.client(http2=http2) as http,
            http.stream("POST", CHAT, content=b"{}") as answer,
        ):
            received = []
            async for line in answer.aiter_lines():
                if line:
                    received.append(line)
                    seen.set()
            assert received == [f"data: {number}" for number in range(20)]

    async def test_the_picker_s_stream_ends_with_the_response(self, start_pool: StartPool) -> None:
        release = asyncio.Event()

        async def slow(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"first")
            await release.wait()
            return response

        async with start_pool(slow) as pool, pool.client() as http:
            async with http.stream("POST", CHAT, content=b"{}") as answer:
                assert await anext(answer.aiter_raw()) == b"first"
                assert pool.picker.open_streams == 1
                release.set()
            await pool.picker.becomes_idle()

    async def test_a_client_that_leaves_ends_the_request_at_rank_and_picker(
        self, start_pool: StartPool
    ) -> None:
        ended = asyncio.Event()

        async def endless(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            try:
                while True:
                    await response.write(b"x")
                    await asyncio.sleep(0.01)
            finally:
                ended.set()

        async with start_pool(endless) as pool:
            async with pool.client() as http, http.stream("POST", CHAT, content=b"{}") as answer:
                await anext(answer.aiter_raw())
            await asyncio.wait_for(ended.wait(), 5)
            await pool.picker.becomes_idle()

    async def test_a_chunked_body_arrives_whole(self, start_pool: StartPool) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            for number in range(50):
                yield str(number).encode() * 1000

        async with start_pool(ok) as pool, pool.client() as http:
            assert (await http.post(CHAT, content=pieces())).status_code == 200
            whole = b"".join([piece async for piece in pieces()])
            assert pool.ranks[0].received[-1].body == whole
            assert pool.picker.messages[-1].request_body.body == whole

    async def test_more_than_1024_requests_at_a_time_are_carried(self, start_pool: StartPool) -> None:
        """Envoy's default circuit breakers stop there."""
        arrived = 0
        all_arrived = asyncio.Event()

        async def together(_request: web.Request) -> web.StreamResponse:
            nonlocal arrived
            arrived += 1
            if arrived == 1100:
                all_arrived.set()
            await asyncio.wait_for(all_arrived.wait(), 100)
            return web.Response()

        async with (
            start_pool(together, message_timeout_s=60, connect_timeout_s=60) as pool,
            aiohttp.ClientSession(pool.envoy.url, connector=aiohttp.TCPConnector(limit=0)) as http,
        ):

            async def status() -> int:
                async with http.post(CHAT, data=b"{}") as answer:
                    all_arrived.set()  # the first answer ends the wait, also when it is a refusal
                    return answer.status

            statuses = await asyncio.gather(*(status() for _ in range(1100)))
        assert set(statuses) == {200}


class TestHealthChecks:
    """Envoy's own guide the fallback policy; what is picked is the picker's responsibility."""

    async def becomes(self, envoy: RunningEnvoy, health: dict[str, bool]) -> None:
        """Wait until Envoy sees the ranks like this."""
        async with asyncio.timeout(20):
            while await envoy.healthy_ranks() != health:
                await asyncio.sleep(0.05)

    async def test_an_unhealthy_rank_gets_no_request_unless_it_is_picked(self, start_pool: StartPool) -> None:
        async with start_pool(ok, ok, health_check=FAST_HEALTH_CHECK) as pool:
            sick, well = pool.ranks
            sick.is_healthy = False
            await self.becomes(pool.envoy, {sick.endpoint: False, well.endpoint: True})
            pool.picker.reply = picks()
            for _ in range(10):
                assert (await pool.post()).headers["x-wavegate-rank"] == "g0/1"
            pool.picker.reply = picks(sick.endpoint)
            assert (await pool.post()).headers["x-wavegate-rank"] == "g0/0"

    async def test_when_no_rank_is_healthy_all_are_tried(self, start_pool: StartPool) -> None:
        async with start_pool(ok, ok, with_picker=False, health_check=FAST_HEALTH_CHECK) as pool:
            for rank in pool.ranks:
                rank.is_healthy = False
            await self.becomes(pool.envoy, {rank.endpoint: False for rank in pool.ranks})
            assert (await pool.post()).status_code == 200

    async def test_a_rank_that_recovers_is_used_again(self, start_pool: StartPool) -> None:
        async with start_pool(ok, health_check=FAST_HEALTH_CHECK) as pool:
            (rank,) = pool.ranks
            rank.is_healthy = False
            await self.becomes(pool.envoy, {rank.endpoint: False})
            rank.is_healthy = True
            await self.becomes(pool.envoy, {rank.endpoint: True})


async def test_every_request_leaves_one_line_in_the_access_log(start_pool: StartPool) -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await asyncio.sleep(0.1)
        await response.prepare(request)
        await response.write(b"12345")
        await asyncio.sleep(0.3)
        await response.write(b"67890")
        return response

    async with start_pool(slow) as pool, pool.client() as http:
        await http.post(f"{CHAT}?key=secret", content=b"{}", headers={"x-request-id": "mine"})
        (line,) = await pool.envoy.access_log(1, within_s=5)
        endpoint = pool.ranks[0].endpoint
    times: dict[str, Any] = {name: line.pop(name) for name in ("time", "duration_ms", "first_byte_ms")}
    assert 90 <= times["first_byte_ms"] < times["duration_ms"] - 200
    assert line == {
        "request_id": "mine",
        "method": "POST",
        "path": CHAT,  # without its query, which may hold a key
        "status": 200,
        "details": "via_upstream",
        "flags": "-",
        "rank": "g0/0",
        "picked": endpoint,
        "attempts": 1,
        "bytes_received": 2,
        "bytes_sent": 10,
        "client": "127.0.0.1",
    }


async def test_idle_connections_to_ranks_are_closed_by_envoy_first(start_pool: StartPool) -> None:
    async with start_pool(ok) as pool:
        await pool.post()
        async with asyncio.timeout(RANK_IDLE_TIMEOUT_S + 10):
            while await pool.envoy.stat("cluster.ranks.upstream_cx_idle_timeout") == 0:
                await asyncio.sleep(0.1)


async def test_two_envoys_run_side_by_side(start_pool: StartPool) -> None:
    async with start_pool(ok) as one, start_pool(ok) as other:
        assert (await one.post()).status_code == (await other.post()).status_code == 200
