"""Ranks that fail behind a real Envoy and a real gateway: how soon clients are spared."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from aiohttp import web

from tests.builders_parts import stub_rank
from tests.builders_wavegate import WavegateProcess, embedded_group, running_wavegate, write_config

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


async def refuse_all(_request: web.Request) -> web.StreamResponse:
    """What a vLLM rank that drains answers, with /health 200."""
    return web.json_response({"error": {"message": "cannot schedule new futures after shutdown"}}, status=500)


async def test_a_rank_that_answers_with_errors_loses_its_group_the_traffic(tmp_path: Path) -> None:
    async with stub_rank(refuse_all) as broken, stub_rank() as good:
        groups = [
            {"engine": "adopted", "name": name, "model": "m", "endpoints": [rank.endpoint]}
            for name, rank in (("bad", broken), ("good", good))
        ]
        config = write_config(tmp_path, groups)
        url = f"http://127.0.0.1:{config['envoy']['port']}/v1/chat/completions"
        async with running_wavegate(tmp_path, "up") as up, httpx2.AsyncClient(timeout=30) as http:
            await up.says("serving on http://127.0.0.1:")
            async with asyncio.timeout(20):
                while (await http.post(url, json=CHAT)).status_code == 200:
                    pass  # the first ones may all have gone to the good rank
            await asyncio.sleep(1.0)
            answers = [await http.post(url, json=CHAT) for _ in range(20)]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-wavegate-rank"] for answer in answers} == {"good/0"}


@asynccontextmanager
async def embedded_pool(folder: Path, **supervision: Any) -> AsyncIterator[tuple[WavegateProcess, Any]]:
    """Two embedded ranks in lock step that can be made to fail, and their configuration."""
    config = write_config(
        folder, [embedded_group(2, args=["--enable-fault-injection"])], supervision=supervision
    )
    async with running_wavegate(folder, "up") as up:
        await up.says("serving on http://127.0.0.1:")
        yield up, config


async def hang(config: Any, *, on: bool) -> None:
    """Let the engine of rank 1 stand still, or go on."""
    async with httpx2.AsyncClient(timeout=10) as http:
        url = f"http://127.0.0.1:{config['groups'][0]['port'] + 1}/fault_injection"
        assert (await http.post(url, json={"fault": "hang", "on": on})).status_code == 200


async def serving_again(config: Any) -> float:
    """Ask until an answer comes, and return how long that took."""
    url = f"http://127.0.0.1:{config['envoy']['port']}/v1/completions"
    body = {"model": "wavegate-embedded", "prompt": "Hello", "max_tokens": 4}
    started_s = time.monotonic()
    async with httpx2.AsyncClient(timeout=60) as http, asyncio.timeout(60):
        while (await http.post(url, json=body)).status_code != 200:
            await asyncio.sleep(0.1)
    return time.monotonic() - started_s


async def refused(config: Any) -> httpx2.Response:
    """The first answer of the gateway itself to a stream of requests, none of which waits for the others."""
    url = f"http://127.0.0.1:{config['envoy']['port']}/v1/completions"
    body = {"model": "wavegate-embedded", "prompt": "Hello", "max_tokens": 4}
    async with httpx2.AsyncClient(timeout=60) as http, asyncio.timeout(30):
        pending = set()
        while True:
            pending.add(asyncio.create_task(http.post(url, json=body)))
            done, pending = await asyncio.wait(pending, timeout=0.2)
            for task in done:
                if task.result().status_code == 503:
                    for other in pending:
                        other.cancel()
                    return task.result()


async def test_a_hang_takes_the_group_out_with_health_200_and_ends_when_it_passes(tmp_path: Path) -> None:
    async with embedded_pool(tmp_path) as (up, config):
        await hang(config, on=True)
        answer = await refused(config)
        assert answer.headers["x-wavegate-drop-reason"] == "no_rank"
        assert "retry-after" in answer.headers
        for rank in (0, 1):
            async with httpx2.AsyncClient(timeout=10) as http:
                url = f"http://127.0.0.1:{config['groups'][0]['port'] + rank}/health"
                assert (await http.get(url)).status_code == 200
        await hang(config, on=False)
        await serving_again(config)
        assert "restarting" not in up.output


async def test_a_hang_that_does_not_pass_ends_in_a_restart(tmp_path: Path) -> None:
    async with embedded_pool(tmp_path, restart_hung_after_s=3) as (up, config):
        await hang(config, on=True)
        await refused(config)
        await up.says("group g0 is out of rotation: rank g0/")
        await up.says("group g0 is back in rotation")
        await serving_again(config)


async def test_a_slow_upload_to_idle_ranks_costs_nobody_an_answer(tmp_path: Path) -> None:
    """Where no body is waited for before the pick, its rank has nothing to do until all of it has come."""
    config = write_config(tmp_path, [embedded_group(2)], envoy={"mode": "header_only"})
    port = config["envoy"]["port"]
    body = json.dumps({"model": "wavegate-embedded", "prompt": "Hello " * 20_000, "max_tokens": 4}).encode()
    async with running_wavegate(tmp_path, "up") as up:
        await up.says("serving on http://127.0.0.1:")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        )
        async with httpx2.AsyncClient(timeout=60) as http:
            for tenth in range(10):
                writer.write(body[tenth * len(body) // 10 : (tenth + 1) * len(body) // 10])
                await asyncio.sleep(0.6)
                if tenth % 5 == 4:  # after 3 s, and after 6 s
                    assert (await ask(http, config)).status_code == 200
            async with asyncio.timeout(60):
                answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert "is out of rotation" not in (tmp_path / ".wavegate" / "logs" / "gateway.log").read_text()


async def ask(http: httpx2.AsyncClient, config: Any) -> httpx2.Response:
    """One short request."""
    url = f"http://127.0.0.1:{config['envoy']['port']}/v1/completions"
    return await http.post(url, json={"model": "wavegate-embedded", "prompt": "Hello", "max_tokens": 4})
