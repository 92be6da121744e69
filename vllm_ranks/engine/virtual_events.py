"""What a virtual-time engine is told and what it tells: groups, request events, traced steps.

Plain records; must never do anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_ranks.engine.plan import PlanRecord
from vllm_ranks.engine.queue_limits import QueueLimits
from vllm_ranks.engine.request import FinishReason
from vllm_ranks.engine.scheduler import SchedulerLimits
from vllm_ranks.engine.time_model import StepTimeModel
from vllm_ranks.engine.waiting import SchedulingPolicy


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group of ranks."""

    ranks: int = 1
    lock_step: bool = True
    """A MoE model: its ranks step together. Dense ranks, and a single one, step alone."""
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)
    policy: SchedulingPolicy = "fcfs"
    num_blocks: int = 131_072
    """KV blocks of each rank; with blocks of 16 tokens, two million tokens."""
    block_size: int = 16
    enable_prefix_caching: bool = True
    time_model: StepTimeModel = field(default_factory=StepTimeModel)
    rank_time_models: Mapping[int, StepTimeModel] = field(default_factory=dict)
    """Exceptions by rank, such as one slow machine."""
    dp_sync_interval: int = 16
    queue_limits: QueueLimits = field(default_factory=QueueLimits)
    """Per rank: each has its own API server."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A request's first token reached its API server."""

    at_s: float
    group: int
    rank: int
    request_id: str
    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended by itself; one that was aborted is not heard of again."""

    at_s: float
    group: int
    rank: int
    request_id: str
    reason: FinishReason
    first_token_s: float
    generated_tokens: int
    cached_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was turned away."""

    at_s: float
    group: int
    rank: int
    request_id: str
    reason: str
    """The queue limit that was reached (503), or why this rank can never serve such a request (400)."""


VirtualEvent = FirstToken | Finished | Refused


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's part of a traced step."""

    rank: int
    cost_s: float
    """What it needed by itself; the rest of the step it waited."""
    prefill_tokens: int
    decode_sequences: int
    plan: PlanRecord | None
    """`None`: a dummy batch."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step of the ranks that step together, or of one that steps alone."""

    start_s: float
    duration_s: float
    ranks: tuple[RankShare, ...]
