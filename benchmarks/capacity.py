"""The highest load at which enough requests meet their targets: what a buyer of GPUs asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks.matrix import Cell, best_budgets, run_matrix
from benchmarks.simulation import Deployment
from benchmarks.traces import load
from ext_proc.settings import Targets

PRECISION = 0.05
"""Bisection ends when the bounds are this close, as a share of the upper one."""


class Capacity(msgspec.Struct, frozen=True):
    """One policy's answer."""

    policy: str
    speed: float
    """Load, as a multiple of the trace's; 0 if even the lowest tried was too much."""
    budget_tokens: int
    """The budget it takes."""
    goodput: float


def capacity(
    policy: str,
    trace: Path,
    trace_format: str,
    deployment: Deployment,
    *,
    budgets: Sequence[int],
    targets: Targets,
    share: float = 0.8,
    duration_s: float = 600.0,
    speeds: tuple[float, float] = (0.1, 3.2),
    seed: int = 0,
    on_tried: Callable[[Cell, float], None] = lambda cell, speed: None,
) -> Capacity:
    """By bisection, the highest of `speeds` at which the goodput is at least `share`, at the best budget."""

    def at(speed: float) -> Cell:
        requests = load(trace, trace_format, speed=speed, duration_s=duration_s, seed=seed)
        cells = run_matrix(
            requests, deployment, policies=[policy], budgets=budgets, targets=[targets], seed=seed
        )
        (cell,) = best_budgets(cells)
        on_tried(cell, speed)
        return cell

    low, high = speeds
    best = at(low)
    if best.score.goodput < share:
        return Capacity(policy, 0.0, best.budget_tokens, best.score.goodput)
    reached = low
    while high - reached > PRECISION * high:
        middle = (reached + high) / 2
        cell = at(middle)
        if cell.score.goodput >= share:
            reached, best = middle, cell
        else:
            high = middle
    return Capacity(policy, reached, best.budget_tokens, best.score.goodput)
