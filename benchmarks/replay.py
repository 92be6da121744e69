"""Replays requests in wall clock against any OpenAI-compatible URL, and measures what a client gets.

Prompts are text made from the trace: equal blocks become equal text, so that shared prefixes are shared. The
clock of a request starts when it is due, not when it could be sent: a slow gateway cannot slow the load down.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import aiohttp

from benchmarks.simulation import Served
from benchmarks.traces import BLOCK_TOKENS, TraceRequest

BYTES_PER_TOKEN = 4
"""The embedded engine's tokenizer, and about what others make of such text."""
RANK_HEADER = "x-wavegate-rank"
TIMEOUT_S = 600.0
_DONE = b"[DONE]"
_SYLLABLES = ("ka", "lo", "mi", "ne", "po", "ra", "su", "te", "vi", "zu", "be", "do")


@dataclass(slots=True)
class ReplayResult:
    """What came of a replay."""

    served: list[Served]
    statuses: Counter[str] = field(default_factory=Counter)
    """Requests by HTTP status, or by the kind of the error that broke them."""
    elapsed_s: float = 0.0
    """From the first request to the last token."""

    @property
    def by_rank(self) -> Counter[str]:
        """Requests by the rank that answered, where it names itself."""
        return Counter(one.rank or "?" for one in self.served if one.finished_s is not None)


async def replay(
    url: str,
    model: str,
    requests: Sequence[TraceRequest],
    *,
    concurrency: int | None = None,
    time_scale: float = 1.0,
    api_key: str | None = None,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> ReplayResult:
    """Send every request as a streamed completion.

    Args:
        url: base URL, without `/v1`.
        model: name to ask for.
        requests: in order of arrival.
        concurrency: if given, arrival times do not matter and so many requests are always under way.
        time_scale: engines that run this many times as fast; arrivals come faster, measured times count more.
        api_key: sent as a bearer token.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    result = ReplayResult([Served(request) for request in requests])
    done = 0
    async with aiohttp.ClientSession(
        # A server may close a connection that was idle just when it is used again.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        headers=headers,
        read_bufsize=1 << 20,
    ) as session:
        slots = asyncio.Semaphore(concurrency or len(requests))
        start_s = time.perf_counter()

        def now_s() -> float:
            return (time.perf_counter() - start_s) * time_scale

        async def one(number: int) -> None:
            nonlocal done
            served = result.served[number]
            if concurrency is None:
                await asyncio.sleep(served.request.at_s / time_scale - (time.perf_counter() - start_s))
            async with slots:
                if concurrency is not None:
                    served.request = replace(served.request, at_s=now_s())
                result.statuses[await _send(session, url, model, number, served, now_s)] += 1
            done += 1
            on_done(done, len(requests))

        await asyncio.gather(*(one(number) for number in range(len(requests))))
        result.elapsed_s = now_s()
    return result


async def _send(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    number: int,
    served: Served,
    now_s: Callable[[], float],
) -> str:
    """One request, to its end. Fills in `served` and returns the status, or what broke it."""
    body = {
        "model": model,
        "prompt": prompt_text(served.request, number),
        "max_tokens": served.request.output_tokens,
        "stream": True,
        "ignore_eos": True,
    }
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            served.rank = response.headers.get(RANK_HEADER)
            if response.status != 200:
                await response.read()
                served.refused = True
                return str(response.status)
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                if _DONE in line:
                    served.finished_s = now_s()
                elif served.first_token_s is None:
                    served.first_token_s = now_s()
            return "200" if served.finished_s is not None else "broken stream"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return type(error).__name__


def prompt_text(request: TraceRequest, number: int) -> str:
    """Text of about the request's length: its blocks' text, then some of its own."""
    shared = "".join(_text(block, BLOCK_TOKENS) for block in request.blocks)
    own_tokens = request.prompt_tokens - BLOCK_TOKENS * len(request.blocks)
    return shared + _text(-1 - number, max(1, own_tokens))


def _text(seed: int, tokens: int) -> str:
    rng = random.Random(seed)
    length = tokens * BYTES_PER_TOKEN
    words: list[str] = []
    written = 0
    while written < length:
        word = "".join(rng.choices(_SYLLABLES, k=3)) + " "
        words.append(word)
        written += len(word)
    return "".join(words)[:length]
