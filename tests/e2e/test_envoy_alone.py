"""`wavegate envoy` as whatever supervises it sees it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
from aiohttp import web

from tests.builders_parts import stub_rank
from tests.builders_processes import eventually, running
from tests.builders_wavegate import WavegateProcess, adopted_group, running_wavegate, write_config

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
COMPLETIONS = "/v1/chat/completions"


async def endless(request: web.Request) -> web.StreamResponse:
    """Begin an answer that never ends."""
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"first ")
    await asyncio.sleep(300)
    return response


@asynccontextmanager
async def envoy_alone(
    folder: Path, endpoint: str, *, drain_timeout_s: float = 30
) -> AsyncIterator[tuple[WavegateProcess, httpx2.AsyncClient]]:
    """Envoy over one rank, once it serves, and a client of it."""
    config = write_config(folder, [adopted_group(endpoint)], drain_timeout_s=drain_timeout_s)
    base_url = f"http://127.0.0.1:{config['envoy']['port']}"
    async with (
        running_wavegate(folder, "envoy") as envoy,
        httpx2.AsyncClient(base_url=base_url, timeout=60) as http,
    ):
        await envoy.says("starting main dispatch loop")
        yield envoy, http


async def refuses(http: httpx2.AsyncClient) -> None:
    """Return once nobody listens any more."""
    async with asyncio.timeout(20):
        while True:
            try:
                _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.05)


async def test_envoy_alone_serves_without_a_gateway_and_logs_to_stdout(tmp_path: Path) -> None:
    async with stub_rank() as rank, envoy_alone(tmp_path, rank.endpoint) as (envoy, http):
        assert (await http.post(COMPLETIONS, json=CHAT)).status_code == 200
        await envoy.says(f'"path":"{COMPLETIONS}"')


async def test_sigterm_waits_for_requests_under_way_and_takes_no_new_ones(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first ")
        await release.wait()
        await response.write(b"last")
        return response

    async with stub_rank(slow) as rank, envoy_alone(tmp_path, rank.endpoint) as (envoy, http):
        async with http.stream("POST", COMPLETIONS, json=CHAT) as answer:
            pieces = answer.aiter_raw()
            received = await anext(pieces)
            envoy.process.terminate()
            await refuses(http)
            assert envoy.process.returncode is None
            release.set()
            received += b"".join([piece async for piece in pieces])
        assert received == b"first last"
        assert await envoy.exit_status() == 0


async def test_requests_that_outlast_the_drain_timeout_are_cut_and_counted(tmp_path: Path) -> None:
    async with (
        stub_rank(endless) as rank,
        envoy_alone(tmp_path, rank.endpoint, drain_timeout_s=0.5) as (envoy, http),
    ):
        async with http.stream("POST", COMPLETIONS, json=CHAT):
            envoy.process.terminate()
            assert await envoy.exit_status() == 0
        assert "1 requests were still under way after 0.5 s" in envoy.output


async def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    async with (
        stub_rank(endless) as rank,
        envoy_alone(tmp_path, rank.endpoint, drain_timeout_s=300) as (envoy, http),
        http.stream("POST", COMPLETIONS, json=CHAT),
    ):
        envoy.process.send_signal(signal.SIGINT)
        await envoy.says("draining")
        envoy.process.send_signal(signal.SIGINT)
        assert await envoy.exit_status(within_s=20) == 0


async def test_when_envoy_ends_by_itself_so_does_the_command(tmp_path: Path) -> None:
    async with stub_rank() as rank, envoy_alone(tmp_path, rank.endpoint) as (envoy, _http):
        (process,) = envoy.descendants()
        os.kill(process, signal.SIGKILL)
        assert await envoy.exit_status() == 1
        assert "Envoy ended by itself: signal SIGKILL" in envoy.output


async def test_a_killed_command_takes_envoy_with_it(tmp_path: Path) -> None:
    async with stub_rank() as rank, envoy_alone(tmp_path, rank.endpoint) as (envoy, _http):
        started = envoy.descendants()
        assert len(started) == 1
        envoy.process.kill()
        await envoy.exit_status()
        await eventually(lambda: running(started) == [])


async def test_a_missing_envoy_is_told_in_one_line(tmp_path: Path) -> None:
    write_config(tmp_path, [adopted_group("127.0.0.1:1")], envoy={"binary": "/no/such/envoy"})
    async with running_wavegate(tmp_path, "envoy") as envoy:
        assert await envoy.exit_status() == 1
        assert envoy.output == "envoy.binary: /no/such/envoy is not an executable file\n"
