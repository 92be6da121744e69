"""Many runs at once: every policy at every budget, for every pair of targets, over the machine's CPUs.

A policy that never holds requests does the same whatever the targets are, so one run of it serves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace

import msgspec

from benchmarks.score import Score, score
from benchmarks.simulation import Deployment, Gateway, Observation, simulate
from benchmarks.traces import TraceRequest
from benchmarks.workers import worker_processes
from ext_proc.policies import make_policy
from ext_proc.settings import AdmissionSettings, Targets

OnDone = Callable[[int, int], None]
"""Told how many runs are done, of how many."""


class Cell(msgspec.Struct, frozen=True):
    """One policy at one budget, judged by one pair of targets."""

    policy: str
    budget_tokens: int
    ttft_target_ms: float
    tpot_target_ms: float
    score: Score


@dataclass(frozen=True, slots=True)
class _Job:
    trace: tuple[TraceRequest, ...]
    deployment: Deployment
    gateway: Gateway
    observation: Observation
    judged_by: tuple[Targets, ...]
    seed: int


def run_matrix(
    trace: Sequence[TraceRequest],
    deployment: Deployment,
    *,
    policies: Sequence[str],
    budgets: Sequence[int],
    targets: Sequence[Targets],
    observation: Observation | None = None,
    admission: AdmissionSettings | None = None,
    seed: int = 0,
    on_done: OnDone = lambda done, total: None,
) -> list[Cell]:
    """Every policy at every budget for every pair of targets, in that order."""
    jobs = [
        _Job(
            tuple(trace),
            replace(deployment, budget_tokens=budget),
            Gateway(
                policy=policy,
                targets=judged_by[0],
                admission=replace(admission or AdmissionSettings(), targets=judged_by[0]),
            ),
            observation or Observation(),
            judged_by,
            seed,
        )
        for policy in policies
        for budget in budgets
        for judged_by in _runs_for(policy, targets)
    ]
    results: dict[int, list[Cell]] = {}
    with worker_processes() as executor:
        futures = {executor.submit(_run, job): n for n, job in enumerate(jobs)}
        for future in as_completed(futures):
            results[futures[future]] = future.result()
            on_done(len(results), len(jobs))
    return [cell for n in range(len(jobs)) for cell in results[n]]


def best_budgets(cells: Sequence[Cell]) -> list[Cell]:
    """Of each policy and pair of targets, the cell with the highest goodput."""
    best: dict[tuple[str, float, float], Cell] = {}
    for cell in cells:
        key = (cell.policy, cell.ttft_target_ms, cell.tpot_target_ms)
        if key not in best or cell.score.goodput > best[key].score.goodput:
            best[key] = cell
    return list(best.values())


def _runs_for(policy: str, targets: Sequence[Targets]) -> Iterator[tuple[Targets, ...]]:
    if make_policy(policy).holds:
        yield from ((one,) for one in targets)
    else:
        yield tuple(targets)


def _run(job: _Job) -> list[Cell]:
    record = simulate(job.trace, job.deployment, job.gateway, job.observation, seed=job.seed)
    return [
        Cell(
            job.gateway.policy,
            job.deployment.budget_tokens,
            targets.ttft_s * 1000,
            targets.tpot_s * 1000,
            score(record, targets),
        )
        for targets in job.judged_by
    ]
