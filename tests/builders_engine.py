"""Engine parts for tests, in a few words: requests, schedulers, cores."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_ranks.engine.core import EngineCore
from vllm_ranks.engine.kv_cache import KVCache, KvEvent
from vllm_ranks.engine.plan import StepOutcome, StepPlan
from vllm_ranks.engine.request import EngineRequest, FinishReason
from vllm_ranks.engine.scheduler import Scheduler, SchedulerLimits
from vllm_ranks.engine.time_model import StepTimeModel
from vllm_ranks.engine.virtual import VirtualEngine
from vllm_ranks.engine.virtual_events import VirtualEvent
from vllm_ranks.engine.waiting import SchedulingPolicy
from vllm_ranks.engine.waves import WaveState

BLOCK = 4
"""Tokens per KV block wherever a test does not say otherwise."""
LONG_S = 3600.0
"""In which every test's requests have ended."""


def engine_request(
    request_id: str,
    prompt: int = 4,
    output: int = 3,
    *,
    family: str | None = None,
    priority: int = 0,
    arrival_s: float = 0.0,
    reason: FinishReason = FinishReason.STOP,
    block_size: int = BLOCK,
    lora: str | None = None,
) -> EngineRequest:
    """A request whose prompt shares all blocks with those of the same `family` (by default its own id)."""
    hashes = [(family or request_id, index) for index in range(prompt // block_size)]
    return EngineRequest(request_id, arrival_s, prompt, output, reason, priority, hashes, lora)


def scheduler(
    *,
    seqs: int = 8,
    budget: int = 64,
    blocks: int = 64,
    model_len: int | None = None,
    policy: SchedulingPolicy = "fcfs",
    caching: bool = True,
    events: list[KvEvent] | None = None,
    block_size: int = BLOCK,
    **limits: Any,
) -> Scheduler:
    """A scheduler with room for everything, unless told otherwise."""
    cache = KVCache(
        blocks,
        block_size,
        enable_prefix_caching=caching,
        listener=None if events is None else events.append,
    )
    return Scheduler(
        SchedulerLimits(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=model_len or blocks * block_size,
            **limits,
        ),
        cache,
        policy,
    )


def step(engine: Scheduler, *, throttle_prefills: bool = False) -> tuple[StepPlan, StepOutcome]:
    """One step that must have something to do."""
    plan = engine.schedule(throttle_prefills=throttle_prefills)
    assert plan is not None
    return plan, engine.complete(plan)


def chunks(plan: StepPlan) -> dict[str, int]:
    """Prefill tokens of a plan, by request."""
    return {sequence.request.request_id: tokens for sequence, tokens in plan.prefills}


def names(sequences: Sequence[Any]) -> list[str]:
    """Request ids."""
    return [sequence.request.request_id for sequence in sequences]


def tokens(outcome: StepOutcome) -> dict[str, FinishReason | None]:
    """Requests that got a token in a step, with the reason if it was their last."""
    produced = [*outcome.decoded, *outcome.prefilled]
    assert len(set(produced)) == len(produced)
    assert set(outcome.finished) <= set(produced)
    return {s.request.request_id: s.finish_reason if s in outcome.finished else None for s in produced}


def until_idle(engine: VirtualEngine) -> Iterator[VirtualEvent]:
    """What happens until all ranks are at rest; the clock goes on to an hour later at most."""
    yield from engine.advance_to(engine.now_s + LONG_S)


def core(
    rank: int | None = None, *, time_model: StepTimeModel | None = None, interval: int = 16, **options: Any
) -> EngineCore:
    """One rank; without a number it steps alone."""
    return EngineCore(
        scheduler(**options),
        time_model or StepTimeModel(),
        random.Random(0),
        None if rank is None else WaveState(rank, interval),
    )
