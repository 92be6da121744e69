"""Scrapes every rank's `/metrics` at a steady, jittered pace over one kept connection per rank.

Hands each report, or the failure to get one, to its listener. Keeps no picture of its own.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable
from functools import partial
from typing import Protocol

import aiohttp

from ext_proc.vocabulary import Rank, RankReport
from vllm_ranks.reports.asking import TooLong, keep_asking, read_at_most, shortened
from vllm_ranks.reports.metrics_text import UnreadableReport, parse_metrics

log = logging.getLogger(__name__)

MAX_PAGE_BYTES = 8 * 1024 * 1024
"""A page longer than this is refused unread."""


class ReportListener(Protocol):
    """Who wants to know what the ranks say."""

    def on_report(self, rank: Rank, report: RankReport) -> None:
        """A rank answered."""
        ...

    def on_failed_scrape(self, rank: Rank, cause: str, *, refused: bool) -> None:
        """A rank did not answer, or not with a report; `refused`: nobody listens on its port."""
        ...


class Scraper:
    """One task per rank until closed."""

    def __init__(
        self,
        ranks: Iterable[Rank],
        listener: ReportListener,
        *,
        interval_s: float,
        jitter_ratio: float,
        timeout_s: float,
    ) -> None:
        """Scrape each of `ranks` every `interval_s` × (1 ± `jitter_ratio`), waiting at most `timeout_s`."""
        self._ranks = tuple(ranks)
        self._listener = listener
        self._interval_s = interval_s
        self._jitter_ratio = jitter_ratio
        self._timeout_s = timeout_s
        self._complaints: dict[Rank, str | None] = {}
        """Of each rank that has been tried."""
        self._first_round = asyncio.Event()

    async def wait_first_round(self) -> None:
        """Return once every rank has been tried."""
        await self._first_round.wait()

    async def run(self) -> None:
        """Scrape until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for rank in self._ranks:
                tasks.create_task(self._follow(rank), name=f"scrape {rank.name}")

    async def _follow(self, rank: Rank) -> None:
        # One connection kept per rank; `force_close` stays off so that it survives between scrapes.
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=1, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            await keep_asking(
                rank,
                partial(self._scrape_once, session, rank),
                failed=partial(self._fail, rank),
                pause_s=self._next_pause_s,
            )

    def _next_pause_s(self) -> float:
        return self._interval_s * random.uniform(1 - self._jitter_ratio, 1 + self._jitter_ratio)

    def _fail(self, rank: Rank, cause: str, *, refused: bool = False) -> None:
        self._listener.on_failed_scrape(rank, cause, refused=refused)
        self._tell(rank, cause)

    def _tell(self, rank: Rank, complaint: str | None) -> None:
        """The rank has been tried: tell an operator what there is to look at, if that is news."""
        if complaint != self._complaints.get(rank, ""):
            if complaint is None:
                log.info("rank %s at %s reports", rank.name, rank.endpoint)
            else:
                log.warning("rank %s at %s: %s", rank.name, rank.endpoint, complaint)
        self._complaints[rank] = complaint
        if len(self._complaints) == len(self._ranks):
            self._first_round.set()

    async def _scrape_once(self, session: aiohttp.ClientSession, rank: Rank) -> None:
        """Hand one report to the listener, or why there is none."""
        refused = False
        try:
            async with session.get(f"http://{rank.endpoint}/metrics", allow_redirects=False) as response:
                if response.status != 200:
                    raise UnreadableReport(f"/metrics answered {response.status}")
                page = await read_at_most(response.content, MAX_PAGE_BYTES)
            metrics = parse_metrics(page.decode("utf-8", "replace"))
        except UnreadableReport as error:
            cause = shortened(str(error))
        except TooLong as error:
            cause = f"/metrics is {error}"
        except TimeoutError:
            cause = f"no answer within {self._timeout_s:g} s"
        except aiohttp.ClientConnectorError as error:
            cause = f"cannot connect: {error.os_error.strerror or error.os_error}"
            refused = isinstance(error.os_error, ConnectionRefusedError)
        except (aiohttp.ClientError, OSError) as error:
            cause = f"connection broke: {type(error).__name__}"
        else:
            self._listener.on_report(
                rank,
                RankReport(
                    taken_at_s=time.monotonic(),
                    running=metrics.running,
                    waiting=metrics.waiting,
                    kv_cache_usage=metrics.kv_cache_usage,
                    wave=metrics.wave,
                    counters=metrics.counters,
                    kv_capacity_tokens=metrics.kv_capacity_tokens,
                    kv_block_tokens=metrics.kv_block_tokens,
                    engine_steps=metrics.engine_steps,
                    adapters=metrics.adapters,
                ),
            )
            self._tell(rank, _strange_engines(rank, metrics.engines))
            return
        self._fail(rank, cause, refused=refused)


def _strange_engines(rank: Rank, engines: frozenset[str]) -> str | None:
    if engines == {str(rank.index)}:
        return None
    named = shortened(", ".join(sorted(engines)) or "none")
    return f"reports for engine {named}, not {rank.index}: are the addresses in order of rank?"
