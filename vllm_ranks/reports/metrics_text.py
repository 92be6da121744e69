"""Reads a rank's report out of its Prometheus text. Pure.

Names and labels: vLLM 0.32 vllm/v1/metrics/loggers.py. A real rank's page has over a thousand lines, most of
them histogram buckets; only the lines that matter are handed to the parser.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from ext_proc.vocabulary import RankCounters

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"
CACHE_CONFIG = "vllm:cache_config_info"
FIRST_TOKENS = "vllm:time_to_first_token_seconds_count"
INTER_TOKEN_SUM = "vllm:inter_token_latency_seconds_sum"
INTER_TOKEN_COUNT = "vllm:inter_token_latency_seconds_count"
PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
ENGINE_STEPS = "vllm:iteration_tokens_total_count"
WAVE = "embedded:data_parallel_wave"

COMPUTED = "local_compute"
"""The `source` of prompt tokens that came from no cache."""

_GAUGES = (RUNNING, WAITING, KV_CACHE_USAGE)
_COUNTERS = (FIRST_TOKENS, INTER_TOKEN_SUM, INTER_TOKEN_COUNT, PROMPT_TOKENS)
_WANTED = (*_GAUGES, *_COUNTERS, CACHE_CONFIG, ENGINE_STEPS, WAVE)
_WANTED_LINE = re.compile(rf"^(?:{'|'.join(_WANTED)})[{{ ].*\n?", re.MULTILINE)


class UnreadableReport(ValueError):
    """The page is not a vLLM rank's metrics; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """What matters of one page, over all engines it names."""

    running: int
    waiting: int
    kv_cache_usage: float
    counters: RankCounters | None
    """`None` if the page lacks one of them."""
    kv_capacity_tokens: int | None
    kv_block_tokens: int | None
    engine_steps: int | None
    wave: int | None
    engines: frozenset[str]
    """Values of the `engine` label: the global data-parallel ranks that speak through this page."""


def parse_metrics(text: str) -> MetricsPage:
    """What matters of a `/metrics` page.

    A page of several engines (an internal-LB server adopted as one rank) is summed; KV usage is the highest.

    Raises:
        UnreadableReport: a gauge is missing or a line is malformed.
    """
    values: dict[str, list[float]] = {name: [] for name in _WANTED}
    engines = set()
    kv_capacity_tokens = 0
    kv_block_tokens = None
    try:
        for family in text_string_to_metric_families("".join(_WANTED_LINE.findall(text)) + "\n"):
            for sample in family.samples:
                if sample.labels.get("source", COMPUTED) != COMPUTED:
                    continue
                values[sample.name].append(sample.value)
                if sample.name == CACHE_CONFIG:
                    kv_capacity_tokens += _kv_capacity_tokens(sample.labels)
                    kv_block_tokens = _positive(sample.labels.get("block_size", ""))
                elif "engine" in sample.labels:
                    engines.add(sample.labels["engine"])
        page = MetricsPage(
            running=int(sum(values[RUNNING])),
            waiting=int(sum(values[WAITING])),
            kv_cache_usage=max(values[KV_CACHE_USAGE], default=0.0),
            counters=RankCounters(
                first_tokens=int(sum(values[FIRST_TOKENS])),
                inter_token_sum_s=sum(values[INTER_TOKEN_SUM]),
                inter_token_count=int(sum(values[INTER_TOKEN_COUNT])),
                computed_prompt_tokens=int(sum(values[PROMPT_TOKENS])),
            )
            if all(values[name] for name in _COUNTERS)
            else None,
            kv_capacity_tokens=kv_capacity_tokens or None,
            kv_block_tokens=kv_block_tokens,
            engine_steps=int(sum(values[ENGINE_STEPS])) if values[ENGINE_STEPS] else None,
            wave=int(max(values[WAVE])) if values[WAVE] else None,
            engines=frozenset(engines),
        )
    except (ValueError, OverflowError, KeyError) as error:
        raise UnreadableReport(f"malformed metrics line: {error}") from error
    for name in _GAUGES:
        if not values[name]:
            raise UnreadableReport(f"no {name} on the page; is this a vLLM server with stats enabled?")
    return page


def _positive(text: str) -> int | None:
    return int(text) or None if text.isdecimal() else None


def _kv_capacity_tokens(labels: dict[str, str]) -> int:
    """Size of one engine's KV cache; the labels are the fields of vLLM's CacheConfig, as text."""
    for product in (("kv_cache_size_tokens",), ("num_gpu_blocks", "block_size")):
        factors = [labels.get(name, "") for name in product]
        if all(factor.isdecimal() for factor in factors):
            size = 1
            for factor in factors:
                size *= int(factor)
            return size
    return 0
