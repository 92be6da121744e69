"""`wavegate bench`: routing quality in virtual time and in wall clock, against every baseline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import tables
from benchmarks.capacity import capacity as find_capacity
from benchmarks.contenders import (
    Contender,
    ContenderError,
    groups_of,
    plain_envoy,
    router,
    vllm_internal,
    wavegate,
)
from benchmarks.matrix import Cell, OnDone, best_budgets, run_matrix
from benchmarks.replay import replay as replay_requests
from benchmarks.robustness import run_situations, situations
from benchmarks.score import score
from benchmarks.simulation import Deployment, Gateway, RunRecord, simulate
from benchmarks.suite import BUDGETS, CASES, OURS, Verdict, run_suite
from benchmarks.traces import READERS, TraceError, TraceRequest, load
from benchmarks.wall_clock import (
    SLOW_RANK_CONCURRENCY,
    WallClockResult,
    compare,
    slow_rank_groups,
    slow_rank_requests,
)
from ext_proc.policies import policy_names
from ext_proc.settings import AdmissionSettings, Targets
from gateway.cli.options import fail
from gateway.config_groups import EmbeddedGroup
from vllm_ranks.engine.time_model import DEFAULT_PRESET, PRESETS, StepTimeModel

app = typer.Typer(
    help="Measure routing: in virtual time with the decision code that ships, or in wall clock.\n\n"
    "Traces are public files that you fetch yourself; benchmarks/README.md says where they are.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

ALL_BUDGETS = ",".join(map(str, BUDGETS))
MINUTE_FROM_SHARE = 0.5
"""Where in a run the pictured minute begins."""

TraceFile = Annotated[
    Path, typer.Option("--trace", metavar="FILE", exists=True, dir_okay=False, help="The trace.")
]
TraceFormat = Annotated[str, typer.Option("--format", help=f"Its format: {', '.join(READERS)}.")]
Speed = Annotated[float, typer.Option(min=0.001, help="Play the trace this many times as fast.")]
Duration = Annotated[float, typer.Option(metavar="S", min=1, help="Seconds of it to play, at that speed.")]
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
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all results there.")]
Seed = Annotated[int, typer.Option(help="Same seed, same results.")]


@app.command()
def quality(
    trace: TraceFile,
    trace_format: TraceFormat = "mooncake",
    speed: Speed = 1.0,
    duration: Duration = 600.0,
    groups: Groups = 1,
    ranks: Ranks = 8,
    dense: Dense = False,
    policy: Policies = None,
    budget: Budget = "fixed",
    slo: Slo = ["2000/100"],  # noqa: B006 — typer's way of a repeatable option with a default
    model_preset: Preset = DEFAULT_PRESET,
    step_fixed_ms: Annotated[float | None, typer.Option(help="Instead of the preset's fixed cost.")] = None,
    prefill_us_per_token: Annotated[float | None, typer.Option(help="Likewise, per prompt token.")] = None,
    decode_us_per_sequence: Annotated[float | None, typer.Option(help="Likewise, per sequence.")] = None,
    kv_ns_per_token: Annotated[float | None, typer.Option(help="Likewise, per resident KV token.")] = None,
    prefill_schedule_interval: Annotated[
        int, typer.Option(min=1, help="vLLM's own: engines admit prefills only every so many steps.")
    ] = 1,
    phases: Annotated[bool, typer.Option(help="Let the default policy hold prompts for phases.")] = True,
    json_path: Json = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw goodput, and a minute of two runs.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Replay a trace in virtual time under several policies and compare what requests get."""
    targets = [_targets(text) for text in slo]
    budgets = _budgets(budget)
    requests = _load(trace, trace_format, speed=speed, duration_s=duration, seed=seed)
    deployment = Deployment(
        groups=groups,
        ranks=ranks,
        lock_step=not dense,
        prefill_schedule_interval=prefill_schedule_interval,
        time_model=_time_model(
            model_preset, step_fixed_ms, prefill_us_per_token, decode_us_per_sequence, kv_ns_per_token
        ),
    )
    admission = AdmissionSettings(phases=phases)
    with _progress(f"{len(requests)} requests") as on_done:
        cells = run_matrix(
            requests,
            deployment,
            policies=_policies(policy),
            budgets=budgets,
            targets=targets,
            admission=admission,
            seed=seed,
            on_done=on_done,
        )
    best = best_budgets(cells)
    for one in targets:
        judged = [cell for cell in best if _is_judged_by(cell, one)]
        console.print(tables.rich_table(tables.title(judged[0]), judged))
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(cells)))
    if plot is not None:
        _draw(plot, best, requests, deployment, targets[0], admission, seed)


