"""Renders the listener that clients connect to: filters, route, retries, local replies, access log.

Must never know about single ranks: those are the clusters' matter.
"""

from __future__ import annotations

from ext_proc.protocol_names import DESTINATION, LB_NAMESPACE
from gateway.config import EnvoySection
from gateway.envoy_clusters import EXT_PROC_CLUSTER, RANK_KEY, RANKS_CLUSTER
from gateway.envoy_types import Json, duration, ip_address, typed

RANK_HEADER = "x-wavegate-rank"

CONNECTION_BUFFER_BYTES = 1 << 20
"""What Envoy holds for one connection before it slows the sender down. Request bodies have a limit of their
own, so that a slow reader of a stream does not cost as much memory as the largest prompt."""

REQUEST_TIMEOUT_S = 300.0
"""How long a client may take to send a whole request: bounds the bodies that are held for slow senders."""

_FILTERS = "envoy.extensions.filters"
_RANK = f"%UPSTREAM_METADATA({LB_NAMESPACE}:{RANK_KEY})%"

_SOCKET_KEEPALIVE: list[Json] = [
    {"level": level, "name": name, "int_value": value, "state": "STATE_PREBIND"}
    for level, name, value in ((1, 9, 1), (6, 4, 30), (6, 5, 5), (6, 6, 3))
]
"""SO_KEEPALIVE, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT: a client's machine that vanished while its request
was quiet is noticed within 45 s, and its rank set free."""

_NO_RANK_FLAGS: list[Json] = ["UH", "UF", "UO", "UC", "UR", "UT", "LR", "URX"]
"""Response flags of replies that Envoy made because no rank could be reached or none answered."""


def openai_listener(envoy: EnvoySection) -> dict[str, Json]:
    """The OpenAI-compatible front door, HTTP/1.1 and HTTP/2."""
    return {
        "name": "openai",
        "address": ip_address(envoy.host, envoy.port),
        "per_connection_buffer_limit_bytes": CONNECTION_BUFFER_BYTES,
        "socket_options": _SOCKET_KEEPALIVE,
        "filter_chains": [
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": _connection_manager(envoy),
                    }
                ]
            }
        ],
    }


def _connection_manager(envoy: EnvoySection) -> dict[str, Json]:
    return typed(
        f"{_FILTERS}.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="openai",
        codec_type="AUTO",
        # Clients are not trusted proxies: their x-envoy-* headers must not change retries and timeouts.
        use_remote_address=True,
        # Yet their x-request-id is kept: vLLM names its answer after it.
        preserve_external_request_id=True,
        always_set_request_id_in_response=True,
        # A stream may be silent for as long as a prompt takes to prefill; the default ends it after 5 min.
        stream_idle_timeout="0s",
        request_timeout=duration(REQUEST_TIMEOUT_S),
        route_config={
            "virtual_hosts": [{"name": "ranks", "domains": ["*"], "routes": [_route(envoy)]}],
        },
        http_filters=[_ext_proc_filter(envoy), _buffer_filter(envoy), _router_filter()],
        local_reply_config=_local_replies(envoy),
        access_log=[_access_log(envoy), _failed_answers_log()],
    )


def _route(envoy: EnvoySection) -> dict[str, Json]:
    return {
        "match": {"prefix": "/"},
        # Larger bodies get 413. Also what may be kept for a retry; the default is the connection's buffer.
        "request_body_buffer_limit": envoy.max_body_bytes,
        "route": {
            "cluster": RANKS_CLUSTER,
            "timeout": "0s",  # streams last as long as they last; the default is 15 s
            "retry_policy": _retry_policy(envoy.retries),
        },
        # vLLM takes the first as an index local to the server: anything but 0 is a 400 in external mode.
        "request_headers_to_remove": ["x-data-parallel-rank", DESTINATION],
        "response_headers_to_add": [
            {
                "header": {"key": RANK_HEADER, "value": _RANK},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            }
        ],
    }


def _retry_policy(retries: int) -> dict[str, Json]:
    """Retries that cannot do the same work twice: the rank was not reached, or refused with 503.

    503 is what vLLM answers when its queue limits are reached. `reset` (connection lost after the request was
    sent) is left out on purpose: a prompt that kills a rank would be handed to the next one.
    Retries go down the pick's list. Once it is used up, the fallback policy chooses, and the predicate keeps
    it from choosing a rank that was tried.
    """
    return {
        "retry_on": "connect-failure,refused-stream,reset-before-request,retriable-status-codes",
        "retriable_status_codes": [503],
        "num_retries": retries,
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": typed("envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"),
            }
        ],
        "host_selection_retry_max_attempts": 3,
    }


