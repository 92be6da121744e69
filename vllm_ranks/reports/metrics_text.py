"""Reads a rank's report out of its Prometheus text. Pure.

Names and labels: vLLM 0.32 vllm/v1/metrics/loggers.py. A real rank's page has over a thousand lines, most of
them histogram buckets; only the lines that matter are handed to the parser.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"
WAVE = "embedded:data_parallel_wave"

_WANTED = (RUNNING, WAITING, KV_CACHE_USAGE, WAVE)
_WANTED_LINE_STARTS = tuple(f"{name}{end}" for name in _WANTED for end in ("{", " "))


class UnreadableReport(ValueError):
    """The page is not a vLLM rank's metrics; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """The gauges of one page, over all engines it names."""

    running: int
    waiting: int
    kv_cache_usage: float
    wave: int | None
    engines: frozenset[str]
    """Values of the `engine` label: the global data-parallel ranks that speak through this page."""


def parse_gauges(text: str) -> EngineGauges:
    """The gauges of a `/metrics` page.

    A page of several engines (an internal-LB server adopted as one rank) is summed; KV usage is the highest.

    Raises:
        UnreadableReport: a gauge is missing or a line is malformed.
    """
    lines = [line for line in text.split("\n") if line.startswith(_WANTED_LINE_STARTS)]
    values: dict[str, list[float]] = {name: [] for name in _WANTED}
    engines = set()
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                values[sample.name].append(sample.value)
                if "engine" in sample.labels:
                    engines.add(sample.labels["engine"])
        gauges = EngineGauges(
            running=int(sum(values[RUNNING])),
            waiting=int(sum(values[WAITING])),
            kv_cache_usage=max(values[KV_CACHE_USAGE], default=0.0),
            wave=int(max(values[WAVE])) if values[WAVE] else None,
            engines=frozenset(engines),
        )
    except (ValueError, OverflowError, KeyError) as error:
        raise UnreadableReport(f"malformed metrics line: {error}") from error
    for name in (RUNNING, WAITING, KV_CACHE_USAGE):
        if not values[name]:
            raise UnreadableReport(f"no {name} on the page; is this a vLLM server with stats enabled?")
    return gauges
