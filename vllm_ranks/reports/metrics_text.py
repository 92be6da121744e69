"""Reads a rank's report out of its Prometheus text. Pure.

Names and labels: vLLM 0.32 vllm/v1/metrics/loggers.py. A real rank's page has over a thousand lines, most of
them histogram buckets; only the lines that matter are handed to the parser.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice

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
LORA_REQUESTS = "vllm:lora_requests_info"

MAX_ADAPTERS = 256
"""LoRA adapters taken from one page."""
MAX_ADAPTER_CHARS = 256
"""An adapter with a longer name is left out."""
MAX_ADAPTERS_LINE_CHARS = 64 * 1024
"""Of a longer line nothing is taken: it would keep the parser, and so all others, busy."""

COMPUTED = "local_compute"
"""The `source` of prompt tokens that came from no cache."""

_GAUGES = (RUNNING, WAITING, KV_CACHE_USAGE)
_COUNTERS = (FIRST_TOKENS, INTER_TOKEN_SUM, INTER_TOKEN_COUNT, PROMPT_TOKENS)
_WANTED = (*_GAUGES, *_COUNTERS, CACHE_CONFIG, ENGINE_STEPS, WAVE)
MAX_WANTED_CHARS = 256 * 1024
"""Of the lines that matter: some hundred engines. More would keep the parser, and so all others, busy."""
LARGEST_COUNT = 1 << 53
"""Up to here a float counts one by one; a rank that says more is not counting."""
_WANTED_LINE = re.compile(rf"^(?:{'|'.join(_WANTED)})[{{ ].*\n?", re.MULTILINE)
_LORA_LINE = re.compile(rf"^{LORA_REQUESTS}\{{.*\}} (\S+)\n?", re.MULTILINE)


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
    adapters: frozenset[str]
    """LoRA adapters with requests, running or waiting, when the page's engines last told."""
    engines: frozenset[str]
    """Values of the `engine` label: the global data-parallel ranks that speak through this page."""


def parse_metrics(text: str) -> MetricsPage:
    """What matters of a `/metrics` page.

    A page of several engines (an internal-LB server adopted as one rank) is summed; KV usage is the highest,
    adapters are those of the engine that told last.

    Raises:
        UnreadableReport: a gauge is missing, a line is malformed, or a value cannot be.
    """
    wanted = "".join(_WANTED_LINE.findall(text)) + "\n"
    if len(wanted) > MAX_WANTED_CHARS:
        raise UnreadableReport(f"more than {MAX_WANTED_CHARS} characters of metrics of engines")
    values: dict[str, list[float]] = {name: [] for name in _WANTED}
    engines = set()
    kv_capacity_tokens = 0
    kv_block_tokens = None
    try:
        for family in text_string_to_metric_families(wanted):
            for sample in family.samples:
                if sample.labels.get("source", COMPUTED) != COMPUTED:
                    continue
                values[sample.name].append(_count(sample.value))
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
            adapters=_adapters(text),
            engines=frozenset(engines),
        )
    except (ValueError, OverflowError, KeyError) as error:
        raise UnreadableReport(f"malformed metrics line: {error}") from error
    for name in _GAUGES:
        if not values[name]:
            raise UnreadableReport(f"no {name} on the page; is this a vLLM server with stats enabled?")
    return page


def _adapters(text: str) -> frozenset[str]:
    """LoRA adapters of the newest `vllm:lora_requests_info`, whose value is the time it was written at.

    vLLM writes one after each step with work, and keeps all label sets that there ever were, one for each
    order of names: only the newest is handed to the parser. Once no request for an adapter is left, the
    newest names none.
    """
    newest = max(_LORA_LINE.finditer(text), key=lambda line: float(line[1]), default=None)
    if newest is None or len(newest[0]) > MAX_ADAPTERS_LINE_CHARS:
        return frozenset()
    (family,) = text_string_to_metric_families(newest[0])
    (sample,) = family.samples
    listed = (sample.labels.get(f"{state}_lora_adapters", "") for state in ("running", "waiting"))
    names = dict.fromkeys(name for names in listed for name in names.split(","))
    usable = (name for name in names if 0 < len(name) <= MAX_ADAPTER_CHARS)
    return frozenset(islice(usable, MAX_ADAPTERS))


def _count(value: float) -> float:
    if not 0 <= value <= LARGEST_COUNT:  # neither does NaN pass
        raise ValueError(f"{value:g} is no count")
    return value


def _positive(text: str) -> int | None:
    return int(_count(int(text))) or None if text.isdecimal() else None


def _kv_capacity_tokens(labels: dict[str, str]) -> int:
    """Size of one engine's KV cache; the labels are the fields of vLLM's CacheConfig, as text."""
    for product in (("kv_cache_size_tokens",), ("num_gpu_blocks", "block_size")):
        factors = [labels.get(name, "") for name in product]
        if all(factor.isdecimal() for factor in factors):
            size = 1
            for factor in factors:
                size *= int(factor)
            return int(_count(size))
    return 0
