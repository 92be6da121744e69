"""The scheduler and its decode clock against the naive reading of vLLM's, under arbitrary operations."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from tests.builders_engine import tokens
from tests.builders_naive_engine import NaiveScheduler, NaiveStep
from vllm_ranks.engine.kv_cache import BlocksRemoved, BlocksStored, KVCache, KvEvent
from vllm_ranks.engine.plan import StepPlan
from vllm_ranks.engine.request import EngineRequest, FinishReason
from vllm_ranks.engine.scheduler import Scheduler, SchedulerLimits


@dataclass(frozen=True)
class Engine:
    limits: SchedulerLimits
    num_blocks: int
    block_size: int
    caching: bool
    policy: Literal["fcfs", "priority"]


@dataclass(frozen=True)
class Add:
    prompt_share: float
    family: int
    output_tokens: int
    priority: int = 0
    arrival_s: float = 0.0
    hashed: bool = True


@dataclass(frozen=True)
class Abort:
    which: int


@dataclass(frozen=True)
class Schedule:
    throttle: bool = False


@dataclass(frozen=True)
class Complete:
    steps: int = 1


Operation = Add | Abort | Schedule | Complete


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    block_size = draw(st.integers(1, 5))
    num_blocks = draw(st.integers(4, 40))
    max_model_len = draw(st.integers(2, num_blocks * block_size))
    max_num_seqs = draw(st.integers(1, 8))
    chunked = draw(st.sampled_from([True, True, True, False]))
    budget = max_num_seqs + draw(st.sampled_from([0, 1, 5, 12]))
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget if chunked else max(budget, max_model_len),
        max_model_len=max_model_len,
        long_prefill_token_threshold=min(draw(st.sampled_from([0, 1, 2, 3, 5])), max_model_len),
        enable_chunked_prefill=chunked,
    )
    policy: Literal["fcfs", "priority"] = draw(st.sampled_from(["fcfs", "priority"]))
    return Engine(limits, num_blocks, block_size, draw(st.booleans()), policy)


operations = st.lists(
    st.one_of(
        st.builds(
            Add,
            st.floats(0, 1),
            st.integers(0, 2),
            st.integers(1, 40),
            st.integers(0, 2),
            st.integers(0, 3).map(float),
            st.sampled_from([True, True, True, False]),
        ),
        st.builds(Abort, st.integers(0, 30)),
        st.builds(Schedule, st.sampled_from([False, False, True])),
        st.builds(Complete, st.integers(1, 25)),
    ),
    max_size=40,
)


class Pair:
    """Both schedulers, given the same operations, compared after each."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.cached: Counter[Hashable] = Counter()
        """Blocks that the real cache has told of and not taken back, by content."""
        cache = KVCache(
            engine.num_blocks,
            engine.block_size,
            enable_prefix_caching=engine.caching,
            listener=self.on_cache_event,
        )
        self.real = Scheduler(engine.limits, cache, engine.policy)
        self.naive = NaiveScheduler(
            engine.limits, engine.num_blocks, engine.block_size, engine.caching, engine.policy
        )
        self.added = 0
        self.open: tuple[StepPlan, NaiveStep] | None = None

    def on_cache_event(self, event: KvEvent) -> None:
        if isinstance(event, BlocksStored):
            self.cached.update(event.block_hashes)
        elif isinstance(event, BlocksRemoved):
            self.cached.subtract(event.block_hashes)

    def apply(self, operation: Operation) -> None:
        match operation:
            case Add():
                self.add(operation)
            case Abort(which):
                self.abort(f"r{which % (self.added + 1)}")
            case Schedule(throttle):
                self.schedule(throttle)
            case Complete(steps):
                for _ in range(steps):
                    self.schedule(throttle=False)
                    self.complete()
        self.compare()

    def add(self, operation: Add) -> None:
        prompt_tokens = max(1, round(operation.prompt_share * (self.engine.limits.max_model_len - 1)))
        hashes = [(operation.family, index) for index in range(prompt_tokens // self.engine.block_size)]
        self.added += 1
        request = EngineRequest(
            f"r{self.added}",
            operation.arrival_s,
            prompt_tokens,
            operation.output_tokens,
            FinishReason.STOP,
            operation.priority,
            hashes if operation.hashed else (),
        )
        self.real.add(request)
        self.naive.add(request)

    def abort(self, request_id: str) -> None:
        present = request_id in self.real.requests
        aborted = self.real.abort([request_id])
        assert [s.request.request_id for s in aborted] == ([request_id] if present else [])
        self.naive.abort(request_id)

    def schedule(self, throttle: bool) -> None:
        if self.open is not None:
            return
        had_work = self.real.has_unfinished
        plan, step = self.real.schedule(throttle_prefills=throttle), self.naive.schedule(throttle)
        assert (plan is not None) == had_work
        if plan is None:
            return
        self.open = plan, step
        record = plan.record()
        assert list(record.prefills) == step.prefills
        assert list(record.decodes) == step.decodes
        assert list(record.preempted) == step.preempted
        assert plan.prefill_tokens == sum(tokens for _, tokens in step.prefills)
        assert plan.decode_sequences == len(step.decodes)
        assert plan.resident_kv_tokens == sum(s.computed for s in self.naive.running)
        assert plan.prefills or plan.decoding or plan.preempted, "nothing would ever change again"

    def complete(self) -> None:
        if self.open is None:
            return
        plan, step = self.open
        self.open = None
        outcome = self.real.complete(plan)
        produced, finished = self.naive.complete(step)
        assert sorted(tokens(outcome)) == sorted(produced)
        assert [
            (s.request.request_id, s.generated_tokens, s.finish_reason) for s in outcome.finished
        ] == finished

    def compare(self) -> None:
        real, naive, cache = self.real, self.naive, self.real.kv_cache
        assert (real.running, real.waiting) == (len(naive.running), len(naive.waiting))
        assert cache.free_blocks == len(naive.free)
        assert self.cached == Counter(block.block_hash for block in naive.cached)
        idle = [block.block_hash for block in naive.free if block.block_hash is not None]
        assert [block.block_hash for block in cache._idle] == idle
        assert (real.prefix_cache_queries, real.prefix_cache_hits) == (naive.queries, naive.hits)

    def run_dry(self) -> None:
        for _ in range(5_000):
            self.schedule(throttle=False)
            self.complete()
            if not self.real.has_unfinished:
                break
        assert not self.real.has_unfinished
        assert self.real.kv_cache.free_blocks == self.real.kv_cache.num_blocks
        clock = self.real._clock
        assert (clock._boundaries, clock._finishes, clock.resident_tokens_after_step) == ({}, {}, 0)


def starved_by_a_long_prompt(threshold: int) -> tuple[Engine, list[Operation]]:
    """Cached prompts are admitted while prefills are throttled; then the long one before them goes on."""
    cached = Add(0.1, family=0, output_tokens=9)
    return Engine(SchedulerLimits(4, 4, 30, threshold), 40, 1, True, "fcfs"), [
        *[Add(0.1, family=0, output_tokens=1), Complete(3)],
        *[Add(0.0, family=1, output_tokens=30), Complete(1)],
        *[Add(0.9, family=2, output_tokens=1), Complete(1)],
        *[cached, cached, Schedule(throttle=True), Complete(6)],
    ]


OUT_OF_BLOCKS_WHILE_PREFILLS_ARE_DEFERRED: tuple[Engine, list[Operation]] = (
    Engine(SchedulerLimits(3, 3, 12), 12, 1, True, "fcfs"),
    [
        *[Add(0.2, family=0, output_tokens=1), Complete(3)],
        *[Add(0.0, family=1, output_tokens=30), Complete(1)],
        *[Add(0.5, family=2, output_tokens=1), Complete(1)],
        *[Add(0.2, family=0, output_tokens=30), *[Schedule(throttle=True), Complete(1)] * 6],
    ],
)
PREEMPTED_AND_RESUMED = (
    Engine(SchedulerLimits(4, 8, 12), 6, 2, True, "priority"),
    [Add(0.2, 0, 8, 2), Add(0.2, 1, 8, 1), Add(0.2, 2, 8, 0), Complete(12), Abort(2)],
)


def busy_script(rng: random.Random) -> list[Operation]:
    """Many requests at once, which short random lists hardly ever are."""
    script: list[Operation] = []
    for _ in range(rng.randint(10, 80)):
        kind = rng.random()
        if kind < 0.4:
            share, family, length = (
                rng.random() ** rng.choice([1, 2, 3]),
                rng.randint(0, 2),
                rng.randint(1, 40),
            )
            priority, arrival_s = rng.randint(0, 2), float(rng.randint(0, 3))
            script.append(Add(share, family, length, priority, arrival_s, rng.random() < 0.8))
        elif kind < 0.5:
            script.append(Abort(rng.randint(0, 30)))
        elif kind < 0.75:
            script.append(Schedule(rng.random() < 0.4))
        else:
            script.append(Complete(rng.randint(1, 8)))
    return script


def check(engine: Engine, script: list[Operation]) -> None:
    pair = Pair(engine)
    for operation in script:
        pair.apply(operation)
    pair.run_dry()


@settings(max_examples=200, deadline=None)
@given(engines(), operations)
@example(*starved_by_a_long_prompt(threshold=0))
@example(*starved_by_a_long_prompt(threshold=2))
@example(*OUT_OF_BLOCKS_WHILE_PREFILLS_ARE_DEFERRED)
@example(*PREEMPTED_AND_RESUMED)
def test_same_schedule_tokens_and_blocks_as_the_naive_model(engine: Engine, script: list[Operation]) -> None:
    check(engine, script)


@settings(max_examples=1_500, deadline=None, phases=[Phase.generate])
@given(engines(), st.integers(0, 1 << 32))
def test_the_same_on_busy_ranks(engine: Engine, seed: int) -> None:
    check(engine, busy_script(random.Random(seed)))