@app.command()
def capacity(
    trace: TraceFile,
    trace_format: TraceFormat = "mooncake",
    duration: Duration = 600.0,
    ranks: Ranks = 8,
    policy: Policies = None,
    budget: Budget = ALL_BUDGETS,
    slo: Annotated[str, typer.Option(metavar="TTFT/TPOT", help="Targets in ms.")] = "2000/100",
    share: Annotated[
        float, typer.Option(min=0.01, max=1, help="Requests that must meet both targets.")
    ] = 0.8,
    json_path: Json = None,
    seed: Seed = 0,
) -> None:
    """Find the highest load at which enough requests meet their targets, per policy at its best budget."""
    found = []
    for name in _policies(policy):
        with console.status(f"{name}: searching") as status:
            found.append(
                find_capacity(
                    name,
                    trace,
                    trace_format,
                    Deployment(ranks=ranks),
                    budgets=_budgets(budget),
                    targets=_targets(slo),
                    share=share,
                    duration_s=duration,
                    seed=seed,
                    on_tried=lambda cell, speed, name=name: status.update(  # type: ignore[misc]
                        f"{name}: ×{speed:.2f} gives {cell.score.goodput:.3f}"
                    ),
                )
            )
        one = found[-1]
        console.print(f"{name:16} ×{one.speed:.2f}  (budget {one.budget_tokens}, goodput {one.goodput:.3f})")
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(found)))


