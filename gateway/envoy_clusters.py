"""Renders Envoy's two clusters: the ranks, and the ext_proc service that chooses among them.

Must never touch listeners or routes.
"""

from __future__ import annotations

from ext_proc.protocol_names import DESTINATION, LB_NAMESPACE
from gateway.config import Config
from gateway.config_types import split_endpoint
from gateway.envoy_types import Json, duration, ip_address, typed

RANKS_CLUSTER = "ranks"
EXT_PROC_CLUSTER = "ext_proc"

RANK_KEY = "rank"
"""Key of a rank's name in its endpoint's metadata, in `LB_NAMESPACE`."""

RANK_IDLE_TIMEOUT_S = 3.0
"""vLLM closes a connection 5 s after its last answer (VLLM_HTTP_TIMEOUT_KEEP_ALIVE). A request sent on a
connection that is being closed cannot be retried safely, so Envoy must always be the first to close."""

_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_POLICIES = "envoy.load_balancing_policies"


def ranks_cluster(config: Config) -> dict[str, Json]:
    """All ranks of all groups; the pick chooses among them, least_request where there is no pick."""
    envoy = config.envoy
    return {
        "name": RANKS_CLUSTER,
        "type": "STATIC",
        "connect_timeout": duration(envoy.connect_timeout_s),
        "circuit_breakers": _circuit_breakers(envoy.max_concurrent_requests),
        "health_checks": [
            {
                "interval": duration(envoy.health_check.interval_s),
                # The default is 60 s as long as a cluster has had no traffic.
                "no_traffic_interval": duration(envoy.health_check.interval_s),
                "timeout": duration(envoy.health_check.timeout_s),
                "unhealthy_threshold": envoy.health_check.unhealthy_threshold,
                "healthy_threshold": envoy.health_check.healthy_threshold,
                "interval_jitter_percent": 20,
                "http_health_check": {"path": "/health"},
            }
        ],
        # Panic only when no rank at all is healthy: better to try one than to refuse everybody.
        "common_lb_config": {"healthy_panic_threshold": {"value": 1}},
        "load_balancing_policy": _policy(
            "override_host",
            "OverrideHost",
            override_host_sources=[{"metadata": {"key": LB_NAMESPACE, "path": [{"key": DESTINATION}]}}],
            fallback_policy=_policy("least_request", "LeastRequest"),
        ),
        "typed_extension_protocol_options": {
            _HTTP_OPTIONS: typed(
                _HTTP_OPTIONS,
                common_http_protocol_options={"idle_timeout": duration(RANK_IDLE_TIMEOUT_S)},
                explicit_http_config={"http_protocol_options": {}},
            )
        },
        "upstream_connection_options": {"tcp_keepalive": _TCP_KEEPALIVE},
        "load_assignment": {
            "cluster_name": RANKS_CLUSTER,
            "endpoints": [
                {
                    "lb_endpoints": [
                        {
                            "endpoint": {"address": ip_address(*split_endpoint(rank.endpoint))},
                            "metadata": {"filter_metadata": {LB_NAMESPACE: {RANK_KEY: rank.name}}},
                        }
                        for rank in config.ranks()
                    ]
                }
            ],
        },
    }


def ext_proc_cluster(config: Config) -> dict[str, Json]:
    """The gateway's gRPC service, known to be gone within about two seconds of its end."""
    return {
        "name": EXT_PROC_CLUSTER,
        "type": "STATIC",
        "connect_timeout": duration(config.envoy.connect_timeout_s),
        "circuit_breakers": _circuit_breakers(config.envoy.max_concurrent_requests),
        "health_checks": [
            {
                "interval": "1s",
                "no_traffic_interval": "1s",
                "no_traffic_healthy_interval": "1s",
                "timeout": "1s",
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "grpc_health_check": {},
            }
        ],
        # An unhealthy gateway is not asked: the fallback policy answers at once instead of after a timeout.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "typed_extension_protocol_options": {
            _HTTP_OPTIONS: typed(_HTTP_OPTIONS, explicit_http_config={"http2_protocol_options": {}})
        },
        "load_assignment": {
            "cluster_name": EXT_PROC_CLUSTER,
            "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": _listen_address(config.gateway.ext_proc_listen)}}]}
            ],
        },
    }


_TCP_KEEPALIVE: dict[str, Json] = {"keepalive_time": 30, "keepalive_interval": 5, "keepalive_probes": 3}
"""A machine that vanished without closing its connections is noticed within 45 s."""


def _circuit_breakers(max_concurrent: int) -> dict[str, Json]:
    """Envoy's defaults (1,024 requests, 3 retries at a time) would refuse ordinary load of long streams."""
    thresholds: Json = {
        "max_connections": max_concurrent,
        "max_pending_requests": max_concurrent,
        "max_requests": max_concurrent,
        "max_retries": max_concurrent,
    }
    return {"thresholds": [thresholds]}


def _policy(name: str, message: str, **fields: Json) -> dict[str, Json]:
    config = typed(f"envoy.extensions.load_balancing_policies.{name}.v3.{message}", **fields)
    return {"policies": [{"typed_extension_config": {"name": f"{_POLICIES}.{name}", "typed_config": config}}]}


def _listen_address(listen: str) -> dict[str, Json]:
    if listen.startswith("unix:"):
        return {"pipe": {"path": listen.removeprefix("unix:")}}
    return ip_address(*split_endpoint(listen))
