"""The gateway's picture of a rank's prefix cache is the rank's own, by KV cache events of embedded ranks."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.config import Config
from gateway.server import GatewayServer
from tests.builders_group import FAST, RankProcess, rank
from tests.builders_ports import free_port
from vllm_ranks.tiny_moe import write_tiny_moe

BLOCK = 16
EVENTS = json.dumps({"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"})
OPTIONS = (*FAST, "--kv-events-config", EVENTS, "--enable-prompt-tokens-details")
LIMIT_S = 20.0


class Gateway:
    """A gateway over one rank, seen through its admin API."""

    def __init__(self, http: aiohttp.ClientSession, admin_url: str) -> None:
        self._http = http
        self._admin_url = admin_url

    async def cached_tokens(self, prompt: Any, **fields: Any) -> int:
        """What the rank has of a prompt."""
        body = {"model": "m", "prompt": prompt, **fields}
        url = f"{self._admin_url}/explain?path=/v1/completions"
        async with self._http.post(url, json=body) as answer:
            (row,) = (await answer.json())["ranks"]
            return int(row["cached_tokens"])

    async def until_cached(self, tokens: int, prompt: Any, **fields: Any) -> None:
        """Wait until the rank has so much of a prompt."""
        async with asyncio.timeout(LIMIT_S):
            while await self.cached_tokens(prompt, **fields) != tokens:
                await asyncio.sleep(0.01)

    async def blocks(self) -> int:
        """How many blocks of the rank are known."""
        async with self._http.get(f"{self._admin_url}/status") as answer:
            (group,) = (await answer.json())["groups"]
            return int(group["index_blocks"])


@asynccontextmanager
async def gateway_over(served: RankProcess, tokenizer: Path) -> AsyncIterator[Gateway]:
    group = {
        "engine": "adopted",
        "name": "g0",
        "model": "m",
        "endpoints": [f"127.0.0.1:{served.port}"],
        "tokenizer": str(tokenizer),
    }
    section = {
        "admin_port": free_port(),
        "ext_proc_listen": f"127.0.0.1:{free_port()}",
        "reports": {"interval_s": 0.02},
    }
    stop = asyncio.Event()
    server = GatewayServer(Config.model_validate({"groups": [group], "gateway": section}))
    serving = asyncio.create_task(server.serve(stop))
    admin_url = f"http://127.0.0.1:{section['admin_port']}"
    try:
        async with aiohttp.ClientSession() as http:
            async with asyncio.timeout(LIMIT_S):
                while not await is_ready(http, admin_url):
                    await asyncio.sleep(0.01)
            yield Gateway(http, admin_url)
    finally:
        stop.set()
        await serving


async def is_ready(http: aiohttp.ClientSession, admin_url: str) -> bool:
    try:
        return (await http.get(f"{admin_url}/readyz")).status == 200
    except aiohttp.ClientConnectorError:
        return False


async def complete(served: RankProcess, prompt: Any, **fields: Any) -> int:
    """A completion of one token; how many of the prompt's the rank took from its cache."""
    answer = await asyncio.to_thread(served.complete, prompt, max_tokens=1, **fields)
    details = answer["usage"]["prompt_tokens_details"]
    return details["cached_tokens"] if details is not None else 0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another model than the ranks', so prompts are given as tokens here."""
    return write_tiny_moe(tmp_path_factory.mktemp("model"))


async def test_before_each_request_the_gateway_knows_what_the_rank_will_find_in_its_cache(
    tokenizer: Path,
) -> None:
    """Prompts that share beginnings, in a cache too small for them: much is evicted on the way."""
    rng = random.Random(3)
    documents = [[rng.randrange(1000) for _ in range(200)] for _ in range(6)]
    with rank(*OPTIONS, "--num-gpu-blocks", "41", "--max-model-len", "512") as served:
        async with gateway_over(served, tokenizer) as gateway:
            credits = set()
            for _ in range(60):
                document = rng.choice(documents)
                shared = rng.randrange(20, 200)
                prompt = [*document[:shared], *(rng.randrange(1000) for _ in range(rng.randrange(1, 60)))]
                credit = await gateway.cached_tokens(prompt)
                assert await complete(served, prompt) == credit
                # Its own blocks come last of what the rank tells of it.
                await gateway.until_cached((len(prompt) - 1) // BLOCK * BLOCK, prompt)
                credits.add(credit // BLOCK)
            blocks = await gateway.blocks()
    assert len(credits) > 3
    assert 20 < blocks <= 40


async def test_what_was_computed_with_a_salt_is_known_with_it_alone(tokenizer: Path) -> None:
    prompt = list(range(100))
    with rank(*OPTIONS) as served:
        async with gateway_over(served, tokenizer) as gateway:
            await complete(served, prompt, cache_salt="mine")
            await gateway.until_cached(96, prompt, cache_salt="mine")
            assert await gateway.cached_tokens(prompt) == 0
            assert await gateway.cached_tokens(prompt, cache_salt="yours") == 0
