"""What a rank's `/metrics` says, kept as plain numbers for ranks that have no HTTP server.

Attribute names are those of the series without `vllm:` (vLLM 0.32 vllm/v1/metrics/loggers.py), and like
there they change only when the engine tells its front end something: never while it idles or dummy-steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from vllm_ranks.engine.core import EngineCore
from vllm_ranks.engine.plan import StepOutcome, StepPlan
from vllm_ranks.engine.request import FinishReason


@dataclass(slots=True)
class RankMetrics:
    """Gauges, counters, and histograms as count and sum."""

    # Gauges.
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage_perc: float = 0.0

    # Counters.
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    request_success: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    # Histograms.
    iteration_tokens_total_count: int = 0
    iteration_tokens_total_sum: int = 0
    time_to_first_token_seconds_count: int = 0
    time_to_first_token_seconds_sum: float = 0.0
    inter_token_latency_seconds_count: int = 0
    inter_token_latency_seconds_sum: float = 0.0
    request_queue_time_seconds_count: int = 0
    request_queue_time_seconds_sum: float = 0.0
    e2e_request_latency_seconds_count: int = 0
    e2e_request_latency_seconds_sum: float = 0.0

    last_step_s: float = 0.0
    """End of the latest step that computed something: decoding sequences got their last token then."""

    def snapshot(self) -> RankMetrics:
        """What a scrape at this moment would read."""
        return replace(self, request_success=self.request_success.copy())

    def observe(self, core: EngineCore, plan: StepPlan | None, outcome: StepOutcome, now_s: float) -> None:
        """The engine reported the end of a step (or, without a plan, only its gauges) at `now_s`."""
        scheduler = core.scheduler
        self.num_requests_running = scheduler.running
        self.num_requests_waiting = scheduler.waiting
        self.kv_cache_usage_perc = scheduler.kv_cache.usage
        self.prefix_cache_queries = scheduler.prefix_cache_queries
        self.prefix_cache_hits = scheduler.prefix_cache_hits
        if plan is None:
            return
        decoded = len(outcome.decoded)
        self.inter_token_latency_seconds_count += decoded
        self.inter_token_latency_seconds_sum += (decoded + plan.starved) * (now_s - self.last_step_s)
        if plan.preempted:
            for sequence in plan.preempted:
                if sequence.generated_tokens > 0 and sequence.interrupted_s is None:
                    sequence.interrupted_s = self.last_step_s
        self.last_step_s = now_s

        computed = 0
        if outcome.prefilled:
            for sequence in outcome.prefilled:
                self.num_preemptions += sequence.unreported_preemptions
                sequence.unreported_preemptions = 0
                request = sequence.request
                if sequence.generated_tokens == 1:
                    computed += request.prompt_tokens - sequence.cached_tokens
                    self.prompt_tokens += request.prompt_tokens
                    self.prompt_tokens_cached += sequence.cached_tokens
                    self.time_to_first_token_seconds_count += 1
                    self.time_to_first_token_seconds_sum += now_s - request.arrival_s
                elif sequence.interrupted_s is not None:
                    self.inter_token_latency_seconds_count += 1
                    self.inter_token_latency_seconds_sum += now_s - sequence.interrupted_s
                    sequence.interrupted_s = None
        generated = decoded + len(outcome.prefilled)
        if generated:
            self.generation_tokens += generated
            self.iteration_tokens_total_count += 1
            self.iteration_tokens_total_sum += computed + generated
        for sequence in outcome.finished:
            self.request_success[sequence.finish_reason] += 1
            self.e2e_request_latency_seconds_count += 1
            self.e2e_request_latency_seconds_sum += now_s - sequence.request.arrival_s
            if sequence.scheduled_s is not None:
                self.request_queue_time_seconds_count += 1
                self.request_queue_time_seconds_sum += sequence.scheduled_s - sequence.queued_s
