"""The `wavegate` command: one module per sub-command, each imported only when it runs.

Module `gateway.cli.<name with _>` has an `app: typer.Typer` and owns its options; this one only hands the
command line over, so that `wavegate --help` and `wavegate rank` load nothing they do not need.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Annotated

import typer
from typer.main import get_command

from gateway.cli.help_text import fold_help

SUB_COMMANDS: dict[str, str] = {
    "demo": "Start a small pool of embedded ranks behind Envoy, drive it with the openai client, show it.",
    "up": "Start and supervise what a configuration asks for: ranks, gateway and Envoy, on this machine.",
    "ranks": "Start and supervise the ranks of one machine alone, or print the commands for it (--dry-run).",
    "doctor": "Check this machine before a launch: vLLM, GPUs, model, ports, limits, Envoy.",
    "gateway": "Run the gateway alone: the ext_proc service that Envoy asks, and the admin API.",
    "envoy": "Run Envoy alone, and drain it before it stops.",
    "rank": "Run one rank of the embedded engine (development and evaluation; production is vllm serve).",
    "status": "Show the ranks as the gateway sees them: load, reservations, age of their reports.",
    "tune": "Find the engine settings that suit your targets: token budget, long prompts' chunks, schedule.",
    "config": "Check a configuration, show it with its defaults, or print its JSON Schema.",
    "bench": "Measure routing against every baseline: in virtual time, or in wall clock against any URL.",
    "envoy-config": "Print the Envoy configuration that a wavegate configuration asks for.",
}

main = typer.Typer(
    name="wavegate",
    help="Balance OpenAI-style traffic over vLLM data-parallel ranks in external load-balancer mode.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"wavegate {version('wavegate')}")
        raise typer.Exit


@main.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _hand_over(name: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        module = import_module(f"gateway.cli.{name.replace('-', '_')}")
        command = get_command(module.app)
        fold_help(command)
        command(args=context.args, prog_name=f"wavegate {name}")

    return run


for _name, _help in SUB_COMMANDS.items():
    main.command(
        _name,
        help=_help,
        add_help_option=False,
        context_settings={
            "allow_extra_args": True,
            "allow_interspersed_args": False,
            "ignore_unknown_options": True,
        },
    )(_hand_over(_name))
