"""A client that goes away frees the engine at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.builders_group import RankProcess, eventually, group, rank

LONG = {"prompt": "go on", "max_tokens": 5_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def served() -> Iterator[RankProcess]:
    with rank("--step-fixed-ms", "5", "--num-gpu-blocks", "60000") as started:
        yield started


@asynccontextmanager
async def streaming(served: RankProcess, **fields: object) -> AsyncIterator[aiohttp.ClientResponse]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{served.url}/v1/completions", json={**LONG, "stream": True, **fields}) as response,
    ):
        await response.content.readline()
        yield response


async def busy(served: RankProcess, expected: float) -> bool:
    return await asyncio.to_thread(
        eventually, lambda: served.metric("vllm:num_requests_running") == expected, 5
    )


async def test_closing_a_stream_ends_the_request_in_the_engine(served: RankProcess) -> None:
    async with streaming(served):
        assert await busy(served, 1)
    assert await busy(served, 0)
    assert served.metric("vllm:kv_cache_usage_perc") == 0


async def test_closing_a_stream_ends_all_its_sequences(served: RankProcess) -> None:
    async with streaming(served, n=3, prompt=["a", "b"]):
        assert await busy(served, 6)
    assert await busy(served, 0)


async def test_giving_up_on_an_answer_that_is_not_streamed_ends_the_request(served: RankProcess) -> None:
    timeout = aiohttp.ClientTimeout(total=0.5)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        with pytest.raises(TimeoutError):
            await session.post(f"{served.url}/v1/completions", json=LONG)
    assert await busy(served, 0)


async def test_many_clients_leaving_at_once_leave_nothing(served: RankProcess) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        responses = [
            await session.post(f"{served.url}/v1/completions", json={**LONG, "stream": True})
            for _ in range(100)
        ]
        assert await busy(served, 100)
        for response in responses:
            response.close()
    assert await busy(served, 0)
    assert served.complete()["usage"]["completion_tokens"] == 4


async def test_leaving_while_waiting_in_the_queue_leaves_nothing() -> None:
    with rank("--max-num-seqs", "1", "--step-fixed-ms", "5", "--num-gpu-blocks", "20000") as served:
        async with streaming(served), aiohttp.ClientSession() as session:
            response = await session.post(f"{served.url}/v1/completions", json={**LONG, "stream": True})
            assert await asyncio.to_thread(
                eventually, lambda: served.metric("vllm:num_requests_waiting") == 1
            )
            response.close()
            assert await asyncio.to_thread(
                eventually, lambda: served.metric("vllm:num_requests_waiting") == 0
            )


async def test_a_client_leaving_a_group_does_not_disturb_the_others() -> None:
    with group(2, "--step-fixed-ms", "5") as (first, second):
        async with streaming(first):
            assert await busy(first, 1)
            pending = asyncio.create_task(asyncio.to_thread(second.complete, max_tokens=100, ignore_eos=True))
        assert (await pending)["usage"]["completion_tokens"] == 100
        assert await busy(first, 0)


async def test_200_concurrent_streams_are_complete_and_in_order(served: RankProcess) -> None:
    async def one(session: aiohttp.ClientSession, index: int) -> bytes:
        body = {"prompt": f"stream {index}", "max_tokens": 20, "ignore_eos": True, "stream": True}
        async with session.post(f"{served.url}/v1/completions", json=body) as response:
            assert response.status == 200
            return await response.read()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        bodies = await asyncio.gather(*(one(session, index) for index in range(200)))
    for body in bodies:
        events = body.split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        assert len(events) == 22
