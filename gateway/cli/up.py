"""`wavegate up`: the supervisor in the foreground."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gateway.cli.options import DEFAULT_CONFIG_PATH, ConfigPath, fail, load_resolved, require_tokenizers
from gateway.config import Config
from gateway.config_types import endpoint
from gateway.deployment import StartFailed, run_deployment
from gateway.progress import Progress
from gateway.run_folder import DEFAULT_RUN_FOLDER, RunFolder, RunFolderError, locked_run_folder

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

RunDir = Annotated[
    Path, typer.Option("--run-dir", metavar="DIR", help="Where logs and rendered configurations go.")
]


@app.command()
def up(config: ConfigPath = DEFAULT_CONFIG_PATH, run_dir: RunDir = DEFAULT_RUN_FOLDER) -> None:
    """Start and supervise what a configuration asks for: ranks, gateway and Envoy, on this machine.

    A gateway or Envoy that ends is restarted, a group that loses a rank is restarted whole. SIGTERM or Ctrl-C
    stops in order: no new requests, wait for those under way (gateway.drain_timeout_s), stop. A second one
    stops at once. Adopted groups are left alone.
    """
    loaded = load_resolved(config)
    require_tokenizers(loaded, config)
    try:
        with locked_run_folder(run_dir) as folder:
            asyncio.run(_run(loaded, folder, Progress(Console())))
    except (RunFolderError, StartFailed) as error:
        fail(str(error))


async def _run(config: Config, folder: RunFolder, progress: Progress) -> None:
    async def serve() -> None:
        progress.note(
            f"serving on http://{endpoint(config.envoy.host, config.envoy.port)}, logs in {folder.path}/logs"
        )
        await asyncio.Event().wait()

    await run_deployment(config, folder, progress, serve)
