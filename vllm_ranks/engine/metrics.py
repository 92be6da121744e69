"""The `vllm:*` series of one API server: names, types, labels, buckets and freshness of vLLM 0.32.

Gauges change only when an engine reports after a step (vllm/v1/metrics/loggers.py): while a rank idles, runs
dummy batches or hangs, they keep their last values. `embedded:*` gauges are the embedded engine's own.
One registry per app; with several API servers (PROMETHEUS_MULTIPROC_DIR set) every server exposes the sum
of all. Must never take a label value from a client.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from vllm_ranks.engine import wire
from vllm_ranks.engine.metric_buckets import (
    INTER_TOKEN_LATENCY_S,
    ITERATION_TOKENS,
    REQUEST_LATENCY_S,
    REQUEST_N,
    REQUEST_PREEMPTIONS,
    TIME_TO_FIRST_TOKEN_S,
    request_token_buckets,
)
from vllm_ranks.engine.queue_limits import QueueLimit
from vllm_ranks.engine.request import FinishReason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ENGINE_LABELS = ("model_name", "engine")
_MAX_LORA_SERIES = 64
"""Label sets of `lora_requests_info` kept; vLLM keeps all, a reader takes the newest."""

_HISTOGRAMS: Mapping[str, tuple[str, Sequence[float] | None]] = {
    "request_prompt_tokens": ("Number of prefill tokens processed.", None),
    "request_generation_tokens": ("Number of generation tokens processed.", None),
    "iteration_tokens_total": ("Histogram of number of tokens per engine_step.", ITERATION_TOKENS),
    "request_max_num_generation_tokens": ("Maximum number of requested generation tokens.", None),
    "request_params_n": ("The n request parameter.", REQUEST_N),
    "request_params_max_tokens": ("The max_tokens request parameter.", None),
    "time_to_first_token_seconds": ("Time to first token in seconds.", TIME_TO_FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Inter-token latency in seconds.", INTER_TOKEN_LATENCY_S),
    "request_time_per_output_token_seconds": ("Mean time per output token.", INTER_TOKEN_LATENCY_S),
    "e2e_request_latency_seconds": ("End to end request latency in seconds.", REQUEST_LATENCY_S),
    "request_queue_time_seconds": ("Time spent in WAITING phase.", REQUEST_LATENCY_S),
    "request_inference_time_seconds": ("Time spent in RUNNING phase.", REQUEST_LATENCY_S),
    "request_prefill_time_seconds": ("Time spent in PREFILL phase.", REQUEST_LATENCY_S),
    "request_decode_time_seconds": ("Time spent in DECODE phase.", REQUEST_LATENCY_S),
    "request_num_preemptions": ("Times a request was preempted.", REQUEST_PREEMPTIONS),
    "request_prefill_kv_computed_tokens": ("New KV tokens computed during prefill.", None),
}
"""Buckets `None`: 1-2-5 series up to the model's length."""

_COUNTERS: Mapping[str, str] = {
    "prefix_cache_queries": "Prefix cache queries, in number of queried tokens.",
    "prefix_cache_hits": "Prefix cache hits, in number of cached tokens.",
    "external_prefix_cache_queries": "Prefix cache queries of a KV connector (none here).",
    "external_prefix_cache_hits": "Prefix cache hits of a KV connector (none here).",
    "mm_cache_queries": "Multi-modal cache queries (none here).",
    "mm_cache_hits": "Multi-modal cache hits (none here).",
    "num_preemptions": "Cumulative number of preemptions.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "prompt_tokens_cached": "Number of cached prompt tokens.",
    "generation_tokens": "Number of generation tokens processed.",
    "estimated_flops_per_gpu": "Estimated floating point operations (not estimated here).",
    "estimated_read_bytes_per_gpu": "Estimated bytes read from memory (not estimated here).",
    "estimated_write_bytes_per_gpu": "Estimated bytes written to memory (not estimated here).",
}
_PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_CACHE_TIERS = ("device", "host", "p2p", "disk", "external_unspecified")
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


@dataclass(slots=True)
class FinishedRequest:
    """Times and sizes of one finished request, in seconds and tokens."""

    reason: FinishReason
    prompt_tokens: int
    generation_tokens: int
    cached_tokens: int
    max_tokens: int | None
    preemptions: int
    e2e_s: float
    queued_s: float
    prefill_s: float
    decode_s: float
    inference_s: float


