"""The cases by which routing quality is judged here, on the public traces, with every peer side by side.

Part A fixes the engines' token budget where most people leave it, part B lets every policy have its best one,
part C takes a fifth of the load, and D bounds what the waiting costs. Last comes the load that each policy
can carry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.capacity import Capacity, capacity
from benchmarks.matrix import Cell, OnDone, best_budgets, run_matrix
from benchmarks.simulation import Deployment
from benchmarks.traces import load
from ext_proc.policies import BUILT_IN
from ext_proc.policies.lockstep import Lockstep
from ext_proc.settings import AdmissionSettings, Targets

OURS = Lockstep.name
CAPACITY_CASE = "Capacity: Mooncake, 8 ranks, 80 % of requests within targets"
CAPACITY_AT_LEAST = 1.5
"""Times the best peer's."""
CAPACITY_DURATION_S = 600.0
FIXED_BUDGET = (2048,)
BUDGETS = (256, 512, 768, 1024, 2048, 8192)


@dataclass(frozen=True, slots=True)
class Case:
    """One trace at one load on one group, judged by one pair of targets."""

    name: str
    trace_format: str
    speed: float
    duration_s: float
    ranks: int
    tpot_target_s: float
    budgets: tuple[int, ...]
    at_least: float | None
    """Goodput that the default policy must reach; `None`: only compared."""
    ttft_within: tuple[float, float] = (1.6, 2.0)
    """What its median and 99th percentile of TTFT may be, as multiples of the lowest of any baseline."""

    @property
    def targets(self) -> Targets:
        """TTFT is 2 s everywhere."""
        return Targets(ttft_s=2.0, tpot_s=self.tpot_target_s)

    def at_a_fifth(self) -> Case:
        """The same requests five times as slowly."""
        return Case(
            f"{self.name}, a fifth of the load",
            self.trace_format,
            self.speed / 5,
            self.duration_s,
            self.ranks,
            self.tpot_target_s,
            self.budgets,
            None,
            (1.05, 1.05),
        )


CASES: tuple[Case, ...] = (
    Case("A1 Mooncake x0.8, 8 ranks", "mooncake", 0.8, 1200, 8, 0.100, FIXED_BUDGET, 0.60),
    Case("A2 Mooncake x3.2, 32 ranks", "mooncake", 3.2, 300, 32, 0.100, FIXED_BUDGET, 0.50),
    Case("A3 Azure x12, 32 ranks", "azure", 12.0, 150, 32, 0.100, FIXED_BUDGET, 0.95),
    Case("B1 Mooncake x0.8, 8 ranks", "mooncake", 0.8, 600, 8, 0.100, BUDGETS, 0.81),
    Case("B2 Mooncake x1.6, 8 ranks", "mooncake", 1.6, 500, 8, 0.100, BUDGETS, 0.72),
    Case("B3 Mooncake x5.6, 32 ranks", "mooncake", 5.6, 250, 32, 0.100, BUDGETS, 0.82),
    Case("B4 Mooncake x5.6, 32 ranks", "mooncake", 5.6, 250, 32, 0.050, BUDGETS, 0.50),
    Case("B5 Mooncake x0.8, 8 ranks", "mooncake", 0.8, 600, 8, 0.040, BUDGETS, 0.29),
)


class Verdict(msgspec.Struct, frozen=True):
    """What came of one case."""

    case: str
    ours: Cell
    best_peer: Cell
    """The baseline with the highest goodput."""
    fastest_ttft_p50_s: float
    """Lowest median TTFT of any baseline at the budget ours ran with."""
    fastest_ttft_p99_s: float
    at_least: float | None
    ttft_within: tuple[float, float]
    cells: tuple[Cell, ...]
    """Every policy at its best budget."""

    @property
    def ttft_ratios(self) -> tuple[float, float]:
        """Median and 99th percentile of TTFT, as multiples of the lowest of any baseline at that budget."""
        ttft_s = self.ours.score.ttft_s
        return ttft_s.p50 / self.fastest_ttft_p50_s, ttft_s.p99 / self.fastest_ttft_p99_s

    @property
    def missed(self) -> tuple[str, ...]:
        """What was asked for and not reached."""
        asked = {
            "goodput": self.at_least is None or self.ours.score.goodput >= self.at_least,
            "median TTFT": self.ttft_ratios[0] <= self.ttft_within[0],
            "p99 TTFT": self.ttft_ratios[1] <= self.ttft_within[1],
            "longest hold": self.ours.score.longest_hold_s <= AdmissionSettings().max_hold_s,
        }
        return tuple(name for name, is_reached in asked.items() if not is_reached)


