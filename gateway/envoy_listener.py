"""Renders the listener that clients connect to: filters, route, retries, local replies, access log.

Must never know about ranks one by one: those are the clusters' matter.
"""

from __future__ import annotations

from gateway.config import EnvoySection
from gateway.envoy_clusters import EXT_PROC_CLUSTER, PICK_KEY, PICK_NAMESPACE, RANK_KEY, RANKS_CLUSTER
from gateway.envoy_types import Json, duration, ip_address, typed

RANK_HEADER = "x-wavegate-rank"
_FILTERS = "envoy.extensions.filters"


def openai_listener(envoy: EnvoySection) -> dict[str, Json]:
    """The OpenAI-compatible front door, HTTP/1.1 and HTTP/2."""
    return {
        "name": "openai",
        "address": ip_address(envoy.host, envoy.port),
        "per_connection_buffer_limit_bytes": envoy.max_body_bytes,
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
        use_remote_address=True,
        preserve_external_request_id=True,
        always_set_request_id_in_response=True,
        stream_idle_timeout="0s",
        request_timeout="300s",
        route_config={
            "virtual_hosts": [{"name": "ranks", "domains": ["*"], "routes": [_route(envoy)]}],
        },
        http_filters=[_ext_proc_filter(envoy), _buffer_filter(envoy), _router_filter()],
        local_reply_config=_local_replies(envoy),
        access_log=[_access_log(envoy)],
    )


def _route(envoy: EnvoySection) -> dict[str, Json]:
    return {
        "match": {"prefix": "/"},
        "route": {
            "cluster": RANKS_CLUSTER,
            "timeout": "0s",
            "retry_policy": {
                "retry_on": "connect-failure,refused-stream,reset-before-request,retriable-status-codes",
                "retriable_status_codes": [503],
                "num_retries": envoy.retries,
                "retry_host_predicate": [
                    {
                        "name": "envoy.retry_host_predicates.previous_hosts",
                        "typed_config": typed(
                            "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                        ),
                    }
                ],
                "host_selection_retry_max_attempts": 3,
            },
        },
        "request_headers_to_remove": ["x-data-parallel-rank", PICK_KEY],
        "response_headers_to_add": [
            {
                "header": {"key": RANK_HEADER, "value": f"%UPSTREAM_METADATA({PICK_NAMESPACE}:{RANK_KEY})%"},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            }
        ],
    }


def _ext_proc_filter(envoy: EnvoySection) -> dict[str, Json]:
    return {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": typed(
            f"{_FILTERS}.http.ext_proc.v3.ExternalProcessor",
            grpc_service={"envoy_grpc": {"cluster_name": EXT_PROC_CLUSTER}},
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
            metadata_options={"receiving_namespaces": {"untyped": [PICK_NAMESPACE]}},
        ),
    }


def _buffer_filter(envoy: EnvoySection) -> dict[str, Json]:
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
    return {
        "mappers": [
            {
                "filter": {
                    "status_code_filter": {
                        "comparison": {"op": "EQ", "value": {"default_value": 413, "runtime_key": "unused"}}
                    }
                },
                "body_format_override": {
                    "json_format": {
                        "error": {
                            "message": f"Request body is larger than {envoy.max_body_bytes} bytes.",
                            "type": "invalid_request_error",
                            "param": None,
                            "code": "request_too_large",
                        }
                    }
                },
            }
        ]
    }


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
                    "rank": f"%UPSTREAM_METADATA({PICK_NAMESPACE}:{RANK_KEY})%",
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
