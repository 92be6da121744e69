"""`wavegate status`: the rank table, once or again and again."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from gateway.cli.options import AdminConfigPath, AdminUrl, admin_address, fail
from gateway.status_client import StatusError, parse_status, read_status, status_session
from gateway.status_view import status_view

WATCH_INTERVAL_S = 0.5

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def status(
    config: AdminConfigPath = None,
    admin: AdminUrl = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON as the admin API gives it; with --watch one line each time.")
    ] = False,
) -> None:
    """Show the ranks as the gateway sees them.

    running, waiting, KV use: what the rank said last. reserved: requests the gateway has placed there and not
    seen end, by its reckoning in the queue before their prefill, in it, and decoding. report age: how old the
    rank's word is; a stale or unknown rank counts as neither idle nor full.

    decode step, prefill step: how long the engines' steps are at the present load, as the gateway has learned
    it. lead: how far decoding is ahead of the TPOT target. index: memory for what the ranks have in their
    prefix caches.
    """
    admin_url = admin_address(config, admin)
    try:
        asyncio.run(_watch(admin_url, as_json) if watch else _show(admin_url, as_json))
    except StatusError as error:
        fail(str(error))
    except KeyboardInterrupt:
        pass


async def _show(admin_url: str, as_json: bool) -> None:
    console = Console()
    async with status_session() as session:
        text = await read_status(session, admin_url)
    if as_json:
        typer.echo(text.decode())
    else:
        console.print(status_view(parse_status(text), width=console.width))


async def _watch(admin_url: str, as_json: bool) -> None:
    async with status_session() as session:
        if as_json:
            while True:
                typer.echo((await read_status(session, admin_url)).decode())
                await asyncio.sleep(WATCH_INTERVAL_S)
        console = Console()
        if not console.is_terminal:
            while True:
                status = parse_status(await read_status(session, admin_url))
                console.print(status_view(status, width=console.width))
                console.line()
                await asyncio.sleep(WATCH_INTERVAL_S)
        with Live(console=console, auto_refresh=False) as live:
            shown: RenderableType = ""
            while True:
                try:
                    text = await read_status(session, admin_url)
                    shown = status_view(parse_status(text), width=console.width)
                    live.update(shown, refresh=True)
                except StatusError as error:
                    # A gateway that restarts is back in a moment: keep the last table in sight.
                    live.update(Group(shown, Text(str(error), style="red")), refresh=True)
                await asyncio.sleep(WATCH_INTERVAL_S)
