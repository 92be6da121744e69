"""What clients and operators see of real vLLM ranks behind Envoy and the gateway."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest

from gateway.config import Config
from gateway.envoy_route import RANK_HEADER
from gateway.server import GatewayServer
from tests.builders_ports import consecutive_free_ports, free_port
from tests.builders_vllm_pool import RANKS, VllmPool, vllm_pool
from vllm_ranks.reports import kv_subscriber
from vllm_ranks.reports.kv_events import Batch
from vllm_ranks.reports.kv_subscriber import batch_of

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
    """Two real ranks, whose waves show in their logs and whose prompts are known as tokens."""
    folder = tmp_path_factory.mktemp("pool")
    with vllm_pool(
        folder,
        args=("--enable-prompt-tokens-details",),
        env={"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_SERVER_DEV_MODE": "1"},
        # Nothing here fails; a machine that stands still for a while must not be taken for a hang.
        supervision={"hang_after_s": 30},
        group={
            "kv_events_port": consecutive_free_ports(2 * RANKS),
            "tokenizer": str(folder / "tiny-moe"),
        },
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


# --- The prefix caches, as the gateway knows them by KV cache events --------------------------------------

BLOCK = 128
"""Tokens of a block on a CPU."""


def numbers(seed: int) -> list[int]:
    """A prompt of 600 tokens that no other test has: four full blocks and a part of one."""
    return [(seed * position) % 500 for position in range(600)]


def explained(admin_url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What a gateway would decide about a request."""
    answer: dict[str, Any] = httpx2.post(f"{admin_url}/explain?path={path}", json=body, timeout=10).json()
    return answer


def cached_tokens(pool: VllmPool, token_ids: list[int], *, admin_url: str | None = None) -> list[int]:
    """What each rank has of a prompt by a gateway's picture, in order of rank."""
    body = {"model": pool.model, "prompt": token_ids}
    ranks = explained(admin_url or pool.admin_url, "/v1/completions", body)["ranks"]
    return [row["cached_tokens"] for row in sorted(ranks, key=lambda row: str(row["rank"]))]


def complete(pool: VllmPool, token_ids: list[int], *, url: str | None = None) -> int:
    """One completion of a prompt that is given as tokens, through Envoy or on one rank.

    Returns how many of its tokens the rank took from its cache.
    """
    body = {"model": pool.model, "prompt": token_ids, "max_tokens": 2}
    answer = httpx2.post(f"{url or pool.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200
    return cached_by(answer.json())


def cached_by(answer: dict[str, Any]) -> int:
    """How much a rank says it took from its cache."""
    details = answer["usage"]["prompt_tokens_details"]
    return details["cached_tokens"] if details is not None else 0


def reset_caches(pool: VllmPool) -> None:
    """Empty the prefix cache of every rank (only in vLLM's development mode)."""
    for url in pool.rank_urls:
        assert httpx2.post(f"{url}/reset_prefix_cache", timeout=60).status_code == 200
        # A rank publishes after a step, so one that is idle keeps this to itself.
        complete(pool, [1, 2, 3], url=url)


def test_the_gateway_knows_exactly_what_a_real_rank_has_of_a_prompt(pool: VllmPool) -> None:
    prompt, branch = numbers(7), [*numbers(7)[: 4 * BLOCK], *range(200, 400)]
    assert complete(pool, prompt) == 0
    assert eventually(lambda: sorted(cached_tokens(pool, prompt)) == [0, 4 * BLOCK])
    assert cached_tokens(pool, prompt[1:]) == [0, 0]
    holder = cached_tokens(pool, prompt).index(4 * BLOCK)
    # Asked on the rank itself: the gateway has not sent it there, it can only have been told.
    assert complete(pool, branch, url=pool.rank_urls[holder]) == 4 * BLOCK
    assert eventually(lambda: cached_tokens(pool, branch)[holder] == 5 * BLOCK)
    assert complete(pool, branch) == 5 * BLOCK
    reset_caches(pool)
    assert eventually(lambda: cached_tokens(pool, prompt) == [0, 0])


def wait_for_reports(pool: VllmPool) -> None:
    """Until the gateway has heard each rank twice more."""

    def heard() -> list[float]:
        lines = httpx2.get(f"{pool.admin_url}/metrics", timeout=10).text.splitlines()
        counts = [one for one in lines if one.startswith("wavegate_scrapes_total{") and '"ok"' in one]
        assert len(counts) == 2
        return [float(one.rpartition(" ")[2]) for one in counts]

    before = heard()
    assert eventually(lambda: all(now >= then + 2 for now, then in zip(heard(), before, strict=True)))


def test_a_chat_is_known_as_the_tokens_that_a_real_rank_makes_of_it(pool: VllmPool) -> None:
    def group() -> dict[str, Any]:
        (group,) = pool.get_json(f"{pool.admin_url}/status")["groups"]
        return dict(group)

    wait_for_reports(pool)
    before = group()
    story = [{"role": "system", "content": "the water and the wind " * 100}, *hello()]
    for fields in (
        {"messages": story},
        {"messages": story, "tools": [WEATHER_TOOL], "tool_choice": "none"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "façade 東京 🌊 " * 99}]}]},
    ):
        # Long enough for a report between the first token and the end: only then is it known as computed.
        body = {"model": pool.model, "max_tokens": 16, **fields}
        first = httpx2.post(f"{pool.url}/v1/chat/completions", json=body, timeout=60)
        prompt_tokens = first.json()["usage"]["prompt_tokens"]
        holder = int(first.headers[RANK_HEADER].rpartition("/")[2])
        whole = prompt_tokens // BLOCK * BLOCK

        def seen(body: dict[str, Any] = body, holder: int = holder) -> int:
            ranks = explained(pool.admin_url, "/v1/chat/completions", body)["ranks"]
            return int(next(row for row in ranks if row["rank"].endswith(f"/{holder}"))["cached_tokens"])

        request = explained(pool.admin_url, "/v1/chat/completions", body)["request"]
        assert (request["prompt_tokens"], request["prompt_is_exact"]) == (prompt_tokens, True)
        assert eventually(lambda seen=seen, whole=whole: seen() == whole)
        again = httpx2.post(f"{pool.rank_urls[holder]}/v1/chat/completions", json=body, timeout=60)
        assert cached_by(again.json()) == whole
        wait_for_reports(pool)  # else the first token of that answer would be taken for the next prompt's

    assert eventually(lambda: group()["prompts_found"] >= before["prompts_found"] + 3)
    assert group()["prompts_missing"] == before["prompts_missing"]


