"""What the `wavegate bench` commands share: their options, how those are read, and how progress is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.matrix import OnDone
from benchmarks.traces import READERS, TraceError, TraceRequest, load
from ext_proc.policies import policy_names
from ext_proc.settings import Targets
from gateway.cli.choices import none_of
from gateway.cli.options import fail
from vllm_ranks.engine.time_model import PRESETS

console = Console()

TraceFile = Annotated[
    Path, typer.Option("--trace", metavar="FILE", exists=True, dir_okay=False, help="The trace.")
]
TraceFormat = Annotated[str, typer.Option("--format", help=f"Its format: {', '.join(READERS)}.")]
Speed = Annotated[float, typer.Option(min=0.001, help="Play the trace this many times as fast.")]
Duration = Annotated[float, typer.Option(metavar="S", min=1, help="Seconds of it to play, at that speed.")]
Skip = Annotated[
    float, typer.Option(metavar="S", min=0, help="Leave out so much of it first, in its own seconds.")
]
Groups = Annotated[int, typer.Option(min=1, help="Groups of ranks.")]
Ranks = Annotated[int, typer.Option(min=1, help="Ranks per group.")]
Dense = Annotated[bool, typer.Option("--dense", help="Ranks step alone: independent replicas.")]
Budget = Annotated[
    str,
    typer.Option(metavar="N,N,…", help="Token budgets of the engines to compare, or `fixed` for 2048 alone."),
]
Slo = Annotated[
    list[str],
    typer.Option("--slo", metavar="TTFT/TPOT", help="Targets in ms, such as 2000/100. May be given again."),
]
Policies = Annotated[
    list[str] | None,
    typer.Option("--policy", metavar="NAME", help=f"Only these of: {', '.join(policy_names())}."),
]
Preset = Annotated[str, typer.Option("--model-preset", help=f"How long steps take: {', '.join(PRESETS)}.")]
Concurrency = Annotated[
    int | None, typer.Option(min=1, help="Ignore arrival times and keep so many requests under way.")
]
VllmRouter = Annotated[
    Path | None, typer.Option(metavar="BIN", exists=True, help="vllm-router, to compare with.")
]
SglangRouter = Annotated[
    Path | None, typer.Option(metavar="BIN", exists=True, help="sglang-router, to compare with.")
]
Contenders = Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only these contenders.")]


def _can_be_written(path: Path | None) -> Path | None:
    """Told before the run, not after it."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}: make it first")
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder: name a file in it")
    return path


Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", callback=_can_be_written, help="Write all results there."),
]
Markdown = Annotated[
    Path | None,
    typer.Option(metavar="FILE", callback=_can_be_written, help="Write the tables as Markdown there."),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.png", callback=_can_be_written, help="Draw goodput, and a minute of two runs."
    ),
]
Seed = Annotated[int, typer.Option(help="Same seed, same results.")]


def load_trace(
    path: Path, trace_format: str, *, speed: float, duration_s: float, seed: int, skip_s: float = 0.0
) -> list[TraceRequest]:
    if trace_format not in READERS:
        fail(f"--format: {none_of(trace_format, READERS)}", status=2)
    try:
        return load(path, trace_format, speed=speed, duration_s=duration_s, skip_s=skip_s, seed=seed)
    except TraceError as error:
        fail(str(error), status=2)


def chosen_policies(names: list[str] | None) -> list[str]:
    known = policy_names()
    for name in names or []:
        if name not in known:
            fail(f"--policy: {none_of(name, known)}", status=2)
    return names or known


def parse_budgets(text: str) -> list[int]:
    return (
        [2048] if text == "fixed" else parse_counts("--budget", text, "`fixed` or numbers such as 512,1024")
    )


def parse_counts(option: str, text: str, wanted: str) -> list[int]:
    """Positive numbers with commas between them."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        fail(f"{option}: {text!r} should be {wanted}", status=2)
    return [int(part) for part in parts]


def parse_targets(text: str) -> Targets:
    ttft, separator, tpot = text.partition("/")
    try:
        ttft_ms, tpot_ms = float(ttft), float(tpot)
    except ValueError:
        ttft_ms = tpot_ms = 0.0
    if not separator or ttft_ms <= 0 or tpot_ms <= 0:
        fail(f"--slo: {text!r} is not TTFT/TPOT in ms, such as 2000/100", status=2)
    return Targets(ttft_ms / 1000, tpot_ms / 1000)


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


@contextmanager
def progress_bar(description: str) -> Iterator[OnDone]:
    with _bar() as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def staged_progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """One bar that names the stage it is in."""
    with _bar() as progress:
        task = progress.add_task("", total=None)
        yield lambda stage, done, total: progress.update(task, description=stage, completed=done, total=total)
