"""`wavegate doctor`: what stands in the way of a launch, before anything is started."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from gateway.cli.options import DEFAULT_CONFIG_PATH, ConfigPath, load_resolved_where_possible
from gateway.doctor import Finding, Level, examine
from gateway.this_machine import ThisMachine

MARKS = {Level.FINE: ("green", "✓"), Level.ADVICE: ("yellow", "!"), Level.PROBLEM: ("red", "✗")}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def doctor(
    config: ConfigPath = DEFAULT_CONFIG_PATH,
    node: Annotated[
        int | None,
        typer.Option(min=0, max=1023, help="Which of the machines in a group's `ranks` this one is, from 0."),
    ] = None,
) -> None:
    """Check this machine before a launch, and say what to do about each finding.

    Looks at vLLM and its version, GPUs against ranks and tensor parallelism, the model's files, ports, the
    way to rank 0, shared memory, limits, and Envoy. Starts nothing. Exit status 1 if something will not work.
    """
    loaded = load_resolved_where_possible(config)
    findings = examine(loaded.config, node, ThisMachine(loaded.config), loaded.open_questions)
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        _show(console, finding)
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    if problems:
        console.print(f"[red]{problems} of {len(findings)} findings will keep it from working[/red]")
        raise typer.Exit(1)
    console.print("nothing stands in the way")


def _show(console: Console, finding: Finding) -> None:
    color, mark = MARKS[finding.level]
    console.print(f"[{color}]{mark}[/{color}] {escape(f'{finding.subject}: {finding.text}')}")
    if finding.remedy:
        console.print(f"    {escape(finding.remedy)}")
