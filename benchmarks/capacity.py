"""The highest load at which enough requests meet their targets: what a buyer of GPUs asks for.

Goodput does not fall steadily with load: where it is about enough, it goes up and down by a hundredth from
one load to the next. So a bisection finds one of several crossings, and higher loads are looked at after it.
"""

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
FURTHER = (1.5, 1.35, 1.2, 1.1)
"""Multiples of a load that passes at which it is looked whether a higher one does."""


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
    """The highest of `speeds` at which the goodput is at least `share`, at the best budget there."""
    tried: dict[float, Cell] = {}

    def passes(speed: float) -> bool:
        if speed not in tried:
            requests = load(trace, trace_format, speed=speed, duration_s=duration_s, seed=seed)
            cells = run_matrix(
                requests, deployment, policies=[policy], budgets=budgets, targets=[targets], seed=seed
            )
            (tried[speed],) = best_budgets(cells)
            on_tried(tried[speed], speed)
        return tried[speed].score.goodput >= share

    speed = highest_load(passes, *speeds)
    best = tried[speeds[0] if speed is None else speed]
    return Capacity(policy, speed or 0.0, best.budget_tokens, best.score.goodput)


def highest_load(passes: Callable[[float], bool], lowest: float, highest: float) -> float | None:
    """The highest load that passes, by bisection; `None` if not even the lowest does.

    None of the loads looked at beyond it, up to half as high again, passes.
    """
    if not passes(lowest):
        return None
    reached, above = lowest, highest
    while True:
        while above - reached > PRECISION * above:
            middle = (reached + above) / 2
            if passes(middle):
                reached = middle
            else:
                above = middle
        further = (factor * reached for factor in FURTHER if factor * reached <= highest)
        higher = next(filter(passes, further), None)
        if higher is None:
            return reached
        reached, above = higher, min(highest, FURTHER[-1] * higher)