@app.command()
def suite(
    mooncake: Annotated[Path | None, typer.Option(metavar="FILE", exists=True, dir_okay=False)] = None,
    azure: Annotated[Path | None, typer.Option(metavar="FILE", exists=True, dir_okay=False)] = None,
    a_fifth: Annotated[bool, typer.Option(help="Also every case at a fifth of its load.")] = True,
    json_path: Json = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the tables as Markdown there.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Run every case of benchmarks/README.md and say what was reached and what was not."""
    given = {"mooncake": mooncake, "azure": azure}
    traces = {name: path for name, path in given.items() if path is not None}
    if not traces:
        fail("give at least one trace: --mooncake FILE, --azure FILE", status=2)
    verdicts = []
    with _stages() as on_done:
        for verdict in run_suite(traces, CASES, with_a_fifth=a_fifth, seed=seed, on_done=on_done):
            verdicts.append(verdict)
            console.print(_verdict(verdict))
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(verdicts)))
    if markdown is not None:
        sections = [f"#### {v.case}\n\n{tables.markdown(v.cells)}\n" for v in verdicts]
        markdown.write_text("\n".join(sections))
    if any(verdict.reached is False for verdict in verdicts):
        raise typer.Exit(1)


@app.command()
def robustness(
    only: Annotated[str | None, typer.Option(help="Only situations whose name contains this.")] = None,
    budget: Budget = "fixed",
    json_path: Json = None,
    seed: Seed = 0,
) -> None:
    """Try traffic and faults that no public trace has; a peer that is clearly better is printed as a loss."""
    chosen = [one for one in situations(seed) if only is None or only in one.name]
    if not chosen:
        fail(f"no situation has {only!r} in its name", status=2)
    outcomes = []
    with _stages() as on_done:
        for outcome in run_situations(chosen, budgets=_budgets(budget), seed=seed, on_done=on_done):
            outcomes.append(outcome)
            ours, peer = outcome.ours.score, outcome.best_peer.score
            console.print(
                f"{'LOSS' if outcome.is_loss else ' ok '}  {outcome.situation:40} "
                f"{OURS} {ours.goodput:.3f}   {outcome.best_peer.policy} {peer.goodput:.3f}"
            )
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes)))


@app.command()
def replay(
    trace: TraceFile,
    url: Annotated[str, typer.Option(metavar="URL", help="What to measure, without /v1.")],
    model: Annotated[str, typer.Option(help="Model to ask for.")],
    trace_format: TraceFormat = "mooncake",
    speed: Speed = 1.0,
    duration: Duration = 60.0,
    slo: Annotated[str, typer.Option(metavar="TTFT/TPOT", help="Targets in ms.")] = "2000/100",
    concurrency: Concurrency = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")
    ] = None,
    json_path: Json = None,
    seed: Seed = 0,
) -> None:
    """Replay a trace in wall clock against a live gateway, router or server."""
    requests = _load(trace, trace_format, speed=speed, duration_s=duration, seed=seed)
    with _progress(f"{len(requests)} requests") as on_done:
        result = asyncio.run(
            replay_requests(
                url.rstrip("/"), model, requests, concurrency=concurrency, api_key=api_key, on_done=on_done
            )
        )
    judged = score(RunRecord(result.served, 0.0, []), _targets(slo))
    console.print(tables.wall_clock_table([("", judged, result.elapsed_s, dict(result.by_rank))]))
    console.print(f"answers: {_counts(result.statuses)}")
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(judged)))


@app.command("wall-clock")
def wall_clock(
    trace: TraceFile,
    trace_format: TraceFormat = "mooncake",
    speed: Speed = 0.4,
    duration: Duration = 120.0,
    ranks: Ranks = 4,
    slo: Annotated[str, typer.Option(metavar="TTFT/TPOT", help="Targets in ms.")] = "2000/100",
    vllm_router: VllmRouter = None,
    sglang_router: SglangRouter = None,
    contender: Contenders = None,
    time_scale: Annotated[
        float, typer.Option(min=0.1, help="Run the embedded ranks so many times as fast as their model.")
    ] = 1.0,
    json_path: Json = None,
    seed: Seed = 0,
) -> None:
    """Put wavegate and its peers in front of the same embedded lock-step ranks, one after the other."""
    requests = _load(trace, trace_format, speed=speed, duration_s=duration, seed=seed)
    args = ("--time-scale", str(time_scale), "--max-model-len", "200000")
    _compare(
        _contenders(contender, vllm_router, sglang_router),
        requests,
        lambda: groups_of(ranks, 1, args),
        _targets(slo),
        json_path,
        time_scale=time_scale,
    )


@app.command("slow-rank")
def slow_rank(
    vllm_router: VllmRouter = None,
    sglang_router: SglangRouter = None,
    contender: Contenders = None,
    json_path: Json = None,
) -> None:
    """120 short streams, 12 at a time, over two independent ranks of which one is eight times slower."""
    chosen = _contenders(contender, vllm_router, sglang_router)
    chosen.pop("vllm internal", None)  # has no independent ranks
    _compare(
        chosen,
        slow_rank_requests(),
        slow_rank_groups,
        Targets(),
        json_path,
        concurrency=SLOW_RANK_CONCURRENCY,
    )


def _compare(
    contenders: dict[str, Contender],
    requests: Sequence[TraceRequest],
    groups: Callable[[], tuple[EmbeddedGroup, ...]],
    targets: Targets,
    json_path: Path | None,
    *,
    concurrency: int | None = None,
    time_scale: float = 1.0,
) -> None:
    async def run() -> list[WallClockResult]:
        with _stages() as on_done:
            return [
                result
                async for result in compare(
                    contenders,
                    requests,
                    groups,
                    targets,
                    concurrency=concurrency,
                    time_scale=time_scale,
                    on_done=on_done,
                )
            ]

    try:
        results = asyncio.run(run())
    except ContenderError as error:
        fail(str(error))
    console.print(tables.wall_clock_table([(r.contender, r.score, r.elapsed_s, r.by_rank) for r in results]))
    for result in results:
        if set(result.statuses) != {"200"}:
            console.print(f"{result.contender}: {_counts(result.statuses)}")
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(results)))


def _contenders(
    names: list[str] | None, vllm_router: Path | None, sglang_router: Path | None
) -> dict[str, Contender]:
    found: dict[str, Contender] = {
        "wavegate": wavegate,
        "envoy round_robin": plain_envoy("round_robin"),
        "envoy least_request": plain_envoy("least_request"),
        "vllm internal": vllm_internal,
    }
    if vllm_router is not None:
        found["vllm-router power_of_two"] = router(vllm_router, "power_of_two")
        found["vllm-router cache_aware"] = router(vllm_router, "cache_aware")
    if sglang_router is not None:
        found["sglang-router cache_aware"] = router(sglang_router, "cache_aware")
    for name in names or []:
        if name not in found:
            fail(f"--contender: {name!r} is none of {', '.join(found)}", status=2)
    return {name: found[name] for name in names or found}


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in sorted(counts.items()))


def _verdict(verdict: Verdict) -> str:
    ours, peer = verdict.ours, verdict.best_peer
    ttft = ours.score.ttft_s
    mark = {True: "reached", False: "MISSED ", None: "       "}[verdict.reached]
    wanted = "" if verdict.at_least is None else f" (at least {verdict.at_least:.2f})"
    return (
        f"{mark} {verdict.case}: {ours.score.goodput:.3f} at budget {ours.budget_tokens}{wanted}; "
        f"best peer {peer.policy} {peer.score.goodput:.3f} at {peer.budget_tokens}\n"
        f"        TTFT p50 {ttft.p50:.2f} s ({_ratio(ttft.p50, verdict.fastest_ttft_p50_s)}), "
        f"p99 {ttft.p99:.1f} s ({_ratio(ttft.p99, verdict.fastest_ttft_p99_s)}), "
        f"longest hold {ours.score.longest_hold_s:.1f} s"
    )


def _ratio(ours: float, theirs: float) -> str:
    return f"×{ours / theirs:.2f} of the fastest"


def _draw(
    path: Path,
    cells: Sequence[Cell],
    requests: Sequence[TraceRequest],
    deployment: Deployment,
    targets: Targets,
    admission: AdmissionSettings,
    seed: int,
) -> None:
    """A minute of the default policy, and of the best other one, at their best budgets."""
    from benchmarks.picture import draw

    judged = [cell for cell in cells if _is_judged_by(cell, targets)]
    ranked = sorted(judged, key=lambda cell: -cell.score.goodput)
    ours = [cell for cell in ranked if cell.policy == OURS][:1]
    others = [cell for cell in ranked if cell.policy != OURS][:1]
    minutes = []
    for cell in ours + others:
        record = simulate(
            requests,
            replace(deployment, budget_tokens=cell.budget_tokens),
            Gateway(policy=cell.policy, targets=targets, admission=replace(admission, targets=targets)),
            seed=seed,
            record_steps=True,
        )
        minutes.append((f"{cell.policy} at budget {cell.budget_tokens}", record))
    try:
        draw(path, cells, minutes, from_s=MINUTE_FROM_SHARE * requests[-1].at_s)
    except ModuleNotFoundError:
        fail("--plot needs matplotlib: pip install 'wavegate[bench]'")


def _load(path: Path, trace_format: str, *, speed: float, duration_s: float, seed: int) -> list[TraceRequest]:
    if trace_format not in READERS:
        fail(f"--format: {trace_format!r} is none of {', '.join(READERS)}", status=2)
    try:
        return load(path, trace_format, speed=speed, duration_s=duration_s, seed=seed)
    except TraceError as error:
        fail(str(error), status=2)


def _policies(names: list[str] | None) -> list[str]:
    known = policy_names()
    for name in names or []:
        if name not in known:
            fail(f"--policy: {name!r} is none of {', '.join(known)}", status=2)
    return names or known


def _budgets(text: str) -> list[int]:
    if text == "fixed":
        return [2048]
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        fail(f"--budget: {text!r} is neither `fixed` nor numbers such as 512,1024", status=2)
    return [int(part) for part in parts]


def _targets(text: str) -> Targets:
    ttft, separator, tpot = text.partition("/")
    try:
        ttft_ms, tpot_ms = float(ttft), float(tpot)
    except ValueError:
        ttft_ms = tpot_ms = 0.0
    if not separator or ttft_ms <= 0 or tpot_ms <= 0:
        fail(f"--slo: {text!r} is not TTFT/TPOT in ms, such as 2000/100", status=2)
    return Targets(ttft_ms / 1000, tpot_ms / 1000)


def _time_model(
    preset: str,
    fixed_ms: float | None,
    prefill_us: float | None,
    decode_us: float | None,
    kv_ns: float | None,
) -> StepTimeModel:
    if preset not in PRESETS:
        fail(f"--model-preset: {preset!r} is none of {', '.join(PRESETS)}", status=2)
    given = {
        "fixed_s": fixed_ms and fixed_ms / 1e3,
        "per_prefill_token_s": prefill_us and prefill_us / 1e6,
        "per_decode_sequence_s": decode_us and decode_us / 1e6,
        "per_kv_token_s": kv_ns and kv_ns / 1e9,
    }
    return replace(PRESETS[preset], **{name: value for name, value in given.items() if value is not None})


def _is_judged_by(cell: Cell, targets: Targets) -> bool:
    return (cell.ttft_target_ms, cell.tpot_target_ms) == (targets.ttft_s * 1000, targets.tpot_s * 1000)


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
def _progress(description: str) -> Iterator[OnDone]:
    with _bar() as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def _stages() -> Iterator[Callable[[str, int, int], None]]:
    """One bar that names the stage it is in."""
    with _bar() as progress:
        task = progress.add_task("", total=None)
        yield lambda stage, done, total: progress.update(task, description=stage, completed=done, total=total)
