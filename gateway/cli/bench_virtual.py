"""The `wavegate bench` commands that run in virtual time: quality, capacity, suite, robustness, picks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks import picking, tables
from benchmarks.capacity import capacity as find_capacity
from benchmarks.matrix import Cell, best_budgets, run_matrix
from benchmarks.robustness import run_situations, situations
from benchmarks.simulation import Deployment, Gateway, simulate
from benchmarks.suite import (
    BUDGETS,
    CAPACITY_AT_LEAST,
    CAPACITY_CASE,
    CASES,
    OURS,
    CapacityVerdict,
    Verdict,
    run_capacity,
    run_suite,
)
from benchmarks.traces import TraceRequest
from ext_proc.settings import AdmissionSettings, Targets
from gateway.cli.bench_options import (
    Budget,
    Dense,
    Duration,
    Groups,
    Json,
    Markdown,
    Plot,
    Policies,
    Preset,
    Ranks,
    Seed,
    Skip,
    Slo,
    Speed,
    TraceFile,
    TraceFormat,
    chosen_policies,
    console,
    load_trace,
    parse_budgets,
    parse_counts,
    parse_targets,
    progress_bar,
    staged_progress_bar,
)
from gateway.cli.choices import none_of
from gateway.cli.options import fail
from vllm_ranks.engine.time_model import DEFAULT_PRESET, PRESETS, StepTimeModel

ALL_BUDGETS = ",".join(map(str, BUDGETS))
MINUTE_FROM_SHARE = 0.5
"""Where in a run the pictured minute begins."""


def quality(
    trace: TraceFile,
    trace_format: TraceFormat = "mooncake",
    speed: Speed = 1.0,
    duration: Duration = 600.0,
    skip: Skip = 0.0,
    groups: Groups = 1,
    ranks: Ranks = 8,
    dense: Dense = False,
    policy: Policies = None,
    budget: Budget = "fixed",
    slo: Slo = ["2000/100"],  # noqa: B006 — typer's way of a repeatable option with a default
    model_preset: Preset = DEFAULT_PRESET,
    step_fixed_ms: Annotated[
        float | None, typer.Option(min=0.001, help="Instead of the preset's fixed cost.")
    ] = None,
    prefill_us_per_token: Annotated[
        float | None, typer.Option(min=0, help="Likewise, per prompt token.")
    ] = None,
    decode_us_per_sequence: Annotated[
        float | None, typer.Option(min=0, help="Likewise, per sequence.")
    ] = None,
    kv_ns_per_token: Annotated[
        float | None, typer.Option(min=0, help="Likewise, per resident KV token.")
    ] = None,
    prefill_schedule_interval: Annotated[
        int, typer.Option(min=1, help="vLLM's own: engines admit prefills only every so many steps.")
    ] = 1,
    phases: Annotated[bool, typer.Option(help="Let the default policy hold prompts for phases.")] = True,
    phases_from: Annotated[
        float, typer.Option(metavar="N", min=0, help="From so many requests decoding per rank on.")
    ] = AdmissionSettings().phases_from_requests_per_rank,
    json_path: Json = None,
    plot: Plot = None,
    seed: Seed = 0,
) -> None:
    """Replay a trace in virtual time under several policies and compare what requests get."""
    if plot is not None and find_spec("matplotlib") is None:
        fail("--plot needs matplotlib: make bench-env, or pip install 'wavegate[bench]'")
    targets = [parse_targets(text) for text in slo]
    budgets = parse_budgets(budget)
    requests = load_trace(trace, trace_format, speed=speed, duration_s=duration, skip_s=skip, seed=seed)
    deployment = Deployment(
        groups=groups,
        ranks=ranks,
        lock_step=not dense,
        prefill_schedule_interval=prefill_schedule_interval,
        time_model=_time_model(
            model_preset, step_fixed_ms, prefill_us_per_token, decode_us_per_sequence, kv_ns_per_token
        ),
    )
    admission = AdmissionSettings(phases=phases, phases_from_requests_per_rank=phases_from)
    with progress_bar(f"{len(requests)} requests") as on_done:
        cells = run_matrix(
            requests,
            deployment,
            policies=chosen_policies(policy),
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
    """Find the highest load at which enough requests meet their targets, per policy at its best budget.

    By bisection, then up to half as high again, since goodput does not fall steadily with load.
    """
    found = []
    for name in chosen_policies(policy):
        with console.status(f"{name}: searching") as status:
            found.append(
                find_capacity(
                    name,
                    trace,
                    trace_format,
                    Deployment(ranks=ranks),
                    budgets=parse_budgets(budget),
                    targets=parse_targets(slo),
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


def suite(
    mooncake: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Mooncake's conversation trace."),
    ] = None,
    azure: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Azure's conversation trace."),
    ] = None,
    a_fifth: Annotated[bool, typer.Option(help="Also every case at a fifth of its load.")] = True,
    capacity: Annotated[bool, typer.Option(help="Also the load that each policy carries.")] = True,
    skip: Skip = 0.0,
    json_path: Json = None,
    markdown: Markdown = None,
    seed: Seed = 0,
) -> None:
    """Run every case of benchmarks/README.md and say what was reached and what was not."""
    given = {"mooncake": mooncake, "azure": azure}
    traces = {name: path for name, path in given.items() if path is not None}
    if not traces:
        fail("give at least one trace: --mooncake FILE, --azure FILE", status=2)
    verdicts: list[Verdict] = []
    carried: CapacityVerdict | None = None
    with staged_progress_bar() as on_done:
        for verdict in run_suite(
            traces, CASES, with_a_fifth=a_fifth, skip_s=skip, seed=seed, on_done=on_done
        ):
            verdicts.append(verdict)
            console.print(_verdict(verdict))
        if capacity and mooncake is not None:
            carried = run_capacity(mooncake, seed=seed, on_done=on_done)
            console.print(_capacity_verdict(carried))
    if json_path is not None:
        results = {"cases": verdicts, "capacity": carried}
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    if markdown is not None:
        sections = [tables.summary_markdown(verdicts)]
        sections += [f"#### {v.case}\n\n{tables.markdown(v.cells)}" for v in verdicts]
        if carried is not None:
            sections.append(f"#### {CAPACITY_CASE}\n\n{tables.capacity_markdown(carried.capacities)}")
        markdown.write_text("\n\n".join(sections) + "\n")
    if any(verdict.missed for verdict in verdicts) or (carried is not None and not carried.reached):
        raise typer.Exit(1)


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
    with staged_progress_bar() as on_done:
        for outcome in run_situations(chosen, budgets=parse_budgets(budget), seed=seed, on_done=on_done):
            outcomes.append(outcome)
            ours, peer = outcome.ours.score, outcome.best_peer.score
            console.print(
                f"{'LOSS' if outcome.is_loss else ' ok '}  {outcome.situation:40} "
                f"{OURS} {ours.goodput:.3f}   {outcome.best_peer.policy} {peer.goodput:.3f}"
            )
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes)))


def picks(
    ranks: Annotated[str, typer.Option(metavar="N,N,…", help="Pool sizes to measure.")] = ",".join(
        map(str, picking.RANKS)
    ),
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = picking.PROMPT_TOKENS,
    policy: Annotated[str, typer.Option(help="Policy to measure.")] = OURS,
    json_path: Json = None,
) -> None:
    """Measure the CPU time of one decision, and how it grows with the number of ranks."""
    sizes = parse_counts("--ranks", ranks, "numbers such as 8,64")
    chosen_policies([policy])
    console.print(f"{'ranks':>6} {'read µs':>9} {'pick µs':>9} {'decision µs':>12}")
    costs = picking.run(
        sizes,
        prompt_tokens=prompt_tokens,
        policy=policy,
        on_done=lambda cost: console.print(
            f"{cost.ranks:6} {cost.read_us:9.1f} {cost.pick_us:9.1f} {cost.decision_us:12.1f}"
        ),
    )
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(costs)))


_MARKS = {True: "reached", False: "MISSED "}


def _verdict(verdict: Verdict) -> str:
    ours, peer = verdict.ours, verdict.best_peer
    ttft = ours.score.ttft_s
    mark = _MARKS[not verdict.missed]
    wanted = "" if verdict.at_least is None else f" (at least {verdict.at_least:.2f})"
    (p50, p99), (p50_within, p99_within) = verdict.ttft_ratios, verdict.ttft_within
    return (
        f"{mark} {verdict.case}: {ours.score.goodput:.3f} at budget {ours.budget_tokens}{wanted}; "
        f"best peer {peer.policy} {peer.score.goodput:.3f} at {peer.budget_tokens}\n"
        f"        TTFT p50 {ttft.p50:.2f} s, ×{p50:.2f} of the fastest (at most ×{p50_within:g}), "
        f"p99 {ttft.p99:.1f} s, ×{p99:.2f} (at most ×{p99_within:g}), "
        f"longest hold {ours.score.longest_hold_s:.1f} s"
        + (f"\n        missed: {', '.join(verdict.missed)}" if verdict.missed else "")
    )


def _capacity_verdict(verdict: CapacityVerdict) -> str:
    ours, peer = verdict.ours, verdict.best_peer
    return (
        f"{_MARKS[verdict.reached]} {CAPACITY_CASE}: ×{ours.speed:.2f} at budget {ours.budget_tokens}; "
        f"best peer {peer.policy} ×{peer.speed:.2f} at {peer.budget_tokens} "
        f"(at least {CAPACITY_AT_LEAST:g} times that)"
    )


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
    draw(path, cells, minutes, from_s=MINUTE_FROM_SHARE * requests[-1].at_s)


def _time_model(
    preset: str,
    fixed_ms: float | None,
    prefill_us: float | None,
    decode_us: float | None,
    kv_ns: float | None,
) -> StepTimeModel:
    if preset not in PRESETS:
        fail(f"--model-preset: {none_of(preset, PRESETS)}", status=2)
    given = {
        "fixed_s": fixed_ms and fixed_ms / 1e3,
        "per_prefill_token_s": prefill_us and prefill_us / 1e6,
        "per_decode_sequence_s": decode_us and decode_us / 1e6,
        "per_kv_token_s": kv_ns and kv_ns / 1e9,
    }
    return replace(PRESETS[preset], **{name: value for name, value in given.items() if value is not None})


def _is_judged_by(cell: Cell, targets: Targets) -> bool:
    return (cell.ttft_target_ms, cell.tpot_target_ms) == (targets.ttft_s * 1000, targets.tpot_s * 1000)
