#!/opt/wavegate/bin/python
"""The one-shot client of the Compose profile `test`: the openai client, all kinds of calls, through Envoy.

Ends with 0 only if every request was answered and every rank served.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rich.console import Console

from gateway.config_file import load
from gateway.demo_drive import demo_requests, drive
from gateway.demo_view import problems_of, show_heading, show_result, summary

REQUESTS_PER_RANK = 8
CONCURRENCY_PER_RANK = 3


async def main(url: str) -> int:
    """Drive the pool whose configuration lies in the current folder; the exit status."""
    config = load(Path("wavegate.yaml"))
    ranks = [rank.name for rank in config.ranks()]
    console = Console(highlight=False)
    show_heading(console)
    results = await drive(
        url,
        config.groups[0].model,
        demo_requests(REQUESTS_PER_RANK * len(ranks)),
        concurrency=CONCURRENCY_PER_RANK * len(ranks),
        on_result=lambda result: show_result(console, result),
    )
    problems = problems_of(results, ranks)
    for line in [summary(results), *problems]:
        console.print(line)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1])))
