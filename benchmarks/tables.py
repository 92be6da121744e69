"""Results as tables: for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.table import Table

from benchmarks.capacity import Capacity
from benchmarks.lock_step import DecodeSpeed
from benchmarks.matrix import Cell
from benchmarks.score import Score
from benchmarks.suite import Verdict

COLUMNS = (
    "policy",
    "budget",
    "goodput",
    "TTFT met",
    "TPOT met",
    "TTFT p50/p90/p99 s",
    "TPOT p50/p90/p99 ms",
    "E2E p50/p90/p99 s",
    "cache hits",
    "lost to slowest",
    "held p50/max s",
)


def rows(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """A row per cell, the best goodput first."""
    ordered = sorted(cells, key=lambda cell: -cell.score.goodput)
    return [_row(cell) for cell in ordered]


def rich_table(title: str, cells: Sequence[Cell]) -> Table:
    """For a terminal of 80 columns; the rest is in the JSON."""
    table = Table(title=title, title_justify="left", box=SIMPLE, header_style="bold", padding=(0, 0))
    table.add_column("policy", no_wrap=True)
    for column in ("budget", "good-\nput", "TTFT s\np50", "\np90", "\np99", "TPOT ms\np50", "\np99"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("cache\nhits", "lost", "max\nhold s"):
        table.add_column(column, justify="right", no_wrap=True)
    for cell in sorted(cells, key=lambda cell: -cell.score.goodput):
        score = cell.score
        table.add_row(
            cell.policy,
            str(cell.budget_tokens),
            f"{score.goodput:.3f}",
            f"{score.ttft_s.p50:.2f}",
            f"{score.ttft_s.p90:.2f}",
            f"{score.ttft_s.p99:.1f}",
            f"{score.tpot_s.p50 * 1e3:.0f}",
            f"{score.tpot_s.p99 * 1e3:.0f}",
            f"{score.cache_hit_share:.2f}",
            f"{score.lost_share:.2f}",
            f"{score.longest_hold_s:.1f}",
            style="bold" if cell.policy == "lockstep" else "",
        )
    return table


def wall_clock_table(results: Sequence[tuple[str, Score, float, dict[str, int]]]) -> Table:
    """Name, score, seconds for all requests, and requests per rank of each run."""
    table = Table(box=SIMPLE, header_style="bold", padding=(0, 0))
    table.add_column("", no_wrap=True)
    for column in ("good-\nput", "TTFT s\np50", "\np99", "TPOT ms\np50", "\np99", "all\nin s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("requests per rank", overflow="fold")
    for name, score, elapsed_s, by_rank in results:
        table.add_row(
            name,
            f"{score.goodput:.3f}",
            f"{score.ttft_s.p50:.2f}",
            f"{score.ttft_s.p99:.1f}",
            f"{score.tpot_s.p50 * 1e3:.0f}",
            f"{score.tpot_s.p99 * 1e3:.0f}",
            f"{elapsed_s:.1f}",
            " ".join(f"{count}" for _, count in sorted(by_rank.items())),
        )
    return table


def lock_step_table(speeds: Sequence[DecodeSpeed]) -> Table:
    """What the answer on the second rank saw; prompts go as each row says."""
    table = Table(box=SIMPLE, header_style="bold", padding=(0, 0))
    table.add_column("long prompts", no_wrap=True)
    for column in ("prompts", "tokens\nper s", "gap ms\np50", "\np99", "stalled"):
        table.add_column(column, justify="right", no_wrap=True)
    for speed in speeds:
        table.add_row(
            speed.situation,
            str(speed.prompts),
            f"{speed.tokens_per_s:.1f}",
            f"{speed.gap_p50_ms:.1f}",
            f"{speed.gap_p99_ms:.1f}",
            f"{speed.stalled_share:.0%}",
        )
    return table


def markdown(cells: Sequence[Cell]) -> str:
    """For a document."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in rows(cells)]
    return "\n".join(lines)


def summary_markdown(verdicts: Sequence[Verdict]) -> str:
    """A row per case of the suite, for a document."""
    lines = [
        "| case | TPOT target | best peer | wavegate | asked for | TTFT p50 | TTFT p99 | longest hold "
        "| missed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for verdict in verdicts:
        ours, peer = verdict.ours, verdict.best_peer
        p50, p99 = verdict.ttft_ratios
        asked = "" if verdict.at_least is None else f"{verdict.at_least:.2f}"
        lines.append(
            f"| {verdict.case} | {ours.tpot_target_ms:g} ms "
            f"| {peer.score.goodput:.3f} {peer.policy} @ {peer.budget_tokens} "
            f"| **{ours.score.goodput:.3f}** @ {ours.budget_tokens} | {asked} "
            f"| {ours.score.ttft_s.p50:.2f} s, ×{p50:.2f} | {ours.score.ttft_s.p99:.1f} s, ×{p99:.2f} "
            f"| {ours.score.longest_hold_s:.1f} s | {', '.join(verdict.missed)} |"
        )
    return "\n".join(lines)


def capacity_markdown(capacities: Sequence[Capacity]) -> str:
    """For a document."""
    lines = ["| policy | load carried | budget | goodput there |", "|---|---|---|---|"]
    lines += [
        f"| {one.policy} | ×{one.speed:.2f} | {one.budget_tokens} | {one.goodput:.3f} |" for one in capacities
    ]
    return "\n".join(lines)


def title(cell: Cell) -> str:
    """What a table of such cells shows."""
    return f"targets: TTFT {cell.ttft_target_ms / 1000:g} s, TPOT {cell.tpot_target_ms:g} ms"


def _row(cell: Cell) -> tuple[str, ...]:
    score = cell.score
    ttft, tpot, e2e = score.ttft_s, score.tpot_s, score.e2e_s
    return (
        cell.policy,
        str(cell.budget_tokens),
        f"{score.goodput:.3f}",
        f"{score.ttft_met:.3f}",
        f"{score.tpot_met:.3f}",
        f"{ttft.p50:.2f} / {ttft.p90:.2f} / {ttft.p99:.1f}",
        f"{tpot.p50 * 1e3:.0f} / {tpot.p90 * 1e3:.0f} / {tpot.p99 * 1e3:.0f}",
        f"{e2e.p50:.1f} / {e2e.p90:.1f} / {e2e.p99:.1f}",
        f"{score.cache_hit_share:.3f}",
        f"{score.lost_share:.2f}",
        f"{score.held_s.p50:.2f} / {score.longest_hold_s:.1f}",
    )
