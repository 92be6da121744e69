"""`wavegate demo`: a pool of embedded ranks behind Envoy, driven and shown."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gateway.cli.options import fail
from gateway.config import Config, EnvoySection, GatewaySection
from gateway.config_types import endpoint, split_endpoint
from gateway.deployment import StartFailed
from gateway.ports import port_problems
from gateway.run_folder import DEFAULT_RUN_FOLDER, RunFolderError, locked_run_folder

MODEL = "wavegate-embedded"
FIRST_RANK_PORT = 8100
FIRST_RPC_PORT = 29550
PORT_OFFSETS = range(1000, 20_000, 1000)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Ranks in each group.")] = 4,
    groups: Annotated[int, typer.Option(min=1, max=8, help="Groups, each a data-parallel deployment.")] = 1,
    exit_after: Annotated[
        bool, typer.Option("--exit", help="End after the drive; status 0 only if all went well.")
    ] = False,
    port_offset: Annotated[
        int, typer.Option(min=-1000, max=30_000, help="Added to every port, when the usual ones are taken.")
    ] = 0,
    run_dir: Annotated[
        Path, typer.Option("--run-dir", metavar="DIR", help="Where logs and rendered configurations go.")
    ] = DEFAULT_RUN_FOLDER,
) -> None:
    """Start a small pool of embedded ranks behind a real Envoy, drive it, and show who serves what.

    The embedded engine queues, batches and works in lock step like vLLM's, but computes no model: it is there
    for development and evaluation. Production ranks are `vllm serve`.
    """
    if find_spec("openai") is None:
        fail("the demo drives the gateway with the openai client: pip install 'wavegate[demo]'")
    config = demo_config(groups=groups, ranks=ranks, port_offset=port_offset)
    if problems := port_problems(config.listeners(), remedy=lambda _listener: _move(groups, ranks)):
        fail("\n".join(problems))
    console = Console(highlight=False)
    try:
        with locked_run_folder(run_dir) as folder:
            console.print(
                f"{groups} × {ranks} embedded ranks (a development engine; production is vllm serve), the "
                f"gateway, Envoy. Logs: {folder.path}/logs"
            )
            from gateway.demo import Demo

            session = Demo(config, console, exit_after)
            asyncio.run(session.run(folder))
    except (RunFolderError, StartFailed) as error:
        fail(str(error))
    raise typer.Exit(session.exit_status)


def demo_config(*, groups: int, ranks: int, port_offset: int = 0) -> Config:
    """Groups of embedded ranks on the default ports, moved by `port_offset`."""
    envoy, gateway = EnvoySection(), GatewaySection()
    ext_proc_host, ext_proc_port = split_endpoint(gateway.ext_proc_listen)
    return Config.model_validate(
        {
            "groups": [
                {
                    "engine": "embedded",
                    "name": f"g{index}",
                    "model": MODEL,
                    "data_parallel_size": ranks,
                    "port": FIRST_RANK_PORT + index * ranks + port_offset,
                    "data_parallel_rpc_port": FIRST_RPC_PORT + index + port_offset,
                }
                for index in range(groups)
            ],
            "envoy": {"port": envoy.port + port_offset, "admin_port": envoy.admin_port + port_offset},
            "gateway": {
                "admin_port": gateway.admin_port + port_offset,
                "ext_proc_listen": endpoint(ext_proc_host, ext_proc_port + port_offset),
            },
        }
    )


def _move(groups: int, ranks: int) -> str:
    for offset in PORT_OFFSETS:
        moved = demo_config(groups=groups, ranks=ranks, port_offset=offset)
        if not port_problems(moved.listeners(), remedy=lambda _listener: ""):
            return f"move all ports of the demo: --port-offset {offset}"
    return "move all ports of the demo with --port-offset"