@dataclass(slots=True)
class IterationStats:
    """What one message of an engine's outputs adds to the counters and histograms."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    time_to_first_token_s: list[float] = field(default_factory=list)
    inter_token_latency_s: list[float] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)
    max_generation_tokens: list[int] = field(default_factory=list)
    n_params: list[int] = field(default_factory=list)


class _Engine:
    """The series of one engine, bound to their labels once."""

    def __init__(self) -> None:
        self.gauges: dict[str, Gauge] = {}
        self.counters: dict[str, Counter] = {}
        self.histograms: dict[str, Histogram] = {}
        self.prompt_sources: dict[str, Counter] = {}
        self.cache_tiers: dict[str, Counter] = {}
        self.success: dict[FinishReason, Counter] = {}


class EngineMetrics:
    """All series of one API server."""

    def __init__(
        self,
        model_name: str,
        engines: Sequence[int],
        *,
        max_model_len: int,
        cache_info: Mapping[str, str],
        max_loras: int,
        lock_step: bool,
    ) -> None:
        """`engines`: global ranks. `cache_info`: labels of `cache_config_info`. `max_loras`: 0 is off."""
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._engines = {engine: _Engine() for engine in engines}
        self.latest: dict[int, wire.SchedulerStats] = {engine: wire.SchedulerStats() for engine in engines}
        """Each engine's last report."""
        self._define_gauges(cache_info, lock_step)
        self._define_counters()
        for name, (text, buckets) in _HISTOGRAMS.items():
            histogram = Histogram(
                f"vllm:{name}",
                text,
                _ENGINE_LABELS,
                registry=self.registry,
                buckets=buckets if buckets is not None else request_token_buckets(max_model_len),
            )
            for engine, series in self._engines.items():
                series.histograms[name] = histogram.labels(model_name, str(engine))
        self._max_loras = max_loras
        self._lora_series: dict[tuple[str, str, str], None] = {}
        self._lora_info: Gauge | None = None
        if max_loras:
            self._lora_info = Gauge(
                "vllm:lora_requests_info",
                "Running stats on lora requests.",
                ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
                registry=self.registry,
                multiprocess_mode="sum",
            )

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(
            name, text, (*_ENGINE_LABELS, *labels), registry=self.registry, multiprocess_mode="mostrecent"
        )

    def _define_gauges(self, cache_info: Mapping[str, str], lock_step: bool) -> None:
        names = {
            "vllm:num_requests_running": "Number of requests in model execution batches.",
            "vllm:num_requests_waiting": "Number of requests waiting to be processed.",
            "vllm:kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
        }
        if lock_step:
            names["embedded:data_parallel_wave"] = "Number of the current wave."
            names["embedded:data_parallel_running"] = "1 while the group steps through a wave."
        for name, text in names.items():
            gauge = self._gauge(name, text)
            for engine, series in self._engines.items():
                series.gauges[name] = gauge.labels(self._model_name, str(engine))
        by_reason = self._gauge(
            "vllm:num_requests_waiting_by_reason",
            "Waiting requests: for capacity, or deferred by transient constraints.",
            "reason",
        )
        sleep = self._gauge("vllm:engine_sleep_state", "Engine sleep state; awake = 1.", "sleep_state")
        cache = Gauge(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            (*cache_info, "engine"),
            registry=self.registry,
            multiprocess_mode="mostrecent",
        )
        for engine, series in self._engines.items():
            for reason in ("capacity", "deferred"):
                series.gauges[reason] = by_reason.labels(self._model_name, str(engine), reason)
            for state in _SLEEP_STATES:
                sleep.labels(self._model_name, str(engine), state).set(state == "awake")
            cache.labels(*cache_info.values(), str(engine)).set(1)

    def _define_counters(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", text, (*_ENGINE_LABELS, *labels), registry=self.registry)

        plain = {name: counter(name, text) for name, text in _COUNTERS.items()}
        sources = counter("prompt_tokens_by_source", "Number of prompt tokens by source.", "source")
        tiers = counter("prompt_tokens_cached_by_source", "Prefix-cache hit tokens by cache tier.", "source")
        success = counter("request_success", "Count of finished requests.", "finished_reason")
        for engine, series in self._engines.items():
            labels = (self._model_name, str(engine))
            series.counters = {name: family.labels(*labels) for name, family in plain.items()}
            series.prompt_sources = {source: sources.labels(*labels, source) for source in _PROMPT_SOURCES}
            series.cache_tiers = {tier: tiers.labels(*labels, tier) for tier in _CACHE_TIERS}
            series.success = {reason: success.labels(*labels, reason.name.lower()) for reason in FinishReason}
        rejections = Counter(
            "vllm:admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self._rejections = {r: rejections.labels(self._model_name, r) for r in get_args(QueueLimit)}

    def record_scheduler(self, engine: int, stats: wire.SchedulerStats) -> None:
        """An engine reported its scheduler's state after a step."""
        self.latest[engine] = stats
        series = self._engines[engine]
        gauges, counters = series.gauges, series.counters
        gauges["vllm:num_requests_running"].set(stats.num_running_reqs)
        gauges["vllm:num_requests_waiting"].set(stats.num_waiting_reqs + stats.num_skipped_waiting_reqs)
        gauges["capacity"].set(stats.num_waiting_reqs)
        gauges["deferred"].set(stats.num_skipped_waiting_reqs)
        gauges["vllm:kv_cache_usage_perc"].set(stats.kv_cache_usage)
        counters["prefix_cache_queries"].inc(stats.prefix_cache_stats.queries)
        counters["prefix_cache_hits"].inc(stats.prefix_cache_stats.hits)
        series.cache_tiers["device"].inc(stats.prefix_cache_stats.hits)
        if self._lora_info is not None:
            self._record_lora(self._lora_info, stats)

    def _record_lora(self, info: Gauge, stats: wire.SchedulerStats) -> None:
        labels = (
            str(self._max_loras),
            ",".join(stats.waiting_lora_adapters),
            ",".join(stats.running_lora_adapters),
        )
        info.labels(*labels).set_to_current_time()
        self._lora_series.pop(labels, None)
        self._lora_series[labels] = None
        if len(self._lora_series) > _MAX_LORA_SERIES:
            oldest = next(iter(self._lora_series))
            del self._lora_series[oldest]
            info.remove(*oldest)

    def record_iteration(self, engine: int, stats: IterationStats) -> None:
        """One message of outputs was processed."""
        series = self._engines[engine]
        counters, histograms = series.counters, series.histograms
        counters["num_preemptions"].inc(stats.preemptions)
        counters["prompt_tokens"].inc(stats.prompt_tokens)
        counters["prompt_tokens_cached"].inc(stats.cached_tokens)
        series.prompt_sources["local_compute"].inc(stats.computed_tokens)
        series.prompt_sources["local_cache_hit"].inc(stats.cached_tokens)
        counters["generation_tokens"].inc(stats.generation_tokens)
        histograms["iteration_tokens_total"].observe(stats.computed_tokens + stats.generation_tokens)
        for name, values in (
            ("request_max_num_generation_tokens", stats.max_generation_tokens),
            ("request_params_n", stats.n_params),
            ("time_to_first_token_seconds", stats.time_to_first_token_s),
            ("inter_token_latency_seconds", stats.inter_token_latency_s),
        ):
            observe = histograms[name].observe
            for value in values:
                observe(value)
        for finished in stats.finished:
            self._record_finished(series, finished)

    def _record_finished(self, series: _Engine, finished: FinishedRequest) -> None:
        series.success[finished.reason].inc()
        decoded = finished.generation_tokens - 1
        values = {
            "e2e_request_latency_seconds": finished.e2e_s,
            "request_queue_time_seconds": finished.queued_s,
            "request_prefill_time_seconds": finished.prefill_s,
            "request_inference_time_seconds": finished.inference_s,
            "request_decode_time_seconds": finished.decode_s,
            "request_num_preemptions": finished.preemptions,
            "request_prefill_kv_computed_tokens": finished.prompt_tokens - finished.cached_tokens,
            "request_prompt_tokens": finished.prompt_tokens,
            "request_generation_tokens": finished.generation_tokens,
            "request_time_per_output_token_seconds": finished.decode_s / decoded if decoded > 0 else 0.0,
        }
        if finished.max_tokens:
            values["request_params_max_tokens"] = finished.max_tokens
        for name, value in values.items():
            series.histograms[name].observe(value)

    def record_rejection(self, limit: QueueLimit) -> None:
        """A request was answered 503 by a queue limit."""
        self._rejections[limit].inc()

    def record_wave(self, wave: int, running: bool) -> None:
        """What this front end knows of its group's wave; the same for all its engines."""
        for series in self._engines.values():
            series.gauges["embedded:data_parallel_wave"].set(wave)
            series.gauges["embedded:data_parallel_running"].set(running)

    def expose(self) -> bytes:
        """The text of `/metrics`."""
        registry = self.registry
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
