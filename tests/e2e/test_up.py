"""`wavegate up` as an operator sees it: start, service, restarts, drain, stop, and nothing left running."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import httpx2
from aiohttp import web

from tests.builders_parts import stub_rank
from tests.builders_processes import eventually, running
from tests.builders_wavegate import (
    WavegateProcess,
    adopted_group,
    embedded_group,
    running_wavegate,
    write_config,
)

CHAT = {"model": "wavegate-embedded", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def url(config: Any, path: str = "/v1/chat/completions") -> str:
    """An address at Envoy's."""
    return f"http://127.0.0.1:{config['envoy']['port']}{path}"


async def serving(up: WavegateProcess) -> None:
    """Wait until it says that it serves."""
    await up.says("serving on http://127.0.0.1:")


async def test_up_serves_embedded_ranks_and_stops_on_sigterm(tmp_path: Path) -> None:
    config = write_config(tmp_path, [embedded_group(2)])
    async with running_wavegate(tmp_path, "up") as up:
        await serving(up)
        async with httpx2.AsyncClient(timeout=30) as http:
            answers = [await http.post(url(config), json=CHAT) for _ in range(4)]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-wavegate-rank"] for answer in answers} <= {"g0/0", "g0/1"}
        started = up.descendants()
        assert len(started) >= 4
        up.process.terminate()
        assert await up.exit_status() == 0
        assert running(started) == []
        lines = [line.split(" ")[1].rstrip(":") for line in up.output.splitlines()]
        assert lines == ["group", "gateway", "Envoy", "serving", "draining", "stopping"]


async def test_no_other_user_can_read_what_a_deployment_writes(tmp_path: Path) -> None:
    write_config(tmp_path, [embedded_group(1)])
    async with running_wavegate(tmp_path, "up") as up:
        await serving(up)
        run_folder = tmp_path / ".wavegate"
        written = [run_folder, *run_folder.rglob("*")]
        names = {path.name for path in written}
        assert {"wavegate.yaml", "envoy.yaml", "lock", "gateway.log", "envoy.log", "rank-g0-0.log"} <= names
        assert [path for path in written if path.stat().st_mode & 0o077] == []


