"""Pictures of results: goodput per policy, and one minute of a run with its phases. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.matrix import Cell
from benchmarks.simulation import RunRecord

PREFILL, DECODE, LOST, IDLE = "#d9480f", "#4c6ef5", "#e9ecef", "#f8f9fa"
OURS, THEIRS = "#2b8a3e", "#adb5bd"


def draw(
    path: Path, cells: Sequence[Cell], minutes: Sequence[tuple[str, RunRecord]], *, from_s: float
) -> None:
    """Goodput of each cell above, and below one minute of some runs of a single group, from `from_s` on."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1 + len(minutes),
        1,
        figsize=(14, 4 + 3.2 * len(minutes)),
        height_ratios=[1.2, *(1.0 for _ in minutes)],
        layout="constrained",
        squeeze=False,
    )
    _goodput(axes[0][0], cells)
    for (name, record), row in zip(minutes, axes[1:], strict=True):
        _minute(row[0], name, record, from_s)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _goodput(axis: Any, cells: Sequence[Cell]) -> None:
    """A bar for each cell, the best at the top."""
    ordered = sorted(cells, key=lambda cell: cell.score.goodput)
    labels = [
        f"{cell.policy} @ {cell.budget_tokens}, {cell.ttft_target_ms / 1000:g} s / {cell.tpot_target_ms:g} ms"
        for cell in ordered
    ]
    colours = [OURS if cell.policy == "lockstep" else THEIRS for cell in ordered]
    bars = axis.barh(labels, [cell.score.goodput for cell in ordered], color=colours)
    axis.bar_label(bars, fmt="%.3f", padding=3, fontsize=8)
    axis.set_xlim(0, 1.05)
    axis.set_title("goodput: share of requests that met both targets", loc="left")
    axis.tick_params(axis="y", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _minute(axis: Any, name: str, record: RunRecord, from_s: float) -> None:
    """Ranks as rows: what each did in its part of every step, and how long it then waited for the slowest."""
    by_colour: dict[str, dict[int, list[tuple[float, float]]]] = {PREFILL: {}, DECODE: {}, LOST: {}}
    for step in record.steps[0]:
        if not from_s <= step.start_s < from_s + 60:
            continue
        for share in step.ranks:
            start_s = step.start_s - from_s
            if share.prefill_tokens or share.decode_sequences:
                colour = PREFILL if share.prefill_tokens else DECODE
                by_colour[colour].setdefault(share.rank, []).append((start_s, share.cost_s))
            by_colour[LOST].setdefault(share.rank, []).append(
                (start_s + share.cost_s, step.duration_s - share.cost_s)
            )
    for colour, ranks in by_colour.items():
        for rank, spans in ranks.items():
            axis.broken_barh(spans, (rank - 0.42, 0.84), facecolors=colour, linewidth=0)
    axis.set_title(f"one minute of {name}: prefill orange, decode blue, waiting grey", loc="left")
    axis.set_xlim(0, 60)
    axis.set_xlabel("seconds")
    axis.set_ylabel("rank")
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
