"""Which settings of the engines serve a trace best, tried out in virtual time under one policy.

First the token budget; at the best one, whether vLLM's limit on long prompts' chunks or its prefill schedule
helps further. Every trial is a whole run of the trace by the decision code that ships.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from benchmarks.score import Score, score
from benchmarks.simulation import Deployment, Gateway, simulate
from benchmarks.traces import TraceRequest
from benchmarks.workers import worker_processes
from ext_proc.settings import AdmissionSettings, Targets

INTERVALS = (8,)
"""Prefill schedule intervals tried beside 1."""


class EngineSettings(msgspec.Struct, frozen=True):
    """What can be told to vLLM."""

    max_num_batched_tokens: int
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in a step; 0: no limit of its own."""
    prefill_schedule_interval: int = 1
    """Prefills begin only every so many steps."""

    def options(self) -> str:
        """The same as options of `vllm serve`."""
        options = [f"--max-num-batched-tokens {self.max_num_batched_tokens}"]
        if self.long_prefill_token_threshold:
            options.append(f"--long-prefill-token-threshold {self.long_prefill_token_threshold}")
        if self.prefill_schedule_interval > 1:
            options.append(f"--prefill-schedule-interval {self.prefill_schedule_interval}")
        return " ".join(options)


class Trial(msgspec.Struct, frozen=True):
    """Settings and what requests get with them."""

    settings: EngineSettings
    score: Score


OnTried = Callable[[Trial, int], None]
"""Told each trial, and how many there will be."""


def tune(
    trace: Sequence[TraceRequest],
    deployment: Deployment,
    targets: Targets,
    *,
    budgets: Sequence[int],
    policy: str = "lockstep",
    seed: int = 0,
    on_tried: OnTried = lambda trial, total: None,
) -> list[Trial]:
    """All trials, the best first."""
    gateway = Gateway(policy=policy, targets=targets, admission=AdmissionSettings(targets=targets))
    variants = 1 + len(INTERVALS)
    total = len(budgets) + variants
    with worker_processes() as pool:

        def run(settings: Sequence[EngineSettings]) -> list[Trial]:
            jobs = [_Job(tuple(trace), _with(deployment, one), gateway, one, seed) for one in settings]
            trials = []
            for trial in pool.map(_run, jobs):
                on_tried(trial, total)
                trials.append(trial)
            return trials

        trials = run([EngineSettings(budget) for budget in budgets])
        best = max(trials, key=_merit).settings
        trials += run(
            [
                msgspec.structs.replace(best, long_prefill_token_threshold=best.max_num_batched_tokens // 2),
                *(msgspec.structs.replace(best, prefill_schedule_interval=n) for n in INTERVALS),
            ]
        )
    return sorted(trials, key=_merit, reverse=True)


@dataclass(frozen=True, slots=True)
class _Job:
    trace: tuple[TraceRequest, ...]
    deployment: Deployment
    gateway: Gateway
    settings: EngineSettings
    seed: int


def _run(job: _Job) -> Trial:
    record = simulate(job.trace, job.deployment, job.gateway, seed=job.seed)
    return Trial(job.settings, score(record, job.gateway.targets))


def _with(deployment: Deployment, settings: EngineSettings) -> Deployment:
    return replace(
        deployment,
        budget_tokens=settings.max_num_batched_tokens,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        prefill_schedule_interval=settings.prefill_schedule_interval,
    )


def _merit(trial: Trial) -> tuple[float, float]:
    """More requests well served; among equals, sooner first tokens."""
    return round(trial.score.goodput, 3), -trial.score.ttft_s.p50
