"""One rank's engine core: scheduler, step time and wave state, in the order of vLLM's run loop.

The loop itself belongs to whoever has the clock (`engine_process` in wall-clock time, `virtual` in
virtual time). One iteration (vLLM 0.32 vllm/v1/engine/core.py run_busy_loop):

    1. drain inputs:           add_request, abort, start_dp_wave
    2. work = begin_step(now)  None: nothing to do, block for the next input
    3. a lock-step group waits until every rank has begun; the step lasts as long as its slowest rank's
    4. outputs = end_step(work, now)
    5. if agreement_due:       agree(whether any rank of the group has unfinished work)
    6. take_messages() go to the coordinator

Must never wait, and never read a clock.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from vllm_ranks.engine.plan import StepOutcome, StepPlan
from vllm_ranks.engine.request import EngineRequest
from vllm_ranks.engine.scheduler import Scheduler
from vllm_ranks.engine.sequence import SequenceState
from vllm_ranks.engine.time_model import StepTimeModel
from vllm_ranks.engine.waves import EngineCounts, EngineMessage, EngineStats, RankIdentity, WaveState


class StepKind(Enum):
    """What a rank does in a step."""

    MODEL = auto()
    """Computes its plan."""
    DUMMY = auto()
    """Computes nothing of its own, because its group steps together."""
    FLUSH = auto()
    """Does not step: it only has new gauges to report, after requests were aborted, finished or preempted."""


@dataclass(slots=True)
class StepWork:
    """One rank's part of a step."""

    kind: StepKind
    cost_s: float
    """How long this rank alone needs."""
    plan: StepPlan | None
    """Empty, if anything, unless the kind is MODEL."""
    reports: bool
    """Whether `end_step` has something to tell the front end."""

    @property
    def in_lock_step(self) -> bool:
        """Whether the other ranks of the group must take part."""
        return self.kind is not StepKind.FLUSH


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A rank's gauges and cache counters at one moment."""

    running: int
    waiting: int
    deferred: int
    """Those of the waiting that were passed over: too many LoRA adapters would have run at once."""
    kv_usage: float
    prefix_cache_queries: int
    """Since the start, in tokens."""
    prefix_cache_hits: int
    current_wave: int
    step_counter: int


class EngineCore:
    """One rank of a group."""

    def __init__(
        self,
        scheduler: Scheduler,
        time_model: StepTimeModel,
        rng: random.Random,
        waves: WaveState | None = None,
    ) -> None:
        """`waves`: `None` for a rank that steps alone (dense model, or a group of one).

        `rng` draws the time model's jitter; give every rank its own.
        """
        self.scheduler = scheduler
        self.time_model = time_model
        self.waves = waves
        self.agreement_due = False
        """The step that ended is one after which the group agrees whether to go on."""
        self._rng = rng

    @property
    def has_unfinished(self) -> bool:
        """This rank's vote in the agreement."""
        return self.scheduler.has_unfinished

    # --- 1. Inputs ----------------------------------------------------------------------------------

    def add_request(self, request: EngineRequest, now_s: float, request_wave: int = 0) -> SequenceState:
        """Queue a request, tagged with the wave its front end believed to be current.

        Raises ValueError for a request this rank can never serve.
        """
        sequence = self.scheduler.add(request)
        sequence.queued_s = now_s
        if self.waves is not None:
            self.waves.on_add(request_wave)
        return sequence

    def abort(self, request_ids: Iterable[str]) -> list[SequenceState]:
        """End requests; also right before `end_step`, for aborts that came during the step."""
        return self.scheduler.abort(request_ids)

    def start_dp_wave(self, wave: int, exclude: RankIdentity) -> None:
        """The coordinator wakes the group."""
        if self.waves is not None:
            self.waves.on_start_dp_wave(wave, exclude)

    # --- 2. to 6. The step --------------------------------------------------------------------------

    def begin_step(self, now_s: float) -> StepWork | None:
        """Decide this iteration's work. `None`: the rank is idle."""
        scheduler, waves = self.scheduler, self.waves
        plan = scheduler.schedule(throttle_prefills=self._throttles_prefills())
        flush = scheduler.take_flush()
        if plan is not None and (plan.decoding or plan.prefills):
            for sequence in plan.admitted:
                if sequence.scheduled_s is None:
                    sequence.scheduled_s = now_s
            return StepWork(StepKind.MODEL, self.time_model.step_s(plan, self._rng), plan, True)
        reports = flush or plan is not None
        if waves is not None and (waves.running or plan is not None):
            return StepWork(StepKind.DUMMY, self.time_model.dummy_step_s(self._rng), plan, reports)
        return StepWork(StepKind.FLUSH, 0.0, plan, reports) if reports else None

    def end_step(self, work: StepWork, now_s: float) -> StepOutcome | None:
        """The work is done. What the front end must be told, together with `stats()`; `None`: nothing."""
        outcome = None
        if work.plan is not None:
            outcome = self.scheduler.complete(work.plan)
            for sequence in outcome.prefilled:
                if sequence.first_token_s is None:
                    sequence.first_token_s = now_s
        elif work.reports:
            outcome = StepOutcome([], [], [])
        if work.kind is not StepKind.FLUSH and self.waves is not None:
            self.agreement_due = self.waves.step_done()
        return outcome

    def agree(self, any_rank_unfinished: bool) -> None:
        """The group's combined answer after a step with `agreement_due`."""
        assert self.waves is not None
        self.agreement_due = False
        self.waves.agree(any_rank_unfinished)

    def take_messages(self) -> list[EngineMessage]:
        """Messages for the coordinator."""
        return [] if self.waves is None else self.waves.take_messages()

    def stats(self) -> SchedulerStats:
        """Gauges and cache counters as they are now."""
        scheduler, waves = self.scheduler, self.waves
        return SchedulerStats(
            scheduler.running,
            scheduler.waiting,
            scheduler.deferred,
            scheduler.kv_cache.usage,
            scheduler.prefix_cache_queries,
            scheduler.prefix_cache_hits,
            0 if waves is None else waves.current_wave,
            0 if waves is None else waves.step_counter,
        )

    def coordinator_stats(self) -> EngineStats:
        """The same for the coordinator, which wants it in internal and hybrid mode only."""
        stats = self.stats()
        return EngineStats(
            EngineCounts(stats.waiting, stats.running, stats.kv_usage), stats.current_wave, stats.step_counter
        )

    def _throttles_prefills(self) -> bool:
        interval = self.scheduler.limits.prefill_schedule_interval
        return interval > 1 and self.waves is not None and self.waves.step_counter % interval != 0
