"""What looks like a hang of real vLLM ranks and is none, and one that no report shows."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import httpx2
import pytest

from tests.builders_failures import until
from tests.builders_vllm_pool import VllmPool, vllm_pool

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

HANG_AFTER_S = 2.0
PROMPT_TOKENS = 12_000
LIMIT_S = 20.0
"""For what takes 3 s on a machine that does nothing else."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmPool]:
    """Ranks that read prompts in small steps."""
    small_steps = {"max_num_batched_tokens": 64}
    with vllm_pool(tmp_path_factory.mktemp("pool"), group=small_steps) as pool:
        yield pool


async def ask(pool: VllmPool, prompt: str | list[int]) -> int:
    """The status of the answer to a prompt."""
    async with httpx2.AsyncClient(base_url=pool.url, timeout=120) as http:
        body = {"model": pool.model, "prompt": prompt, "max_tokens": 1}
        return (await http.post("/v1/completions", json=body)).status_code


async def keep_asking(pool: VllmPool) -> None:
    """Ask again after each answer: ranks that have not gone to sleep yet need no coordinator for one."""
    while True:
        await ask(pool, "Hello")
        await asyncio.sleep(0.5)


def steps(pool: VllmPool) -> list[float]:
    """How many steps each rank has counted."""
    return [pool.metric(rank, "vllm:iteration_tokens_total_count") for rank in (0, 1)]


async def test_a_long_prompt_is_no_hang_though_none_of_its_steps_is_counted_before_the_last(
    pool: VllmPool,
) -> None:
    asking = asyncio.create_task(ask(pool, [5 + index % 200 for index in range(PROMPT_TOKENS)]))
    counts, counted_s, longest_s = [0.0, 0.0], time.monotonic(), 0.0
    while not asking.done():
        await asyncio.sleep(0.1)
        before, counts = counts, await asyncio.to_thread(steps, pool)
        if counts != before:
            counted_s = time.monotonic()
        longest_s = max(longest_s, time.monotonic() - counted_s)
    assert await asking == 200
    assert longest_s > 1.5 * HANG_AFTER_S
    assert "is out of rotation" not in pool.gateway_log()


async def test_the_loss_of_a_coordinator_is_found_where_nobody_watches_it(pool: VllmPool) -> None:
    """As with ranks that somebody else has started. All reports go on to say that nothing runs."""
    os.kill(pool.process.pid, signal.SIGSTOP)
    try:
        (coordinator,) = pool.processes("VLLM::DPCoordinator")
        os.kill(coordinator, signal.SIGKILL)
        asking = asyncio.create_task(keep_asking(pool))
        started_s = time.monotonic()
        await until(lambda: not pool.is_serving(), LIMIT_S, "the group is out of rotation")
        print(f"loss of the coordinator, unsupervised: out after {time.monotonic() - started_s:.1f} s")
        assert pool.group()["trouble"]["verdict"] == "hung"
        assert [pool.metric(rank, "vllm:num_requests_running") for rank in (0, 1)] == [0, 0]
        asking.cancel()
    finally:
        os.kill(pool.process.pid, signal.SIGCONT)
