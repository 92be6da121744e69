"""`wavegate tune`: which engine settings suit the targets, by learned or assumed step times."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.simulation import Deployment
from benchmarks.tuning import Trial
from benchmarks.tuning import tune as try_out
from ext_proc.advice import BudgetEffect, Load, best_budget_tokens, effect
from ext_proc.settings import Targets
from ext_proc.step_times import FEWEST_OBSERVATIONS, StepCosts
from gateway.cli.bench_options import Duration, Seed, Speed, TraceFormat, load_trace
from gateway.cli.choices import none_of
from gateway.cli.options import AdminConfigPath, AdminUrl, admin_address, fail
from gateway.status_client import GroupStatus, Status, StatusError, parse_status, read_status, status_session
from gateway.status_view import step_costs
from vllm_ranks.engine.time_model import PRESETS, StepTimeModel

BUDGETS = (256, 512, 768, 1024, 2048, 4096, 8192)
ASSUMED_LOAD = Load(decoding_sequences=64, kv_tokens=250_000)
"""Where nothing is measured."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()


@dataclass(frozen=True, slots=True)
class Subject:
    """The engines to advise on."""

    name: str
    costs: StepCosts
    load: Load
    budget_tokens: int | None
    """As it is now; `None`: not known."""
    ranks: int
    lock_step: bool


@app.command()
def tune(
    slo_ttft_ms: Annotated[float, typer.Option(min=1, help="Target: time to first token.")],
    slo_tpot_ms: Annotated[float, typer.Option(min=1, help="Target: time per output token after the first.")],
    config: AdminConfigPath = None,
    admin: AdminUrl = None,
    group: Annotated[str | None, typer.Option(help="Only this group.")] = None,
    model_preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Ask no gateway; assume step times: {', '.join(PRESETS)}."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks per group.", show_default="as it is, or 8")
    ] = None,
    decoding_sequences: Annotated[
        float | None,
        typer.Option(min=0, help="Sequences that the busiest rank decodes.", show_default="as now"),
    ] = None,
    kv_tokens: Annotated[
        float | None, typer.Option(min=0, help="KV tokens on that rank.", show_default="as now")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, help="Try settings out on this trace."),
    ] = None,
    trace_format: TraceFormat = "mooncake",
    speed: Speed = 1.0,
    duration: Duration = 600.0,
    seed: Seed = 0,
) -> None:
    """Find the engine settings that suit your targets.

    The step times come from a running gateway, which learns them from its ranks, or from a preset. With a
    trace, settings are tried out on it in virtual time, under the gateway's own decisions.
    """
    targets = Targets(slo_ttft_ms / 1e3, slo_tpot_ms / 1e3)
    load = None
    if decoding_sequences is not None or kv_tokens is not None:
        load = Load(decoding_sequences or 0.0, kv_tokens or 0.0)
    if model_preset is not None:
        subjects = [_assumed(model_preset, load or ASSUMED_LOAD, ranks or 8)]
    else:
        subjects = _measured(_read(admin_address(config, admin)), group, load, ranks)
    for subject in subjects:
        _advise(subject, targets)
        if trace is None:
            console.print(
                "Leave --long-prefill-token-threshold and --prefill-schedule-interval as they are: whether "
                "they help depends on the prompts; --trace FILE tries it out."
            )
        else:
            requests = load_trace(trace, trace_format, speed=speed, duration_s=duration, seed=seed)
            deployment = Deployment(
                ranks=subject.ranks,
                lock_step=subject.lock_step,
                time_model=_time_model(subject.costs),
            )
            with console.status(f"trying settings out on {len(requests)} requests"):
                trials = try_out(requests, deployment, targets, budgets=_budgets(subject, targets), seed=seed)
            _show_trials(trials, subject)


def _assumed(preset: str, load: Load, ranks: int) -> Subject:
    model = PRESETS.get(preset)
    if model is None:
        fail(f"--model-preset: {none_of(preset, PRESETS)}", status=2)
    costs = StepCosts(
        model.fixed_s, model.per_prefill_token_s, model.per_decode_sequence_s, model.per_kv_token_s
    )
    return Subject(preset, costs, load, None, ranks, lock_step="moe" in preset)


def _read(admin_url: str) -> Status:
    async def read() -> Status:
        async with status_session() as session:
            return parse_status(await read_status(session, admin_url))

    try:
        return asyncio.run(read())
    except StatusError as error:
        fail(f"{error} Without one, say --model-preset {next(iter(PRESETS))}.")


def _measured(status: Status, name: str | None, load: Load | None, ranks: int | None) -> list[Subject]:
    groups = [group for group in status.groups if name in (None, group.name) and group.step_time is not None]
    if not groups:
        known = ", ".join(group.name for group in status.groups)
        fail(f"--group: there is no group {name!r}; there are: {known}", status=2)
    for group in groups:
        if group.observations < FEWEST_OBSERVATIONS:
            console.print(
                f"{group.name}: its step times are hardly learned yet ({group.observations} observations) "
                "and mostly those of the configuration; ask again after some traffic."
            )
        if group.budget_tokens is None:
            console.print(
                f"{group.name}: the token budget that its engines have is neither told nor learned yet; the "
                "group's field max_num_batched_tokens tells it."
            )
        if load is None and not group.decoding_sequences:
            console.print(
                f"{group.name}: nothing decodes just now, so the table assumes that nothing will; "
                "--decoding-sequences N and --kv-tokens N say what the busiest rank will have to do."
            )
    return [_subject(status, group, load, ranks) for group in groups]


