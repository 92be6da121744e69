"""Ranks that fail behind a real Envoy and a real gateway: how soon clients are spared."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
from aiohttp import web

from tests.builders_parts import stub_rank
from tests.builders_wavegate import running_wavegate, write_config

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
