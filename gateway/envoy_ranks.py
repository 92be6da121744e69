"""Renders the cluster of ranks: how Envoy reaches them, watches them, and chooses where nobody has picked.

Must never touch listeners or routes.
"""

from __future__ import annotations

from collections.abc import Iterable

from ext_proc.protocol_names import DESTINATION, LB_NAMESPACE, SERVED_KEY
from ext_proc.vocabulary import Rank
from gateway.config import Config
from gateway.config_envoy import EnvoyHealthCheck, EnvoyOutlierDetection, EnvoySection
from gateway.config_types import split_endpoint
from gateway.envoy_modes import MODES
from gateway.envoy_types import HTTP_OPTIONS, Json, circuit_breakers, duration, ip_address, typed

RANKS_CLUSTER = "ranks"

RANK_KEY = "rank"
"""Key of a rank's name in its endpoint's metadata, in `LB_NAMESPACE`."""
RANK_OF_REQUEST = f"%UPSTREAM_METADATA({LB_NAMESPACE}:{RANK_KEY})%"
"""For headers and logs: the name of the rank that a request was sent to last."""

RANK_IDLE_TIMEOUT_S = 3.0
"""vLLM closes a connection 5 s after its last answer (VLLM_HTTP_TIMEOUT_KEEP_ALIVE). A request sent on a
connection that is being closed cannot be retried safely, so Envoy must always be the first to close."""

_POLICIES = "envoy.load_balancing_policies"


def ranks_cluster(config: Config) -> dict[str, Json]:
    """All ranks of all groups; the pick chooses among them, least_request where there is no pick."""
    envoy = config.envoy
    return {
        "name": RANKS_CLUSTER,
        "type": "STATIC",
        "connect_timeout": duration(envoy.connect_timeout_s),
        "circuit_breakers": circuit_breakers(envoy.max_concurrent_requests),
        "health_checks": [_rank_health_check(envoy.health_check)],
        "outlier_detection": _rank_outlier_detection(envoy.outlier_detection),
        # Panic only when no rank is healthy (of more than 100, when fewer than 1 % are; Envoy knows whole
        # percents): better to try one than to refuse everybody.
        "common_lb_config": {"healthy_panic_threshold": {"value": 1}},
        "load_balancing_policy": _obey_the_pick(envoy),
        "typed_extension_protocol_options": {
            HTTP_OPTIONS: typed(
                HTTP_OPTIONS,
                common_http_protocol_options={"idle_timeout": duration(RANK_IDLE_TIMEOUT_S)},
                explicit_http_config={"http_protocol_options": {}},
                outlier_detection={"error_matcher": _FAILED_ANSWER},
            )
        },
        "upstream_connection_options": {"tcp_keepalive": _TCP_KEEPALIVE},
        "load_assignment": {
            "cluster_name": RANKS_CLUSTER,
            "endpoints": [{"lb_endpoints": _rank_endpoints(config.ranks())}],
        },
    }


_TCP_KEEPALIVE: dict[str, Json] = {"keepalive_time": 30, "keepalive_interval": 5, "keepalive_probes": 3}
"""A machine that vanished without closing its connections is noticed within 45 s."""

_FAILED_ANSWER: dict[str, Json] = {
    "and_match": {
        "rules": [
            {
                "http_response_headers_match": {
                    "headers": [{"name": ":status", "range_match": {"start": 500, "end": 600}}]
                }
            },
            {
                "not_match": {
                    "http_response_headers_match": {
                        "headers": [{"name": ":status", "string_match": {"exact": "503"}}]
                    }
                }
            },
        ]
    }
}
"""Answers that count as failures of the rank. 503 is a full queue: to leave such ranks out would send their
load to the others until these are full too. Connections that fail or break count without being listed."""


def _rank_health_check(settings: EnvoyHealthCheck) -> dict[str, Json]:
    return {
        "interval": duration(settings.interval_s),
        # The default is 60 s as long as a cluster has had no traffic.
        "no_traffic_interval": duration(settings.interval_s),
        "timeout": duration(settings.timeout_s),
        "unhealthy_threshold": settings.unhealthy_threshold,
        "healthy_threshold": settings.healthy_threshold,
        "interval_jitter_percent": 20,
        "http_health_check": {"path": "/health"},
    }


def _rank_outlier_detection(settings: EnvoyOutlierDetection) -> dict[str, Json]:
    """For requests that nobody picks for; picks are obeyed whatever Envoy thinks of a rank.

    Envoy knows no groups: of a group that has lost a rank, the others are left out once they fail too.
    """
    return {
        "consecutive_5xx": settings.consecutive_failures,
        "enforcing_success_rate": 0,
        "base_ejection_time": duration(settings.ejection_s),
        "interval": "1s",
        # All may be out: then the panic threshold has every rank tried.
        "max_ejection_percent": 100,
    }


def _obey_the_pick(envoy: EnvoySection) -> dict[str, Json]:
    """The picked endpoints in order, one for each attempt; then, or without a pick, least_request."""
    fields: dict[str, Json] = {
        "override_host_sources": [{"metadata": _metadata_key(DESTINATION)}],
        "fallback_policy": _policy("least_request", "LeastRequest"),
    }
    if MODES[envoy.mode].sees_responses:
        fields["selected_host_key"] = _metadata_key(SERVED_KEY)
    return _policy("override_host", "OverrideHost", **fields)


def _metadata_key(key: str) -> dict[str, Json]:
    return {"key": LB_NAMESPACE, "path": [{"key": key}]}


def _rank_endpoints(ranks: Iterable[Rank]) -> list[Json]:
    return [
        {
            "endpoint": {"address": ip_address(*split_endpoint(rank.endpoint))},
            "metadata": {"filter_metadata": {LB_NAMESPACE: {RANK_KEY: rank.name}}},
        }
        for rank in ranks
    ]


def _policy(name: str, message: str, **fields: Json) -> dict[str, Json]:
    config = typed(f"envoy.extensions.load_balancing_policies.{name}.v3.{message}", **fields)
    return {"policies": [{"typed_extension_config": {"name": f"{_POLICIES}.{name}", "typed_config": config}}]}
