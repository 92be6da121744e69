"""ORCA load reports in a response header, as vLLM writes them on request (vllm orca_metrics.py).

A client that sends `endpoint-load-metrics-format: text` or `json` gets `endpoint-load-metrics` with
exactly two metrics: waiting requests and KV-cache usage. Only on responses that are not streamed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping

from vllm_ranks.engine import wire

REQUEST_HEADER = "endpoint-load-metrics-format"
RESPONSE_HEADER = "endpoint-load-metrics"

logger = logging.getLogger(__name__)


def load_headers(metrics_format: str | None, latest: Iterable[wire.SchedulerStats]) -> Mapping[str, str]:
    """The header for the format a client asked for; none if it asked for none, or for an unknown one.

    Args:
        latest: the last report of each engine of this server.
    """
    if not metrics_format:
        return {}
    metrics: list[tuple[str, float]] = []
    for stats in latest:
        waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        metrics.append(("num_requests_waiting", float(waiting)))
        metrics.append(("kv_cache_usage_perc", stats.kv_cache_usage))
    match metrics_format.lower():
        case "text":
            report = "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics)
        case "json":
            report = "JSON " + json.dumps({"named_metrics": dict(metrics)})
        case _:
            logger.warning("ORCA header format %.32r is not supported: use text or json", metrics_format)
            return {}
    return {RESPONSE_HEADER: report}
