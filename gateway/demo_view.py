"""What the demo shows: a line for each request as it ends, the rank table below, a summary.

Must never drive or start anything.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape

from gateway.demo_drive import DemoResult
from gateway.rank_table import rank_table
from gateway.status_client import StatusError, parse_status, read_status, status_session

TABLE_INTERVAL_S = 0.25


def show_heading(console: Console) -> None:
    """What the columns of `show_result` are."""
    console.print(f"[bold]#    {'call':<20} tokens in → out  rank      took  first token[/bold]")


def show_result(console: Console, result: DemoResult) -> None:
    """One line for one finished request."""
    request = result.request
    what = f"#{request.number:<3} {request.kind:<20}"
    if result.error is not None:
        line = f"{what} failed after {result.total_s:.1f} s: {result.error}"
        console.print(f"[red]{escape(line)}[/red]", soft_wrap=True)
        return
    first = "" if result.first_token_s is None else f"{result.first_token_s:9.2f} s"
    console.print(
        f"{what} {result.prompt_tokens:>9,} → {result.completion_tokens:<3}  "
        f"[bold cyan]{escape(result.rank or ''):<6}[/bold cyan] {result.total_s:5.2f} s  [dim]{first}[/dim]",
        soft_wrap=True,
    )


@asynccontextmanager
async def live_rank_table(console: Console, admin_url: str, *, is_kept: bool) -> AsyncIterator[None]:
    """Keep the rank table up to date at the bottom of a terminal, and leave it there at the end if `is_kept`.

    Elsewhere than in a terminal a table that is kept is printed once, at the end.
    """
    async with status_session() as session:

        async def refresh(live: Live) -> None:
            while True:
                try:
                    status = parse_status(await read_status(session, admin_url))
                    live.update(Group("", rank_table(status, width=console.width)), refresh=True)
                except StatusError:
                    pass  # the supervisor says why, and brings the gateway back
                await asyncio.sleep(TABLE_INTERVAL_S)

        with Live("", console=console, auto_refresh=False, transient=not is_kept) as live:
            refreshing = asyncio.create_task(refresh(live))
            try:
                yield
            finally:
                refreshing.cancel()
        if is_kept and not console.is_terminal:
            console.line()  # a terminal gets its line end from Live


def problems_of(results: Sequence[DemoResult], ranks: Sequence[str]) -> list[str]:
    """Why a drive was no success; nothing when it was one."""
    problems = []
    if failed := [result for result in results if result.error is not None]:
        problems.append(f"{len(failed)} of {len(results)} requests failed")
    served = {result.rank for result in results}
    if idle := [rank for rank in ranks if rank not in served]:
        problems.append(f"no request was served by {', '.join(idle)}")
    return problems


def summary(results: Sequence[DemoResult]) -> str:
    """How many requests each rank served."""
    served = Counter(result.rank for result in results if result.error is None and result.rank is not None)
    shares = ", ".join(f"{rank} {count}" for rank, count in sorted(served.items()))
    return f"{sum(served.values())} of {len(results)} requests answered: {shares}"
