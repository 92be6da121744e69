"""Shows lock step on live ranks of one group: how fast one decodes while others of it read long prompts.

One answer streams from the second rank all the time. Beside it long prompts come in three ways: to the first
rank alone, to both ranks in turn, and to both at once (aligned, as phases make it). In lock step the first
slows the decoding rank although it has nothing to read, and prompts at once cost it about half of what they
cost in turn. Goes to the ranks directly: what it shows is theirs.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from benchmarks.replay import TIMEOUT_S

DECODED_TOKENS = 8_000
"""Asked for by the answer that streams; it is cut off at the end of a situation."""
TOKEN_IDS = range(32, 250)
"""Prompts are made of these, which every vocabulary has."""
SHORT_PROMPT_TOKENS = 8
PAUSE_S = 1.0
"""Between situations, for the group to become quiet."""

Arrivals = Sequence[tuple[float, int]]
"""When, as a share of a period, which rank gets a prompt."""

SITUATIONS: dict[str, Arrivals] = {
    "no prompts": (),
    "to the first rank alone": ((0.0, 0), (0.5, 0)),
    "to both in turn": ((0.0, 0), (0.5, 1)),
    "to both at once": ((0.0, 0), (0.0, 1)),
}


class DecodeSpeed(msgspec.Struct, frozen=True):
    """What the answer that streamed from the second rank saw in one situation."""

    situation: str
    prompts: int
    """Read by the group meanwhile."""
    tokens_per_s: float
    gap_p50_ms: float
    gap_p99_ms: float
    stalled_share: float
    """Of the time, spent in gaps of more than twice the median without prompts."""


async def measure(
    ranks: Sequence[str],
    model: str,
    *,
    prompt_tokens: int,
    periods: int,
    period_s: float,
    on_done: Callable[[str, int, int], None] = lambda situation, done, total: None,
) -> list[DecodeSpeed]:
    """All situations, one after the other.

    Args:
        ranks: base URLs of two ranks of one group, without `/v1`.
        model: name to ask for.
        prompt_tokens: length of the long prompts.
        periods: how often a situation's prompts come.
        period_s: seconds from one time to the next.

    Raises:
        aiohttp.ClientError: a rank cannot be reached, or refuses a request; may be in an `ExceptionGroup`.
    """
    results: list[DecodeSpeed] = []
    quiet_gap_s = float("inf")
    async with aiohttp.ClientSession(
        # A server may close a connection that was idle just when it is used again.
        connector=aiohttp.TCPConnector(force_close=True),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        raise_for_status=True,
        read_bufsize=1 << 20,
    ) as session:
        for situation, arrivals in SITUATIONS.items():
            async with _decoding(session, ranks[1], model) as tokens_s, asyncio.TaskGroup() as prompts:
                start_s = time.perf_counter()
                for period in range(periods):
                    for share, rank in arrivals:
                        await _until(start_s + (period + share) * period_s)
                        prompts.create_task(_read(session, ranks[rank], model, prompt_tokens))
                    await _until(start_s + (period + 1) * period_s)
                    on_done(situation, period + 1, periods)
                within = [at_s for at_s in tokens_s if at_s >= start_s]
            gaps_s = [later - earlier for earlier, later in itertools.pairwise(within)]
            if not arrivals:
                quiet_gap_s = statistics.median(gaps_s)
            results.append(_speed(situation, len(arrivals) * periods, gaps_s, quiet_gap_s))
            await asyncio.sleep(PAUSE_S)
    return results


def _speed(situation: str, prompts: int, gaps_s: Sequence[float], quiet_gap_s: float) -> DecodeSpeed:
    cuts = statistics.quantiles(gaps_s, n=100)
    return DecodeSpeed(
        situation,
        prompts,
        tokens_per_s=len(gaps_s) / sum(gaps_s),
        gap_p50_ms=cuts[49] * 1e3,
        gap_p99_ms=cuts[98] * 1e3,
        stalled_share=sum(gap for gap in gaps_s if gap > 2 * quiet_gap_s) / sum(gaps_s),
    )


@asynccontextmanager
async def _decoding(session: aiohttp.ClientSession, url: str, model: str) -> AsyncIterator[list[float]]:
    """An answer that streams during the block; when its tokens came, from the first on."""
    tokens_s: list[float] = []
    begun = asyncio.Event()

    async def stream() -> None:
        body = _body(model, SHORT_PROMPT_TOKENS, DECODED_TOKENS)
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data:"):
                    tokens_s.append(time.perf_counter())
                    begun.set()

    streaming = asyncio.create_task(stream())
    waiting = asyncio.create_task(begun.wait())
    await asyncio.wait((streaming, waiting), return_when=asyncio.FIRST_COMPLETED)
    try:
        if not begun.is_set():
            await streaming
        yield tokens_s
    finally:
        for task in (streaming, waiting):
            task.cancel()
        await asyncio.gather(streaming, waiting, return_exceptions=True)


async def _read(session: aiohttp.ClientSession, url: str, model: str, tokens: int) -> None:
    """A long prompt, and one token of an answer."""
    async with session.post(f"{url}/v1/completions", json=_body(model, tokens, 1)) as answer:
        await answer.read()


def _body(model: str, prompt_tokens: int, max_tokens: int) -> dict[str, object]:
    """A streamed completion of a prompt that no cache holds."""
    prompt = random.choices(TOKEN_IDS, k=prompt_tokens)
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}


async def _until(moment_s: float) -> None:
    await asyncio.sleep(moment_s - time.perf_counter())
