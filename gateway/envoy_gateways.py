"""Renders the cluster of gateways, whose ext_proc services choose among the ranks: who is asked, and how.

TLS files are named, never read. TLS towards clients is not rendered: envoy/README.md shows how Envoy does it.
"""

from __future__ import annotations

import ipaddress

from gateway.config import Config
from gateway.config_envoy import EnvoyExtProcTls
from gateway.config_types import split_endpoint
from gateway.envoy_types import HTTP_OPTIONS, Json, circuit_breakers, duration, ip_address, typed

EXT_PROC_CLUSTER = "ext_proc"

_GATEWAY_HEALTH_CHECK: dict[str, Json] = {
    "interval": "1s",
    # By default 60 s, as long as a cluster has had no traffic.
    "no_traffic_interval": "1s",
    "timeout": "1s",
    "unhealthy_threshold": 2,
    "healthy_threshold": 1,
    "grpc_health_check": {},
}
"""Finds gateways that hang, or drain, within about two seconds."""

_GATEWAY_OUTLIER_DETECTION: dict[str, Json] = {
    # Only what happens to the connection: a gateway that refuses a stream with a status is there.
    "split_external_local_origin_errors": True,
    "consecutive_local_origin_failure": 1,
    "enforcing_consecutive_5xx": 0,
    "enforcing_success_rate": 0,
    "enforcing_local_origin_success_rate": 0,
    # Long enough for the health check to have found out too.
    "base_ejection_time": "3s",
    "interval": "1s",
    "max_ejection_percent": 100,
}
"""Finds gateways that have ended, at the first request that notices. Until then some requests of full-duplex
modes would be answered 500: their bodies were sent away before the connection was known to be refused."""


def ext_proc_cluster(config: Config) -> dict[str, Json]:
    """The gateways' gRPC services: one decides, the next only while those before it are down."""
    return {
        "name": EXT_PROC_CLUSTER,
        "type": "STATIC",
        "connect_timeout": duration(config.envoy.connect_timeout_s),
        "circuit_breakers": circuit_breakers(config.envoy.max_concurrent_requests),
        "health_checks": [_GATEWAY_HEALTH_CHECK],
        "outlier_detection": _GATEWAY_OUTLIER_DETECTION,
        # An unhealthy gateway is not asked: the fallback policy answers at once instead of after a timeout.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        **_tls(config),
        "typed_extension_protocol_options": {
            HTTP_OPTIONS: typed(HTTP_OPTIONS, explicit_http_config={"http2_protocol_options": {}})
        },
        "load_assignment": {
            "cluster_name": EXT_PROC_CLUSTER,
            "endpoints": [
                {"priority": priority, "lb_endpoints": [{"endpoint": {"address": _address(gateway)}}]}
                for priority, gateway in enumerate(
                    (config.gateway.ext_proc_listen, *config.envoy.standby_gateways)
                )
            ],
        },
    }


def _tls(config: Config) -> dict[str, Json]:
    """The field `transport_socket` of the ext_proc cluster; nothing where gateways speak plain text."""
    of_gateway = config.gateway.ext_proc_tls
    if of_gateway is None:
        return {}
    tls = config.envoy.ext_proc_tls or EnvoyExtProcTls()
    context: dict[str, Json] = {
        # gRPC servers refuse a connection that does not offer HTTP/2 in the handshake.
        "alpn_protocols": ["h2"],
        "validation_context": {
            "trusted_ca": {"filename": str(tls.ca or of_gateway.cert)},
            **({"match_typed_subject_alt_names": _names(tls)} if tls.server_names else {}),
        },
    }
    if tls.cert is not None and tls.key is not None:
        context["tls_certificates"] = [
            {
                "certificate_chain": {"filename": str(tls.cert)},
                "private_key": {"filename": str(tls.key)},
            }
        ]
    return {
        "transport_socket": {
            "name": "envoy.transport_sockets.tls",
            "typed_config": typed(
                "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext", common_tls_context=context
            ),
        }
    }


def _names(tls: EnvoyExtProcTls) -> list[Json]:
    return [
        {"san_type": "IP_ADDRESS" if _is_ip_address(name) else "DNS", "matcher": {"exact": name}}
        for name in tls.server_names
    ]


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _address(listen: str) -> dict[str, Json]:
    if listen.startswith("unix:"):
        return {"pipe": {"path": listen.removeprefix("unix:")}}
    return ip_address(*split_endpoint(listen))
