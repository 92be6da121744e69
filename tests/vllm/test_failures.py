"""Failures of real vLLM ranks under load: how soon nothing is sent there any more, and that service returns.

`make test-vllm ARGS='-k failures -s'` prints what docs/vllm-failures.md tells.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.builders_failures import Observation, observed, until
from tests.builders_processes import running
from tests.builders_vllm_pool import VllmPool, vllm_pool

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

RECOVERY_LIMIT_S = 240.0
AFTER_FAILED_ANSWER_S = 1.0
"""No request goes to a dead group later than this after its first failed answer."""
AFTER_HANG_S = 3.0
"""No request goes to a hanging group later than this. Tests allow for a machine that is busy otherwise."""
SLACK = 2.0
PATIENT = {"max_failures_in_a_row": 100}
"""Failures follow each other closely here."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmPool]:
    """Ranks as the launcher starts them."""
    with vllm_pool(tmp_path_factory.mktemp("pool"), supervision=PATIENT) as pool:
        yield pool


@pytest.fixture(scope="module")
def draining_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmPool]:
    """Ranks that finish their requests when they are asked to stop; hangs end in a restart soon."""
    with vllm_pool(
        tmp_path_factory.mktemp("draining"),
        args=("--shutdown-timeout=20",),
        supervision={**PATIENT, "restart_hung_after_s": 6},
    ) as pool:
        yield pool


def send(number: signal.Signals, pids: list[int]) -> None:
    """Signal processes that are known to run."""
    for pid in pids:
        os.kill(pid, number)


async def until_back(seen: Observation) -> None:
    """Wait until the group serves again."""
    await until(lambda: seen.served_again_s is not None, RECOVERY_LIMIT_S, "the group serves again")


def expect_nothing_sent_in_vain(seen: Observation, limit_s: float) -> None:
    """No request was sent to a rank that did not answer it, later than the limit."""
    last_s = seen.last_sent_to_failure_s
    assert last_s is None or last_s <= limit_s


def expect_out_soon_after_first_failed_answer(seen: Observation) -> None:
    """The promise about deaths."""
    assert seen.first_failed_s is not None
    expect_nothing_sent_in_vain(seen, seen.first_failed_s + AFTER_FAILED_ANSWER_S * SLACK)


async def test_a_killed_rank(pool: VllmPool) -> None:
    """SIGKILL to the API server of rank 1: its engine would go on without it."""
    async with observed(pool) as seen:
        await until(lambda: len(seen.sent) >= 8, 60, "requests are answered")
        server, *below = pool.tree(1)
        seen.cause(lambda: os.kill(server, signal.SIGKILL))
        await until_back(seen)
    print(seen.report("SIGKILL of rank 1"))
    expect_out_soon_after_first_failed_answer(seen)
    assert running([server, *below]) == []


async def test_a_killed_coordinator(pool: VllmPool) -> None:
    """SIGKILL to the coordinator, which vLLM does not watch in external mode."""
    async with observed(pool) as seen:
        await until(lambda: len(seen.sent) >= 8, 60, "requests are answered")
        (coordinator,) = pool.processes("VLLM::DPCoordinator")
        seen.cause(lambda: os.kill(coordinator, signal.SIGKILL))
        await until_back(seen)
    print(seen.report("SIGKILL of the coordinator"))
    expect_nothing_sent_in_vain(seen, AFTER_FAILED_ANSWER_S * SLACK)


async def test_a_hang_that_passes(pool: VllmPool) -> None:
    """SIGSTOP to the engine and worker of rank 1 for 20 s: rank 0 hangs with it, in a collective."""
    async with observed(pool) as seen:
        await until(lambda: len(seen.sent) >= 8, 60, "requests are answered")
        stopped = pool.tree(1)
        seen.cause(lambda: send(signal.SIGSTOP, stopped))
        await until(lambda: seen.out_s is not None, 30, "the group is out of rotation")
        await until(lambda: seen.rotation[-1][0] - seen.cause_s >= 20, 30, "20 s have passed")
        send(signal.SIGCONT, stopped)
        await until_back(seen)
    print(seen.report("SIGSTOP of rank 1 for 20 s"))
    expect_nothing_sent_in_vain(seen, AFTER_HANG_S * SLACK)


async def test_a_rank_that_is_asked_to_stop(pool: VllmPool) -> None:
    """SIGTERM to rank 1 by somebody else, without --shutdown-timeout."""
    async with observed(pool) as seen:
        await until(lambda: len(seen.sent) >= 8, 60, "requests are answered")
        server = pool.server(1)
        seen.cause(lambda: os.kill(server, signal.SIGTERM))
        await until_back(seen)
    print(seen.report("SIGTERM of rank 1, --shutdown-timeout 0"))
    expect_out_soon_after_first_failed_answer(seen)


async def test_a_rank_that_is_asked_to_stop_and_drains(draining_pool: VllmPool) -> None:
    """SIGTERM to rank 1 by somebody else, with --shutdown-timeout: it answers 200 and aborts."""
    async with observed(draining_pool) as seen:
        await until(lambda: len(seen.sent) >= 8, 60, "requests are answered")
        server = draining_pool.server(1)
        seen.cause(lambda: os.kill(server, signal.SIGTERM))
        await until_back(seen)
    print(seen.report("SIGTERM of rank 1, --shutdown-timeout 20"))
    expect_nothing_sent_in_vain(seen, (seen.first_failed_s or 0.0) + AFTER_FAILED_ANSWER_S * SLACK)


async def test_a_hang_that_does_not_pass(draining_pool: VllmPool) -> None:
    """SIGSTOP to all of rank 1, for good: the group is restarted."""
    async with observed(draining_pool) as seen:
        await until(lambda: len(seen.sent) >= 8, 60, "requests are answered")
        stopped = draining_pool.tree(1)
        seen.cause(lambda: send(signal.SIGSTOP, stopped))
        await until_back(seen)
    print(seen.report("SIGSTOP of rank 1 for good, restart_hung_after_s 6"))
    expect_nothing_sent_in_vain(seen, AFTER_HANG_S * SLACK)
    assert running(stopped) == []
