"""Renders Envoy's two logs of requests: a line for everybody's, and a message to the gateway for failed ones.

Must never log what a client wrote, but for the path without its query and the request's id.
"""

from __future__ import annotations

from ext_proc.protocol_names import DESTINATION, LB_NAMESPACE
from gateway.config_envoy import EnvoySection
from gateway.envoy_gateways import EXT_PROC_CLUSTER
from gateway.envoy_ranks import RANK_OF_REQUEST
from gateway.envoy_types import Json, status_filter, typed


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
    return {
        "name": "envoy.access_loggers.http_grpc",
        "filter": {"and_filter": {"filters": [status_filter("GE", 500), status_filter("NE", 503)]}},
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