def _ext_proc_filter(envoy: EnvoySection) -> dict[str, Json]:
    return {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": typed(
            f"{_FILTERS}.http.ext_proc.v3.ExternalProcessor",
            grpc_service={"envoy_grpc": {"cluster_name": EXT_PROC_CLUSTER}},
            # Without the gateway requests are balanced by the ranks cluster's fallback policy.
            failure_mode_allow=True,
            message_timeout=duration(envoy.message_timeout_s),
            processing_mode={
                "request_header_mode": "SKIP",
                "request_body_mode": "BUFFERED",
                "request_trailer_mode": "SKIP",
                "response_header_mode": "SKIP",
                "response_body_mode": "NONE",
                "response_trailer_mode": "SKIP",
            },
            request_attributes=["request.path", "request.id"],
            metadata_options={"receiving_namespaces": {"untyped": [LB_NAMESPACE]}},
        ),
    }


def _buffer_filter(envoy: EnvoySection) -> dict[str, Json]:
    """Holds the headers until the body is complete: the router then chooses after ext_proc has answered."""
    return {
        "name": "envoy.filters.http.buffer",
        "typed_config": typed(f"{_FILTERS}.http.buffer.v3.Buffer", max_request_bytes=envoy.max_body_bytes),
    }


def _router_filter() -> dict[str, Json]:
    return {
        "name": "envoy.filters.http.router",
        "typed_config": typed(f"{_FILTERS}.http.router.v3.Router", suppress_envoy_headers=True),
    }


def _local_replies(envoy: EnvoySection) -> dict[str, Json]:
    """Envoy's own answers in the shape that OpenAI clients read.

    The ext_proc service's ImmediateResponse passes this way too, but carries no flag: its body stays.
    """
    too_large = f"The request body is larger than {envoy.max_body_bytes} bytes, the limit of this gateway."
    return {
        "mappers": [
            {
                "filter": _status_filter("EQ", 413),
                "body_format_override": _error("invalid_request_error", "request_too_large", too_large),
            },
            {
                "filter": {"response_flag_filter": {"flags": _NO_RANK_FLAGS}},
                "body_format_override": _error(
                    "server_error", "no_rank_available", "No rank could answer: %LOCAL_REPLY_BODY%"
                ),
            },
        ]
    }


def _error(kind: str, code: str, message: str) -> dict[str, Json]:
    return {"json_format": {"error": {"message": message, "type": kind, "param": None, "code": code}}}


def _failed_answers_log() -> dict[str, Json]:
    """Tells the gateway at once of answers that show trouble on a rank; 503 only says that it is full."""
    return {
        "name": "envoy.access_loggers.http_grpc",
        "filter": {"and_filter": {"filters": [_status_filter("GE", 500), _status_filter("NE", 503)]}},
        "typed_config": typed(
            "envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
            common_config={
                "log_name": "failed_answers",
                "transport_api_version": "V3",
                "grpc_service": {"envoy_grpc": {"cluster_name": EXT_PROC_CLUSTER}},
                # Each entry is sent as it comes; the default is to collect 16 KiB.
                "buffer_size_bytes": 0,
            },
        ),
    }


def _status_filter(comparison: str, status: int) -> dict[str, Json]:
    value: Json = {"default_value": status, "runtime_key": "unused"}
    return {"status_code_filter": {"comparison": {"op": comparison, "value": value}}}


def _access_log(envoy: EnvoySection) -> dict[str, Json]:
    return {
        "name": "envoy.access_loggers.file",
        "typed_config": typed(
            "envoy.extensions.access_loggers.file.v3.FileAccessLog",
            path=envoy.access_log,
            log_format={
                "json_format": {
                    "time": "%START_TIME%",
                    "request_id": "%REQ(X-REQUEST-ID)%",
                    "method": "%REQ(:METHOD)%",
                    "path": "%PATH(NQ)%",
                    "status": "%RESPONSE_CODE%",
                    "details": "%RESPONSE_CODE_DETAILS%",
                    "flags": "%RESPONSE_FLAGS%",
                    "rank": _RANK,
                    # Null: nobody picked (no body, or no gateway), the fallback policy chose.
                    "picked": f"%DYNAMIC_METADATA({LB_NAMESPACE}:{DESTINATION})%",
                    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
                    "first_byte_ms": "%RESPONSE_DURATION%",
                    "duration_ms": "%DURATION%",
                    "bytes_received": "%BYTES_RECEIVED%",
                    "bytes_sent": "%BYTES_SENT%",
                    "client": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%",
                }
            },
        ),
    }