def _subject(status: Status, group: GroupStatus, load: Load | None, ranks: int | None) -> Subject:
    return Subject(
        group.name,
        step_costs(group),
        load or Load(group.decoding_sequences, group.kv_tokens),
        group.budget_tokens,
        ranks or sum(rank.group == group.name for rank in status.ranks),
        group.lock_step,
    )


def _advise(subject: Subject, targets: Targets) -> None:
    """The base rule: the largest budget whose longest step keeps the TPOT target."""
    costs, load, now = subject.costs, subject.load, subject.budget_tokens
    best = best_budget_tokens(costs, load, targets)
    effects = [effect(costs, load, targets, budget) for budget in _budgets(subject, targets)]
    decode_step_s = costs.decode_step_s(load.decoding_sequences, load.kv_tokens)
    title = (
        f"{subject.name}: {load.decoding_sequences:.0f} sequences and {load.kv_tokens:,.0f} KV tokens on the "
        f"busiest rank; steps without prefill take {decode_step_s * 1e3:.1f} ms"
    )
    console.print(_effects_table(title, effects, targets, best, now))
    if best is None:
        console.print(
            f"No budget keeps {targets.tpot_s * 1e3:.0f} ms: decoding alone takes longer. Fewer sequences "
            "per rank (--max-num-seqs), or more ranks, would."
        )
        return
    console.print(f"Best: --max-num-batched-tokens {best} (not below --max-num-seqs)")
    if now is not None and now != best:
        console.print(_gain(effect(costs, load, targets, now), effect(costs, load, targets, best)))


def _gain(now: BudgetEffect, best: BudgetEffect) -> str:
    rate = best.prefill_tokens_per_s / now.prefill_tokens_per_s - 1
    return (
        f"Expected against {now.budget_tokens} now: {best.longest_step_s * 1e3:.0f} instead of "
        f"{now.longest_step_s * 1e3:.0f} ms between tokens while somebody prefills; prompts are computed "
        f"{abs(rate):.0%} {'faster' if rate > 0 else 'slower'}."
    )


def _budgets(subject: Subject, targets: Targets) -> list[int]:
    further = (best_budget_tokens(subject.costs, subject.load, targets), subject.budget_tokens)
    return sorted({*BUDGETS, *(budget for budget in further if budget is not None)})


def _effects_table(
    title: str, effects: list[BudgetEffect], targets: Targets, best: int | None, now: int | None
) -> Table:
    table = _table(title)
    for name in ("budget", "longest step", "prompt tokens/s", "longest prompt in time", ""):
        table.add_column(name, justify="right")
    for one in effects:
        notes = [word for word, budget in (("best", best), ("now", now)) if budget == one.budget_tokens]
        table.add_row(
            f"{one.budget_tokens:,}",
            f"{one.longest_step_s * 1e3:.0f} ms",
            f"{one.prefill_tokens_per_s:,.0f}",
            f"{one.longest_prompt_tokens:,}",
            " ".join(notes),
            style="" if one.longest_step_s <= targets.tpot_s else "dim",
        )
    return table


def _show_trials(trials: list[Trial], subject: Subject) -> None:
    table = _table(f"{subject.name}: tried out on the trace, in virtual time")
    table.add_column("settings", overflow="fold")
    for name in ("good-\nput", "TTFT s\np50", "\np99", "TPOT ms\np50", "\np90"):
        table.add_column(name, justify="right", no_wrap=True)
    for trial in trials:
        score = trial.score
        table.add_row(
            trial.settings.options(),
            f"{score.goodput:.3f}",
            f"{score.ttft_s.p50:.2f}",
            f"{score.ttft_s.p99:.1f}",
            f"{score.tpot_s.p50 * 1e3:.0f}",
            f"{score.tpot_s.p90 * 1e3:.0f}",
        )
    console.print(table)
    best = trials[0]
    as_it_is = next(
        (t for t in trials if t.settings.options() == f"--max-num-batched-tokens {subject.budget_tokens}"),
        None,
    )
    instead = f" instead of {as_it_is.score.goodput:.3f} as it is" if as_it_is not in (None, best) else ""
    console.print(f"Best: {best.settings.options()} (goodput {best.score.goodput:.3f}{instead})")


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE, header_style="bold", padding=(0, 1))


def _time_model(costs: StepCosts) -> StepTimeModel:
    return StepTimeModel(
        fixed_s=costs.fixed_s,
        per_prefill_token_s=costs.per_prefill_token_s,
        per_decode_sequence_s=costs.per_decode_sequence_s,
        per_kv_token_s=costs.per_kv_token_s,
        dummy_s=costs.fixed_s,
    )
