"""The `wavegate bench` commands that run in wall clock: replay, wall-clock, slow-rank, lock-step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import aiohttp
import msgspec
import typer

from benchmarks import lock_step as lock_step_benchmark
from benchmarks import tables
from benchmarks.contenders import (
    Contender,
    ContenderError,
    groups_of,
    plain_envoy,
    router,
    vllm_internal,
    wavegate,
)
from benchmarks.replay import replay as replay_requests
from benchmarks.score import score
from benchmarks.simulation import RunRecord
from benchmarks.traces import TraceRequest
from benchmarks.wall_clock import (
    SLOW_RANK_CONCURRENCY,
    WallClockResult,
    compare,
    slow_rank_groups,
    slow_rank_requests,
)
from ext_proc.settings import Targets
from gateway.cli.bench_options import (
    Concurrency,
    Contenders,
    Duration,
    Json,
    Ranks,
    Seed,
    SglangRouter,
    Speed,
    TraceFile,
    TraceFormat,
    VllmRouter,
    console,
    load_trace,
    parse_targets,
    progress_bar,
    staged_progress_bar,
)
from gateway.cli.choices import none_of
from gateway.cli.options import fail
from gateway.config_groups import EmbeddedGroup


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
    requests = load_trace(trace, trace_format, speed=speed, duration_s=duration, seed=seed)
    with progress_bar(f"{len(requests)} requests") as on_done:
        result = asyncio.run(
            replay_requests(
                url.rstrip("/"), model, requests, concurrency=concurrency, api_key=api_key, on_done=on_done
            )
        )
    if not any(one.finished_s is not None for one in result.served):
        fail(f"no request was answered: {_counts(result.statuses)}")
    judged = score(RunRecord(result.served, 0.0, []), parse_targets(slo))
    console.print(tables.wall_clock_table([("", judged, result.elapsed_s, dict(result.by_rank))]))
    console.print(f"answers: {_counts(result.statuses)}")
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(judged)))


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
    requests = load_trace(trace, trace_format, speed=speed, duration_s=duration, seed=seed)
    args = ("--time-scale", str(time_scale), "--max-model-len", "200000")
    _compare(
        _contenders(contender, vllm_router, sglang_router),
        requests,
        lambda: groups_of(ranks, 1, args),
        parse_targets(slo),
        json_path,
        time_scale=time_scale,
    )


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


def lock_step(
    rank: Annotated[
        list[str], typer.Option(metavar="URL", help="Base URL of a rank. Twice: two ranks of one group.")
    ],
    model: Annotated[str, typer.Option(help="Model to ask for.")],
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the long prompts.")] = 8_000,
    periods: Annotated[int, typer.Option(min=1, help="How often prompts come, in each situation.")] = 10,
    period: Annotated[float, typer.Option(metavar="S", min=0.1, help="Seconds from one to the next.")] = 2.0,
    json_path: Json = None,
) -> None:
    """Watch a live rank decode while ranks of its group read long prompts: alone, in turn, at once."""
    if len(rank) != 2:
        fail(f"--rank: {len(rank)} given; give it twice, for two ranks of one group", status=2)
    try:
        with staged_progress_bar() as on_done:
            speeds = asyncio.run(
                lock_step_benchmark.measure(
                    [url.rstrip("/") for url in rank],
                    model,
                    prompt_tokens=prompt_tokens,
                    periods=periods,
                    period_s=period,
                    on_done=on_done,
                )
            )
    except aiohttp.ClientError as error:
        fail(f"a rank did not answer as it should: {error}")
    except ExceptionGroup as errors:
        refused = errors.subgroup(aiohttp.ClientError)
        if refused is None:
            raise
        fail(f"a rank did not answer as it should: {refused.exceptions[0]}")
    console.print(tables.lock_step_table(speeds))
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(speeds)))


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
        with staged_progress_bar() as on_done:
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
            fail(f"--contender: {none_of(name, found)}", status=2)
    return {name: found[name] for name in names or found}


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in sorted(counts.items()))
