"""`wavegate demo`: a pool of embedded ranks, or of real ones on the CPU, behind Envoy, driven and shown."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gateway.cli.choices import one_of, shown
from gateway.cli.options import fail
from gateway.config import Config
from gateway.config_envoy import EnvoySection
from gateway.config_gateway import GatewaySection
from gateway.config_types import endpoint, split_endpoint
from gateway.deployment import StartFailed
from gateway.ports import port_problems
from gateway.run_folder import DEFAULT_RUN_FOLDER, RunFolderError, locked_run_folder
from gateway.vllm_cpu import cpu_group
from vllm_ranks.tiny_moe import write_tiny_moe

MODEL = "wavegate-embedded"
EMBEDDED_RANKS, REAL_RANKS, MAX_REAL_RANKS = 4, 2, 4
DEFAULT_VLLM = Path(".venv-vllm/bin/vllm")
FIRST_RANK_PORT = 8100
FIRST_RPC_PORT = 29550
PORT_OFFSETS = range(1000, 20_000, 1000)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class DemoEngine(StrEnum):
    """What serves the demo."""

    EMBEDDED = "embedded"
    VLLM_CPU = "vllm-cpu"


@app.command()
def demo(
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Ranks in each group.", show_default="4, with vllm-cpu 2; there at most 4"
        ),
    ] = None,
    groups: Annotated[int, typer.Option(min=1, max=8, help="Groups, each a data-parallel deployment.")] = 1,
    engine: Annotated[
        DemoEngine,
        typer.Option(
            parser=one_of(DemoEngine),
            metavar=shown(DemoEngine),
            help="vllm-cpu: real vLLM ranks of a tiny model, from the environment of make vllm-env.",
        ),
    ] = DemoEngine.EMBEDDED,
    vllm: Annotated[
        Path, typer.Option(metavar="FILE", help="With vllm-cpu: the `vllm` command of vLLM's CPU build.")
    ] = DEFAULT_VLLM,
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
    for development and evaluation. Production ranks are `vllm serve`; --engine vllm-cpu runs some here.
    """
    if find_spec("openai") is None:
        fail("the demo drives the gateway with the openai client: pip install 'wavegate[demo]'")
    is_real = engine is DemoEngine.VLLM_CPU
    if is_real and not vllm.exists():
        fail(f"there is no {vllm}: run `make vllm-env`, or name vLLM's command with --vllm")
    size = ranks or (REAL_RANKS if is_real else EMBEDDED_RANKS)
    if is_real and size > MAX_REAL_RANKS:
        fail(f"the tiny model can be shared by at most {MAX_REAL_RANKS} ranks: --ranks {MAX_REAL_RANKS}")
    checkpoint = (run_dir / "tiny-moe").resolve()
    real = RealRanks(checkpoint, vllm.absolute()) if is_real else None
    config = demo_config(groups=groups, ranks=size, port_offset=port_offset, real=real)
    if problems := port_problems(config.listeners(), remedy=lambda _listener: _move(groups, size)):
        fail("\n".join(problems))
    console = Console(highlight=False)
    kind = (
        "real vLLM ranks of a tiny model with made-up weights, on the CPU (its text means nothing)"
        if is_real
        else "embedded ranks (a development engine; production is vllm serve)"
    )
    try:
        with locked_run_folder(run_dir) as folder:
            console.print(f"{groups} × {size} {kind}, the gateway, Envoy. Logs: {folder.path}/logs")
            if is_real:
                write_tiny_moe(checkpoint)
            from gateway.demo import Demo

            session = Demo(config, console, exit_after)
            asyncio.run(session.run(folder))
    except (RunFolderError, StartFailed) as error:
        fail(str(error))
    raise typer.Exit(session.exit_status)


@dataclass(frozen=True, slots=True)
class RealRanks:
    """What real ranks are started from."""

    checkpoint: Path
    executable: Path


def demo_config(*, groups: int, ranks: int, port_offset: int = 0, real: RealRanks | None = None) -> Config:
    """Groups of embedded ranks, or of real ones, on the default ports, moved by `port_offset`."""

    def section(name: str) -> dict[str, Any]:
        if real is None:
            return {"engine": "embedded", "name": name, "model": MODEL}
        return {
            **cpu_group(
                name=name, model="tiny-moe", checkpoint=real.checkpoint, executable=str(real.executable)
            ),
            "moe": True,
        }

    envoy, gateway = EnvoySection(), GatewaySection()
    ext_proc_host, ext_proc_port = split_endpoint(gateway.ext_proc_listen)
    return Config.model_validate(
        {
            "groups": [
                {
                    **section(f"g{index}"),
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
            # Real ranks on a few busy cores may stand still for seconds without being in trouble.
            "supervision": {} if real is None else {"hang_after_s": 10},
        }
    )


def _move(groups: int, ranks: int) -> str:
    for offset in PORT_OFFSETS:
        moved = demo_config(groups=groups, ranks=ranks, port_offset=offset)
        if not port_problems(moved.listeners(), remedy=lambda _listener: ""):
            return f"move all ports of the demo: --port-offset {offset}"
    return "move all ports of the demo with --port-offset"
