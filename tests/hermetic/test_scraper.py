"""The scraper against real HTTP servers that answer well, badly, slowly or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from ext_proc.vocabulary import Rank, RankReport
from vllm_ranks.reports.scraper import Scraper

GOOD_PAGE = """\
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:lora_requests_info{max_lora="2",running_lora_adapters="poet",waiting_lora_adapters=""} 1.7e+09
"""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Heard:
    """Remembers what the scraper said of each rank."""

    def __init__(self) -> None:
        self.reports: list[RankReport] = []
        self.causes: list[str] = []
        self.refusals: list[bool] = []
        self.something = asyncio.Event()
        self.error: Exception | None = None
        """What taking in a report fails with."""

    def on_report(self, _rank: Rank, report: RankReport) -> None:
        if self.error is not None:
            raise self.error
        self.reports.append(report)
        self.something.set()

    def on_failed_scrape(self, _rank: Rank, cause: str, *, refused: bool) -> None:
        self.causes.append(cause)
        self.refusals.append(refused)
        self.something.set()


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """A rank whose /metrics is `handler`; yields its endpoint."""
    app = web.Application()
    app.router.add_get("/metrics", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def scraping(endpoint: str, *, timeout_s: float = 5.0, index: int = 0) -> AsyncIterator[Heard]:
    """Scrapes one endpoint every 5 ms."""
    heard = Heard()
    scraper = Scraper(
        [Rank("g0", index, endpoint)], heard, interval_s=0.005, jitter_ratio=0.2, timeout_s=timeout_s
    )
    task = asyncio.create_task(scraper.run())
    try:
        await asyncio.wait_for(scraper.wait_first_round(), 10)
        yield heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_reports_arrive_over_one_kept_connection() -> None:
    peers = set()

    async def metrics(request: web.Request) -> web.Response:
        peers.add(request.transport.get_extra_info("peername"))  # type: ignore[union-attr]
        return web.Response(text=GOOD_PAGE)

    async with serving(metrics) as endpoint, scraping(endpoint) as heard:
        async with asyncio.timeout(10):
            while len(heard.reports) < 10:
                heard.something.clear()
                await heard.something.wait()
    assert len(peers) == 1
    assert (heard.reports[0].running, heard.reports[0].waiting, heard.reports[0].kv_cache_usage) == (
        3,
        1,
        0.5,
    )
    assert heard.reports[0].adapters == {"poet"}
    times_s = [report.taken_at_s for report in heard.reports]
    assert times_s == sorted(times_s)


@pytest.mark.parametrize(
    ("response", "cause"),
    [
        (lambda: web.Response(status=500), "answered 500"),
        (lambda: web.Response(text="hello"), "no vllm:num_requests_running"),
        (lambda: web.Response(body=b"\xff" * 100), "no vllm:num_requests_running"),
        (lambda: web.Response(text="x" * (9 << 20)), "longer than"),
        (lambda: web.Response(text=f"vllm:num_requests_running {'x' * 9999}"), "malformed"),
        (lambda: web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}), "answered 302"),
    ],
)
async def test_an_answer_that_is_no_report_is_a_failed_scrape(
    response: Callable[[], web.Response], cause: str
) -> None:
    async def metrics(_request: web.Request) -> web.Response:
        return response()

    async with serving(metrics) as endpoint, scraping(endpoint) as heard:
        assert cause in heard.causes[0]
        assert heard.reports == []


async def test_a_rank_that_hangs_is_given_up_in_time() -> None:
    async def metrics(_request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    async with serving(metrics) as endpoint, scraping(endpoint, timeout_s=0.05) as heard:
        assert heard.causes[0] == "no answer within 0.05 s"
        assert not heard.refusals[0]


async def test_a_refused_connection_is_a_failed_scrape(unused_tcp_port: int) -> None:
    async with scraping(f"127.0.0.1:{unused_tcp_port}") as heard:
        assert "cannot connect" in heard.causes[0]
        assert heard.refusals[0]


async def test_a_rank_that_recovers_reports_again() -> None:
    answers = 0

    async def metrics(_request: web.Request) -> web.Response:
        nonlocal answers
        answers += 1
        return web.Response(status=503) if answers < 3 else web.Response(text=GOOD_PAGE)

    async with serving(metrics) as endpoint, scraping(endpoint) as heard:
        async with asyncio.timeout(10):
            while not heard.reports:
                heard.something.clear()
                await heard.something.wait()
    assert len(heard.causes) == 2


async def test_addresses_out_of_rank_order_are_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(text=GOOD_PAGE)

    async with serving(metrics) as endpoint, scraping(endpoint, index=1) as heard:
        assert heard.reports
    assert "reports for engine 0, not 1" in caplog.text


async def test_a_report_that_cannot_be_taken_in_is_a_failed_scrape_and_no_end_of_scraping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(text=GOOD_PAGE)

    async with serving(metrics) as endpoint, scraping(endpoint) as heard:
        heard.error = ZeroDivisionError("as nobody expected")
        async with asyncio.timeout(10):
            while len(heard.causes) < 3:
                await asyncio.sleep(0.001)
            heard.error, known = None, len(heard.reports)
            while len(heard.reports) == known:
                await asyncio.sleep(0.001)
    assert set(heard.causes) == {"unexpected error: ZeroDivisionError: as nobody expected"}
    assert [record.exc_info is not None for record in caplog.records].count(True) == 1
