"""What a failure looks like from outside: a steady load through Envoy, all ranks' `/health`, the rotation."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby

import aiohttp

from tests.builders_vllm_pool import RANKS, VllmPool

HEALTH_INTERVAL_S = 0.2
ROTATION_INTERVAL_S = 0.03
REQUEST_TIMEOUT_S = 60.0
PAUSE_AFTER_FAILURE_S = 0.1


@dataclass(slots=True)
class Sent:
    """One request of the load."""

    started_s: float
    ended_s: float = 0.0
    rank: str | None = None
    """The rank that Envoy sent it to; `None`: to none."""
    outcome: str = ""
    """`ok`, or what the client saw instead."""

    @property
    def failed_on_a_rank(self) -> bool:
        """Whether a rank was given it and did not answer it."""
        return self.outcome != "ok" and self.rank is not None


@dataclass(slots=True)
class Observation:
    """All that was seen of one failure; times in seconds since it was caused."""

    cause_s: float = 0.0
    """On the monotonic clock."""
    sent: list[Sent] = field(default_factory=list)
    health: list[list[tuple[float, str]]] = field(default_factory=lambda: [[] for _ in range(RANKS)])
    rotation: list[tuple[float, bool]] = field(default_factory=list)

    def cause(self, fault: Callable[[], None]) -> None:
        """Cause the failure."""
        self.cause_s = time.monotonic()
        fault()

    @property
    def first_failed_s(self) -> float | None:
        """When the first client was told of it."""
        failed = [r.ended_s for r in self.sent if r.failed_on_a_rank and r.ended_s >= self.cause_s]
        return min(failed) - self.cause_s if failed else None

    @property
    def last_sent_to_failure_s(self) -> float | None:
        """When the last request was sent to a rank that did not answer it."""
        failed = [r.started_s for r in self.sent if r.failed_on_a_rank and r.ended_s >= self.cause_s]
        return max(failed) - self.cause_s if failed else None

    @property
    def out_s(self) -> float | None:
        """When the group left rotation."""
        return next((at_s for at_s, is_in in self._rotation_since() if not is_in), None)

    @property
    def back_s(self) -> float | None:
        """When it was back for good."""
        rotation = self._rotation_since()
        last_out_s = max((at_s for at_s, is_in in rotation if not is_in), default=None)
        if last_out_s is None:
            return None
        return next((at_s for at_s, _ in rotation if at_s > last_out_s), None)

    def _rotation_since(self) -> list[tuple[float, bool]]:
        return [(at_s - self.cause_s, is_in) for at_s, is_in in self.rotation if at_s >= self.cause_s]

    @property
    def served_again_s(self) -> float | None:
        """When the first request sent afterwards had been answered."""
        back_s = self.back_s
        if back_s is None:
            return None
        ends = [
            r.ended_s for r in self.sent if r.outcome == "ok" and r.started_s >= self.cause_s + back_s - 0.1
        ]
        return min(ends) - self.cause_s if ends else None

    def outcomes(self) -> dict[str, int]:
        """How often clients saw what, from the failure on."""
        counts: dict[str, int] = {}
        for request in self.sent:
            if request.ended_s >= self.cause_s:
                counts[request.outcome] = counts.get(request.outcome, 0) + 1
        return counts

    def health_story(self, rank: int) -> str:
        """What `/health` of a rank said, and until when."""
        seen = [(at_s - self.cause_s, said) for at_s, said in self.health[rank] if at_s >= self.cause_s - 0.3]
        runs = [(said, [at_s for at_s, _ in run]) for said, run in groupby(seen, key=lambda entry: entry[1])]
        return ", ".join(f"{said} until {times[-1]:.1f} s" for said, times in runs)

    def report(self, title: str) -> str:
        """Everything, for people."""
        shown = {
            "first failed answer": self.first_failed_s,
            "out of rotation": self.out_s,
            "last request sent to a rank in vain": self.last_sent_to_failure_s,
            "back in rotation": self.back_s,
            "first answer afterwards": self.served_again_s,
        }
        lines = [f"=== {title}"]
        lines += [f"  {name}: {'-' if at_s is None else f'{at_s:.2f} s'}" for name, at_s in shown.items()]
        lines += [f"  /health of rank {rank}: {self.health_story(rank)}" for rank in range(RANKS)]
        lines += [f"  clients saw {outcome!r}: {count}" for outcome, count in sorted(self.outcomes().items())]
        return "\n".join(lines)


@asynccontextmanager
async def observed(
    pool: VllmPool, *, concurrency: int = 4, max_tokens: int = 40
) -> AsyncIterator[Observation]:
    """Load the pool and watch it, until the block ends and the requests under way have."""
    seen = Observation()
    stop = asyncio.Event()
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as tasks,
    ):
        for worker in range(concurrency):
            tasks.create_task(_send(session, pool, seen, stop, worker, max_tokens))
        for rank in range(RANKS):
            tasks.create_task(_watch_health(pool, seen, stop, rank))
        tasks.create_task(_watch_rotation(session, pool, seen, stop))
        try:
            yield seen
        finally:
            stop.set()


async def _send(
    session: aiohttp.ClientSession,
    pool: VllmPool,
    seen: Observation,
    stop: asyncio.Event,
    worker: int,
    max_tokens: int,
) -> None:
    number = 0
    while not stop.is_set():
        number += 1
        body = {
            "model": pool.model,
            "prompt": f"Worker {worker} sends request {number} and wants an answer",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        request = Sent(time.monotonic())
        await _send_one(session, f"{pool.url}/v1/completions", body, request)
        request.ended_s = time.monotonic()
        seen.sent.append(request)
        if request.outcome != "ok":
            await asyncio.sleep(PAUSE_AFTER_FAILURE_S)


async def _send_one(session: aiohttp.ClientSession, url: str, body: object, request: Sent) -> None:
    try:
        async with session.post(url, json=body) as answer:
            request.rank = answer.headers.get("x-wavegate-rank") or None
            text = (await answer.read()).decode(errors="replace")
    except TimeoutError:
        request.outcome = "no end within the client's patience"
    except aiohttp.ClientError as error:
        request.outcome = f"stream cut ({type(error).__name__})"
    else:
        request.outcome = _outcome(answer.status, text)


def _outcome(status: int, text: str) -> str:
    if status != 200:
        try:
            error = json.loads(text)["error"]
            return f"{status} {error.get('code') or error.get('type')}"
        except (ValueError, KeyError, TypeError):
            return f"{status}"
    if '"error"' in text:
        return "error event in the stream"
    if '"finish_reason":"abort"' in text:
        return "200, finish_reason abort"
    return "ok" if text.rstrip().endswith("data: [DONE]") else "stream without end"


async def _watch_health(pool: VllmPool, seen: Observation, stop: asyncio.Event, rank: int) -> None:
    while not stop.is_set():
        said = await asyncio.to_thread(pool.health, rank)
        seen.health[rank].append((time.monotonic(), said))
        await asyncio.sleep(HEALTH_INTERVAL_S)


async def _watch_rotation(
    session: aiohttp.ClientSession, pool: VllmPool, seen: Observation, stop: asyncio.Event
) -> None:
    while not stop.is_set():
        try:
            async with session.get(f"{pool.admin_url}/groups/{pool.group_name}") as answer:
                seen.rotation.append((time.monotonic(), (await answer.json())["in_rotation"]))
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(ROTATION_INTERVAL_S)


async def until(condition: Callable[[], object], limit_s: float, what: str) -> None:
    """Wait for a condition; fails the test after the limit."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {limit_s:g} s: {what}"
        await asyncio.sleep(0.05)
