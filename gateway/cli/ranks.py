"""`wavegate ranks`: the ranks of one machine, supervised; or the commands that start them, printed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gateway.cli.choices import one_of, shown
from gateway.cli.options import DEFAULT_CONFIG_PATH, ConfigPath, fail, load_resolved
from gateway.config import Config
from gateway.config_groups import VllmGroup
from gateway.deployment import StartFailed, gateway_url, run_ranks
from gateway.dry_run import CommandFormat, NothingToWrite, render_commands
from gateway.progress import Progress
from gateway.run_folder import DEFAULT_RUN_FOLDER, RunFolder, RunFolderError, locked_run_folder

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def ranks(
    config: ConfigPath = DEFAULT_CONFIG_PATH,
    node: Annotated[
        int | None,
        typer.Option(min=0, max=1023, help="Which of the machines in a group's `ranks` this one is, from 0."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the commands, with their environment, for all machines or one."
        ),
    ] = False,
    as_format: Annotated[
        CommandFormat,
        typer.Option(
            "--as",
            parser=one_of(CommandFormat),
            metavar=shown(CommandFormat),
            help="With --dry-run: lines for a shell, a Slurm job, or a Kubernetes manifest.",
        ),
    ] = CommandFormat.SHELL,
    gateway: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The gateway's admin API, if it is on another machine.",
            show_default="that of the configuration",
        ),
    ] = None,
    run_dir: Annotated[
        Path, typer.Option("--run-dir", metavar="DIR", help="Where logs go.")
    ] = DEFAULT_RUN_FOLDER / "ranks",
) -> None:
    """Start and supervise the ranks that a configuration has for this machine, without gateway and Envoy.

    A group that loses a rank is taken out of rotation at the gateway, restarted whole, warmed up and brought
    back. SIGTERM or Ctrl-C stops in order: out of rotation, wait for requests under way, stop.

    \b
    A group over two machines, the first of which also runs the rest:
      machine 0:  wavegate up                     and   wavegate ranks --node 0
      machine 1:  wavegate ranks --node 1 --gateway http://<machine 0>:9090
    """
    loaded = load_resolved(config)
    if dry_run:
        try:
            typer.echo(render_commands(loaded, node, as_format), nl=False)
        except NothingToWrite as error:
            fail(str(error), status=2)
        return
    if problem := _node_problem(loaded, node):
        fail(problem, status=2)
    try:
        with locked_run_folder(run_dir) as folder:
            asyncio.run(_run(loaded, node, gateway or gateway_url(loaded), folder, Progress(Console())))
    except (RunFolderError, StartFailed) as error:
        fail(str(error))


def _node_problem(config: Config, node: int | None) -> str | None:
    nodes = max((g.nodes for g in config.groups if isinstance(g, VllmGroup) and not g.is_local), default=0)
    if node is None and nodes:
        return f"groups run on {nodes} machines: say which one this is, --node 0 to --node {nodes - 1}"
    if node is not None and node >= max(nodes, 1):
        return f"there is no machine {node}: groups run on {max(nodes, 1)}, counted from 0"
    return None


async def _run(config: Config, node: int | None, gateway: str, folder: RunFolder, progress: Progress) -> None:
    async def serve() -> None:
        progress.note(f"ranks serve, logs in {folder.path}/logs")
        await asyncio.Event().wait()

    await run_ranks(config, node, gateway, folder, progress, serve)
