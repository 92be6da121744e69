"""What an engine tells its front ends and the coordinator after a step, as messages.

vLLM 0.32 vllm/v1/core/sched/scheduler.py `update_from_output` and vllm/v1/engine/core.py
`_maybe_publish_request_counts`. Must never send anything.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm_ranks.engine import wire
from vllm_ranks.engine.core import EngineCore
from vllm_ranks.engine.engine_requests import EngineSideRequests
from vllm_ranks.engine.plan import StepOutcome
from vllm_ranks.engine.sequence import SequenceState
from vllm_ranks.engine.waves import EngineCounts


class StepOutputs:
    """Builds the messages of one engine."""

    def __init__(
        self, core: EngineCore, requests: EngineSideRequests, *, log_stats: bool, names_finished: bool
    ) -> None:
        """`log_stats`: tell the scheduler's state, which `/metrics` shows.

        `names_finished`: list the ids of finished requests, which balancing clients count.
        """
        self._core = core
        self._requests = requests
        self._log_stats = log_stats
        self._names_finished = names_finished
        self._told_counts: EngineCounts | None = None
        self._told_queries = 0
        self._told_hits = 0

    def of_step(self, outcome: StepOutcome, now_s: float) -> Mapping[int, wire.EngineCoreOutputs]:
        """By front end, the tokens of a step; requests that ended with it are forgotten."""
        finished = set(outcome.finished)
        messages: dict[int, wire.EngineCoreOutputs] = {}
        for sequences, ends_prefill in ((outcome.prefilled, True), (outcome.decoded, False)):
            for sequence in sequences:
                request_id = sequence.request.request_id
                kept = self._requests[request_id]
                output = wire.EngineCoreOutput(request_id, [kept.next_token()])
                if ends_prefill:
                    self._tell_of_prefill(output, sequence, now_s)
                message = messages.get(kept.client_index)
                if message is None:
                    message = wire.EngineCoreOutputs(outputs=[], timestamp=now_s)
                    messages[kept.client_index] = message
                message.outputs.append(output)
                if sequence in finished:
                    output.finish_reason = sequence.finish_reason
                    self._requests.pop(request_id)
                    if self._names_finished:
                        message.finished_requests = [*(message.finished_requests or ()), request_id]
        if self._log_stats:
            if not messages:
                messages[0] = wire.EngineCoreOutputs(timestamp=now_s)
            # One front end is enough: they share their metrics.
            next(iter(messages.values())).scheduler_stats = self._scheduler_stats()
        return messages

    def changed_counts(self) -> wire.EngineCoreOutputs | None:
        """For the coordinator: queue lengths, if they have changed since the last call."""
        stats = self._core.coordinator_stats()
        if stats.counts == self._told_counts:
            return None
        self._told_counts = stats.counts
        return wire.EngineCoreOutputs(
            scheduler_stats=wire.SchedulerStats(
                num_running_reqs=stats.counts.running,
                num_waiting_reqs=stats.counts.waiting,
                step_counter=stats.step,
                current_wave=stats.wave,
                kv_cache_usage=stats.counts.kv_usage,
            )
        )

    def _scheduler_stats(self) -> wire.SchedulerStats:
        stats = self._core.stats()
        lookups = wire.PrefixCacheStats(
            queries=stats.prefix_cache_queries - self._told_queries,
            hits=stats.prefix_cache_hits - self._told_hits,
        )
        self._told_queries = stats.prefix_cache_queries
        self._told_hits = stats.prefix_cache_hits
        return wire.SchedulerStats(
            num_running_reqs=stats.running,
            num_waiting_reqs=stats.waiting,
            step_counter=stats.step_counter,
            current_wave=stats.current_wave,
            kv_cache_usage=stats.kv_usage,
            prefix_cache_stats=lookups,
        )

    def _tell_of_prefill(self, output: wire.EngineCoreOutput, sequence: SequenceState, now_s: float) -> None:
        """The first output of a request, and the first after a preemption, carry what happened before."""
        events = []
        if sequence.generated_tokens == 1:
            scheduled_s = sequence.scheduled_s if sequence.scheduled_s is not None else now_s
            events.append(wire.EngineEvent(wire.EngineEventType.QUEUED, sequence.queued_s))
            events.append(wire.EngineEvent(wire.EngineEventType.SCHEDULED, scheduled_s))
            prompt, cached = sequence.request.prompt_tokens, sequence.cached_tokens
            output.prefill_stats = wire.PrefillStats(
                num_prompt_tokens=prompt,
                num_computed_tokens=prompt - cached,
                num_cached_tokens=cached,
                num_local_cached_tokens=cached,
                num_cache_creation_tokens=self._findable_tokens(prompt) - cached,
            )
        for _ in range(sequence.unreported_preemptions):
            events.append(wire.EngineEvent(wire.EngineEventType.PREEMPTED, now_s))
            events.append(wire.EngineEvent(wire.EngineEventType.SCHEDULED, now_s))
        sequence.unreported_preemptions = 0
        output.events = events or None

    def _findable_tokens(self, prompt_tokens: int) -> int:
        """Prompt tokens that are in the prefix cache once the prompt is computed: those of full blocks."""
        cache = self._core.scheduler.kv_cache
        return prompt_tokens // cache.block_size * cache.block_size if cache.enable_prefix_caching else 0
