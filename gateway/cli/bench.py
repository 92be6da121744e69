"""`wavegate bench`: routing quality in virtual time and in wall clock, against every baseline."""

from __future__ import annotations

import typer

from gateway.cli import bench_virtual, bench_wall_clock

app = typer.Typer(
    help="Measure routing: in virtual time with the decision code that ships, or in wall clock.\n\n"
    "Traces are public files that you fetch yourself; benchmarks/README.md says where they are.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command("quality")(bench_virtual.quality)
app.command("capacity")(bench_virtual.capacity)
app.command("suite")(bench_virtual.suite)
app.command("robustness")(bench_virtual.robustness)
app.command("picks")(bench_virtual.picks)
app.command("replay")(bench_wall_clock.replay)
app.command("wall-clock")(bench_wall_clock.wall_clock)
app.command("slow-rank")(bench_wall_clock.slow_rank)
app.command("lock-step")(bench_wall_clock.lock_step)