def run_case(
    case: Case,
    trace: Path,
    *,
    skip_s: float = 0.0,
    seed: int = 0,
    on_done: OnDone = lambda done, total: None,
) -> Verdict:
    """Every policy on one case, played after the first `skip_s` of the trace."""
    requests = load(
        trace, case.trace_format, speed=case.speed, duration_s=case.duration_s, skip_s=skip_s, seed=seed
    )
    cells = run_matrix(
        requests,
        Deployment(ranks=case.ranks),
        policies=tuple(BUILT_IN),
        budgets=case.budgets,
        targets=[case.targets],
        seed=seed,
        on_done=on_done,
    )
    best = best_budgets(cells)
    ours = next(cell for cell in best if cell.policy == OURS)
    peers = [cell for cell in best if cell.policy != OURS]
    beside = [c for c in cells if c.policy != OURS and c.budget_tokens == ours.budget_tokens]
    return Verdict(
        case.name,
        ours,
        max(peers, key=lambda cell: cell.score.goodput),
        min(cell.score.ttft_s.p50 for cell in beside),
        min(cell.score.ttft_s.p99 for cell in beside),
        case.at_least,
        case.ttft_within,
        tuple(best),
    )


def run_suite(
    traces: dict[str, Path],
    cases: Sequence[Case],
    *,
    with_a_fifth: bool,
    skip_s: float = 0.0,
    seed: int = 0,
    on_done: Callable[[str, int, int], None] = lambda case, done, total: None,
) -> Iterator[Verdict]:
    """The cases whose trace is there, each also at a fifth of its load if asked."""
    for case in cases:
        if case.trace_format not in traces:
            continue
        for one in (case, case.at_a_fifth()) if with_a_fifth else (case,):
            yield run_case(
                one,
                traces[case.trace_format],
                skip_s=skip_s,
                seed=seed,
                on_done=partial(on_done, one.name),
            )


class CapacityVerdict(msgspec.Struct, frozen=True):
    """The load that each policy can carry at its best budget, the highest first."""

    capacities: tuple[Capacity, ...]

    @property
    def ours(self) -> Capacity:
        """Of the default policy."""
        return next(one for one in self.capacities if one.policy == OURS)

    @property
    def best_peer(self) -> Capacity:
        """Of the baseline that carries most."""
        return next(one for one in self.capacities if one.policy != OURS)

    @property
    def reached(self) -> bool:
        """Whether the default policy carries enough more than any peer."""
        return self.ours.speed >= CAPACITY_AT_LEAST * self.best_peer.speed


def run_capacity(
    trace: Path,
    *,
    duration_s: float = CAPACITY_DURATION_S,
    seed: int = 0,
    on_done: Callable[[str, int, int], None] = lambda case, done, total: None,
) -> CapacityVerdict:
    """Every policy's capacity on the Mooncake trace."""
    found: list[Capacity] = []
    for name in BUILT_IN:
        on_done(CAPACITY_CASE, len(found), len(BUILT_IN))
        found.append(
            capacity(
                name,
                trace,
                "mooncake",
                Deployment(ranks=8),
                budgets=BUDGETS,
                targets=Targets(ttft_s=2.0, tpot_s=0.100),
                duration_s=duration_s,
                seed=seed,
            )
        )
    return CapacityVerdict(tuple(sorted(found, key=lambda one: -one.speed)))
