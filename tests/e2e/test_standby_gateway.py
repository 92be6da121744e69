"""A gateway that stands by: what clients see when the first one is killed, stopped, hangs, and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.builders_parts import ok
from tests.builders_standby import BODY, BROKEN, CHAT, NO_TROUBLE, GatewayInTests, Pair, gateway_pair


async def stream_for_a_while(request: web.Request) -> web.StreamResponse:
    """An answer of about 6 s to whoever asks for it, at once to others."""
    if "x-slow" not in request.headers:
        return await ok(request)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for number in range(60):
        await response.write(b"data: %d\n\n" % number)
        await asyncio.sleep(0.1)
    return response


def kill(pair: Pair, how: signal.Signals) -> None:
    """Send the first gateway a signal."""
    assert pair.first.command is not None
    os.kill(pair.first.command.process.pid, how)


@pytest.mark.parametrize("mode", ["one_message", "header_only", "partial_body"])
async def test_no_request_fails_when_the_first_gateway_is_killed_and_comes_back(
    tmp_path: Path, mode: str
) -> None:
    async with gateway_pair(tmp_path, ok, ok, mode=mode) as pair:
        async with pair.traffic():
            await pair.first.gets_requests(within_s=10)
            assert await pair.standby.picks() == 0
            kill(pair, signal.SIGKILL)
            await pair.standby.gets_requests(within_s=10)
            await asyncio.sleep(2)
            await pair.first.start()
            await pair.first.gets_requests(within_s=15)
        assert set(pair.statuses()) == {200}
        # Those under way when it died, and those sent before anybody had noticed: most of them once each.
        assert await pair.balanced_by_envoy() <= 30


async def test_in_endpoint_picker_mode_the_requests_under_way_fail_with_the_gateway(tmp_path: Path) -> None:
    async with gateway_pair(tmp_path, ok, ok, mode="endpoint_picker") as pair:
        async with pair.traffic():
            await pair.first.gets_requests(within_s=10)
            kill(pair, signal.SIGKILL)
            await pair.standby.gets_requests(within_s=10)
            served_s = pair.now_s
            await asyncio.sleep(2)
        statuses = pair.statuses()
        assert set(statuses) <= {200, 500, BROKEN}
        assert statuses[500] + statuses[BROKEN] <= 30
        assert set(pair.statuses(since_s=served_s)) == {200}


async def test_a_first_gateway_that_is_stopped_costs_no_request_and_hardly_a_pick(tmp_path: Path) -> None:
    async with gateway_pair(tmp_path, ok, ok) as pair:
        async with pair.traffic():
            await pair.first.gets_requests(within_s=10)
            kill(pair, signal.SIGTERM)
            await pair.standby.gets_requests(within_s=10)
        assert set(pair.statuses()) == {200}
        assert await pair.balanced_by_envoy() <= 30


async def test_a_first_gateway_that_hangs_is_passed_over_and_costs_its_requests_the_message_timeout(
    tmp_path: Path,
) -> None:
    async with gateway_pair(tmp_path, ok, ok, message_timeout_s=12) as pair:
        async with pair.traffic():
            await pair.first.gets_requests(within_s=10)
            kill(pair, signal.SIGSTOP)
            await asyncio.sleep(5)
            async with (
                asyncio.timeout(5),
                aiohttp.ClientSession(pair.envoy.url) as http,
                http.post(CHAT, data=BODY) as answer,
            ):
                assert answer.status == 200
            assert await pair.standby.picks() == 1
        assert set(pair.statuses()) == {200}
        assert 11 < pair.longest_s < 30


async def test_streams_outlive_the_gateway_that_placed_them(tmp_path: Path) -> None:
    async with (
        gateway_pair(tmp_path, stream_for_a_while) as pair,
        aiohttp.ClientSession(pair.envoy.url) as http,
        http.post(CHAT, data=BODY, headers={"x-slow": "1"}) as answer,
    ):
        assert await pair.first.picks() == 1
        kill(pair, signal.SIGKILL)
        async with pair.traffic():
            await pair.standby.gets_requests(within_s=10)
        events = (await answer.text()).split("\n\n")
        assert events[-2] == "data: 59"


async def test_what_envoy_tells_of_failed_answers_goes_to_the_gateway_that_decides(tmp_path: Path) -> None:
    broken = False

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500) if broken and request.method == "POST" else await ok(request)

    async def fail_once(pair: Pair) -> None:
        async with aiohttp.ClientSession(pair.envoy.url) as http, http.post(CHAT, data=BODY) as answered:
            assert answered.status == 500

    async with gateway_pair(tmp_path, answer) as pair:
        async with pair.traffic():
            kill(pair, signal.SIGKILL)
            await pair.standby.gets_requests(within_s=10)
        broken = True
        await fail_once(pair)
        await until(pair.standby, "a request was answered 500")
        broken = False
        await until(pair.standby, NO_TROUBLE)
        await pair.first.start()
        async with pair.traffic():
            await pair.first.gets_requests(within_s=15)
        broken = True
        await fail_once(pair)
        await until(pair.first, "a request was answered 500")


async def until(gateway: GatewayInTests, trouble: str) -> None:
    """Wait until the gateway thinks so of its ranks."""
    async with asyncio.timeout(10):
        while not (await gateway.trouble()).endswith(trouble):
            await asyncio.sleep(0.05)
