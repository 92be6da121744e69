"""Renders Envoy's logs of requests: a line for everybody's, and messages to the gateway about some of them.

Must never log what a client wrote, but for the path without its query and the request's id.
"""

from __future__ import annotations

from collections.abc import Sequence

from ext_proc.protocol_names import DESTINATION, LB_NAMESPACE
from gateway.config_envoy import EnvoySection
from gateway.envoy_gateways import EXT_PROC_CLUSTER
from gateway.envoy_ranks import RANK_OF_REQUEST
from gateway.envoy_types import Json, status_filter, typed

ATTEMPT_HEADER = "x-envoy-attempt-count"
"""Where the virtual host says so, Envoy counts attempts here; upstream logs see the number nowhere else."""


def access_logs(envoy: EnvoySection) -> list[Json]:
    """The access log, and what the gateway hears."""
    return [_access_log(envoy), _failed_answers_log()]


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
                    "rank": RANK_OF_REQUEST,
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


def _failed_answers_log() -> dict[str, Json]:
    """Tells the gateway at once of answers that show trouble on a rank; 503 only says that it is full."""
    return _log_for_gateway("failed_answers", [status_filter("GE", 500), status_filter("NE", 503)])


def upstream_logs() -> dict[str, Json]:
    """Fields of the router that tell the gateway at once when a request goes to another rank than before.

    The entry is written when the connection to the rank is there, so one that refuses connections has none.
    """
    is_retry: Json = {
        "header_filter": {"header": {"name": ATTEMPT_HEADER, "range_match": {"start": 2, "end": 1 << 31}}}
    }
    is_begin: Json = {"log_type_filter": {"types": ["UpstreamPoolReady"]}}
    return {
        "upstream_log": [_log_for_gateway("retries", [is_begin, is_retry])],
        "upstream_log_options": {"flush_upstream_log_on_upstream_stream": True},
    }


def _log_for_gateway(name: str, filters: Sequence[Json]) -> dict[str, Json]:
    return {
        "name": "envoy.access_loggers.http_grpc",
        "filter": {"and_filter": {"filters": filters}},
        "typed_config": typed(
            "envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
            common_config={
                "log_name": name,
                "transport_api_version": "V3",
                "grpc_service": {"envoy_grpc": {"cluster_name": EXT_PROC_CLUSTER}},
                # Each entry is sent as it comes; the default is to collect 16 KiB.
                "buffer_size_bytes": 0,
            },
        ),
    }
