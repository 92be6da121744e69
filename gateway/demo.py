"""The demo: which pool it runs, what it does with it, in which order it is told.

Needs the `openai` client (extra `demo`).
"""

from __future__ import annotations

import asyncio
import json
import signal

from rich.console import Console
from rich.markup import escape

from gateway.config import Config
from gateway.config_types import endpoint
from gateway.demo_drive import demo_requests, drive
from gateway.demo_view import live_rank_table, problems_of, show_heading, show_result, summary
from gateway.deployment import run_deployment
from gateway.progress import Progress
from gateway.run_folder import RunFolder

REQUESTS_PER_RANK = 8
MIN_REQUESTS = 32
CONCURRENCY_PER_RANK = 3
SETTLE_S = 0.5
"""How long the table stays up after the drive, so that its last state is that of idle ranks."""


class Demo:
    """One run of the demo."""

    def __init__(self, config: Config, console: Console, exit_after: bool) -> None:
        self._config = config
        self._console = console
        self._exit_after = exit_after
        self._url = f"http://{endpoint(config.envoy.host, config.envoy.port)}"
        self._admin_url = f"http://{endpoint(config.gateway.admin_host, config.gateway.admin_port)}"
        self.exit_status = 128 + signal.SIGINT
        """As if interrupted, until the drive has ended."""

    async def run(self, folder: RunFolder) -> None:
        """Start, drive, serve until Ctrl-C, stop."""
        await run_deployment(self._config, folder, Progress(self._console), self._work)

    async def _work(self) -> None:
        ranks = [rank.name for rank in self._config.ranks()]
        requests = demo_requests(max(MIN_REQUESTS, REQUESTS_PER_RANK * len(ranks)))
        concurrency = CONCURRENCY_PER_RANK * len(ranks)
        self._console.print(f"\n{len(requests)} requests through {self._url}, {concurrency} at a time\n")
        show_heading(self._console)
        async with live_rank_table(self._console, self._admin_url, is_kept=self._exit_after):
            results = await drive(
                self._url,
                self._config.groups[0].model,
                requests,
                concurrency=concurrency,
                on_result=lambda result: show_result(self._console, result),
            )
            await asyncio.sleep(SETTLE_S)
        problems = problems_of(results, ranks)
        self.exit_status = 1 if problems else 0
        self._console.print(f"\n{summary(results)}")
        for problem in problems:
            self._console.print(f"[bold red]{escape(problem)}[/bold red]")
        if self._exit_after:
            return
        self._console.print(
            f"\nServing until Ctrl-C. Try:\n\n{_curl(self._url, self._config.groups[0].model)}\n",
            soft_wrap=True,
            markup=False,
        )
        async with live_rank_table(self._console, self._admin_url, is_kept=True):
            await asyncio.Event().wait()


def _curl(url: str, model: str) -> str:
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "Hello"}]}, separators=(",", ":")
    )
    return f"curl -i {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
