"""Which requests of one rank get tokens in the next step (vLLM 0.32 vllm/v1/core/sched/scheduler.py).

Each step shares a token budget: running requests first, in order of admission, then waiting ones while
budget, seats and KV blocks last. Prompts are computed in chunks, after what the prefix cache holds. When
blocks run out, the last running request (or the least urgent one) is preempted and starts over later.

    add → waiting ──schedule──▶ prefilling ──complete──▶ decoding ──complete──▶ finished
             ▲───────────────── preempted ◀───schedule──────┘

Must never read a clock or know how long a step takes; `core` does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import merge
from operator import attrgetter

from vllm_ranks.engine.block_tables import BlockHasher, BlockTables, unique_block_hash
from vllm_ranks.engine.decode_clock import DecodeClock
from vllm_ranks.engine.kv_cache import KVCache
from vllm_ranks.engine.plan import StepOutcome, StepPlan
from vllm_ranks.engine.request import EngineRequest, FinishReason
from vllm_ranks.engine.sequence import SequenceState, Stage
from vllm_ranks.engine.waiting import SchedulingPolicy, waiting_queue

_admission = attrgetter("admission")
_urgency = attrgetter("request.priority", "request.arrival_s")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What bounds a step; names, defaults and meaning are vLLM's (vllm/config/scheduler.py)."""

    max_num_seqs: int = 256
    """Requests that may run at once."""
    max_num_batched_tokens: int = 2_048
    """Token budget of a step."""
    max_model_len: int = 131_072
    """Prompt and output together, in tokens."""
    long_prefill_token_threshold: int = 0
    """Largest chunk of one prompt while other requests are there too; 0: no such bound."""
    enable_chunked_prefill: bool = True
    prefill_schedule_interval: int = 1
    """Prefills are admitted only every so many lock-steps, unless more wait than fit."""
    max_loras: int | None = None
    """Different LoRA adapters in one step; `None`: the model takes none, or names do not matter."""

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "prefill_schedule_interval",
            "max_loras",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.long_prefill_token_threshold <= self.max_model_len:
            raise ValueError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) must lie between 0 and "
                f"max_model_len ({self.max_model_len})"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running request needs a token per step"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill max_num_batched_tokens ({self.max_num_batched_tokens}) must be "
                f"at least max_model_len ({self.max_model_len})"
            )


