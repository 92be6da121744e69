"""What clients and operators see of real vLLM ranks behind Envoy and the gateway."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import httpx2
import openai
import pytest
import zmq.asyncio

from ext_proc.vocabulary import Rank
from gateway.envoy_route import RANK_HEADER
from tests.builders_vllm_pool import RANKS, VllmPool, vllm_pool
from tests.builders_wavegate import consecutive_free_ports
from vllm_ranks.reports.kv_events import CacheView, EventOrder, KvEvent
from vllm_ranks.reports.kv_subscriber import find_source, follow_all, replay

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

WEATHER_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmPool]:
    """Two real ranks, whose waves show in their logs."""
    with vllm_pool(
        tmp_path_factory.mktemp("pool"),
        env={"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_SERVER_DEV_MODE": "1"},
        # Nothing here fails; a machine that stands still for a while must not be taken for a hang.
        supervision={"hang_after_s": 30},
        group={"kv_events_port": consecutive_free_ports(2 * RANKS)},
    ) as pool:
        yield pool


@pytest.fixture
def client(pool: VllmPool) -> Iterator[openai.OpenAI]:
    """The official client, which hides no failure by trying again."""
    with openai.OpenAI(base_url=f"{pool.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def eventually(condition: Callable[[], bool], limit_s: float = 20.0) -> bool:
    """Whether a condition comes true before the limit."""
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True


def hello() -> list[Any]:
    """The messages of a chat."""
    return [{"role": "user", "content": "Hello there"}]


# --- The API, unchanged --------------------------------------------------------------------------------


def test_chat(client: openai.OpenAI, pool: VllmPool) -> None:
    answer = client.chat.completions.create(model=pool.model, messages=hello(), max_tokens=8)
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_completions(client: openai.OpenAI, pool: VllmPool) -> None:
    answer = client.completions.create(model=pool.model, prompt="Once", max_tokens=8, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.text for choice in answer.choices)


def test_chat_streamed(client: openai.OpenAI, pool: VllmPool) -> None:
    stream = client.chat.completions.create(
        model=pool.model,
        messages=hello(),
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_completions_streamed_piece_by_piece(client: openai.OpenAI, pool: VllmPool) -> None:
    arrivals = []
    for chunk in client.completions.create(model=pool.model, prompt="Once", max_tokens=40, stream=True):
        arrivals.append((time.monotonic(), chunk.choices[0].text))
    assert len(arrivals) > 10
    assert arrivals[-1][0] - arrivals[0][0] > 0.05, "the stream came in one piece"


def test_logprobs(client: openai.OpenAI, pool: VllmPool) -> None:
    answer = client.chat.completions.create(
        model=pool.model, messages=hello(), max_tokens=4, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(token.top_logprobs) for token in logprobs.content] == [3] * 4


def test_tools_reach_the_model_untouched(client: openai.OpenAI, pool: VllmPool) -> None:
    """The tiny model's chat template writes the tools into the prompt, so they show in its length."""

    def prompt_tokens(**fields: Any) -> int:
        usage = client.chat.completions.create(
            model=pool.model, messages=hello(), max_tokens=1, **fields
        ).usage
        assert usage is not None
        return usage.prompt_tokens

    plain = prompt_tokens()
    with_tools = prompt_tokens(tools=[WEATHER_TOOL], tool_choice="none")
    assert with_tools > plain + 50


def test_an_error_of_vllm_arrives_as_vllm_wrote_it(pool: VllmPool) -> None:
    body = {"model": "no-such-model", "prompt": "x"}
    through = httpx2.post(f"{pool.url}/v1/completions", json=body, timeout=30)
    direct = httpx2.post(f"{pool.rank_urls[0]}/v1/completions", json=body, timeout=30)
    assert through.status_code == direct.status_code == 404
    assert through.content == direct.content
    assert "no-such-model" in through.text


def test_a_request_that_vllm_refuses_is_refused_as_vllm_does(client: openai.OpenAI, pool: VllmPool) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model=pool.model, prompt="x " * 40_000, max_tokens=1)


