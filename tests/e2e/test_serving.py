"""The main job on real parts: the official client, Envoy, the gateway, two groups of two embedded ranks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio

from tests.builders_ports import consecutive_free_ports, free_port
from tests.builders_wavegate import running_wavegate, write_config

MODEL = "wavegate-embedded"
FAST = ("--time-scale", "4", "--seed", "1")
"""Options of the ranks: four times faster than the hardware they model."""


class Pool:
    """What serves, seen from outside."""

    def __init__(self, config: dict[str, Any], http: httpx2.AsyncClient) -> None:
        self.url = f"http://127.0.0.1:{config['envoy']['port']}"
        self._admin = f"http://127.0.0.1:{config['gateway']['admin_port']}"
        self.ranks = [
            f"127.0.0.1:{group['port'] + index}"
            for group in config["groups"]
            for index in range(group["data_parallel_size"])
        ]
        self.http = http
        self.client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    async def status(self) -> list[dict[str, Any]]:
        """The rank table."""
        rows: list[dict[str, Any]] = (await self.http.get(f"{self._admin}/status")).json()["ranks"]
        return rows

    async def reservations(self) -> int:
        """Requests the gateway believes to be under way."""
        return sum(row["reservations"] for row in await self.status())

    async def becomes_idle(self, within_s: float) -> None:
        """Return once no reservation is open."""
        async with asyncio.timeout(within_s):
            while await self.reservations():
                await asyncio.sleep(0.01)

    async def stream(self, prompt: str, max_tokens: int) -> tuple[str, list[str]]:
        """The rank that served a streamed chat, and the pieces of its text."""
        raw = await self.client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=max_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        rank = raw.headers["x-wavegate-rank"]
        pieces = [
            chunk.choices[0].delta.content
            async for chunk in raw.parse()
            if chunk.choices and chunk.choices[0].delta.content
        ]
        return rank, pieces


@asynccontextmanager
async def serving(folder: Path, *groups: dict[str, Any], **gateway: Any) -> AsyncIterator[Pool]:
    """A deployment of these groups."""
    config = write_config(folder, groups, **gateway)
    async with (
        running_wavegate(folder, "up", "-c", "wavegate.yaml") as up,
        httpx2.AsyncClient(timeout=60) as http,
    ):
        await up.says("ready on http")
        pool = Pool(config, http)
        yield pool
        await pool.client.close()


def embedded(name: str, size: int, *args: str, **fields: Any) -> dict[str, Any]:
    return {
        "engine": "embedded",
        "name": name,
        "data_parallel_size": size,
        "port": consecutive_free_ports(size),
        "data_parallel_rpc_port": free_port(),
        "args": [*FAST, *args],
        **fields,
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    """Two groups of two ranks, for all tests of this module that change nothing in it."""
    async with serving(tmp_path_factory.mktemp("pool"), embedded("g0", 2), embedded("g1", 2)) as running:
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_requests_of_mixed_lengths_spread_over_all_ranks(pool: Pool) -> None:
    prompts = ["word " * length for length in (5, 40, 400, 4000) * 8]
    served = Counter(rank for rank, _ in await asyncio.gather(*(pool.stream(p, 16) for p in prompts)))
    assert set(served) == {"g0/0", "g0/1", "g1/0", "g1/1"}
    assert max(served.values()) <= 16


async def test_every_kind_of_call_is_answered(pool: Pool) -> None:
    chat = await pool.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=8
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens <= 8
    text = await pool.client.completions.create(model=MODEL, prompt="hello", max_tokens=8)
    assert text.choices[0].text
    pieces = [
        chunk.choices[0].text
        async for chunk in await pool.client.completions.create(
            model=MODEL, prompt="hello", max_tokens=8, stream=True
        )
    ]
    assert "".join(pieces) == text.choices[0].text


async def test_a_stream_arrives_piece_by_piece_in_order(pool: Pool) -> None:
    _, pieces = await pool.stream("count to ten", 40)
    whole = await pool.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "count to ten"}],
        max_tokens=40,
        extra_body={"ignore_eos": True},
    )
    assert len(pieces) > 20
    assert "".join(pieces) == whole.choices[0].message.content


async def test_get_routes_reach_a_rank(pool: Pool) -> None:
    assert [model.id async for model in pool.client.models.list()] == [MODEL]
    assert (await pool.http.get(f"{pool.url}/health")).status_code == 200


async def test_errors_of_a_rank_pass_unchanged(pool: Pool) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await pool.client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
    assert unknown.value.response.headers["x-wavegate-rank"]
    broken = await pool.http.post(f"{pool.url}/v1/chat/completions", content=b'{"model": ')
    assert broken.status_code == 400
    assert broken.json()["error"]


async def test_a_client_that_aborts_frees_its_reservation_and_its_engine(pool: Pool) -> None:
    await pool.becomes_idle(5)
    body = {"model": MODEL, "prompt": "x", "max_tokens": 5000, "stream": True, "ignore_eos": True}
    async with pool.http.stream("POST", f"{pool.url}/v1/completions", json=body) as response:
        await anext(response.aiter_lines())
        assert await pool.reservations() == 1
    await pool.becomes_idle(0.5)
    async with asyncio.timeout(5):
        while sum(row["running"] for row in await pool.status()):
            await asyncio.sleep(0.02)


async def test_two_hundred_streams_at_once_all_end_and_nothing_is_left(pool: Pool) -> None:
    results = await asyncio.gather(*(pool.stream(f"stream {n}", 30) for n in range(200)))
    assert all(len(pieces) >= 20 for _, pieces in results)
    served = Counter(rank for rank, _ in results)
    assert set(served) == {"g0/0", "g0/1", "g1/0", "g1/1"}
    # Between groups the balance is that of their step times, which so much work on one machine makes uneven.
    for group in ("g0", "g1"):
        one, other = served[f"{group}/0"], served[f"{group}/1"]
        assert max(one, other) <= 2 * min(one, other)
    await pool.becomes_idle(5)


async def test_at_rest_the_rank_table_agrees_with_the_ranks_own_metrics(pool: Pool) -> None:
    await pool.becomes_idle(5)
    async with asyncio.timeout(5):
        while any(row["running"] or row["waiting"] for row in await pool.status()):
            await asyncio.sleep(0.05)
    for row, endpoint in zip(await pool.status(), pool.ranks, strict=True):
        page = (await pool.http.get(f"http://{endpoint}/metrics")).text
        for gauge in ("num_requests_running", "num_requests_waiting"):
            line = next(line for line in page.splitlines() if line.startswith(f"vllm:{gauge}{{"))
            assert float(line.rpartition(" ")[2]) == 0
        assert (row["endpoint"], row["reservations"]) == (endpoint, 0)


async def test_prompts_that_share_a_beginning_meet_on_the_rank_that_has_it(pool: Pool) -> None:
    document = "the same long document. " * 400
    first, _ = await pool.stream(document + "first question", 8)
    ranks = {(await pool.stream(document + f"question {n}", 8))[0] for n in range(6)}
    assert ranks == {first}


async def test_a_rank_eight_times_slower_gets_few_requests(tmp_path: Path) -> None:
    """120 streams, 12 at a time, over two dense ranks."""
    slow = embedded("slow", 1, "--slowdown", "8")
    async with serving(tmp_path, slow, embedded("fast", 1)) as pool:
        slots = asyncio.Semaphore(12)

        async def one(n: int) -> str:
            async with slots:
                return (await pool.stream(f"request {n}", 10))[0]

        served = Counter(await asyncio.gather(*(one(n) for n in range(120))))
    assert served["fast/0"] + served["slow/0"] == 120
    assert served["slow/0"] <= 18


async def test_a_prompt_that_breaks_the_target_is_held_and_the_client_still_served(tmp_path: Path) -> None:
    """A TPOT target that any prefill breaks: phases are on, and every stream ends all the same."""
    group = embedded("g0", 2, max_num_batched_tokens=8192)
    targets = {"ttft_ms": 2000, "tpot_ms": 12}
    async with serving(tmp_path, group, targets=targets) as pool:
        streams = [asyncio.create_task(pool.stream(f"long answer {n}", 400)) for n in range(2)]
        await asyncio.sleep(1.5)
        prompts = [pool.stream(f"{n} " + "word " * 6000, 4) for n in range(6)]
        results = await asyncio.gather(*prompts, *streams)
    assert all(pieces for _, pieces in results)
    assert {rank for rank, _ in results} == {"g0/0", "g0/1"}