def test_a_salted_prompt_is_found_only_with_its_salt(pool: VllmPool) -> None:
    body = {"model": pool.model, "prompt": numbers(17), "max_tokens": 2, "cache_salt": "mine"}
    assert httpx2.post(f"{pool.url}/v1/completions", json=body, timeout=60).status_code == 200

    def most(**fields: Any) -> int:
        ranks = explained(pool.admin_url, "/v1/completions", {**body, **fields})["ranks"]
        return max(row["cached_tokens"] for row in ranks)

    assert eventually(lambda: most() == 4 * BLOCK)
    assert most(cache_salt=None) == most(cache_salt="yours") == 0


@asynccontextmanager
async def another_gateway(pool: VllmPool) -> AsyncIterator[str]:
    """A second gateway over the same ranks, in this process: the address of its admin API."""
    group = {
        "engine": "adopted",
        "name": pool.group_name,
        "model": pool.model,
        "endpoints": [url.removeprefix("http://") for url in pool.rank_urls],
        "tokenizer": pool.config["groups"][0]["tokenizer"],
    }
    gateway = {"admin_port": free_port(), "ext_proc_listen": f"127.0.0.1:{free_port()}"}
    stop = asyncio.Event()
    server = GatewayServer(Config.model_validate({"groups": [group], "gateway": gateway}))
    serving = asyncio.create_task(server.serve(stop))
    admin_url = f"http://127.0.0.1:{gateway['admin_port']}"
    try:
        assert await eventually_async(lambda: answers(f"{admin_url}/readyz"))
        yield admin_url
    finally:
        stop.set()
        await serving


def answers(url: str) -> bool:
    try:
        return bool(httpx2.get(url, timeout=10).status_code == 200)
    except httpx2.TransportError:
        return False


async def eventually_async(condition: Callable[[], bool], limit_s: float = 20.0) -> bool:
    """Whether a condition comes true before the limit; asked in a thread, while the gateway goes on."""
    end_s = time.monotonic() + limit_s
    while not await asyncio.to_thread(condition):
        if time.monotonic() > end_s:
            return False
        await asyncio.sleep(0.05)
    return True


async def test_a_gateway_that_starts_later_learns_what_real_ranks_have_told_before(pool: VllmPool) -> None:
    prompt = numbers(11)
    await asyncio.to_thread(complete, pool, prompt)
    async with another_gateway(pool) as admin_url:
        assert await eventually_async(
            lambda: max(cached_tokens(pool, prompt, admin_url=admin_url)) == 4 * BLOCK
        )


async def test_events_of_a_real_rank_that_got_lost_on_the_way_are_asked_for_again(
    pool: VllmPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[Batch] = []

    def lossy(frames: list[bytes]) -> Batch | None:
        batch = batch_of(frames)
        if batch is not None and not lost:
            lost.append(batch)
            return None
        return batch

    first, second = numbers(13), numbers(19)
    async with another_gateway(pool) as admin_url:

        def seen(prompt: list[int]) -> int:
            return cached_tokens(pool, prompt, admin_url=admin_url)[0]

        await asyncio.to_thread(complete, pool, first, url=pool.rank_urls[0])
        assert await eventually_async(lambda: seen(first) == 4 * BLOCK)
        monkeypatch.setattr(kv_subscriber, "batch_of", lossy)
        await asyncio.to_thread(complete, pool, second, url=pool.rank_urls[0])
        assert await eventually_async(lambda: bool(lost))
        assert await asyncio.to_thread(seen, second) < 4 * BLOCK
        await asyncio.to_thread(complete, pool, numbers(23), url=pool.rank_urls[0])
        assert await eventually_async(lambda: seen(second) == 4 * BLOCK)
        assert await asyncio.to_thread(seen, first) == 4 * BLOCK