def test_a_body_that_is_too_large_is_answered_413(pool: VllmPool) -> None:
    body = {"model": pool.model, "prompt": "x" * (17 << 20)}
    answer = httpx2.post(f"{pool.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


def test_models_are_listed(client: openai.OpenAI, pool: VllmPool) -> None:
    assert [model.id for model in client.models.list()] == [pool.model]


# --- Balance ------------------------------------------------------------------------------------------


def test_both_ranks_serve_and_say_so(client: openai.OpenAI, pool: VllmPool) -> None:
    def ask(number: int) -> str | None:
        raw = client.completions.with_raw_response.create(
            model=pool.model, prompt=f"Number {number}", max_tokens=16
        )
        return raw.headers.get(RANK_HEADER)

    before = [pool.metric(rank, "vllm:request_success_total") for rank in range(RANKS)]
    with ThreadPoolExecutor(4) as threads:
        served = Counter(threads.map(ask, range(16)))
    assert set(served) == {f"{pool.group_name}/{rank}" for rank in range(RANKS)}
    after = [pool.metric(rank, "vllm:request_success_total") for rank in range(RANKS)]
    assert [after[rank] - before[rank] for rank in range(RANKS)] == [
        served[f"{pool.group_name}/{rank}"] for rank in range(RANKS)
    ]


def test_what_real_ranks_report_is_in_the_gateways_picture(client: openai.OpenAI, pool: VllmPool) -> None:
    def is_seen() -> bool:
        row = next(row for row in pool.status() if row["rank"] == rank)
        return bool(row["running"] == 1 and row["reservations"] == 1 and row["kv_cache_usage"] > 0)

    raw = client.completions.with_raw_response.create(
        model=pool.model, prompt="A long one " * 100, max_tokens=2000, stream=True
    )
    rank = raw.headers[RANK_HEADER]
    stream = raw.parse()
    assert eventually(is_seen)
    stream.close()
    assert eventually(lambda: all(row["running"] == row["reservations"] == 0 for row in pool.status()))
    assert {row["state"] for row in pool.status()} == {"fresh"}


def test_a_client_that_goes_away_aborts_its_request_in_the_engine(
    client: openai.OpenAI, pool: VllmPool
) -> None:
    """vLLM 0.32 does not count such a request as finished (`request_success`), it just no longer runs."""

    def running() -> float:
        return sum(pool.metric(rank, "vllm:num_requests_running") for rank in range(RANKS))

    def generated() -> float:
        return sum(pool.metric(rank, "vllm:generation_tokens_total") for rank in range(RANKS))

    before = generated()
    max_tokens = 8000
    stream = client.completions.create(model=pool.model, prompt="Long", max_tokens=max_tokens, stream=True)
    next(stream)
    assert eventually(lambda: running() == 1)
    stream.close()
    assert eventually(lambda: running() == 0)
    assert generated() - before < max_tokens / 2


def test_a_rank_tells_its_load_in_a_header_when_asked(client: openai.OpenAI, pool: VllmPool) -> None:
    raw = client.completions.with_raw_response.create(
        model=pool.model,
        prompt="Hi",
        max_tokens=2,
        extra_headers={"endpoint-load-metrics-format": "json"},
    )
    load = raw.headers["endpoint-load-metrics"]
    assert load.startswith("JSON ")
    assert "kv_cache_usage_perc" in load


# --- Waves --------------------------------------------------------------------------------------------


def waves(pool: VllmPool) -> list[int]:
    """The waves that have ended, as rank 0's coordinator logs them."""
    return [int(number) for number in re.findall(r"Moving DP wave from \d+ to (\d+)", pool.rank_log(0))]


def is_silent(pool: VllmPool, for_s: float) -> bool:
    """Whether the idle rank runs no dummy batches for a while."""

    def batches() -> int:
        return pool.rank_log(1).count("ubatch_slices")

    before = batches()
    time.sleep(for_s)
    return batches() == before


def test_waves_advance_and_the_group_falls_silent(client: openai.OpenAI, pool: VllmPool) -> None:
    assert eventually(lambda: bool(waves(pool)) and is_silent(pool, 1.0))
    before = waves(pool)
    for _ in range(2):
        count = len(waves(pool))
        client.completions.create(model=pool.model, prompt="Wake up", max_tokens=4)
        assert eventually(lambda count=count: len(waves(pool)) > count)
    after = waves(pool)
    assert after[: len(before)] == before
    assert after == sorted(set(after))
    assert eventually(lambda: is_silent(pool, 2.0))


# --- KV cache events ----------------------------------------------------------------------------------


class Follower:
    """A picture of every rank's cache, kept by what the ranks publish."""

    def __init__(self) -> None:
        self.views = {rank: CacheView(10_000) for rank in range(RANKS)}
        self.unknown = Counter[int]()

    def on_cache_unknown(self, rank: Rank) -> None:
        self.unknown[rank.index] += 1
        self.views[rank.index].clear()

    def on_cache_events(self, rank: Rank, events: list[KvEvent]) -> None:
        self.views[rank.index].apply(events)

    def cached_tokens(self, token_ids: list[int]) -> int:
        """On the rank that has most."""
        return max(view.cached_tokens(token_ids) for view in self.views.values())


@pytest.fixture
async def follower(pool: VllmPool) -> AsyncIterator[Follower]:
    """Follows both ranks as long as the test lasts."""
    follower = Follower()
    ranks = [
        Rank(pool.group_name, rank, url.removeprefix("http://")) for rank, url in enumerate(pool.rank_urls)
    ]
    following = asyncio.create_task(follow_all(ranks, follower))
    try:
        assert await eventually_async(lambda: all(follower.unknown[rank] for rank in range(RANKS)))
        yield follower
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def eventually_async(condition: Callable[[], bool], limit_s: float = 20.0) -> bool:
    """Whether a condition comes true before the limit, while others go on."""
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        await asyncio.sleep(0.05)
    return True


async def complete(pool: VllmPool, token_ids: list[int], *, url: str | None = None) -> None:
    """One completion of a prompt that is given as tokens, through Envoy or on one rank."""
    body = {"model": pool.model, "prompt": token_ids, "max_tokens": 2}
    async with httpx2.AsyncClient(timeout=60) as http:
        assert (await http.post(f"{url or pool.url}/v1/completions", json=body)).status_code == 200


async def reset_caches(pool: VllmPool) -> None:
    """Empty the prefix cache of every rank (only in vLLM's development mode)."""
    async with httpx2.AsyncClient(timeout=60) as http:
        for url in pool.rank_urls:
            assert (await http.post(f"{url}/reset_prefix_cache")).status_code == 200
            # A rank publishes after a step, so one that is idle keeps this to itself.
            await complete(pool, [1, 2, 3], url=url)


async def test_the_picture_of_a_real_ranks_cache_follows_its_events(
    pool: VllmPool, follower: Follower
) -> None:
    prompt = [(7 * position) % 500 for position in range(600)]
    await complete(pool, prompt)
    # Blocks are of 128 tokens on a CPU; the last, incomplete one is not kept.
    assert await eventually_async(lambda: follower.cached_tokens(prompt) == 512)
    assert follower.cached_tokens(prompt[1:]) == 0
    await complete(pool, [*prompt[:512], *range(200, 400)])
    assert await eventually_async(lambda: follower.cached_tokens([*prompt[:512], *range(200, 400)]) == 640)
    await reset_caches(pool)
    assert await eventually_async(lambda: follower.cached_tokens(prompt) == 0)


async def test_events_of_a_real_rank_that_were_missed_are_sent_again(
    pool: VllmPool, follower: Follower
) -> None:
    """One follower sees everything as it comes, another begins after it has happened."""
    prompt = [(11 * position) % 500 for position in range(600)]
    await complete(pool, prompt)
    assert await eventually_async(lambda: follower.cached_tokens(prompt) == 512)
    late = Follower()
    ranks = [Rank("g", rank, url.removeprefix("http://")) for rank, url in enumerate(pool.rank_urls)]
    following = asyncio.create_task(follow_all(ranks, late))
    try:
        assert await eventually_async(lambda: late.cached_tokens(prompt) == 512)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_a_gap_in_the_events_of_a_real_rank_is_closed(pool: VllmPool) -> None:
    prompt = [(13 * position) % 500 for position in range(600)]
    await complete(pool, prompt)
    async with aiohttp.ClientSession() as session:
        for rank, url in enumerate(pool.rank_urls):
            address = Rank(pool.group_name, rank, url.removeprefix("http://"))
            source = await find_source(session, address)
            assert source is not None
            with zmq.asyncio.Context() as context:
                everything = await replay(context, source, 0)
                if len(everything) < 3:
                    continue  # this rank has published next to nothing so far
                order = EventOrder()
                assert order.accept(everything[0]) is None
                gap = order.accept(everything[2])
                assert gap is not None
                assert (gap.first, gap.end, gap.restarted) == (1, 2, False)
                again = await replay(context, source, gap.first)
                assert again == everything[1:]
                return
    pytest.fail("no rank has published enough")