class Scheduler:
    """The requests of one rank. `schedule` and `complete` alternate; `add` and `abort` may come any time."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv_cache: KVCache,
        policy: SchedulingPolicy = "fcfs",
        *,
        block_hasher: BlockHasher = unique_block_hash,
    ) -> None:
        """Raises ValueError if a single request of the model's length would not fit the KV cache."""
        if kv_cache.blocks_for(limits.max_model_len) > kv_cache.num_blocks:
            raise ValueError(
                f"max_model_len ({limits.max_model_len}) does not fit the KV cache of "
                f"{kv_cache.num_blocks} blocks × {kv_cache.block_size} tokens"
            )
        self.limits = limits
        self.kv_cache = kv_cache
        self.policy: SchedulingPolicy = policy
        self.requests: dict[str, SequenceState] = {}
        """Unfinished requests by id."""
        self.prefix_cache_queries = 0
        """Prompt tokens looked up in the prefix cache since the start (`vllm:prefix_cache_queries`)."""
        self.prefix_cache_hits = 0
        """Those of them it held (`vllm:prefix_cache_hits`)."""
        self._tables = BlockTables(kv_cache, block_hasher)
        self._waiting = waiting_queue(policy)
        self._prefilling: list[SequenceState] = []
        self._clock = DecodeClock(kv_cache.block_size)
        self._admissions = 0
        self._more_waits_than_fits = False
        self._deferred: set[SequenceState] = set()
        self._plan: StepPlan | None = None
        self._left_since_flush = False

    @property
    def running(self) -> int:
        """Requests in the running batch (`vllm:num_requests_running`)."""
        return len(self._prefilling) + len(self._clock)

    @property
    def waiting(self) -> int:
        """Requests queued for the running batch (`vllm:num_requests_waiting`)."""
        return len(self._waiting)

    @property
    def deferred(self) -> int:
        """Those of the waiting that were passed over (`num_requests_waiting_by_reason`)."""
        return len(self._deferred)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would have something to compute."""
        return bool(self.requests)

    def take_flush(self) -> bool:
        """Whether requests left since the last call: an idle rank then has new gauges to report."""
        left, self._left_since_flush = self._left_since_flush, False
        return left

    def add(self, request: EngineRequest) -> SequenceState:
        """Queue a request. Raises ValueError for one this rank can never serve."""
        prompt_tokens = request.prompt_tokens
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if not 1 <= prompt_tokens < self.limits.max_model_len:
            raise ValueError(
                f"a prompt must have 1 to {self.limits.max_model_len - 1} tokens, "
                f"{request.request_id!r} has {prompt_tokens}"
            )
        if request.output_tokens < 1:
            raise ValueError(f"{request.request_id!r} must generate at least 1 token")
        full_blocks = prompt_tokens // self.kv_cache.block_size
        if len(request.prompt_block_hashes) not in (0, full_blocks):
            raise ValueError(
                f"{request.request_id!r} has {full_blocks} full prompt blocks "
                f"but {len(request.prompt_block_hashes)} block hashes"
            )
        room = self.limits.max_model_len - prompt_tokens
        sequence = SequenceState(
            request,
            output_tokens=min(request.output_tokens, room),
            finish_reason=request.finish_reason if request.output_tokens <= room else FinishReason.LENGTH,
            findable=self.kv_cache.enable_prefix_caching and len(request.prompt_block_hashes) == full_blocks,
        )
        self.requests[request.request_id] = sequence
        self._waiting.push(sequence)
        return sequence

    def abort(self, request_ids: Iterable[str]) -> list[SequenceState]:
        """End requests at once, also in the middle of a step; ids that are not here are skipped."""
        aborted = []
        for request_id in request_ids:
            sequence = self.requests.get(request_id)
            if sequence is None:
                continue
            if sequence.stage is Stage.WAITING:
                self._waiting.remove(sequence)
                self._deferred.discard(sequence)
            else:
                self._stop_running(sequence)
                if self._plan is not None:
                    self._plan.decoding = [s for s in self._plan.decoding if s is not sequence]
                    self._plan.prefills = [p for p in self._plan.prefills if p[0] is not sequence]
            sequence.finish_reason = FinishReason.ABORT
            self._finish(sequence)
            aborted.append(sequence)
        return aborted

    # --- One step -----------------------------------------------------------------------------------

    def schedule(self, *, throttle_prefills: bool = False) -> StepPlan | None:
        """The next step's work, or `None` if there is no request.

        A plan may be empty: with priorities, when the only request that got its turn preempted itself.
        `throttle_prefills`: this lock-step is not one at which prefills may be admitted.
        """
        if self._plan is not None:
            raise RuntimeError("the previous step has not been completed")
        if not self.requests:
            return None
        limits = self.limits
        clock = self._clock
        threshold = limits.long_prefill_token_threshold
        if threshold == 0 or self.running + self.waiting == 1:
            threshold = limits.max_num_batched_tokens  # alone, a long prompt starves nobody
        defer_prefills = throttle_prefills and not self._more_waits_than_fits and len(clock) > 0

        decoding, prefills, preempted = self._schedule_running(threshold, defer_prefills)
        budget = limits.max_num_batched_tokens - len(decoding) - sum(tokens for _, tokens in prefills)
        admitted: list[SequenceState] = []
        if not preempted:
            if self._waiting and budget:
                admitted = self._admit_waiting(budget, threshold, defer_prefills, prefills)
            if not defer_prefills:
                self._more_waits_than_fits = len(self._waiting) > len(self._deferred)

        prefill_tokens = 0
        for sequence, tokens in prefills:
            sequence.computed_tokens += tokens
            prefill_tokens += tokens
        self._plan = StepPlan(
            prefills,
            decoding,
            preempted,
            len(clock) - len(decoding),
            admitted,
            prefill_tokens,
            len(decoding),
            clock.resident_tokens_after_step + sum(s.computed_tokens for s in self._prefilling),
        )
        return self._plan

    def complete(self, plan: StepPlan) -> StepOutcome:
        """The step has been computed: hand out its tokens."""
        if plan is not self._plan:
            raise RuntimeError("only the step scheduled last can be completed")
        self._plan = None
        finished = self._clock.advance()
        prefilled = []
        for sequence, _ in plan.prefills:
            if sequence.computed_tokens < sequence.known_tokens:
                continue
            prefilled.append(sequence)
            sequence.generated_tokens += 1
            if sequence.generated_tokens < sequence.output_tokens:
                self._prefilling.remove(sequence)
                self._clock.start(sequence)
            else:
                finished.append(sequence)
        finished.sort(key=_admission)
        for sequence in finished:
            self._stop_running(sequence)
            self._finish(sequence)
        return StepOutcome(prefilled, plan.decoding, finished)

    # --- Running requests ---------------------------------------------------------------------------

    def _schedule_running(
        self, threshold: int, defer_prefills: bool
    ) -> tuple[list[SequenceState], list[tuple[SequenceState, int]], list[SequenceState]]:
        """Who decodes, who prefills how many tokens, and who was preempted to make that possible."""
        clock, tables = self._clock, self._tables
        decoding = clock.sequences.copy()
        prefills: list[tuple[SequenceState, int]] = []
        if self._prefilling and not defer_prefills:
            granted = self._share_budget(threshold, prefills)
            del decoding[granted:]
        boundaries = clock.take_boundaries()
        if not boundaries and not prefills:
            return decoding, prefills, []

        starved = set(clock.sequences[len(decoding) :])
        ends = [(s, clock.computed_tokens(s) + 1) for s in boundaries if s not in starved]
        ends += [(s, s.computed_tokens + tokens) for s, tokens in prefills]
        if len(ends) > 1:
            ends.sort(key=lambda pair: pair[0].admission)
        preempted: list[SequenceState] = []
        if sum(tables.missing(sequence, end) for sequence, end in ends) <= self.kv_cache.free_blocks:
            for sequence, end in ends:
                tables.extend(sequence, end)
        else:
            decoding, prefills, preempted = self._schedule_with_preemption(threshold, defer_prefills)
            starved = set(clock.sequences).difference(decoding)
        for sequence in boundaries:
            if sequence.stage is Stage.DECODING and sequence not in starved:
                clock.expect_boundary(sequence, after_this_step=True)
        clock.hold(starved)
        return decoding, prefills, preempted

    def _share_budget(self, threshold: int, prefills: list[tuple[SequenceState, int]]) -> int:
        """Fill `prefills` with chunks for the prefilling sequences; how many decoding ones get a token.

        Order of admission decides: a long prompt admitted before others began to decode may starve them.
        """
        decoding = self._clock.sequences
        budget = self.limits.max_num_batched_tokens
        granted = 0
        for sequence in self._prefilling:
            ahead = bisect_left(decoding, sequence.admission, lo=granted, key=_admission)
            if ahead - granted >= budget:
                return granted + budget
            budget -= ahead - granted
            granted = ahead
            tokens = min(sequence.known_tokens - sequence.computed_tokens, threshold, budget)
            prefills.append((sequence, tokens))
            budget -= tokens
            if budget == 0:
                return granted
        return min(granted + budget, len(decoding))

    def _schedule_with_preemption(
        self, threshold: int, defer_prefills: bool
    ) -> tuple[list[SequenceState], list[tuple[SequenceState, int]], list[SequenceState]]:
        """As `_schedule_running`, request by request, preempting others whenever blocks are missing."""
        tables = self._tables
        running = list(merge(self._clock.sequences, self._prefilling, key=_admission))
        scheduled: dict[SequenceState, int] = {}
        preempted: list[SequenceState] = []
        budget = self.limits.max_num_batched_tokens
        index = 0
        while index < len(running) and budget > 0:
            sequence = running[index]
            if sequence.stage is Stage.DECODING:
                tokens, end = 1, self._clock.computed_tokens(sequence) + 1
            elif defer_prefills:
                index += 1
                continue
            else:
                tokens = min(sequence.known_tokens - sequence.computed_tokens, threshold, budget)
                end = sequence.computed_tokens + tokens
            while tables.missing(sequence, end) > self.kv_cache.free_blocks:
                victim = max(running, key=_urgency) if self.policy == "priority" else running[-1]
                place = running.index(victim)
                del running[place]
                if place < index:
                    index -= 1
                budget += scheduled.pop(victim, 0)
                self._preempt(victim)
                preempted.append(victim)
                if victim is sequence:
                    break
            if sequence.stage is Stage.WAITING:
                break  # it was the last to go itself
            tables.extend(sequence, end)
            scheduled[sequence] = tokens
            budget -= tokens
            index += 1
        decoding = [s for s in scheduled if s.stage is Stage.DECODING]
        prefills = [(s, tokens) for s, tokens in scheduled.items() if s.stage is Stage.PREFILLING]
        return decoding, prefills, preempted

    # --- Entering and leaving -----------------------------------------------------------------------

    def _running_loras(self) -> set[str]:
        """Adapters of the running batch, if their number is bounded.

        vLLM counts only those of requests that take part in the step, and fails an assertion when one
        that did not comes back beside those admitted meanwhile.
        """
        if self.limits.max_loras is None:
            return set()
        names = {s.request.lora_name for s in (*self._clock.sequences, *self._prefilling)}
        return {name for name in names if name is not None}

    def _admit_waiting(
        self, budget: int, threshold: int, defer_prefills: bool, prefills: list[tuple[SequenceState, int]]
    ) -> list[SequenceState]:
        """Move waiting requests to the running batch while all lasts; their chunks go to `prefills`."""
        kv_cache, tables, waiting, limits = self.kv_cache, self._tables, self._waiting, self.limits
        admitted: list[SequenceState] = []
        passed_over: list[SequenceState] = []
        loras = self._running_loras()
        while waiting and budget > 0 and self.running < limits.max_num_seqs:
            sequence = waiting.peek()
            lora_name = sequence.request.lora_name if limits.max_loras is not None else None
            if lora_name is not None and lora_name not in loras and len(loras) == limits.max_loras:
                passed_over.append(waiting.pop())
                continue
            known_tokens = sequence.known_tokens
            hits = tables.cached_prefix(sequence)
            cached_tokens = len(hits) * kv_cache.block_size
            if defer_prefills and cached_tokens < known_tokens - 1:
                break
            tokens = min(known_tokens - cached_tokens, threshold)
            if tokens > budget and not limits.enable_chunked_prefill:
                break
            tokens = min(tokens, budget)
            # All of it must fit, not only this chunk: half a prompt would sit on blocks in vain.
            missing_blocks = kv_cache.blocks_for(known_tokens) - len(hits) + kv_cache.idle_among(hits)
            if missing_blocks > kv_cache.free_blocks:
                break
            waiting.pop()
            self._deferred.discard(sequence)
            if lora_name is not None:
                loras.add(lora_name)
            tables.adopt(sequence, hits)
            sequence.computed_tokens = cached_tokens
            sequence.stage = Stage.PREFILLING
            sequence.admission = self._admissions
            self._admissions += 1
            self._prefilling.append(sequence)
            if sequence.preemptions == 0:
                sequence.cached_tokens = cached_tokens
                if kv_cache.enable_prefix_caching:
                    self.prefix_cache_queries += known_tokens
                    self.prefix_cache_hits += cached_tokens
            tables.extend(sequence, cached_tokens + tokens)
            prefills.append((sequence, tokens))
            admitted.append(sequence)
            budget -= tokens
        for sequence in reversed(passed_over):
            waiting.put_back(sequence)
        self._deferred.update(passed_over)
        return admitted

    def _preempt(self, sequence: SequenceState) -> None:
        self._stop_running(sequence)
        sequence.stage = Stage.WAITING
        sequence.computed_tokens = 0
        sequence.preemptions += 1
        sequence.unreported_preemptions += 1
        self._waiting.put_back(sequence)

    def _stop_running(self, sequence: SequenceState) -> None:
        """Out of the batch, without its blocks."""
        if sequence.stage is Stage.DECODING:
            self._clock.stop(sequence)
        else:
            self._prefilling.remove(sequence)
        self._tables.release(sequence)

    def _finish(self, sequence: SequenceState) -> None:
        sequence.stage = Stage.FINISHED
        del self.requests[sequence.request.request_id]
        self._left_since_flush = True
