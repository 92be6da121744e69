"""A steady load with the openai client, and what it saw: `async with traffic(url, model) as seen:`."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx2
from openai import APIConnectionError, APIStatusError, AsyncOpenAI, OpenAIError

RANK_HEADER = "x-wavegate-rank"
ANSWERED = "answered"
CONCURRENCY = 6
MAX_TOKENS = (8, 24, 16, 40)
PROMPT_WORDS = (20, 400, 60, 1000)
PAUSE_AFTER_FAILURE_S = 0.2
REQUEST_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Sent:
    """One request and what became of it; times on the monotonic clock."""

    started_s: float
    ended_s: float
    outcome: str
    """`answered`, or what the client saw instead."""
    rank: str | None


@dataclass(slots=True)
class Seen:
    """All that the clients saw, and when it was that something was done to the stack."""

    sent: list[Sent] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)

    def mark(self, what: str) -> float:
        """Note that this happens now; the time."""
        now_s = time.monotonic()
        self.marks.append((now_s, what))
        return now_s

    def failures(self) -> list[Sent]:
        """Requests that were not answered."""
        return [request for request in self.sent if request.outcome != ANSWERED]

    async def answers_after(self, since_s: float, count: int = 10, *, within_s: float = 90.0) -> None:
        """Return once so many requests that were sent after that moment have been answered."""
        async with asyncio.timeout(within_s):
            while sum(r.started_s > since_s and r.outcome == ANSWERED for r in self.sent) < count:
                await asyncio.sleep(0.05)

    def report(self, title: str) -> str:
        """What clients saw between the marks, a line each."""
        lines = [f"--- {title}"]
        first_s = self.marks[0][0]
        ends_s = [at_s for at_s, _ in self.marks[1:]] + [float("inf")]
        for (from_s, what), to_s in zip(self.marks, ends_s, strict=True):
            part = sorted((r for r in self.sent if from_s <= r.ended_s < to_s), key=lambda r: r.ended_s)
            lines.append(f"  {from_s - first_s:5.1f} s  {what}")
            for outcome, count in Counter(request.outcome for request in part).most_common():
                times = [request.ended_s - first_s for request in part if request.outcome == outcome]
                lines.append(f"           {count:4} × {outcome}, {times[0]:.1f} to {times[-1]:.1f} s")
        return "\n".join(lines)


@asynccontextmanager
async def traffic(base_url: str, model: str) -> AsyncIterator[Seen]:
    """Send streamed chats, several at a time, until the block ends and those under way have ended.

    Retries of the client are off: what fails, shows.
    """
    seen = Seen()
    stop = asyncio.Event()
    async with (
        AsyncOpenAI(
            base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S
        ) as client,
        asyncio.TaskGroup() as workers,
    ):
        for number in range(CONCURRENCY):
            workers.create_task(_send_until(stop, client, model, seen, number))
        try:
            yield seen
        finally:
            stop.set()


async def _send_until(stop: asyncio.Event, client: AsyncOpenAI, model: str, seen: Seen, number: int) -> None:
    while not stop.is_set():
        started_s = time.monotonic()
        prompt = f"Request {number}. " + "wave " * PROMPT_WORDS[number % len(PROMPT_WORDS)]
        outcome, rank = await _chat(client, model, prompt, MAX_TOKENS[number % len(MAX_TOKENS)])
        seen.sent.append(Sent(started_s, time.monotonic(), outcome, rank))
        if outcome != ANSWERED:
            await asyncio.sleep(PAUSE_AFTER_FAILURE_S)
        number += CONCURRENCY + 1


async def _chat(client: AsyncOpenAI, model: str, prompt: str, max_tokens: int) -> tuple[str, str | None]:
    rank = None
    try:
        raw = await client.chat.completions.with_raw_response.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=max_tokens,
            stream=True,
        )
        rank = raw.headers.get(RANK_HEADER)
        reasons = [chunk.choices[0].finish_reason async for chunk in raw.parse() if chunk.choices]
    except APIStatusError as error:
        return f"HTTP {error.status_code} {error.code or ''}".rstrip(), error.response.headers.get(
            RANK_HEADER
        )
    except (APIConnectionError, httpx2.HTTPError):
        return ("no answer" if rank is None else "a stream cut short"), rank
    except OpenAIError:
        return "an error within the stream", rank
    return (ANSWERED if reasons and reasons[-1] in {"stop", "length"} else "a stream without its end"), rank