async def test_requests_under_way_are_finished_before_the_stop(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first ")
        await release.wait()
        await response.write(b"last")
        return response

    async with stub_rank(slow) as rank:
        config = write_config(tmp_path, [adopted_group(rank.endpoint)])
        async with running_wavegate(tmp_path, "up") as up, httpx2.AsyncClient(timeout=60) as http:
            await serving(up)
            async with http.stream("POST", url(config), json=CHAT) as answer:
                pieces = answer.aiter_raw()
                received = await anext(pieces)
                up.process.terminate()
                await becomes_closed(config["envoy"]["port"])
                assert up.process.returncode is None
                release.set()
                received += b"".join([piece async for piece in pieces])
            assert received == b"first last"
            assert await up.exit_status() == 0


async def test_requests_that_take_too_long_are_cut_at_the_drain_timeout(tmp_path: Path) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(300)
        return response

    async with stub_rank(endless) as rank:
        config = write_config(tmp_path, [adopted_group(rank.endpoint)], drain_timeout_s=0.5)
        async with running_wavegate(tmp_path, "up") as up, httpx2.AsyncClient(timeout=60) as http:
            await serving(up)
            async with http.stream("POST", url(config), json=CHAT):
                up.process.terminate()
                assert await up.exit_status() == 0
                assert "draining: 1 requests cut after 0.5 s" in up.output


async def test_a_second_signal_does_not_wait_for_requests(tmp_path: Path) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(300)
        return response

    async with stub_rank(endless) as rank:
        config = write_config(tmp_path, [adopted_group(rank.endpoint)], drain_timeout_s=300)
        async with running_wavegate(tmp_path, "up") as up, httpx2.AsyncClient(timeout=60) as http:
            await serving(up)
            started = up.descendants()
            async with http.stream("POST", url(config), json=CHAT):
                up.process.send_signal(signal.SIGINT)
                await becomes_closed(config["envoy"]["port"])
                up.process.send_signal(signal.SIGINT)
                assert await up.exit_status() == 0
            assert running(started) == []


async def test_gateway_and_envoy_are_restarted(tmp_path: Path) -> None:
    async with stub_rank() as rank:
        config = write_config(tmp_path, [adopted_group(rank.endpoint)])
        async with running_wavegate(tmp_path, "up") as up:
            await serving(up)
            for name in ("cli gateway", "/envoy "):
                (victim,) = up.descendants(matching=name)
                os.kill(victim, signal.SIGKILL)
            await up.says("gateway: admin", times=2)
            await up.says("Envoy: ready on", times=2)
            async with httpx2.AsyncClient() as http:
                assert (await http.post(url(config), json=CHAT)).status_code == 200


async def test_without_the_gateway_no_request_fails(tmp_path: Path) -> None:
    async with stub_rank() as rank:
        config = write_config(tmp_path, [adopted_group(rank.endpoint)])
        async with running_wavegate(tmp_path, "up") as up, httpx2.AsyncClient(timeout=30) as http:
            await serving(up)
            (gateway,) = up.descendants(matching="cli gateway")
            os.kill(gateway, signal.SIGKILL)
            while "gateway: admin" not in up.output.partition("restarting")[2]:
                assert (await http.post(url(config), json=CHAT)).status_code == 200


async def test_a_gateway_that_hangs_is_passed_over_within_seconds(tmp_path: Path) -> None:
    async with stub_rank() as rank:
        config = write_config(tmp_path, [adopted_group(rank.endpoint)])
        async with running_wavegate(tmp_path, "up") as up, httpx2.AsyncClient(timeout=30) as http:
            await serving(up)
            (gateway,) = up.descendants(matching="cli gateway")
            os.kill(gateway, signal.SIGSTOP)
            health = f"http://127.0.0.1:{config['envoy']['admin_port']}/stats"
            healthy = "cluster.ext_proc.membership_healthy"
            async with asyncio.timeout(20):
                while f"{healthy}: 0" not in (await http.get(health, params={"filter": healthy})).text:
                    await asyncio.sleep(0.1)
            async with asyncio.timeout(5):
                assert (await http.post(url(config), json=CHAT)).status_code == 200


async def test_the_gateway_takes_over_the_socket_of_its_killed_predecessor(tmp_path: Path) -> None:
    async with stub_rank() as rank:
        socket_path = tmp_path / "ext_proc.sock"
        config = write_config(tmp_path, [adopted_group(rank.endpoint)], ext_proc_listen=f"unix:{socket_path}")
        async with running_wavegate(tmp_path, "up") as up, httpx2.AsyncClient(timeout=30) as http:
            await serving(up)
            (gateway,) = up.descendants(matching="cli gateway")
            os.kill(gateway, signal.SIGKILL)
            await up.says("gateway: admin", times=2)
            log = tmp_path / ".wavegate" / "logs" / "envoy.log"
            async with asyncio.timeout(20):
                while f'"picked":"{rank.endpoint}"' not in log.read_text():
                    assert (await http.post(url(config), json=CHAT)).status_code == 200
                    await asyncio.sleep(0.2)


async def test_a_group_that_loses_a_rank_is_restarted_whole(tmp_path: Path) -> None:
    config = write_config(tmp_path, [embedded_group(2)])
    async with running_wavegate(tmp_path, "up") as up:
        await serving(up)
        ranks = up.descendants(matching="cli rank")
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        await up.says("group g0 is back in rotation")
        assert set(up.descendants(matching="cli rank")).isdisjoint(ranks)
        async with httpx2.AsyncClient(timeout=30) as http:
            assert (await http.post(url(config), json=CHAT)).status_code == 200


async def test_a_killed_supervisor_leaves_nothing_running(tmp_path: Path) -> None:
    write_config(tmp_path, [embedded_group(2)])
    async with running_wavegate(tmp_path, "up") as up:
        await serving(up)
        started = up.descendants()
        assert len(started) >= 4
        up.process.kill()
        await up.exit_status()
        await eventually(lambda: running(started) == [])


async def test_a_taken_port_stops_the_start_with_one_line(tmp_path: Path) -> None:
    config = write_config(tmp_path, [embedded_group(2)])
    port = config["groups"][0]["port"] + 1
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", port))
        squatter.listen()
        async with running_wavegate(tmp_path, "up") as up:
            assert await up.exit_status() == 1
            (line,) = up.output.splitlines()
            assert line.startswith(f"port {port} for rank g0/1 is taken by another process: stop it, or set ")
            assert "groups[0].port" in line


async def test_a_rank_that_dies_at_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    write_config(tmp_path, [embedded_group(2, rank_args={1: ["--max-num-batched-tokens", "0"]})])
    async with running_wavegate(tmp_path, "up") as up:
        assert await up.exit_status() == 1
        assert "rank g0/1 ended with exit code 2" in up.output
        assert "max_num_batched_tokens (0) must be at least 1" in up.output
        assert up.descendants() == []


async def test_a_missing_envoy_stops_the_start_with_one_line(tmp_path: Path) -> None:
    write_config(tmp_path, [embedded_group()], envoy={"binary": "/no/such/envoy"})
    async with running_wavegate(tmp_path, "up") as up:
        assert await up.exit_status() == 1
        assert up.output == "envoy.binary: /no/such/envoy is not an executable file\n"


async def becomes_closed(port: int) -> None:
    """Wait until nobody listens on `port`."""

    def refuses() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) != 0

    await eventually(refuses)
