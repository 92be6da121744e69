"""Renders the listener that clients connect to, and its HTTP connection manager.

Must never know about single ranks: those are the clusters' matter.
"""

from __future__ import annotations

from ext_proc.request_head import HeadNames
from gateway.config_envoy import EnvoySection
from gateway.envoy_filters import http_filters
from gateway.envoy_local_replies import local_replies
from gateway.envoy_logs import access_logs
from gateway.envoy_modes import MODES
from gateway.envoy_route import route
from gateway.envoy_types import Json, duration, ip_address, typed

CONNECTION_BUFFER_BYTES = 1 << 20
"""What Envoy holds for one connection before it slows the sender down. Request bodies have a limit of their
own, so that a slow reader of a stream does not cost as much memory as the largest prompt."""

MAX_STREAMS_PER_CONNECTION = 1_024
"""Requests at once on one HTTP/2 connection; clients open another for more. Envoy 1.40's own default, which
was none before."""

REQUEST_TIMEOUT_S = 300.0
"""How long a client may take to send a whole request: bounds the bodies that are held for slow senders."""

_SOCKET_KEEPALIVE: list[Json] = [
    {"level": level, "name": name, "int_value": value, "state": "STATE_PREBIND"}
    for level, name, value in ((1, 9, 1), (6, 4, 30), (6, 5, 5), (6, 6, 3))
]
"""SO_KEEPALIVE, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT: a client's machine that vanished while its request
was quiet is noticed within 45 s, and its rank set free."""


def openai_listener(envoy: EnvoySection, names: HeadNames) -> dict[str, Json]:
    """The OpenAI-compatible front door, HTTP/1.1 and HTTP/2."""
    return {
        "name": "openai",
        "address": ip_address(envoy.host, envoy.port),
        **listener_settings(envoy),
        "filter_chains": [
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": _connection_manager(envoy, names),
                    }
                ]
            }
        ],
    }


def listener_settings(envoy: EnvoySection) -> dict[str, Json]:
    """What a listener of any name and address needs."""
    return {
        "per_connection_buffer_limit_bytes": _connection_buffer_bytes(envoy),
        "socket_options": _SOCKET_KEEPALIVE,
    }


def _connection_buffer_bytes(envoy: EnvoySection) -> int:
    # Partial bodies need the route's limit and this one to agree: with 64 KiB there and 1 MiB here, one in
    # five bodies of 2 MB lost its end.
    return envoy.partial_body_bytes if MODES[envoy.mode].sends_part_of_body else CONNECTION_BUFFER_BYTES


def _connection_manager(envoy: EnvoySection, names: HeadNames) -> dict[str, Json]:
    return typed(
        "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="openai",
        codec_type="AUTO",
        **connection_manager_settings(envoy),
        route_config={
            "virtual_hosts": [
                {"name": "ranks", "domains": ["*"], **virtual_host_settings(), "routes": [route(envoy)]}
            ],
        },
        http_filters=http_filters(envoy, names),
    )


def virtual_host_settings() -> dict[str, Json]:
    """Fields of the virtual host."""
    # Ranks get the number too, and no longer what a client may have written there.
    return {"include_request_attempt_count": True}


def connection_manager_settings(envoy: EnvoySection) -> dict[str, Json]:
    """What a connection manager needs beside filters and routes."""
    return {
        # Clients are not trusted proxies: their x-envoy-* headers must not change retries and timeouts.
        "use_remote_address": True,
        # Yet their x-request-id is kept: vLLM names its answer after it.
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        # A stream may be silent for as long as a prompt takes to prefill; the default ends it after 5 min.
        "stream_idle_timeout": "0s",
        "request_timeout": duration(REQUEST_TIMEOUT_S),
        "http2_protocol_options": {"max_concurrent_streams": MAX_STREAMS_PER_CONNECTION},
        "local_reply_config": local_replies(envoy),
        "access_log": access_logs(envoy),
    }
