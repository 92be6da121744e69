"""What `wavegate status` shows: the rank table, the groups' step times, what is held, and what does not fit.

Pure: status in, text out.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ext_proc.advice import Load, best_budget_tokens
from ext_proc.settings import Targets
from ext_proc.step_times import FEWEST_OBSERVATIONS, StepCosts
from gateway.rank_table import UNKNOWN, rank_table
from gateway.status_client import GroupStatus, Status

COLUMNS = ("decode\nstep", "prefill\nstep", "budget", "prefill\ntokens/s", "lead", "index")

MANY_PROMPTS = 20
"""So many prompts that ranks know by other tokens are no accident."""


def status_view(status: Status, *, width: int) -> Group:
    """Everything, in tables of at most `width` columns."""
    parts: list[RenderableType] = [rank_table(status, width=width), "", _group_table(status)]
    if status.held.requests:
        held = status.held
        parts.append(Text(f"held: {held.requests:,} requests with {held.tokens:,} prompt tokens"))
    parts += [Text(warning, style="yellow") for warning in warnings(status)]
    return Group(*parts)


def _group_table(status: Status) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("group", no_wrap=True)
    table.add_column("now", no_wrap=True, min_width=8)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for group in status.groups:
        table.add_row(
            group.name,
            _doing(group),
            f"{group.decode_step_ms:.1f} ms",
            f"{group.prefill_step_ms:.1f} ms",
            UNKNOWN if group.budget_tokens is None else f"{group.budget_tokens:,}",
            f"{group.prefill_tokens_per_s:,.0f}",
            f"{group.lead_tokens:+.0f}" if group.lock_step and group.decoding_sequences else UNKNOWN,
            size(group.index_bytes),
        )
    return table


def _doing(group: GroupStatus) -> str:
    if not group.healthy:
        return "out"
    if group.is_prefilling:
        return "prefills"
    return "decodes" if group.decoding_sequences else "idle"


def warnings(status: Status) -> Iterator[str]:
    """What an operator should change."""
    yield from _wrong_tokenizers(status)
    yield from _budgets(status)


def _wrong_tokenizers(status: Status) -> Iterator[str]:
    for group in status.groups:
        if group.prompts_missing > max(MANY_PROMPTS, group.prompts_found):
            yield (
                f"{group.name}: of {group.prompts_found + group.prompts_missing} prompts computed by its "
                f"ranks {group.prompts_missing} are not among what they say they hold, so their tokens were "
                "others. The group's field tokenizer must name the ranks' own tokenizer and chat template."
            )


def _budgets(status: Status) -> Iterator[str]:
    """Groups whose engines cannot keep the targets, and the budget that could.

    Only by what is known of them: with neither a budget told nor steps seen, nothing is.
    """
    if status.targets is None:
        return
    targets = Targets(status.targets.ttft_ms / 1e3, status.targets.tpot_ms / 1e3)
    for group in status.groups:
        if group.step_time is None or group.prefill_step_ms <= status.targets.tpot_ms:
            continue
        costs, load = step_costs(group), Load(group.decoding_sequences, group.kv_tokens)
        best = best_budget_tokens(costs, load, targets)
        if best is not None and group.budget_tokens is not None:
            yield (
                f"{group.name}: steps with prefill take {group.prefill_step_ms:.0f} ms, the TPOT target is "
                f"{status.targets.tpot_ms:.0f} ms. --max-num-batched-tokens {best} instead of "
                f"{group.budget_tokens} would keep it at this load; `wavegate tune` tells more."
            )
        elif best is None and (group.budget_tokens is not None or group.observations >= FEWEST_OBSERVATIONS):
            decode_step_s = costs.decode_step_s(load.decoding_sequences, load.kv_tokens)
            yield (
                f"{group.name}: at this load steps take {decode_step_s * 1e3:.0f} ms even "
                f"without prefill, the TPOT target is {status.targets.tpot_ms:.0f} ms: no token budget can "
                "keep it. Fewer requests per rank would."
            )


def step_costs(group: GroupStatus) -> StepCosts:
    """The model of step times that the gateway has learned."""
    learned = group.step_time
    assert learned is not None
    return StepCosts(
        fixed_s=learned.fixed_ms / 1e3,
        per_prefill_token_s=learned.prefill_us_per_token / 1e6,
        per_decode_sequence_s=learned.decode_us_per_sequence / 1e6,
        per_kv_token_s=learned.kv_ns_per_token / 1e9,
    )


def size(count: int) -> str:
    """A number of bytes for people."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
