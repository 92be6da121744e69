"""A scheduler written the slow and obvious way, to compare the real one with.

Every block is an object in one free list, every sequence is visited in every step, all counters are
explicit: the reading of vLLM 0.32's scheduler that is easiest to check by eye.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from vllm_ranks.engine.request import EngineRequest, FinishReason
from vllm_ranks.engine.scheduler import SchedulerLimits


@dataclass(eq=False)
class NaiveBlock:
    block_hash: Hashable | None = None
    references: int = 0


@dataclass(eq=False)
class NaiveSequence:
    request: EngineRequest
    generated: int = 0
    computed: int = 0
    preemptions: int = 0
    prefill_chunk: bool = False
    """After its last scheduled chunk, tokens it knows were still left to compute."""
    blocks: list[NaiveBlock] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens + self.generated

    def hash_of(self, index: int) -> Hashable:
        prompt_hashes = self.request.prompt_block_hashes
        return prompt_hashes[index] if index < len(prompt_hashes) else (self.request_id, index)


@dataclass
class NaiveStep:
    prefills: list[tuple[str, int]]
    decodes: list[str]
    preempted: list[str]
    scheduled: dict[NaiveSequence, int]


class NaiveScheduler:
    def __init__(
        self, limits: SchedulerLimits, num_blocks: int, block_size: int, caching: bool, policy: str
    ) -> None:
        self.limits, self.block_size, self.caching, self.policy = limits, block_size, caching, policy
        self.free = [NaiveBlock() for _ in range(num_blocks)]
        self.cached: list[NaiveBlock] = []
        self.running: list[NaiveSequence] = []
        self.waiting: list[NaiveSequence] = []
        self.more_waits = False
        self.queries = self.hits = 0

    def add(self, request: EngineRequest) -> None:
        self.waiting.append(NaiveSequence(request))
        self.sort_waiting()

    def sort_waiting(self) -> None:
        if self.policy == "priority":
            self.waiting.sort(key=lambda s: (s.request.priority, s.request.arrival_s, s.request_id))

    def abort(self, request_id: str) -> None:
        for sequence in [*self.running, *self.waiting]:
            if sequence.request_id == request_id:
                self.give_back(sequence)
                (self.running if sequence in self.running else self.waiting).remove(sequence)

    # --- blocks ---

    def give_back(self, sequence: NaiveSequence) -> None:
        first, last = [], []
        for block in reversed(sequence.blocks):
            block.references -= 1
            if block.references == 0:
                (first if block.block_hash is None else last).append(block)
        self.free[:0] = first
        self.free += last
        sequence.blocks = []

    def extend(self, sequence: NaiveSequence, end: int) -> None:
        while len(sequence.blocks) * self.block_size < end:
            block = self.free.pop(0)
            if block.block_hash is not None:
                self.cached.remove(block)
                block.block_hash = None
            block.references = 1
            sequence.blocks.append(block)
        if self.findable(sequence):
            for index in range(end // self.block_size):
                if sequence.blocks[index].block_hash is None:
                    sequence.blocks[index].block_hash = sequence.hash_of(index)
                    self.cached.append(sequence.blocks[index])

    def missing(self, sequence: NaiveSequence, end: int) -> int:
        return max(-(-end // self.block_size) - len(sequence.blocks), 0)

    def findable(self, sequence: NaiveSequence) -> bool:
        full = sequence.request.prompt_tokens // self.block_size
        return self.caching and len(sequence.request.prompt_block_hashes) == full

    def lookup(self, sequence: NaiveSequence) -> list[NaiveBlock]:
        hits: list[NaiveBlock] = []
        while self.findable(sequence) and (len(hits) + 1) * self.block_size <= sequence.tokens - 1:
            found = [b for b in self.cached if b.block_hash == sequence.hash_of(len(hits))]
            if not found:
                break
            hits.append(found[0])
        return hits

    # --- a step ---

    def schedule(self, throttle: bool) -> NaiveStep:
        limits = self.limits
        budget = limits.max_num_batched_tokens
        threshold = limits.long_prefill_token_threshold
        if len(self.running) + len(self.waiting) <= 1:
            threshold = 0
        defer = throttle and not self.more_waits and any(not s.prefill_chunk for s in self.running)
        was_prefilling = {s for s in self.running if s.prefill_chunk}
        scheduled: dict[NaiveSequence, int] = {}
        preempted: list[NaiveSequence] = []

        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            if defer and sequence in was_prefilling:
                index += 1
                continue
            tokens = sequence.tokens - sequence.computed
            if 0 < threshold < tokens:
                tokens = threshold
            tokens = min(tokens, budget)
            while self.missing(sequence, sequence.computed + tokens) > len(self.free):
                if self.policy == "priority":
                    victim = max(self.running, key=lambda s: (s.request.priority, s.request.arrival_s))
                else:
                    victim = self.running[-1]
                position = self.running.index(victim)
                self.running.remove(victim)
                if position < index:
                    index -= 1
                budget += scheduled.pop(victim, 0)
                self.give_back(victim)
                victim.computed = 0
                victim.preemptions += 1
                self.waiting.insert(0, victim)
                self.sort_waiting()
                preempted.append(victim)
                if victim is sequence:
                    break
            if sequence in preempted:
                break
            self.extend(sequence, sequence.computed + tokens)
            scheduled[sequence] = tokens
            budget -= tokens
            index += 1

        if not preempted:
            while self.waiting and budget > 0 and len(self.running) < limits.max_num_seqs:
                sequence = self.waiting[0]
                hits = self.lookup(sequence)
                computed = len(hits) * self.block_size
                if defer and computed < sequence.tokens - 1:
                    break
                tokens = sequence.tokens - computed
                if 0 < threshold < tokens:
                    tokens = threshold
                if tokens > budget and not limits.enable_chunked_prefill:
                    break
                tokens = min(tokens, budget)
                needed = -(-sequence.tokens // self.block_size) - len(hits)
                if needed + sum(b.references == 0 for b in hits) > len(self.free):
                    break
                self.waiting.pop(0)
                for block in hits:
                    if block.references == 0:
                        self.free.remove(block)
                    block.references += 1
                sequence.blocks = hits
                sequence.computed = computed
                if self.caching and sequence.preemptions == 0:
                    self.queries += sequence.tokens
                    self.hits += computed
                self.running.append(sequence)
                was_prefilling.add(sequence)
                self.extend(sequence, computed + tokens)
                scheduled[sequence] = tokens
                budget -= tokens
            if not defer:
                self.more_waits = bool(self.waiting)

        for sequence, tokens in scheduled.items():
            sequence.computed += tokens
            sequence.prefill_chunk = sequence.computed < sequence.tokens
        return NaiveStep(
            [(s.request_id, n) for s, n in scheduled.items() if s in was_prefilling],
            [s.request_id for s in scheduled if s not in was_prefilling],
            [s.request_id for s in preempted],
            scheduled,
        )

    def complete(self, step: NaiveStep) -> tuple[list[str], list[tuple[str, int, FinishReason]]]:
        """Requests that got a token, and those that ended: with how many, and why. In order of admission."""
        produced, finished = [], []
        for sequence in step.scheduled:
            if sequence not in self.running or sequence.computed < sequence.tokens:
                continue
            produced.append(sequence.request_id)
            sequence.generated += 1
            if sequence.generated >= sequence.request.output_tokens:
                finished.append((sequence.request_id, sequence.generated, sequence.request.finish_reason))
            elif sequence.tokens >= self.limits.max_model_len:
                finished.append((sequence.request_id, sequence.generated, FinishReason.LENGTH))
            else:
                continue
            self.running.remove(sequence)
            self.give_back(sequence)
        return produced, finished
